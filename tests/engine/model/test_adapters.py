"""LoRA adapters: merged, a model computes what it would with the adapter beside it; any other is one sentence."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from engine.model import loading, sources
from engine.model.runner import ModelRunner
from engine.protocol import Ready
from tests.engine.model.saying import quiet, refusal, start
from tests.engine.model.tiny import BLOCKS, Part, config_of, eager, make_pool, paged, prompt, save

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def base(folder: Path, name: str = "llama", **changes: Any) -> Path:
    """A model as a folder with a tokenizer of no words, and weights large enough that each moves the logits."""
    save(config_of(name, **changes), folder)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def tune(model: Path, folder: Path, **settings: Any) -> Path:
    """An adapter for `model` with random weights, saved by peft."""
    torch.manual_seed(1)
    module = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    adapted = get_peft_model(module, LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": TARGETS, **settings}))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name or "modules_to_save" in name or (parameter.requires_grad and "bias" in name):
                parameter.normal_(std=0.1)
    adapted.save_pretrained(folder)
    return folder


def prepare(model: Path, adapter: Path, cache: Path) -> sources.PreparedModel:
    return sources.prepare(str(model), cache, quiet, adapter=str(adapter))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model and an adapter of it, to be copied."""
    folder = tmp_path_factory.mktemp("made")
    tune(base(folder / "model"), folder / "tune")
    return folder


@pytest.fixture
def model(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made / "model", tmp_path / "model"))


@pytest.fixture
def adapter(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made / "tune", tmp_path / "tune"))


# --- what is merged ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("llama", {}),
        ("llama", {"use_rslora": True, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"down_proj": 32}}),
        ("llama", {"use_dora": True}),
        ("llama", {"layers_to_transform": [1], "exclude_modules": ["o_proj"]}),
        ("llama", {"modules_to_save": ["lm_head", "embed_tokens"]}),
        ("llama", {"target_modules": ["embed_tokens", "lm_head", "q_proj"]}),
        ("qwen2", {"bias": "lora_only", "target_modules": ["q_proj", "v_proj"]}),
        ("gpt-neox", {"target_modules": ["query_key_value", "dense"]}),
        ("qwen3-moe", {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj"]}),
    ],
)
def test_a_merged_adapter_computes_what_it_would_beside_its_base(
    name: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    model = base(tmp_path / "model", name, tie_word_embeddings=False)
    adapter = tune(model, tmp_path / "tune", **settings)
    loaded = loading.load(prepare(model, adapter, tmp_path), "cpu", "float32")
    ids = prompt(40)
    part = Part(ids, list(range(BLOCKS)), [7, 30, 40])
    (steps,) = paged(ModelRunner(loaded, make_pool(loaded)), [part])
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    unmerged = eager(PeftModel.from_pretrained(plain, adapter).eval(), ids)
    for position, logits in steps:
        assert (logits - unmerged[position]).abs().max() < 1e-5 * unmerged.abs().max()
    without = eager(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), ids)
    assert (unmerged - without).abs().max() > 0.1


def test_in_bfloat16_a_merged_weight_is_rounded_once(model: Path, tmp_path: Path) -> None:
    adapter = tune(model, tmp_path / "tune", modules_to_save=["lm_head"])
    name = "model.layers.0.mlp.up_proj"
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).get_submodule(name).weight
    module = loading.load(prepare(model, adapter, tmp_path), "cpu", "bfloat16", fuse=False).module
    assert {parameter.dtype for parameter in module.parameters()} == {torch.bfloat16}
    tensors = load_file(adapter / "adapter_model.safetensors")
    part = "base_model.model.model.layers.0.mlp.up_proj.lora_{}.weight"
    change = 2.0 * (tensors[part.format("B")] @ tensors[part.format("A")])  # alpha / r
    assert torch.equal(module.get_submodule(name).weight, (plain.float() + change).bfloat16())


def test_an_adapter_has_a_fingerprint_of_its_own_by_content(model: Path, adapter: Path, tmp_path: Path) -> None:
    def of(prepared: sources.PreparedModel) -> str:
        return loading.fingerprint(loading.load(prepared, "cpu", "float32"), 32)

    plain, tuned = sources.prepare(str(model), tmp_path, quiet), prepare(model, adapter, tmp_path)
    assert (plain.name, tuned.name) == ("model", "model+tune")
    assert (tuned.path, tuned.adapter) == (plain.path, adapter)
    seen = [of(plain), of(tuned)]
    weights = adapter / "adapter_model.safetensors"
    save_file({key: value * 1.01 for key, value in load_file(weights).items()}, weights, metadata={"format": "pt"})
    seen.append(of(prepare(model, adapter, tmp_path)))
    change(adapter, lora_alpha=9)
    seen.append(of(prepare(model, adapter, tmp_path)))
    assert len(set(seen)) == 4
    assert of(prepare(model, adapter.rename(adapter.with_name("moved")), tmp_path)) == seen[-1]


def test_an_engine_serves_a_model_with_its_adapter(tiny_model: Path, tmp_path: Path) -> None:
    adapter = tune(tiny_model, tmp_path / "tune")
    (ready,) = start(tiny_model, tmp_path, adapter=str(adapter))
    assert isinstance(ready, Ready)
    assert ready.capabilities.model_name == f"{tiny_model.name}+tune"
    (plain,) = start(tiny_model, tmp_path)
    assert isinstance(plain, Ready)
    assert plain.capabilities.fingerprint != ready.capabilities.fingerprint


# --- what is refused --------------------------------------------------------------------------------------------------


def change(adapter: Path, **settings: Any) -> None:
    """Set keys of its configuration."""
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


