"""Where models come from: names, folders and their files; each that is damaged or dangerous is one sentence."""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.model import convert, digests, loading, sources
from engine.model.convert import convert_tokenizer
from tests.engine.model.saying import quiet, refusal


@pytest.fixture
def model(tiny_model: Path, tmp_path: Path) -> Path:
    """A copy to be damaged."""
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def shards(model: Path) -> Path:
    """The same in two files and an index."""
    tensors = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    names = sorted(tensors)
    halves = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, held in halves.items():
        save_file({name: tensors[name] for name in held}, model / file, metadata={"format": "pt"})
    places = {name: file for file, held in halves.items() for name in held}
    (model / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return model


def change(file: Path, **settings: Any) -> None:
    """Set keys of a JSON object; None takes one out."""
    config = json.loads(file.read_text()) | settings
    file.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def prepare(model: Path, cache: Path) -> sources.PreparedModel:
    return sources.prepare(str(model), cache, quiet)


# --- names ------------------------------------------------------------------------------------------------------------


NOTHING = ["nothing", "/nowhere/at/all", "./here", "~/there", "a/b/c", "-owner/name", "owner/na me", "owner/.."]
NOTHING += ["owner/", "owner/name\n", "öwner/name", "https://huggingface.co/owner/name"]


@pytest.mark.parametrize("name", NOTHING)
def test_names_that_can_be_nothing_are_said_to_be(name: str, cache: Path) -> None:
    assert refusal(name, cache).startswith(f"no model {name!r}: name a directory, a .gguf file, a hub id")


def test_files_that_are_no_models_are_named(model: Path, cache: Path) -> None:
    weights = model / "model.safetensors"
    assert refusal(weights, cache) == f"{weights} is no model: name its folder, or a .gguf file"
    assert refusal(model / "no.gguf", cache).startswith(f"no GGUF file at {model / 'no.gguf'}")


def test_a_link_to_a_folder_is_followed(model: Path, cache: Path) -> None:
    link = model.with_name("linked")
    link.symlink_to(model)
    assert prepare(link, cache).digest == prepare(model, cache).digest


def test_a_place_where_nothing_can_be_kept_is_named(model: Path) -> None:
    inside = model / "config.json" / "models"
    assert refusal(model, inside).startswith(f"cannot keep models in {inside}: Not a directory")


# --- pickles ----------------------------------------------------------------------------------------------------------


def zipped(file: Path, place: Path) -> None:
    """The same as torch saves it."""
    with zipfile.ZipFile(place, "w") as archive:
        archive.write(file, "archive/data.pkl")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "model.pkl"])
def test_a_pickle_is_never_opened(name: str, harm: Path, model: Path, cache: Path) -> None:
    (model / "model.safetensors").unlink()
    shutil.copy(harm, model / name)
    message = refusal(model, cache)
    assert message.startswith(f"{model / name} is a pickle, which can run code when it is opened")
    assert "save_pretrained" in message
    assert not (harm.parent / "harmed").exists()


@pytest.mark.parametrize("copy", [shutil.copy, zipped])
def test_a_pickle_under_another_name_is_not_opened_either(
    copy: Callable[..., object], harm: Path, model: Path, cache: Path
) -> None:
    copy(harm, model / "model.safetensors")
    message = refusal(model, cache)
    assert message.startswith(
        f"{model / 'model.safetensors'} is not safetensors, it looks like a pickle, which can run"
    )
    assert not (harm.parent / "harmed").exists()


def test_a_pickle_beside_safetensors_is_left_alone(harm: Path, model: Path, cache: Path) -> None:
    shutil.copy(harm, model / "pytorch_model.bin")
    assert loading.load(prepare(model, cache), "cpu", "float32").module is not None
    assert not (harm.parent / "harmed").exists()


# --- weights ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda whole: whole[:-1], "damaged, or not safetensors"),
        (lambda whole: whole[:5], "damaged, or not safetensors"),
        (lambda whole: b"", "is empty"),
        (lambda whole: b"\xff" * 64, "damaged, or not safetensors"),
        (lambda whole: (4).to_bytes(8, "little") + b"{{}}" + whole[12:], "damaged, or not safetensors"),
        (lambda whole: b"version https://git-lfs.github.com/spec/v1\nsize 9\n", "run `git lfs pull`"),
    ],
)
def test_damaged_weights_are_named(damage: Callable[[bytes], bytes], words: str, model: Path, cache: Path) -> None:
    weights = model / "model.safetensors"
    weights.write_bytes(damage(weights.read_bytes()))
    message = refusal(model, cache)
    assert message.startswith(f"{weights} ")
    assert words in message


