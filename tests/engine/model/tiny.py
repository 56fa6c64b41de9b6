"""Tiny random models of every family, saved and loaded as real ones are, and what to hold them against."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

from engine.batch import Batch, Draw, Row
from engine.cache.pool import KVPool
from engine.model import loading, selfcheck
from engine.model.loading import LoadedModel
from engine.model.runner import ModelRunner
from engine.model.sources import PreparedModel
from engine.protocol import Sampling

BLOCK, BLOCKS = 4, 64
VOCABULARY, CONTEXT = 97, 128
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": CONTEXT,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def rope(kind: str, **more: Any) -> dict[str, Any]:
    """Rotary parameters of a kind, short of its factors."""
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, **more}}


MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-linear": ("Llama", rope("linear", factor=4.0)),
    "llama-yarn": ("Llama", rope("yarn", factor=4.0, original_max_position_embeddings=32)),
    "llama-llama3": (
        "Llama",
        rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32),
    ),
    "llama-dynamic": ("Llama", rope("dynamic", factor=4.0)),
    "qwen2": ("Qwen2", {}),
    "qwen2-window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {}),
    "mistral": ("Mistral", {"sliding_window": 7}),
    "gemma2": ("Gemma2", {"sliding_window": 7, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 5.0}),
    "gemma3": ("Gemma3Text", {"sliding_window": 7, "query_pre_attn_scalar": 16, "layer_types": MIXED}),
    "phi3": ("Phi3", {"sliding_window": 7}),
    "phimoe": ("Phimoe", {"num_local_experts": 4, "sliding_window": CONTEXT}),
    "olmo2": ("Olmo2", {}),
    "gpt-neox": ("GPTNeoX", {}),
    "granite": ("Granite", {"attention_multiplier": 0.7, "residual_multiplier": 0.6, "logits_scaling": 2.0}),
    "cohere2": ("Cohere2", {"sliding_window": 7, "layer_types": MIXED, "logit_scale": 0.25}),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 0, 1]}),
    "gpt-oss": (
        "GptOss",
        {"sliding_window": 7, "num_local_experts": 4, "num_experts_per_tok": 2, "layer_types": MIXED},
    ),
    "qwen3-moe": ("Qwen3Moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}),
    "stablelm": ("StableLm", {}),  # hands none of a caller's own arguments down to its attention
    "gemma3n": (  # its last two layers read the K and V of earlier ones
        "Gemma3nText",
        {
            "sliding_window": 7,
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "activation_sparsity_pattern": [0.0] * 4,
            "hidden_size_per_layer_input": 4,
            "vocab_size_per_layer_input": VOCABULARY,
            "laurel_rank": 4,
            "altup_num_inputs": 2,
        },
    ),
    "gpt2": ("GPT2", {"n_positions": CONTEXT}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
}


def config_of(name: str, **changes: Any) -> Any:
    """A model's configuration, with changes."""
    prefix, extra = MODELS[name]
    return getattr(transformers, f"{prefix}Config")(**{**COMMON, **extra, **changes})


def save(config: Any, folder: Path) -> PreparedModel:
    """A random model of this configuration as files."""
    of(config).save_pretrained(folder)
    return PreparedModel(name=folder.name, path=folder, digest="0")


def of(config: Any) -> Any:
    """A random model of this configuration in float32, its weights so large that windows, caps, sinks, scales and
    positions change the logits; norms and biases are random too."""
    torch.manual_seed(int(hashlib.sha256(repr(sorted(config.to_dict().items(), key=str)).encode()).hexdigest()[:8], 16))
    module = AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.dim() >= 2:
                parameter.normal_(std=0.35)
            elif "sinks" in name:
                parameter.normal_(std=2.0)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return module


def load(
    name: str, folder: Path, *, context: int | None = None, dtype: str = "float32", fuse: bool = True, **changes: Any
) -> LoadedModel:
    """A model saved in `folder` and loaded as the engine loads it."""
    return loading.load(save(config_of(name, **changes), folder / name), "cpu", dtype, context, fuse=fuse)


def untouched(loaded: LoadedModel) -> Any:
    """transformers' own model of the same files: eager, and never seen by our code."""
    path = loaded.prepared.path
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()


@torch.inference_mode()
def eager(module: Any, ids: Sequence[int]) -> torch.Tensor:
    """The logits after each of the ids, [ids, vocabulary]."""
    return module(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0]


def assert_equal(logits: Sequence[tuple[int, torch.Tensor]], expected: torch.Tensor) -> None:
    """Each of `logits` (position, logits) is that row of `expected` [positions, vocabulary].

    To 1e-5 of the largest logit: the logits here reach 2 to 13, and float32 rounds differently by the shape of a sum.
    """
    for position, row in logits:
        torch.testing.assert_close(row, expected[position], rtol=0, atol=1e-5 * float(expected.abs().max()))


def make_pool(loaded: LoadedModel) -> KVPool:
    """A pool for the model, every slot NaN: whatever is read without having been written spoils the logits."""
    pool = selfcheck.probe(loaded).pool(BLOCKS, BLOCK, loaded.dtype, loaded.device)
    for block in range(BLOCKS):
        pool.poison(block)
    return pool


def draw() -> Draw:
    """A wish for the logits of a row."""
    return Draw(sampling=Sampling(), seed=0, position=0, prompt_ids=[], reply_ids=[])


def prompt(length: int, salt: int = 0) -> list[int]:
    """Ids of a prompt; another salt, another prompt."""
    return [3 + (5 * i * i + 11 * i + 17 * salt) % (VOCABULARY - 3) for i in range(length)]


@dataclass(frozen=True)
class Part:
    """A prompt that is read in chunks: its ids, the blocks it lies in, and where each step's chunk ends."""

    ids: list[int]
    blocks: list[int]
    ends: list[int]


def paged(runner: ModelRunner, parts: Sequence[Part]) -> list[list[tuple[int, torch.Tensor]]]:
    """Step by step, all parts in one batch; for each part and step (last position read, logits after it)."""
    logits: list[list[tuple[int, torch.Tensor]]] = [[] for _ in parts]
    for step in range(max(len(part.ends) for part in parts)):
        rows, owners = [], []
        for index, part in enumerate(parts):
            start, end = ([0, *part.ends][step], part.ends[step]) if step < len(part.ends) else (0, 0)
            if start < end:
                rows.append(Row(token_ids=part.ids[start:end], start=start, block_ids=part.blocks, draws=[draw()]))
                owners.append((index, end - 1))
        for (index, position), row in zip(owners, runner.logits(Batch(rows=rows)), strict=True):
            logits[index].append((position, row))
    return logits