def rewrite(adapter: Path, alter: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(adapter / "adapter_model.safetensors")
    alter(tensors)
    save_file(tensors, adapter / "adapter_model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("name", ["nothing", "/nowhere", "a/b/c", "owner/.."])
def test_names_that_can_be_nothing_are_said_to_be(name: str, model: Path, tmp_path: Path) -> None:
    assert (
        refusal(model, tmp_path, adapter=name) == f"no adapter {name!r}: name a folder, or a hub id such as owner/name"
    )


def test_an_adapter_is_named_by_its_folder(model: Path, adapter: Path, tmp_path: Path) -> None:
    file = adapter / "adapter_model.safetensors"
    assert refusal(model, tmp_path, adapter=file) == f"{file} is no adapter: name its folder, in PEFT's form"
    assert f"no adapter_config.json in {model}" in refusal(model, tmp_path, adapter=model)


def test_missing_weights_are_named(model: Path, adapter: Path, tmp_path: Path) -> None:
    (adapter / "adapter_model.safetensors").unlink()
    assert f"no adapter_model.safetensors in {adapter}" in refusal(model, tmp_path, adapter=adapter)


def test_a_pickle_is_never_opened(harm: Path, model: Path, adapter: Path, tmp_path: Path) -> None:
    weights = adapter / "adapter_model.safetensors"
    shutil.copy(harm, weights)
    assert f"{weights} is not safetensors, it looks like a pickle" in refusal(model, tmp_path, adapter=adapter)
    weights.unlink()
    shutil.copy(harm, adapter / "adapter_model.bin")
    message = refusal(model, tmp_path, adapter=adapter)
    assert message.startswith(f"{adapter / 'adapter_model.bin'} is a pickle, which can run code when it is opened")
    assert not (harm.parent / "harmed").exists()


def test_a_truncated_file_is_named(model: Path, adapter: Path, tmp_path: Path) -> None:
    weights = adapter / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert refusal(model, tmp_path, adapter=adapter).startswith(f"{weights} is damaged, or not safetensors")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"peft_type": "IA3"}, "is an adapter of the type IA3: only LoRA can be used"),
        ({"peft_type": None}, "does not say the adapter's type (peft_type)"),
        ({"layer_replication": [[0, 2], [1, 3]]}, "its adapter_config.json sets layer_replication"),
        ({"alora_invocation_tokens": [5]}, "its adapter_config.json sets alora_invocation_tokens"),
        ({"invented_in_2031": {"depth": 2}}, "its adapter_config.json sets invented_in_2031"),
        ({"init_lora_weights": "pissa"}, "was made for a base that 'pissa' had changed"),
    ],
)
def test_kinds_that_cannot_be_merged_exactly_are_named(
    settings: dict[str, Any], words: str, model: Path, adapter: Path, tmp_path: Path
) -> None:
    change(adapter, **settings)
    message = refusal(model, tmp_path, adapter=adapter)
    assert str(adapter) in message
    assert words in message


def test_another_kind_of_adapter_saved_by_peft_is_named(model: Path, tmp_path: Path) -> None:
    module = AutoModelForCausalLM.from_pretrained(model)
    settings = IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"])
    get_peft_model(module, settings).save_pretrained(tmp_path / "ia3")
    assert "of the type IA3" in refusal(model, tmp_path, adapter=tmp_path / "ia3")


def test_a_damaged_configuration_is_named(model: Path, adapter: Path, tmp_path: Path) -> None:
    (adapter / "adapter_config.json").write_text("{")
    message = refusal(model, tmp_path, adapter=adapter)
    assert message.startswith(f"{adapter / 'adapter_config.json'} is damaged, or not JSON")


def test_a_base_of_other_sizes_is_told(adapter: Path, tmp_path: Path) -> None:
    other = base(tmp_path / "other", hidden_size=64)
    message = refusal(other, tmp_path, adapter=adapter, load=True)
    assert message.startswith("other+tune does not fit its base model: ")
    assert "size mismatch" in message


def test_a_base_of_another_kind_is_told(adapter: Path, tmp_path: Path) -> None:
    other = base(tmp_path / "other", "gpt-neox")
    assert "other+tune does not fit its base model: " in refusal(other, tmp_path, adapter=adapter, load=True)


def test_a_base_with_fewer_layers_is_told(adapter: Path, tmp_path: Path) -> None:
    other = base(tmp_path / "other", num_hidden_layers=2)
    message = refusal(other, tmp_path, adapter=adapter, load=True)
    assert "does not fit its base model, which has no place for base_model.model.model.layers.2" in message


def test_an_adapter_that_is_not_whole_is_told(model: Path, adapter: Path, tmp_path: Path) -> None:
    key = "base_model.model.model.layers.1.mlp.up_proj.lora_B.weight"
    rewrite(adapter, lambda tensors: tensors.pop(key))
    assert f"adapter_model.safetensors lacks {key}" in refusal(model, tmp_path, adapter=adapter, load=True)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_an_adapter_of_no_numbers_is_told(number: float, model: Path, adapter: Path, tmp_path: Path) -> None:
    rewrite(adapter, lambda tensors: next(iter(tensors.values())).fill_(number))
    assert "holds values that are not numbers" in refusal(model, tmp_path, adapter=adapter, load=True)


@pytest.mark.parametrize("settings", [{"modules_to_save": ["lm_head"]}, {"target_modules": ["embed_tokens"]}])
def test_changes_to_embeddings_that_are_used_at_both_ends_are_refused(settings: dict[str, Any], tmp_path: Path) -> None:
    model = base(tmp_path / "model", tie_word_embeddings=True)
    adapter = tune(model, tmp_path / "tune", **settings)
    message = refusal(model, tmp_path, adapter=adapter, load=True)
    assert "which this model uses at both ends: merge it yourself with peft" in message