def test_weights_under_other_names_are_told_from_none(model: Path, cache: Path) -> None:
    (model / "model.safetensors").rename(model / "mine.safetensors")
    assert "rename mine.safetensors if it holds the whole model" in refusal(model, cache)
    (model / "mine.safetensors").rename(model / "mine.gguf")
    assert f"holds mine.gguf: name that file, {model / 'mine.gguf'}, as the model" in refusal(model, cache)
    (model / "mine.gguf").unlink()
    assert refusal(model, cache) == f"no model.safetensors in {model}: other weight formats are not read"


def test_a_model_in_several_files_is_one(shards: Path, tiny_model: Path, cache: Path) -> None:
    whole = loading.load(prepare(tiny_model, cache), "cpu", "float32").module.state_dict()
    parts = loading.load(prepare(shards, cache), "cpu", "float32").module.state_dict()
    assert all(torch.equal(parts[name], whole[name]) for name in whole)
    assert sources.weight_bytes(prepare(shards, cache), torch.float32) == sources.weight_bytes(
        prepare(tiny_model, cache), torch.float32
    )


def test_a_missing_file_of_several_is_named(shards: Path, cache: Path) -> None:
    (shards / "model-00002-of-00002.safetensors").unlink()
    message = refusal(shards, cache)
    assert message.startswith(f"no model-00002-of-00002.safetensors in {shards}, which model.safetensors.index.json")


@pytest.mark.parametrize(
    ("index", "words"),
    [
        ("{", "is damaged, or not JSON"),
        ("[]", "holds a list where an object is needed"),
        ("{}", "does not say which file holds which weights"),
        ('{"weight_map": {"a": 1}}', "does not say which file holds which weights"),
    ],
)
def test_a_damaged_index_is_named(index: str, words: str, shards: Path, cache: Path) -> None:
    file = shards / "model.safetensors.index.json"
    file.write_text(index)
    message = refusal(shards, cache)
    assert message.startswith(str(file))
    assert words in message


def test_an_index_that_promises_too_much_is_refused(shards: Path, cache: Path) -> None:
    index = json.loads((shards / "model.safetensors.index.json").read_text())
    index["weight_map"]["lm_head.weight"] = "model-00001-of-00002.safetensors"
    (shards / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "lacks lm_head.weight, which model.safetensors.index.json names" in refusal(shards, cache)


def rewrite(model: Path, alter: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(model / "model.safetensors")
    alter(tensors)
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})


def test_weights_are_never_made_up(model: Path, cache: Path) -> None:
    rewrite(model, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    message = refusal(model, cache, load=True)
    assert "its files lack model.layers.1.mlp.up_proj.weight" in message


def test_weights_of_another_shape_are_named(shards: Path, cache: Path) -> None:
    part = shards / "model-00001-of-00002.safetensors"
    tensors = load_file(part)
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"][:-1].clone()
    save_file(tensors, part, metadata={"format": "pt"})
    message = refusal(shards, cache, load=True)
    assert "not of the shapes that it says, model.embed_tokens.weight [49151, 32] instead of [49152, 32]" in message


@pytest.mark.parametrize(
    "name", ["model.layers.0.self_attn.q_proj.bias", "model.layers.1.self_attn.q_norm.weight", "lm_head.bias"]
)
def test_weights_that_would_be_dropped_are_named(name: str, model: Path, cache: Path) -> None:
    rewrite(model, lambda tensors: tensors.update({name: torch.ones(32)}))
    assert f"its files hold {name}, which its config.json has no place for" in refusal(model, cache, load=True)


def test_parts_that_the_model_does_not_have_are_nobodys_business(model: Path, cache: Path) -> None:
    foreign = ("vision_tower.patches.weight", "model.vision.weight", "model.layers.2.mtp.weight")
    rewrite(model, lambda tensors: tensors.update({name: torch.ones(2) for name in foreign}))
    rewrite(model, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}))
    loading.load(prepare(model, cache), "cpu", "float32")


