"""Loading: a model is prepared once, and whatever is wrong with one is a sentence that names the file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.config import CacheConfig, EngineConfig
from engine.errors import ModelLoadError
from engine.loop import Engine
from engine.model import loading, selfcheck, sources
from engine.protocol import Event, LoadFailed, Start
from tests.engine.model.saying import quiet, why


def test_a_truncated_weights_file_is_named(model: Path, tmp_path: Path) -> None:
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    assert str(model) in why(model, tmp_path)


def test_a_truncated_gguf_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "cut.gguf"
    with sources._embedded_file().open("rb") as whole:
        file.write_bytes(whole.read(100_000))
    assert str(file) in why(file, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_missing_file_is_named(model: Path, tmp_path: Path, missing: str) -> None:
    (model / missing).unlink()
    message = why(model, tmp_path)
    assert str(model) in message
    assert Path(missing).suffix in message


def test_a_pickle_is_never_read(model: Path, tmp_path: Path) -> None:
    (model / "model.safetensors").unlink()
    (model / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
    assert f"{model / 'pytorch_model.bin'} is a pickle, which can run code" in why(model, tmp_path)


@pytest.mark.parametrize(
    ("device_kv", "words"),
    [
        (1000, "device_kv of 1,000 bytes is too small for model, which needs at least 16 KiB"),
        (2**60, "choose a smaller device_kv"),
    ],
)
def test_a_pool_that_cannot_be_is_refused_with_numbers(model: Path, tmp_path: Path, device_kv: int, words: str) -> None:
    assert words in why(model, tmp_path, cache=CacheConfig(device_kv=device_kv))


@pytest.mark.parametrize(("device", "dtype"), [("tpu", "float32"), ("cpu", "int4")])
def test_unknown_devices_and_dtypes_are_named(model: Path, tmp_path: Path, device: str, dtype: str) -> None:
    with pytest.raises(ModelLoadError, match=r"tpu|int4"):
        loading.choose(device, dtype)
    engine_says: list[Event] = []
    engine = Engine(engine_says.extend)
    engine.inbox.put(Start(config=EngineConfig(model=str(model), cache_dir=str(tmp_path), device=device, dtype=dtype)))
    engine.run()
    assert [type(event) for event in engine_says] == [LoadFailed]  # before anything was read or converted


def test_the_fingerprint_follows_content_dtype_and_layout_but_not_the_name(model: Path, tmp_path: Path) -> None:
    def of(path: Path, dtype: str = "float32", block_size: int = 32) -> str:
        loaded = loading.load(sources.prepare(str(path), tmp_path, quiet), "cpu", dtype)
        return loading.fingerprint(loaded, block_size)

    first = of(model)
    renamed = model.rename(model.with_name("renamed"))
    assert of(renamed) == first
    assert of(renamed, dtype="bfloat16") != first
    assert of(renamed, block_size=16) != first
    config = json.loads((renamed / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] = 5e5
    (renamed / "config.json").write_text(json.dumps(config))
    other_positions = of(renamed)
    assert other_positions != first
    tensors = load_file(renamed / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"] + 1
    save_file(tensors, renamed / "model.safetensors", metadata={"format": "pt"})
    assert of(renamed) not in (first, other_positions)


def test_the_kv_shape_is_the_models(model: Path, tmp_path: Path) -> None:
    loaded = loading.load(sources.prepare(str(model), tmp_path, quiet), "cpu", "bfloat16")
    shape = selfcheck.probe(loaded)
    assert shape == selfcheck.KVShape(layers=2, kv_heads=2, head_dim=8)
    assert shape.bytes_per_token(torch.bfloat16) == 2 * 2 * 2 * 8 * 2
