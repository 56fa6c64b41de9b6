"""The self-check at load lets right attention pass, and no attention that is broken in any of many ways."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from engine.cache.pool import KVPool
from engine.errors import ModelLoadError
from engine.model import attention, selfcheck
from engine.model.attention import PagedContext, Span
from engine.model.kernels import Kernels, TorchKernels
from engine.model.loading import LoadedModel
from tests.engine.model import tiny

right = attention.paged_attention
Broken = Callable[..., tuple[torch.Tensor, None]]


def with_context(change: Callable[[PagedContext], dict[str, Any]]) -> Broken:
    """Attention over another context than the one it was given."""

    def broken(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
        paged = attention._current.get()
        with attention.attending(dataclasses.replace(paged, masks={}, **change(paged))):
            return right(*args, **kwargs)

    return broken


def with_spans(change: Callable[[Span], dict[str, Any]]) -> Broken:
    """Attention over other keys than those of each row."""
    return with_context(lambda paged: {"spans": [dataclasses.replace(s, **change(s)) for s in paged.spans]})


def with_arguments(change: Callable[..., dict[str, Any]]) -> Broken:
    """Attention over other queries, keys or values than those it was given."""

    def broken(module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
        given = {"query": query, "key": key, "value": value}
        return right(module, **{**given, **change(**given)}, attention_mask=mask, **kwargs)

    return broken


def with_output(change: Callable[[torch.Tensor], torch.Tensor]) -> Broken:
    """Attention that gives back something else."""

    def broken(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
        return change(right(*args, **kwargs)[0]), None

    return broken


def with_layer(change: Callable[[int], int]) -> Broken:
    """Attention over another layer's part of the pool."""
    return with_context(lambda paged: {"layer": lambda index: paged.layer(change(index))})


