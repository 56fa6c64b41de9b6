"""GGUF files that are damaged, or of which a part would get lost: each is one sentence."""

from __future__ import annotations

import os
import re
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType

from engine.errors import ModelLoadError
from engine.model.convert import convert_gguf
from tests.engine.model.gguf_files import LLAMA, llama, write
from tests.engine.model.saying import refusal


def broken(file: Path, start: int, new: bytes) -> bytes:
    whole = file.read_bytes()
    return whole[:start] + new + whole[start + len(new) :]


DAMAGE: dict[str, tuple[Any, str]] = {
    "empty": (lambda file: b"", "is empty"),
    "foreign": (lambda file: b"<html>not found</html>" * 9, "is damaged, or not GGUF"),
    "stand-in": (lambda file: b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n", "git lfs pull"),
    "pickle": (lambda file: b"\x80\x04cos\nsystem\n(S'exit 1'\ntR.", "looks like a pickle, which can run code"),
    "magic": (lambda file: b"GGUF", "it ends after 4 bytes"),
    "header": (lambda file: file.read_bytes()[:3000], "it ends after 3000 bytes, within its header"),
    "weights": (lambda file: file.read_bytes()[:-64], "it has .* of .* bytes"),
    "version": (lambda file: broken(file, 4, struct.pack("<I", 1)), "is of GGUF version 1"),
    "order": (lambda file: broken(file, 4, struct.pack(">I", 3)), "another byte order"),
    "tensors": (lambda file: broken(file, 8, struct.pack("<Q", 2**63)), "cut short or damaged"),
    "facts": (lambda file: broken(file, 16, struct.pack("<Q", 2**63)), "cut short or damaged"),
    "name": (lambda file: broken(file, 24, struct.pack("<Q", 2**63)), "cut short or damaged"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_named(damage: str, llama_gguf: Path, tmp_path: Path) -> None:
    change, words = DAMAGE[damage]
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(change(llama_gguf))
    message = refusal(bad, tmp_path)
    assert str(bad) in message
    assert re.search(words, message)
    assert not (tmp_path / "models").exists()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"kind": GGMLQuantizationType.Q8_0, "facts": {"split.count": 3}}, "is one of 3 parts: join them"),
        ({"facts": {"block_count": 10**9}}, "announces 1000000000 layers and holds 21 tensors"),
        ({"facts": {"general.architecture": "rwkv7"}}, "a model of the kind 'rwkv7', which cannot be read from GGUF"),
        ({"extra": {"odd": np.zeros((2, 8), np.int8)}}, r"is quantised as I8, which cannot be converted \(odd\)"),
    ],
)
def test_a_file_that_transformers_cannot_read_is_refused_at_once(
    settings: dict[str, Any], words: str, tmp_path: Path
) -> None:
    file, facts = tmp_path / "odd.gguf", settings.pop("facts", {})
    write(file, llama(), "llama", {**LLAMA, **facts}, **settings)
    message = refusal(file, tmp_path)
    assert str(file) in message
    assert re.search(words, message)


def test_an_unknown_quantisation_is_refused_by_its_number(llama_gguf: Path, tmp_path: Path) -> None:
    bad, name = tmp_path / "bad.gguf", b"blk.0.attn_norm.weight"
    behind = llama_gguf.read_bytes().index(name) + len(name) + 4 + 8  # one dimension
    bad.write_bytes(broken(llama_gguf, behind, struct.pack("<I", 99)))
    assert "does not know (type 99 of blk.0.attn_norm.weight): take another quantisation" in refusal(bad, tmp_path)


def test_a_part_is_known_by_its_name(llama_gguf: Path, tmp_path: Path) -> None:
    part = Path(shutil.copy(llama_gguf, tmp_path / "big-00001-of-00003.gguf"))
    assert "is one of 3 parts: join them with `llama-gguf-split --merge`" in refusal(part, tmp_path)


def test_a_folder_called_like_a_file_is_looked_into(llama_gguf: Path, tmp_path: Path) -> None:
    folder = tmp_path / "x.gguf"
    folder.mkdir()
    assert f"{folder} is not a model's folder" in refusal(folder, tmp_path)
    shutil.copy(llama_gguf, folder / "inner.gguf")
    assert f"holds inner.gguf: name that file, {folder / 'inner.gguf'}" in refusal(folder, tmp_path)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read_is_named(llama_gguf: Path, tmp_path: Path) -> None:
    secret = Path(shutil.copy(llama_gguf, tmp_path / "secret.gguf"))
    secret.chmod(0)
    assert f"{secret} cannot be read: Permission denied" in refusal(secret, tmp_path)


UNFITTING: dict[str, tuple[dict[str, Any], str]] = {
    "fact": ({"facts": {"attention.scale": 0.5}}, r"sets attention.scale to 0\.5, which cannot be applied"),
    "experts": ({"facts": {"expert_count": 8}}, "sets expert_count to 8"),
    "rotated": ({"facts": {"attention.key_length": 16, "rope.dimension_count": 8}}, "sets rope.dimension_count to 8"),
    "stretched": ({"facts": {"rope.scaling.type": "longrope"}}, "sets rope.scaling.type to longrope"),
    "layers": ({"facts": {"attention.sliding_window": 4}}, "sets attention.sliding_window to 4"),
    "factors": ({"extra": {"rope_freqs.weight": np.full(8, 2.0, np.float32)}}, "factors that are not Llama 3's"),
    "dropped": ({"extra": {"blk.0.attn_q.bias": np.ones(64, np.float32)}}, "numbers, of which transformers would use"),
    "missing": ({"without": ("blk.1.attn_q.weight",)}, "its files lack model.layers.1.self_attn.q_proj.weight"),
    "shape": ({"facts": {"feed_forward_length": 128}}, r"down_proj.weight \[64, 96\] instead of \[64, 128\]"),
}


@pytest.mark.parametrize("case", UNFITTING)
def test_a_file_of_which_a_part_would_get_lost_is_refused(case: str, tmp_path: Path) -> None:
    settings, words = UNFITTING[case]
    facts = {**LLAMA, **settings.get("facts", {})}
    weights = {key: value for key, value in settings.items() if key != "facts"}
    write(tmp_path / "odd.gguf", llama(), "llama", facts, **weights)
    with pytest.raises(ModelLoadError, match=words):
        convert_gguf(tmp_path / "odd.gguf", "float32", tmp_path / "out")
