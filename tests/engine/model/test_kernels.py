"""Native kernels against torch's: the same numbers, whatever the shape, the threads, and what is computed beside."""

from __future__ import annotations

import logging
import shutil
import stat
from pathlib import Path

import pytest
import torch

from engine.model import kernels
from engine.model.kernels import Kernels, NativeKernels, Seen, TorchKernels

CPU = torch.device("cpu")
TORCH = TorchKernels()
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(scope="module", params=DTYPES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture(scope="module")
def native(dtype: torch.dtype, tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    chosen = kernels.choose(CPU, dtype, tmp_path_factory.mktemp("kernels"))
    assert isinstance(chosen, NativeKernels)
    return chosen


def some(dtype: torch.dtype, *shape: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))) * scale).to(dtype)


def assert_close(result: torch.Tensor, expected: torch.Tensor) -> None:
    close = 2e-6 if expected.dtype == torch.float32 else 1e-2
    torch.testing.assert_close(result.float(), expected.float(), rtol=close, atol=close)


@pytest.mark.parametrize(("rows", "width"), [(1, 576), (3, 33), (200, 96), (1, 1)])
def test_norm(rows: int, width: int, native: Kernels, dtype: torch.dtype) -> None:
    x, y, weight = some(dtype, rows, width, scale=3), some(dtype, rows, width), some(dtype, width)
    assert_close(native.norm(x.clone(), None, weight, 1e-5), TORCH.norm(x.clone(), None, weight, 1e-5))
    ours, theirs = x.clone(), x.clone()
    assert_close(native.norm(ours, y, weight, 1e-5), TORCH.norm(theirs, y, weight, 1e-5))
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize(("rows", "width"), [(1, 1536), (5, 17), (300, 64)])
def test_gate(rows: int, width: int, native: Kernels, dtype: torch.dtype) -> None:
    for scale in (1.0, 60.0):  # far enough for e to the power of it to overflow
        x = some(dtype, rows, 2 * width, scale=scale)
        result, expected = native.gate(x), TORCH.gate(x)
        torch.testing.assert_close(
            result.float(), expected.float(), rtol=1e-2 if dtype == torch.bfloat16 else 3e-6, atol=1e-6
        )


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (4, 4, 128), (4, 1, 24), (2, 2, 256)])
@pytest.mark.parametrize("tokens", [1, 70])
def test_rotate(tokens: int, heads: int, kv_heads: int, dim: int, native: Kernels, dtype: torch.dtype) -> None:
    qkv = some(dtype, tokens, heads + 2 * kv_heads, dim)
    cos, sin = some(dtype, tokens, dim), some(dtype, tokens, dim + 0, scale=0.7)
    slots = torch.randperm(160, generator=torch.Generator().manual_seed(3))[:tokens]
    results = []
    for its in (native, TORCH):
        x, keys, values = qkv.clone(), *torch.zeros(2, 10, 16, kv_heads, dim, dtype=dtype)
        its.rotate(x, cos, sin, slots, keys, values)
        results.append((x, keys, values))
    for result, expected in zip(*results, strict=True):
        assert_close(result, expected)
    assert results[0][1].flatten(0, 1)[slots].any() and not results[0][2].flatten(0, 1)[slots].eq(0).all()