def test_what_the_weights_take_is_known_without_reading_them(model: Path, cache: Path) -> None:
    prepared = prepare(model, cache)
    module = AutoModelForCausalLM.from_pretrained(model)
    numbers = sum(parameter.numel() for parameter in module.parameters())
    assert sources.weight_bytes(prepared, torch.float32) == 4 * numbers
    assert sources.weight_bytes(prepared, torch.bfloat16) == 2 * numbers
    rewrite(model, lambda tensors: tensors.update(steps=torch.zeros(3, dtype=torch.int64)))
    assert sources.weight_bytes(prepared, torch.bfloat16) == 2 * numbers + 24


# --- configuration ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"{", "is damaged, or not JSON"),
        (b"\xff\xfe\x00", "is damaged, or not JSON"),
        (b"[" * 100_000, "is damaged, or not JSON"),
        (b"", "is empty"),
        (b"[1]", "holds a list where an object is needed"),
        (b"{}", "has the model_type None, which transformers"),
        (b'{"model_type": "martian"}', "has the model_type 'martian', which transformers"),
        (b'{"model_type": ["llama"]}', "has the model_type ['llama'], which transformers"),
        (b'{"model_type": "llama", "hidden_size": "large"}', "hidden_size"),
    ],
)
def test_a_damaged_or_foreign_configuration_is_named(text: bytes, words: str, model: Path, cache: Path) -> None:
    (model / "config.json").write_bytes(text)
    message = refusal(model, cache)
    assert str(model / "config.json") in message
    assert words in message


def test_a_configuration_that_announces_the_impossible_is_refused(model: Path, cache: Path) -> None:
    change(model / "config.json", num_hidden_layers=10**9)
    assert "announces 1000000000 layers and holds 20 tensors" in refusal(model, cache)


def test_weights_named_by_the_configuration_are_not_followed(model: Path, cache: Path) -> None:
    change(model / "config.json", transformers_weights="../other.safetensors")
    assert "names its weights itself (transformers_weights)" in refusal(model, cache)


@pytest.mark.parametrize("known", [False, True])
def test_code_that_comes_with_a_model_is_never_run(known: bool, model: Path, cache: Path) -> None:
    mark = model / "has-run"
    (model / "theirs.py").write_text(f"open({str(mark)!r}, 'w')\nclass Config: pass\nclass Model: pass\n")
    theirs = {"AutoConfig": "theirs.Config", "AutoModelForCausalLM": "theirs.Model", "AutoTokenizer": "theirs.Model"}
    change(model / "config.json", auto_map=theirs, model_type="llama" if known else "theirs")
    change(model / "tokenizer_config.json", auto_map=theirs)
    if known:  # transformers' own code for it is used
        loading.load(prepare(model, cache), "cpu", "float32")
    else:
        message = refusal(model, cache)
        assert message.startswith(
            f"{model} needs program code of its own (auto_map in config.json), which is never run"
        )
    assert not mark.exists()


def test_a_missing_configuration_is_named(model: Path, cache: Path) -> None:
    (model / "config.json").unlink()
    assert refusal(model, cache).startswith(f"no config.json in {model}")


def test_an_adapter_is_told_from_a_model(model: Path, cache: Path) -> None:
    (model / "adapter_config.json").write_text('{"base_model_name_or_path": "owner/name"}')
    assert "name it with --adapter, and its base model with --model" in refusal(model, cache)


# --- tokenizers -------------------------------------------------------------------------------------------------------


def test_a_missing_or_damaged_tokenizer_is_named(model: Path, cache: Path) -> None:
    (model / "tokenizer.json").write_text('{"version": "1.0", "trunc')
    assert refusal(model, cache).startswith(f"{model / 'tokenizer.json'} is damaged, or not JSON")
    (model / "tokenizer.json").unlink()
    assert refusal(model, cache).startswith(f"no tokenizer.json in {model}")


