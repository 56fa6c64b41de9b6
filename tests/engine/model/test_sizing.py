"""What a configuration says of a model's size is what the real model measures, weight by weight and layer by layer."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from engine.errors import ModelLoadError
from engine.model import selfcheck, sizing, witness
from engine.model.loading import DTYPES
from engine.model.selfcheck import KVShape
from engine.model.sizing import Sizing, size
from engine.model.sources import EMBEDDED
from tests.engine.model import gguf_files, test_gguf, tiny

LARGE = {  # (parameters, bytes of a token's K and V in bfloat16) of real models, from their published configurations
    "Qwen2.5-7B": ("Qwen2", 7_615_616_512, 57_344, {
        "vocab_size": 152_064, "hidden_size": 3584, "intermediate_size": 18_944, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4, "max_position_embeddings": 32_768,
    }),
    "Llama-3.1-8B": ("Llama", 8_030_261_248, 131_072, {
        "vocab_size": 128_256, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131_072,
    }),
    "Mixtral-8x7B": ("Mixtral", 46_702_792_704, 131_072, {
        "vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 32_768,
    }),
}  # fmt: skip


def described(config: Any, folder: Path) -> str:
    """A folder that has a config.json and nothing else."""
    config.save_pretrained(folder)
    assert [file.name for file in folder.iterdir()] == ["config.json"]
    return str(folder)


def refused(model: str | Path) -> str:
    with pytest.raises(ModelLoadError) as error:
        size(str(model))
    assert "\n" not in str(error.value)
    return str(error.value)


# --- exact ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", tiny.MODELS)
def test_a_configuration_tells_what_the_real_model_measures(name: str, tmp_path: Path) -> None:
    loaded = tiny.load(name, tmp_path)
    sized = size(described(loaded.module.config, tmp_path / "described"))
    assert sized.parameters == sum(parameter.numel() for parameter in loaded.module.parameters())
    assert sized.shape == selfcheck.probe(loaded)
    assert sized.windows == tuple(call.options.get("sliding_window") for call in witness.listen(loaded, [0, 1]))
    assert (sized.kind, sized.context_length) == (loaded.module.config.model_type, loaded.context)
    weights = sum(parameter.nbytes for parameter in loaded.module.parameters())
    assert sized.weight_bytes(torch.float32) == weights


@pytest.mark.parametrize("name", LARGE)
def test_large_models_are_as_large_as_is_published(name: str, tmp_path: Path) -> None:
    prefix, parameters, token, settings = LARGE[name]
    sized = size(described(getattr(transformers, f"{prefix}Config")(**settings), tmp_path / name))
    assert (sized.name, sized.parameters, sized.kv_bytes(torch.bfloat16)) == (name, parameters, token)


def test_the_embedded_model(embedded_model: Path) -> None:
    sized = size(EMBEDDED)
    assert sized.shape == KVShape(layers=30, kv_heads=3, head_dim=64)
    assert (sized.kv_bytes(torch.bfloat16), sized.kv_bytes(torch.float32, 10)) == (23_040, 460_800)
    assert (sized.parameters, sized.context_length, sized.windows) == (134_515_008, 8192, (None,) * 30)
    converted = size(str(embedded_model))
    assert replace(converted, name=sized.name) == sized


@pytest.mark.parametrize("name", test_gguf.MODELS)
def test_the_header_of_a_gguf_file_tells_the_same(name: str, tmp_path: Path) -> None:
    architecture, _, _, facts = test_gguf.MODELS[name]
    config = test_gguf.config_of(name)
    extra = test_gguf.rope_factors(config) if name == "llama3" else {}
    file = tmp_path / "tiny.gguf"
    module = gguf_files.write(file, gguf_files.random_model(config), architecture, facts, extra=extra)
    sized = size(str(file))
    assert sized.parameters == sum(parameter.numel() for parameter in module.parameters())
    assert sized.shape == size(described(config, tmp_path / "described")).shape
    assert (sized.name, sized.kind, sized.context_length) == ("tiny", config.model_type, 128)


def test_windows_bound_what_is_seen_and_not_what_is_kept() -> None:
    sized = Sizing("m", "k", 1, KVShape(layers=3, kv_heads=2, head_dim=8), (4, None, 4), 128)
    layer = 2 * 2 * 8 * 4
    assert sized.kv_bytes(torch.float32, 100) == 3 * 100 * layer
    assert sized.seen_bytes(torch.float32, 100) == (4 + 100 + 4) * layer
    assert sized.seen_bytes(torch.float32, 3) == sized.kv_bytes(torch.float32, 3) == 9 * layer
    assert {kind: sized.weight_bytes(dtype) for kind, dtype in DTYPES.items()} == {
        "float32": 4, "bfloat16": 2, "float16": 2,
    }  # fmt: skip


# --- where it is ------------------------------------------------------------------------------------------------------


def test_a_configuration_file_may_be_named_itself(tmp_path: Path) -> None:
    folder = described(tiny.config_of("llama"), tmp_path / "folder")
    assert size(f"{folder}/config.json") == size(folder)
    assert size(folder).name == "folder"


def test_sizing_reads_no_weight_and_leaves_nothing_behind(tmp_path: Path) -> None:
    folder = Path(described(tiny.config_of("llama"), tmp_path / "folder"))
    (folder / "model.safetensors").write_bytes(b"not read")
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04cos\nsystem\n(S'exit 1'\ntR.")
    before = {file: file.read_bytes() for file in folder.iterdir()}
    size(str(folder))
    assert {file: file.read_bytes() for file in folder.iterdir()} == before


# --- what cannot be sized ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prefix", "words"),
    [
        ("T5", "it is an encoder-decoder model (t5)"),
        ("Mamba", "it is a linear-attention model (mamba)"),
        ("Jamba", "it is a hybrid model (jamba)"),
    ],
)
def test_what_keepwarm_does_not_serve_is_refused_by_name(prefix: str, words: str, tmp_path: Path) -> None:
    model = described(getattr(transformers, f"{prefix}Config")(), tmp_path / "model")
    assert refused(model).startswith(f"model cannot be served: {words}")


def test_multi_latent_attention_is_refused_by_name(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "n_routed_experts": 4, "first_k_dense_replace": 1}
    model = described(transformers.DeepseekV3Config(**sizes), tmp_path / "model")
    assert "its multi-latent attention (deepseek_v3) keeps K and V of unlike shapes" in refused(model)


def test_missing_and_damaged_configurations_are_named(tmp_path: Path) -> None:
    assert "no config.json in" in refused(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "lla')
    assert str(tmp_path / "config.json") in refused(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "nobody-knows"}')
    assert "'nobody-knows'" in refused(tmp_path)
    config = json.loads(tiny.config_of("llama").to_json_string())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_attention_heads": 0}))
    assert str(tmp_path) in refused(tmp_path) or tmp_path.name in refused(tmp_path)
    shutil.copy(tmp_path / "config.json", tmp_path / "model.gguf")
    assert str(tmp_path / "model.gguf") in refused(tmp_path / "model.gguf")
    for nothing in (tmp_path / "absent.gguf", "no-such-model", "nobody/nothing"):
        assert str(nothing) in refused(nothing)


def test_a_configuration_whose_numbers_make_no_model_is_named(tmp_path: Path) -> None:
    config = tiny.config_of("llama")
    config.save_pretrained(tmp_path / "odd")
    raw = json.loads((tmp_path / "odd" / "config.json").read_text())
    (tmp_path / "odd" / "config.json").write_text(json.dumps({**raw, "intermediate_size": -1}))
    assert refused(tmp_path / "odd").startswith("odd has a configuration that makes no model: ")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"num_hidden_layers": 10_000_000}, "says num_hidden_layers 10000000, and no model has more than 10,000"),
        ({"num_hidden_layers": 0}, "its configuration says num_hidden_layers 0, where 1 is the least"),
        ({"num_hidden_layers": -2}, "its configuration says num_hidden_layers -2, where 1 is the least"),
        ({"vocab_size": -1}, "its configuration says vocab_size -1, where 1 is the least"),
        ({"num_key_value_heads": 0}, "its configuration says num_key_value_heads 0, where 1 is the least"),
    ],
)
def test_sizes_that_no_model_has_are_named(settings: dict[str, int], words: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **settings}))
    assert words in refused(tmp_path)


def test_the_module_is_never_given_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    build = sizing._empty_module
    monkeypatch.setattr(sizing, "_empty_module", lambda *words: made.append(build(*words)) or made[-1])
    size(described(tiny.config_of("gpt-oss"), tmp_path / "model"))
    assert {str(tensor.device) for tensor in (*made[0].parameters(), *made[0].buffers())} == {"meta"}
