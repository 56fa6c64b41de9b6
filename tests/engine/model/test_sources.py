"""Where models come from: names, folders and their files; each that is damaged or dangerous is one sentence."""

from __future__ import annotations

import hashlib
import io
import json
from pathlib import Path

import pytest
import sentencepiece
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from engine.model import convert, digests, folders, loading, sources
from engine.model.convert import convert_tokenizer
from tests.engine.model.altering import change, rewrite
from tests.engine.model.saying import quiet, refusal


def prepare(model: Path, cache: Path) -> sources.PreparedModel:
    return sources.prepare(str(model), cache, quiet)


# --- names ------------------------------------------------------------------------------------------------------------


NOTHING = ["nothing", "/nowhere/at/all", "./here", "~/there", "a/b/c", "-owner/name", "owner/na me", "owner/.."]
NOTHING += ["owner/", "owner/name\n", "öwner/name", "https://huggingface.co/owner/name"]


@pytest.mark.parametrize("name", NOTHING)
def test_names_that_can_be_nothing_are_said_to_be(name: str, cache: Path) -> None:
    assert refusal(name, cache).startswith(f"no model {name!r}: name a directory, a .gguf file, a hub id")


@pytest.mark.parametrize(
    ("name", "why"), [("a" * 5000, "File name too long"), ("~nobody-here/x", "Could not determine home directory.")]
)
def test_names_at_which_nothing_can_be_looked_for_are_said_to_be(name: str, why: str, model: Path, cache: Path) -> None:
    shown = name if len(name) < 200 else f"{name[:200]}…"
    assert refusal(name, cache) == f"no model {shown!r} can be looked for: {why}"
    assert refusal(model, cache, adapter=name) == f"no adapter {shown!r} can be looked for: {why}"


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
    again = sources.prepare(str(model), cache, lambda stage, *_: told.append(stage))
    assert (again.path, told) == (prepared.path, [])


@pytest.mark.parametrize("name", ["merges.txt", "tokenizer_config.json", "chat_template.jinja"])
def test_a_tokenizer_is_made_anew_when_what_it_is_made_of_changes(
    name: str, model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders, "converted", lambda job, _: job.target.mkdir(parents=True, exist_ok=True))
    (model / "tokenizer.json").unlink()
    for file in ("vocab.json", "merges.txt"):
        (model / file).write_text("{}")
    before = prepare(model, cache).path
    assert prepare(model, cache).path == before
    (model / name).write_text("changed")
    assert prepare(model, cache).path != before


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
