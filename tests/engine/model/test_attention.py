"""Paged attention against each model's own eager attention: packed, chunked, scattered, next to NaN-filled blocks."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from engine.batch import Batch, Draw, Row
from engine.cache.pool import KVPool
from engine.errors import ModelLoadError
from engine.model import attention, selfcheck
from engine.model.loading import LoadedModel
from engine.model.runner import ModelRunner
from engine.model.sources import PreparedModel
from engine.protocol import Sampling

BLOCK, BLOCKS = 4, 64
COMMON: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-yarn": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {}),
    "mistral": ("Mistral", {"sliding_window": 7}),
    "gemma2": ("Gemma2", {"sliding_window": 7, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 5.0}),
    "gemma3": ("Gemma3", {"sliding_window": 7, "query_pre_attn_scalar": 16}),
    "gpt-oss": (
        "GptOss",
        {"sliding_window": 7, "num_local_experts": 4, "num_experts_per_tok": 2, "rope_parameters": None},
    ),
    "granite": ("Granite", {"attention_multiplier": 0.7}),
}


def make(name: str) -> LoadedModel:
    """A random model whose weights are large enough that windows, caps, sinks and scales change the logits."""
    prefix, extra = MODELS[name]
    extra = {key: value for key, value in extra.items() if value is not None}
    suffix = "TextConfig" if prefix == "Gemma3" else "Config"
    config = getattr(transformers, prefix + suffix)(**{**COMMON, **extra})
    torch.manual_seed(int(hashlib.sha256(name.encode()).hexdigest()[:8], 16))
    module = getattr(transformers, f"{prefix}ForCausalLM")(config).float().eval()
    with torch.no_grad():
        for parameter_name, parameter in module.named_parameters():
            if parameter.dim() >= 2:
                parameter.normal_(std=0.35)
            elif "sinks" in parameter_name:
                parameter.normal_(std=2.0)
    module.set_attn_implementation(attention.IMPLEMENTATION)
    prepared = PreparedModel(name=name, path=Path(), digest="0")
    return LoadedModel(prepared=prepared, module=module, device=torch.device("cpu"), dtype=torch.float32)


def make_pool(loaded: LoadedModel) -> KVPool:
    """A pool for the model, every slot NaN: whatever is read without having been written spoils the logits."""
    shape = selfcheck.probe(loaded)
    pool = KVPool(
        layers=shape.layers,
        blocks=BLOCKS,
        block_size=BLOCK,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    for block in range(BLOCKS):
        pool.poison(block)
    return pool


@torch.inference_mode()
def eager(loaded: LoadedModel, ids: list[int]) -> torch.Tensor:
    loaded.module.set_attn_implementation("eager")
    logits = loaded.module(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    loaded.module.set_attn_implementation(attention.IMPLEMENTATION)
    return logits


def draw() -> Draw:
    return Draw(sampling=Sampling(), seed=0, position=0, prompt_ids=[], reply_ids=[])


@pytest.mark.parametrize("name", MODELS)
def test_paged_equals_eager(name: str) -> None:
    loaded = make(name)
    runner = ModelRunner(loaded, make_pool(loaded))
    prompts = [[(5 * i + 3 * k) % 97 for i in range(length)] for k, length in enumerate((41, 6, 23))]
    tables = [list(range(40, 51)), [7, 3], [60, 2, 59, 4, 33, 35]]  # consecutive, scattered, scattered
    cuts = [(0, 19, 40, 41), (0, 5, 6, 6), (0, 1, 22, 23)]
    logits: list[list[torch.Tensor]] = [[], [], []]
    for step in range(3):
        rows, owners = [], []
        for which, (ids, table, cut) in enumerate(zip(prompts, tables, cuts, strict=True)):
            start, end = cut[step], cut[step + 1]
            if start < end:
                rows.append(Row(token_ids=ids[start:end], start=start, block_ids=table, draws=[draw()]))
                owners.append((which, end - 1))
        for (which, position), row in zip(owners, runner.logits(Batch(rows=rows)), strict=True):
            expected = eager(loaded, prompts[which])[position]
            torch.testing.assert_close(row, expected, rtol=1e-4, atol=1e-4)
            logits[which].append(row)
    assert [len(rows) for rows in logits] == [3, 2, 3]
    assert runner.forwarded_tokens == 41 + 6 + 23
    assert runner.steps == 3


@pytest.mark.parametrize(
    ("name", "kwarg"),
    [("granite", "scaling"), ("mistral", "sliding_window"), ("gemma2", "softcap"), ("gpt-oss", "s_aux")],
)
def test_each_kwarg_matters_and_the_self_check_sees_it(name: str, kwarg: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = make(name)
    selfcheck.check(loaded, make_pool(loaded))

    def deaf(*args: Any, **kwargs: Any) -> Any:
        return attention.paged_attention(*args, **{**kwargs, kwarg: None})

    transformers.AttentionInterface.register(attention.IMPLEMENTATION, deaf)
    try:
        with pytest.raises(ModelLoadError, match="differs from the model's own"):
            selfcheck.check(loaded, make_pool(loaded))
    finally:
        transformers.AttentionInterface.register(attention.IMPLEMENTATION, attention.paged_attention)


def test_copied_tokens_are_the_same_tokens() -> None:
    loaded = make("llama")
    runner = ModelRunner(loaded, make_pool(loaded))
    ids = [9, 8, 7, 6, 5, 4]
    runner.run(Batch(rows=[Row(token_ids=ids, start=0, block_ids=[10, 11], draws=[])]))
    runner.copy_tokens(11, 30, 1)
    other = [*ids[:5], 50]
    row = Row(token_ids=other[5:], start=5, block_ids=[10, 30], draws=[draw()])
    torch.testing.assert_close(runner.logits(Batch(rows=[row]))[0], eager(loaded, other)[-1], rtol=1e-4, atol=1e-4)


def test_several_draws_come_from_one_row() -> None:
    loaded = make("llama")
    runner = ModelRunner(loaded, make_pool(loaded))
    rows = [
        Row(token_ids=[1, 2, 3], start=0, block_ids=[0], draws=[draw(), draw(), draw()]),
        Row(token_ids=[4, 5], start=0, block_ids=[1], draws=[]),
        Row(token_ids=[6], start=0, block_ids=[2], draws=[draw()]),
    ]
    first, second, third = runner.run(Batch(rows=rows))
    assert first == [int(eager(loaded, [1, 2, 3])[-1].argmax())] * 3
    assert second == []
    assert third == [int(eager(loaded, [6])[-1].argmax())]