def test_a_vocabulary_and_merges_become_a_tokenizer_once(model: Path, cache: Path) -> None:
    whole = json.loads((model / "tokenizer.json").read_text())
    (model / "tokenizer.json").unlink()
    (model / "vocab.json").write_text(json.dumps(whole["model"]["vocab"]))
    (model / "merges.txt").write_text("\n".join(" ".join(pair) for pair in whole["model"]["merges"]))
    change(model / "tokenizer_config.json", tokenizer_class="GPT2Tokenizer", backend=None)
    told: list[str] = []
    prepared = sources.prepare(str(model), cache, lambda stage, *_: told.append(stage))
    assert "converting the tokenizer" in told
    text = "The quick brown fox, twice: the quick brown fox."
    made = Tokenizer.from_file(str(prepared.path / "tokenizer.json"))
    assert made.encode(text).ids == AutoTokenizer.from_pretrained(model).encode(text)
    assert made.decode(made.encode(text).ids) == text
    assert (prepared.name, prepared.digest) == ("model", prepare(model, cache).digest)
    assert {file.name for file in model.iterdir()} <= {file.name for file in prepared.path.iterdir()}
    loading.load(prepared, "cpu", "float32")

    told.clear()
    (model / "chat_template.jinja").write_text("another")
    again = sources.prepare(str(model), cache, lambda stage, *_: told.append(stage))
    assert (again.path, told) == (prepared.path, [])


def test_a_sentencepiece_vocabulary_becomes_a_tokenizer(model: Path, tmp_path: Path) -> None:
    (model / "tokenizer.json").unlink()
    lines = [f"The {n} quick foxes jump over {n} lazy dogs, and {n} more rest in the shade." for n in range(99)]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_prefix=str(model / "tokenizer"),
        vocab_size=320,
        model_type="bpe",
        byte_fallback=True,
        minloglevel=2,
    )
    (model / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer", "add_bos_token": false}')
    convert_tokenizer(model, tmp_path / "made")
    made = Tokenizer.from_file(str(tmp_path / "made" / "tokenizer.json"))
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(model / "tokenizer.model"))
    for text in ("The lazy foxes rest.", "over 12 dogs", "Füchse"):
        assert made.encode(text, add_special_tokens=False).ids == theirs.encode(text)


def test_a_tokenizer_that_cannot_be_converted_is_said_to_be(model: Path, tmp_path: Path) -> None:
    (model / "tokenizer.json").unlink()
    (model / "tokenizer.model").write_bytes(b"nothing like it")
    ended = convert._result(["tokenizer", str(model), str(tmp_path / "made")], io.StringIO())
    assert ended["error"].startswith(f"cannot convert {model}: ")


# --- digests ----------------------------------------------------------------------------------------------------------


def test_new_weights_under_the_old_name_are_noticed(model: Path, cache: Path) -> None:
    first = prepare(model, cache).digest
    rewrite(model, lambda tensors: tensors["model.norm.weight"].add_(1))
    assert prepare(model, cache).digest != first


def test_weights_that_are_known_are_not_read_again(model: Path, cache: Path) -> None:
    first = prepare(model, cache)
    told: list[str] = []
    assert sources.prepare(str(model), cache, lambda stage, *_: told.append(stage)) == first
    assert told == []


@pytest.fixture
def known(cache: Path) -> Path:
    """A list of digests with one entry."""
    cache.mkdir()
    (cache / "weights").write_bytes(b"weights")
    digests.digest([cache / "weights"], cache, quiet)
    return cache / digests.KNOWN


RIGHT = hashlib.sha256(b"weights").hexdigest()


@pytest.mark.parametrize("content", ["", "[1]", "{", "[" * 100_000, '"text"', "null"])
def test_a_damaged_list_of_digests_is_made_anew(content: str, known: Path) -> None:
    known.write_text(content)
    assert digests.digest([known.parent / "weights"], known.parent, quiet) == RIGHT
    assert list(json.loads(known.read_text()).values()) == [RIGHT]


@pytest.mark.parametrize("wrong", ["", "../../etc", 7, None, ["x"], "g" * 64])
def test_an_entry_that_is_no_digest_is_not_believed(wrong: object, known: Path) -> None:
    known.write_text(json.dumps(dict.fromkeys(json.loads(known.read_text()), wrong)))
    assert digests.digest([known.parent / "weights"], known.parent, quiet) == RIGHT


def test_a_list_of_digests_that_cannot_be_written_is_done_without(known: Path) -> None:
    known.unlink()
    known.mkdir()
    assert digests.digest([known.parent / "weights"], known.parent, quiet) == RIGHT
    assert {entry.name for entry in known.parent.iterdir()} == {digests.KNOWN, "weights"}


def test_progress_tells_how_far_the_reading_is(model: Path, cache: Path) -> None:
    told: list[tuple[str, int, int]] = []
    sources.prepare(str(model), cache, lambda *words: told.append(words))
    size = (model / "model.safetensors").stat().st_size
    assert told[-1] == ("checking weights", size, size)