def scattered(dtype: torch.dtype, kv_heads: int, dim: int, block_size: int, blocks: int) -> tuple[torch.Tensor, ...]:
    """A layer's K and V, full of NaN."""
    return tuple(torch.full((blocks, block_size, kv_heads, dim), float("nan"), dtype=dtype) for _ in range(2))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(9, 3, 64), (8, 8, 128), (4, 1, 16), (6, 2, 80), (2, 1, 256), (128, 8, 64)]
)
@pytest.mark.parametrize("block_size", [1, 16, 32])
def test_attend(heads: int, kv_heads: int, dim: int, block_size: int, native: Kernels, dtype: torch.dtype) -> None:
    lengths, firsts = [1, 127, 128, 129, 300, 300], [0, 0, 0, 0, 0, 250]
    keys, values = scattered(dtype, kv_heads, dim, block_size, 1100 // block_size + 20)
    order = torch.randperm(len(keys), generator=torch.Generator().manual_seed(5))
    tables, begin = [], 0
    for length, first in zip(lengths, firsts, strict=True):
        count = -(-length // block_size)
        tables.append(order[begin : begin + count])
        begin += count
        for position in range(first, length):  # nothing else may be read
            block, slot = tables[-1][position // block_size], position % block_size
            keys[block, slot], values[block, slot] = some(dtype, 2, kv_heads, dim)
            keys[block, slot] *= 1 + position % 7
    queries = some(dtype, len(lengths), heads, dim)
    seen = Seen.of(tables, firsts, lengths)
    assert native.attends(queries, keys)
    result = native.attend(queries, keys, values, seen, dim**-0.5)
    assert_close(result, kernels._attended(queries, keys, values, seen, dim**-0.5))


def test_a_token_sees_the_same_alone_and_among_others(native: Kernels, dtype: torch.dtype) -> None:
    keys, values = some(dtype, 2, 80, 16, 3, 64)
    queries = some(dtype, 5, 9, 64)
    tables = [torch.arange(80), torch.arange(80).flip(0), torch.tensor([3]), torch.arange(40), torch.arange(7, 60)]
    lengths = [1280, 1270, 9, 600, 800]
    threads = torch.get_num_threads()
    together = native.attend(queries, keys, values, Seen.of(tables, [0] * 5, lengths), 0.125)
    try:
        torch.set_num_threads(1)
        for i in range(5):
            alone = native.attend(queries[i : i + 1], keys, values, Seen.of([tables[i]], [0], [lengths[i]]), 0.125)
            assert torch.equal(alone[0], together[i])
    finally:
        torch.set_num_threads(threads)


def test_queries_may_be_a_part_of_wider_rows(native: Kernels, dtype: torch.dtype) -> None:
    qkv, (keys, values) = some(dtype, 3, 15, 64), some(dtype, 2, 4, 16, 3, 64)
    seen = Seen.of([torch.arange(4)] * 3, [0] * 3, [20, 21, 22])
    part = native.attend(qkv[:, :9], keys, values, seen, 0.125)
    assert torch.equal(part, native.attend(qkv[:, :9].contiguous(), keys, values, seen, 0.125))
    assert not native.attends(qkv[:, :9].transpose(0, 1), keys)  # what is laid out otherwise is not taken


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(2, 1, 24), (2, 1, 272), (136, 1, 16), (64, 1, 256), (5, 2, 64)]
)
def test_what_it_cannot_attend_it_does_not_take(heads: int, kv_heads: int, dim: int, native: Kernels) -> None:
    assert not native.attends(torch.zeros(1, heads, dim), torch.zeros(1, 16, kv_heads, dim))


def test_nan_stays_nan(native: Kernels, dtype: torch.dtype) -> None:
    nan = torch.full((1, 32), float("nan"), dtype=dtype)
    assert native.norm(nan.clone(), None, torch.ones(32, dtype=dtype), 1e-5).isnan().all()
    assert native.gate(nan).isnan().all()
    keys, values = torch.zeros(2, 1, 16, 1, 16, dtype=dtype)
    keys[0, 3] = float("nan")
    seen = Seen.of([torch.tensor([0])], [0], [5])
    assert native.attend(torch.ones(1, 2, 16, dtype=dtype), keys, values, seen, 1.0).isnan().all()


# --- how they come to be ----------------------------------------------------------------------------------------------


def test_they_are_compiled_once(tmp_path: Path) -> None:
    kernels.choose(CPU, torch.float32, tmp_path)
    (library,) = tmp_path.rglob("*.so")
    made = library.stat().st_mtime_ns
    kernels.choose(CPU, torch.float32, tmp_path)
    assert [library] == list(tmp_path.rglob("*"))[1:] and library.stat().st_mtime_ns == made


def test_without_a_compiler_torch_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert kernels.choose(CPU, torch.float32, tmp_path).name == "torch"


@pytest.mark.parametrize(
    "script", ["exit 1", "true", "echo nonsense > $OUT"], ids=["fails", "makes nothing", "no library"]
)
def test_a_compiler_that_fails_leaves_torch(script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text(f'#!/bin/sh\nwhile [ "$1" != "-o" ]; do shift; done; OUT=$2\n{script}\n')
    compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CC", str(compiler))
    assert kernels.choose(CPU, torch.float32, tmp_path).name == "torch"


@pytest.mark.parametrize(
    ("file", "right", "mistake"),
    [
        ("layer.c", "silu = value *", "silu = 1.01f * value *"),
        ("matrix.c", "from_nibbles(codes, 4)", "from_nibbles(codes, 3)"),
        ("matrix.c", "*zeros = from_halves(group + 2 * TILE)", "*zeros = from_halves(group)"),
    ],
)
def test_wrong_ones_are_not_taken(
    file: str, right: str, mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    wrong = Path(shutil.copytree(kernels.NATIVE, tmp_path / "native"))
    source = (wrong / file).read_text()
    assert source.count(right) == 1
    (wrong / file).write_text(source.replace(right, mistake))
    monkeypatch.setattr(kernels, "NATIVE", wrong)
    with caplog.at_level(logging.WARNING):
        assert kernels.choose(CPU, torch.float32, tmp_path).name == "torch"
    assert "compute something else" in caplog.text


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_other_numbers_are_torchs(dtype: torch.dtype, tmp_path: Path) -> None:
    assert kernels.choose(CPU, dtype, tmp_path).name == "torch"


def test_room_to_work_in_is_of_floats_while_another_model_is_read(native, dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)  # as transformers does for all threads while it makes a model
    try:
        room = native._room(native._work.numel() + 100)
    finally:
        torch.set_default_dtype(before)
    assert room.dtype == torch.float32
