"""Folders in Hugging Face's form: pickles and code stay closed, and whatever is damaged or odd is one sentence."""

from __future__ import annotations

import json
import os
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from engine.errors import ModelLoadError
from engine.model import loading, sources
from tests.engine.model.altering import change, rewrite
from tests.engine.model.saying import quiet, refusal


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


def prepare(model: Path, cache: Path) -> sources.PreparedModel:
    return sources.prepare(str(model), cache, quiet)


# --- what is no file, or not there ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("make", "what"), [(Path.mkdir, "a folder"), (os.mkfifo, "a pipe or a device")])
@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_what_is_no_file_is_not_read(
    name: str, make: Callable[[Path], object], what: str, model: Path, cache: Path
) -> None:
    (model / name).unlink()
    make(model / name)
    assert refusal(model, cache).startswith(f"{model / name} is {what}, where a file is needed")


def test_a_folder_without_a_model_is_named(model: Path, cache: Path) -> None:
    (model / "model.safetensors").unlink()
    assert refusal(model, cache).startswith(f"no model.safetensors in {model}: other weight formats")
    (model / "config.json").unlink()
    message = refusal(model, cache)
    assert message == f"{model} is not a model's folder: it holds no config.json and no model.safetensors"


def test_a_folder_that_is_gone_is_named(model: Path) -> None:
    prepared = sources.PreparedModel(name="gone", path=model / "gone", digest="")
    with pytest.raises(ModelLoadError) as refused:
        sources.weight_bytes(prepared, torch.float32)
    assert str(refused.value) == f"the folder {model / 'gone'} is not there: it was moved or deleted"


# --- sizes that no model has ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [10_001, 10**12, 1e300])
def test_more_layers_than_any_model_has_are_refused_before_anything_is_made_of_them(
    layers: float, model: Path, cache: Path
) -> None:
    change(model / "config.json", num_hidden_layers=layers)
    message = refusal(model, cache)
    assert message.startswith(f"{model / 'config.json'} says num_hidden_layers {layers}, and no model has more than")


@pytest.mark.parametrize("key", ["num_hidden_layers", "vocab_size"])
@pytest.mark.parametrize("value", [0, -3])
def test_sizes_below_one_are_refused(key: str, value: int, model: Path, cache: Path) -> None:
    change(model / "config.json", **{key: value})
    assert f"its configuration says {key} {value}, where 1 is the least" in refusal(model, cache, load=True)


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
    change(model / "config.json", num_hidden_layers=10_000)
    assert "announces 10000 layers and holds 20 tensors" in refusal(model, cache)


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
