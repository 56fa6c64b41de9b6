"""GGUF files: what is converted computes what the file says, and whatever cannot be is one sentence."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import transformers
from filelock import FileLock
from gguf import GGMLQuantizationType
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from engine.errors import ModelLoadError
from engine.model import convert, sources
from engine.model.convert import convert_gguf
from tests.engine.model.gguf_files import LLAMA, SIZES, TEMPLATE, TEXT, VOCABULARY, random_model, tokenizer, write
from tests.engine.model.saying import quiet, refusal

WIDE = {"attention.key_length": 32, "attention.value_length": 32}  # heads wider than their share of the model


def rope(kind: str, **more: float) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 5e5, **more}}


LLAMA3 = rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)

# architecture, configuration, its settings, and the facts in the file that say the same
MODELS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", "Llama", {"rope_theta": 5e5}, {**LLAMA, "vocab_size": VOCABULARY}),
    "llama-linear": (
        "llama",
        "Llama",
        rope("linear", factor=4.0),
        {**LLAMA, "rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
    ),
    "llama-yarn": (
        "llama",
        "Llama",
        rope("yarn", factor=4.0, original_max_position_embeddings=32),
        {
            **LLAMA,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 32,
        },
    ),
    "llama3": ("llama", "Llama", LLAMA3, LLAMA),
    "qwen2": ("qwen2", "Qwen2", {"rope_theta": 1e6, "tie_word_embeddings": True}, {"rope.freq_base": 1e6}),
    "qwen3": ("qwen3", "Qwen3", {"rope_theta": 1e6, "head_dim": 32}, {"rope.freq_base": 1e6, **WIDE}),
    "qwen3moe": (
        "qwen3moe",
        "Qwen3Moe",
        {
            "head_dim": 32,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
        },
        {**WIDE, "expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32},
    ),
    "gemma2": (
        "gemma2",
        "Gemma2",
        {
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "sliding_window": 8,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 3.0,
        },
        {
            **WIDE,
            "attention.sliding_window": 8,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma3": (
        "gemma3",
        "Gemma3Text",
        {
            "num_hidden_layers": 3,
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
            },
        },
        {
            **WIDE,
            "attention.sliding_window": 8,
            "attention.sliding_window_pattern": 2,
            "rope.freq_base": 5e5,
            "rope.freq_base_swa": 2e4,
            "rope.scaling.type": "linear",
            "rope.scaling.factor": 8.0,
        },
    ),
    "phi3": (
        "phi3",
        "Phi3",
        {"sliding_window": 8},
        {"attention.sliding_window": 8, "rope.dimension_count": 16, "rope.scaling.original_context_length": 4096},
    ),
    "starcoder2": (
        "starcoder2",
        "Starcoder2",
        {"rope_theta": 1e6},
        {"rope.freq_base": 1e6, "attention.layer_norm_epsilon": 1e-5},
    ),
    "stablelm": (
        "stablelm",
        "StableLm",
        {"rope_theta": 1e6, "partial_rotary_factor": 0.25},
        {"rope.freq_base": 1e6, "rope.dimension_count": 4, "attention.layer_norm_epsilon": 1e-5},
    ),
}


def config_of(name: str) -> Any:
    _, kind, settings, _ = MODELS[name]
    return getattr(transformers, f"{kind}Config")(**{**SIZES, **settings})


def rope_factors(config: Any) -> dict[str, np.ndarray]:
    """What the converter writes for Llama 3: how much slower each pair of a head's numbers turns."""
    plain = LlamaConfig(**{**SIZES, **rope("linear", factor=1.0)})
    scaled = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))[0]
    unscaled = ROPE_INIT_FUNCTIONS["linear"](plain, torch.device("cpu"))[0]
    return {"rope_freqs.weight": (unscaled / scaled).numpy()}


@torch.inference_mode()
def logits(module: Any) -> torch.Tensor:
    return module(torch.tensor([[5 + 7 * i % 300 for i in range(40)]])).logits


# --- what is converted ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_what_is_converted_computes_what_the_file_says(name: str, tmp_path: Path) -> None:
    architecture, _, _, facts = MODELS[name]
    config = config_of(name)
    extra = rope_factors(config) if name == "llama3" else {}
    held = write(tmp_path / "tiny.gguf", random_model(config), architecture, facts, extra=extra)
    convert_gguf(tmp_path / "tiny.gguf", "float32", tmp_path / "out")
    converted = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    torch.testing.assert_close(logits(converted), logits(held), atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q5_0"])
def test_every_way_to_quantise_gives_the_numbers_that_llama_cpp_would_use(kind: str, tmp_path: Path) -> None:
    model, facts = random_model(config_of("qwen2")), MODELS["qwen2"][3]
    held = write(tmp_path / "tiny.gguf", model, "qwen2", facts, kind=GGMLQuantizationType[kind])
    convert_gguf(tmp_path / "tiny.gguf", "float32", tmp_path / "out")
    weights = load_file(tmp_path / "out" / "model.safetensors")
    expected = {key: value for key, value in held.state_dict().items() if key != "lm_head.weight"}
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[key], expected[key]) for key in weights)


