"""What a decoder layer computes: native calls where a compiler is at hand, else torch's operations.

The C code in `native` is compiled once, at the first start, into the folder for things that can be made again, and held
against torch's results at every start. Whatever is wrong with it, the torch ones serve, only slower.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention

from engine.model import tiles
from engine.model.codes import FILES, quantise

NATIVE = Path(__file__).with_name("native")
PART, MOST_DIM, MOST_HEADS, MOST_WIDTH = 128, 256, 128, 8192  # as in the source
COMPILE_LIMIT = 120.0  # seconds
OPTIONS = ["-std=gnu11", "-O3", "-shared", "-fPIC", "-fopenmp"]
OPTIONS += ["-fassociative-math", "-fno-signed-zeros", "-fno-trapping-math", "-fno-math-errno"]  # but NaN stays NaN
# By what torch says of this CPU, not what the compiler finds: the file may be used on another machine tomorrow.
INSTRUCTIONS = {
    "AVX512": ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mprefer-vector-width=512"],
    "AVX2": ["-mavx2", "-mfma", "-mf16c"],
}

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Seen:
    """What each of some tokens sees: `spans` [tokens, 3] is where its block table is, its first position, and its end.

    `parts` [tokens + 1] counts the parts of the tokens before; `tables` are kept because `spans` points into them.
    """

    spans: torch.Tensor
    parts: torch.Tensor
    tables: list[torch.Tensor]

    @classmethod
    def of(cls, tables: list[torch.Tensor], firsts: list[int], lengths: list[int]) -> Seen:
        """Of tokens with these block tables [blocks] each, that see the positions from first to length."""
        spans = list(zip((table.data_ptr() for table in tables), firsts, lengths, strict=True))
        parts = [0]
        for first, length in zip(firsts, lengths, strict=True):
            parts.append(parts[-1] + -(-(length - first) // PART))
        return cls(torch.tensor(spans), torch.tensor(parts), tables)


class Kernels(Protocol):
    """What a layer needs. Tensors are contiguous, of one dtype and on one device; shapes are per function."""

    name: str

    def norm(self, x: torch.Tensor, y: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Add y to x, in place; return x / rms(x) * weight. All but weight [width] are [rows, width]."""
        ...

    def gate(self, x: torch.Tensor) -> torch.Tensor:
        """Of [rows, gate and up] silu(gate) * up, [rows, width]."""
        ...

    def rotate(  # noqa: PLR0917
        self,
        qkv: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        slots: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> None:
        """Turn queries, in place, and keys of qkv [tokens, heads + 2 kv_heads, dim] by cos and sin [tokens, dim].

        Keys and values go to `slots` [tokens] of a layer's K and V, each [blocks, block_size, kv_heads, dim].
        """
        ...

    def attends(self, queries: torch.Tensor, keys: torch.Tensor) -> bool:
        """Whether `attend` takes such tensors."""
        ...

    def attend(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, seen: Seen, scale: float
    ) -> torch.Tensor:
        """What each token's queries [tokens, heads, dim] see in a layer's K and V, [tokens, heads, dim]."""
        ...

    def multiply(self, x: torch.Tensor, packed: torch.Tensor, bits: int) -> torch.Tensor:
        """x [rows, in] times a weight [out, in] that `tiles` packed in so many bits, transposed: [rows, out]."""
        ...


class TorchKernels:
    """Of torch's operations, on any device: what the native ones are held against. It leaves attention to SDPA."""

    name = "torch"

    def norm(self, x: torch.Tensor, y: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
        if y is not None:
            x.add_(y)
        wide = x.float()
        return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)

    def gate(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up

    def rotate(  # noqa: PLR0917
        self,
        qkv: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        slots: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> None:
        kv_heads = keys.shape[2]
        queries, key, value = qkv.tensor_split([-2 * kv_heads, -kv_heads], dim=1)
        cos, sin = cos[:, None], sin[:, None]
        keys.flatten(0, 1)[slots] = rotated(key, cos, sin)
        values.flatten(0, 1)[slots] = value
        queries.copy_(rotated(queries, cos, sin))

    def attends(self, queries: torch.Tensor, keys: torch.Tensor) -> bool:
        return False

    def attend(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, seen: Seen, scale: float
    ) -> torch.Tensor:
        raise NotImplementedError("attention without a native kernel is SDPA's")

    def multiply(self, x: torch.Tensor, packed: torch.Tensor, bits: int) -> torch.Tensor:
        return F.linear(x.float(), tiles.unpack(packed, bits)).to(x.dtype)


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [..., dim], turned by cos and sin as transformers' llama turns it."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class NativeKernels:
    """Of compiled code, for float32 and bfloat16 on the CPU."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.name = "native"
        pointer, count, real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
        self._norm = _function(library.norm, [pointer] * 3 + [real, pointer] + [count] * 2)
        self._gate = _function(library.gate, [pointer] * 2 + [count] * 2)
        self._rotate = _function(library.rotate, [pointer] * 6 + [count] * 4)
        self._attend = _function(library.attend, [pointer, count] + [pointer] * 6 + [count] * 5 + [real])
        self._multiply = _function(library.multiply, [pointer] * 2 + [count] + [pointer] * 2 + [count] * 3)
        self._decode = _function(library.decode, [pointer, pointer, count] + [pointer] * 3)
        self._work = torch.empty(0)

    def norm(self, x: torch.Tensor, y: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
        out = torch.empty_like(x)
        other = None if y is None else y.data_ptr()
        self._norm(x.data_ptr(), other, weight.data_ptr(), eps, out.data_ptr(), x.shape[0], x.shape[1])
        return out

    def gate(self, x: torch.Tensor) -> torch.Tensor:
        rows, width = x.shape[0], x.shape[1] // 2
        out = x.new_empty(rows, width)
        self._gate(x.data_ptr(), out.data_ptr(), rows, width)
        return out

    def rotate(  # noqa: PLR0917
        self,
        qkv: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        slots: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> None:
        tokens, heads, dim = qkv.shape
        kv_heads = keys.shape[2]
        places = [t.data_ptr() for t in (qkv, cos, sin, slots, keys, values)]
        self._rotate(*places, tokens, heads - 2 * kv_heads, kv_heads, dim)

    def attends(self, queries: torch.Tensor, keys: torch.Tensor) -> bool:
        _, heads, dim = queries.shape
        fits = dim <= MOST_DIM and heads <= MOST_HEADS and heads * dim <= MOST_WIDTH
        return fits and dim % 16 == 0 and heads % keys.shape[2] == 0 and queries.stride()[1:] == (dim, 1)

    def attend(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, seen: Seen, scale: float
    ) -> torch.Tensor:
        tokens, heads, dim = queries.shape
        work = self._room(int(seen.parts[-1]) * heads * (dim + 2))
        out = queries.new_empty(tokens, heads, dim)
        places = [t.data_ptr() for t in (keys, values, seen.spans, seen.parts, out, work)]
        shape = (tokens, heads, keys.shape[2], dim, keys.shape[1])
        self._attend(queries.data_ptr(), queries.stride(0), *places, *shape, scale)
        return out

    def multiply(self, x: torch.Tensor, packed: torch.Tensor, bits: int) -> torch.Tensor:
        rows, width = x.shape
        height = packed.shape[0] * tiles.TILE
        out = x.new_empty(rows, height)
        work = self._room(0 if x.dtype == torch.float32 else x.numel())
        shape = (rows, width, height)
        self._multiply(x.data_ptr(), packed.data_ptr(), bits, out.data_ptr(), work.data_ptr(), *shape)
        return out

    def decode(self, x: torch.Tensor, layers: Any, step: Any, numbers: int, floats: int) -> None:
        """Run x [tokens, width] through layers, in place: an array of C's `Layer`, and its `Step`; see `stack`.

        `numbers` of x's dtype and `floats` are what it needs to work with.
        """
        room, work = x.new_empty(numbers), self._room(floats)
        places = (ctypes.byref(step), room.data_ptr(), work.data_ptr())
        self._decode(x.data_ptr(), layers, len(layers), *places)

    def _room(self, floats: int) -> torch.Tensor:
        """At least so many floats of whatever was there, until the next call."""
        if floats > len(self._work):
            self._work = torch.empty(floats, dtype=torch.float32)  # torch's default changes while another model is read
        return self._work


def choose(device: torch.device, dtype: torch.dtype, folder: Path) -> Kernels:
    """The native ones if they can be had here and agree with torch's; else torch's, and the log says why."""
    if device.type != "cpu" or dtype not in (torch.float32, torch.bfloat16):
        return TorchKernels()
    try:
        kernels = NativeKernels(ctypes.CDLL(str(_compiled(dtype, folder))))
    except (OSError, subprocess.SubprocessError, AttributeError) as error:
        log.info("torch's kernels serve: %s", error)
        return TorchKernels()
    if not agree(kernels, TorchKernels(), dtype):
        log.warning("torch's kernels serve: those compiled here compute something else")
        return TorchKernels()
    return kernels


def agree(some: Kernels, others: Kernels, dtype: torch.dtype) -> bool:
    """Whether both compute the same from a few tokens, to rounding."""
    close = 1e-5 if dtype == torch.float32 else 2e-2
    return all(
        torch.allclose(a.float(), b.float(), rtol=close, atol=close)
        for a, b in zip(_sample_of(some, dtype), _sample_of(others, dtype), strict=True)
    )


def _sample_of(kernels: Kernels, dtype: torch.dtype) -> list[torch.Tensor]:
    """One result of each function, of the same numbers every time."""
    numbers = torch.Generator().manual_seed(7)

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=numbers).to(dtype)

    x, y, both, weight = some(3, 80), some(3, 80), some(3, 160), some(80)
    qkv, keys, values = some(3, 8, 64), some(9, 16, 2, 64), some(9, 16, 2, 64)
    tables = [torch.tensor(blocks) for blocks in ([7, 1, 3], [0, 8, 2, 6, 4, 5, 1, 3, 7], [5])]
    seen, slots = Seen.of(tables, [0, 5, 2], [33, 143, 3]), torch.tensor([0, 143, 80])
    kernels.rotate(qkv, some(3, 64), some(3, 64), slots, keys, values)
    queries = qkv[:, :4]
    if kernels.attends(queries, keys):
        attended = kernels.attend(queries, keys, values, seen, 0.1)
    else:
        attended = _attended(queries, keys, values, seen, 0.1)
    products = [
        kernels.multiply(some(rows, 64), packed, bits)
        for bits, packed in _packed(some(48, 64).float()).items()
        for rows in (1, 2, 3, 4, 29)
    ]
    return [kernels.norm(x, y, weight, 1e-5), x, kernels.gate(both), qkv, keys, values, attended, *products]


def _packed(weight: torch.Tensor) -> dict[int, torch.Tensor]:
    """A weight [out, in] in tiles of each number of bits that there are."""
    packed = {bits: tiles.pack_codes(quantise(weight, bits, exact=False, grid=FILES)) for bits in (4, 8)}
    return {**packed, tiles.BF16: tiles.pack_bf16(weight)}


def _attended(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, seen: Seen, scale: float
) -> torch.Tensor:
    """`attend` by the textbook, in float64."""
    rows = []
    for query, table, (_, first, length) in zip(queries, seen.tables, seen.spans.tolist(), strict=True):
        k, v = (pool[table].flatten(0, 1)[first:length].double() for pool in (keys, values))
        group = query.shape[0] // k.shape[1]
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        weights = (torch.einsum("hd,khd->hk", query.double(), k) * scale).softmax(-1)
        rows.append(torch.einsum("hk,khd->hd", weights, v).to(query.dtype))
    return torch.stack(rows)


def _function(function: Any, arguments: list[Any]) -> Any:
    function.argtypes, function.restype = arguments, None
    return function


def compiler() -> str | None:
    """The C compiler that there is: $CC, or whichever is found."""
    return next(filter(None, map(shutil.which, (os.environ.get("CC", "cc"), "gcc", "clang"))), None)


def _compiled(dtype: torch.dtype, folder: Path) -> Path:
    """The library for numbers of this type, which is made where it is not there. Raises `OSError` and the like."""
    if (program := compiler()) is None:
        raise FileNotFoundError("there is no C compiler (cc, gcc or clang)")
    options = [*OPTIONS, *INSTRUCTIONS.get(torch.backends.cpu.get_cpu_capability(), [])]
    if dtype == torch.bfloat16:
        options.append("-DBFLOAT16")
    sources = sorted(NATIVE.iterdir())
    words = [file.read_bytes() for file in sources] + [word.encode() for word in [program, *options]]
    key = hashlib.sha256(b"\0".join(words))
    library = folder / "kernels" / f"{key.hexdigest()[:32]}.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
            made = Path(scratch) / "kernels.so"
            code = [str(file) for file in sources if file.suffix == ".c"]
            command = [program, *options, *code, "-o", str(made), "-lm"]
            subprocess.run(command, check=True, capture_output=True, timeout=COMPILE_LIMIT)
            made.replace(library)
    return library