BROKEN: dict[str, Broken] = {
    "writes one slot too far": with_context(lambda paged: {"write_slots": paged.write_slots + 1}),
    "writes in reverse": with_context(lambda paged: {"write_slots": paged.write_slots.flip(0)}),
    "reads as if blocks were consecutive": with_spans(lambda span: {"blocks": None}),
    "reads the pool from its start": with_spans(lambda span: {"first_slot": 0, "blocks": None}),
    "sees the last block twice": with_spans(lambda span: {"blocks": span.blocks[[*range(1, len(span.blocks)), -1]]}),
    "sees the first tokens alone": with_spans(lambda span: {"length": span.count}),
    "keeps K and V of the first layer alone": with_layer(lambda index: 0),
    "swaps K and V": with_arguments(lambda query, key, value: {"key": value, "value": key}),
    "swaps the heads of a group": with_arguments(lambda query, key, value: {"query": query.roll(1, dims=1)}),
    "swaps the heads of keys": with_arguments(lambda query, key, value: {"key": key.flip(1)}),
    "scales a little": with_arguments(lambda query, key, value: {"query": query * 1.05}),
    "gives nothing": with_output(torch.zeros_like),
    "gives NaN": with_output(lambda output: output * float("nan")),
    "gives one token's NaN": with_output(lambda output: output.index_fill(1, torch.tensor([0]), float("nan"))),
    "gives tokens in another order": with_output(lambda output: output.roll(1, dims=1)),
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return tiny.load("llama", tmp_path_factory.mktemp("selfcheck"), fuse=False)


@pytest.mark.parametrize("name", BROKEN)
def test_broken_attention_is_noticed(name: str, llama: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(transformers.AttentionInterface._global_mapping, attention.IMPLEMENTATION, BROKEN[name])
    with pytest.raises(ModelLoadError, match=r"^llama cannot be served: paged attention differs from the model's own"):
        selfcheck.check(llama, tiny.make_pool(llama))
    monkeypatch.undo()
    selfcheck.check(llama, tiny.make_pool(llama))  # and it is the attention, not what the check left behind


CHANGES: dict[str, Callable[[PagedContext], dict[str, Any]]] = {
    "writes one slot too far": lambda paged: {"write_slots": paged.write_slots + 1},
    "writes in reverse": lambda paged: {"write_slots": paged.write_slots.flip(0)},
    "keeps K and V of the first layer alone": lambda paged: {"layer": lambda index: paged.layer(0)},
    "reads the first token alone": lambda paged: {
        "spans": [dataclasses.replace(span, length=span.count) for span in paged.spans]
    },
    "reads its blocks in reverse": lambda paged: {
        "spans": [
            dataclasses.replace(span, table=span.table.flip(0), blocks=span.blocks.flip(0)) for span in paged.spans
        ]
    },
}


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("name", CHANGES)
def test_a_fused_layer_that_is_broken_is_noticed(
    name: str, native: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, native_kernels: Kernels
) -> None:
    loaded, kernels = tiny.load("llama", tmp_path), native_kernels if native else TorchKernels()
    right_one = attention.current

    def changed() -> PagedContext | None:
        paged = right_one()
        return None if paged is None else dataclasses.replace(paged, masks={}, few_seen={}, **CHANGES[name](paged))

    monkeypatch.setattr(attention, "current", changed)
    with pytest.raises(ModelLoadError, match=r"^llama cannot be served: paged attention differs from the model's own"):
        selfcheck.check(loaded, tiny.make_pool(loaded), kernels)
    monkeypatch.undo()
    selfcheck.check(loaded, tiny.make_pool(loaded), kernels)


def test_attention_that_sees_the_future_is_noticed(llama: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = tiny.make_pool(llama)
    monkeypatch.setattr(attention, "visible", lambda queries, keys, window: keys <= queries + 1)
    with pytest.raises(ModelLoadError, match="differs from the model's own"):
        selfcheck.check(llama, pool)
    with pytest.raises(ModelLoadError, match=r"looks ahead|looks elsewhere"):
        selfcheck.probe(llama)


def test_a_window_beyond_the_checked_tokens_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = tiny.load("mistral", tmp_path, sliding_window=100)
    pool = tiny.make_pool(loaded)
    monkeypatch.setattr(attention, "visible", lambda queries, keys, window: keys <= queries)
    selfcheck.check(loaded, pool)  # 48 tokens cannot show it
    with pytest.raises(ModelLoadError, match="token 100 does not see token 0"):
        selfcheck.probe(loaded)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt-oss"])
def test_right_attention_passes_in_every_dtype(name: str, dtype: str, tmp_path: Path) -> None:
    loaded = tiny.load(name, tmp_path, dtype=dtype)
    selfcheck.check(loaded, tiny.make_pool(loaded))


@pytest.mark.parametrize("context", [48, 20, 4, 1])
def test_a_short_context_is_checked_as_far_as_it_goes(context: int, tmp_path: Path) -> None:
    loaded = tiny.load("gpt2", tmp_path, context=context)
    selfcheck.check(loaded, tiny.make_pool(loaded))


def test_two_blocks_are_enough(llama: LoadedModel) -> None:
    shape = selfcheck.probe(llama)
    pool = KVPool(shape.layers, 2, 32, shape.kv_heads, shape.head_dim, torch.float32, "cpu")
    selfcheck.check(llama, pool)


def test_the_shape_is_what_attention_is_given(tmp_path: Path) -> None:
    shape = selfcheck.probe(tiny.load("mixtral", tmp_path, num_key_value_heads=1, head_dim=16))
    assert shape == selfcheck.KVShape(layers=3, kv_heads=1, head_dim=16)
    assert shape.bytes_per_token(torch.bfloat16) == 2 * 3 * 1 * 16 * 2


def test_running_out_of_memory_is_not_the_models_fault(llama: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setitem(transformers.AttentionInterface._global_mapping, "keepwarm_witness", full)
    with pytest.raises(torch.OutOfMemoryError):
        selfcheck.probe(llama)