def test_a_conversion_happens_once_for_its_content_and_dtype(tmp_path: Path) -> None:
    file, cache = tmp_path / "own" / "small.gguf", tmp_path / "cache"
    file.parent.mkdir()
    held = write(file, random_model(config_of("qwen2")), "qwen2", MODELS["qwen2"][3])
    for name in ("config.json", "tokenizer_config.json", "adapter_config.json"):  # of some other model
        (file.parent / name).write_text('{"model_type": "gpt2", "peft_type": "LORA", "chat_template": "no"}')
    told: list[tuple[str, int, int]] = []
    prepared = sources.prepare(str(file), cache, lambda *words: told.append(words), dtype=torch.bfloat16)
    count = len(load_file(prepared.path / "model.safetensors"))
    assert ("converting weights", 1, count) in told
    assert ("converting weights", count, count) in told
    assert prepared.name == "small"
    assert prepared.path.name == f"{prepared.digest[:20]}-bfloat16"
    assert {entry.name for entry in prepared.path.parent.iterdir()} == {"conversion.lock", prepared.path.name}
    for key, value in load_file(prepared.path / "model.safetensors").items():
        assert torch.equal(value, held.state_dict()[key].to(torch.bfloat16))
    assert json.loads((prepared.path / "generation_config.json").read_text())["eos_token_id"] == [0, 2]
    assert (prepared.path / "chat_template.jinja").read_text() == TEMPLATE
    assert Tokenizer.from_file(str(prepared.path / "tokenizer.json")).encode(TEXT).ids == tokenizer().encode(TEXT).ids
    assert sources.weight_bytes(prepared, torch.bfloat16) == sum(p.numel() * 2 for p in held.parameters())

    told.clear()
    renamed = file.rename(file.with_name("other.gguf"))
    again = sources.prepare(str(renamed), cache, lambda *words: told.append(words), dtype=torch.bfloat16)
    assert (again.name, again.path) == ("other", prepared.path)
    assert {stage for stage, _, _ in told} == {"checking weights"}


# --- what goes wrong on the way ---------------------------------------------------------------------------------------


def converters() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if "engine.model.convert" in child.cmdline()]


def test_a_converter_that_the_system_ends_is_said_to_lack_memory(llama_gguf: Path, tmp_path: Path) -> None:
    def end(stage: str, *_: int) -> None:
        for child in converters() if stage == "converting weights" else ():
            child.kill()

    with pytest.raises(
        ModelLoadError, match=r"memory ran out while .*llama.gguf was converted: it takes about \d+ KiB"
    ):
        sources.prepare(str(llama_gguf), tmp_path, end)
    assert [entry.name for entry in (tmp_path / "models").iterdir()] == ["conversion.lock"]


def test_a_conversion_that_is_given_up_ends_its_process(llama_gguf: Path, tmp_path: Path) -> None:
    (tmp_path / "models" / "left-over.partial").mkdir(parents=True)

    def give_up(stage: str, *_: int) -> None:
        if stage == "converting weights":
            assert converters()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sources.prepare(str(llama_gguf), tmp_path, give_up)
    assert converters() == []
    assert [entry.name for entry in (tmp_path / "models").iterdir()] == ["conversion.lock"]


def test_a_converter_ends_with_whoever_started_it(llama_gguf: Path, tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "engine.model.convert", "gguf", str(llama_gguf), "float32", str(tmp_path / "out")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    said, _ = process.communicate(timeout=60)  # closes its input
    assert process.returncode == 1
    assert b'"ok"' not in said


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("[enforce fail] DefaultCPUAllocator: not enough memory: you tried ...")]
)
def test_memory_that_runs_out_within_the_converter_is_said(
    error: Exception, llama_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(convert, "_hasten", quiet)
    monkeypatch.setattr(convert, "convert_gguf", fail)
    assert convert._result(["gguf", str(llama_gguf), "float32", str(tmp_path)], io.StringIO()) == {"memory": True}


def test_a_disk_without_room_is_said_with_numbers(
    llama_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(2**30, 2**30 - 2**20, 2**20))
    message = refusal(llama_gguf, tmp_path)
    assert f"no room to convert {llama_gguf}: it takes 64 MiB in {tmp_path / 'models'}, where 1 MiB are free" in message


def test_two_do_not_convert_the_same_at_once(llama_gguf: Path, tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    waiting = threading.Event()
    found: list[sources.PreparedModel] = []

    def prepare() -> None:
        found.append(sources.prepare(str(llama_gguf), tmp_path, lambda stage, *_: "waiting" in stage and waiting.set()))

    with FileLock(tmp_path / "models" / "conversion.lock"):
        thread = threading.Thread(target=prepare)
        thread.start()
        assert waiting.wait(60)
        digest = json.loads((tmp_path / "digests.json").read_text()).popitem()[1]
        made = tmp_path / "models" / f"{digest[:20]}-float32"
        made.mkdir()
    thread.join(60)
    assert [prepared.path for prepared in found] == [made]
