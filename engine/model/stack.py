"""All of a model's decoder layers in one native call, for steps in which every token attends by itself.

Such steps are most of a chat: one token of each reply that is being written. What a layer computes is written in
`engine.model.fused`; here is only what the call needs to know of it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import nn

from engine.model import attention, kinds
from engine.model.compact import CompactLinear
from engine.model.fused import FusedLayer, Norm
from engine.model.kernels import NativeKernels

_POINTER, _COUNT, _REAL = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class _Matrix(ctypes.Structure):
    _fields_ = [("weight", _POINTER), ("bias", _POINTER), ("bits", _COUNT), ("width", _COUNT), ("height", _COUNT)]

    @classmethod
    def of(cls, linear: CompactLinear) -> _Matrix:
        bias = None if linear.bias is None else linear.bias.data_ptr()
        return cls(linear.packed.data_ptr(), bias, linear.bits, linear.in_features, linear.out_features)


class _Norm(ctypes.Structure):
    _fields_ = [("weight", _POINTER), ("eps", _REAL)]

    @classmethod
    def of(cls, norm: Norm | None) -> _Norm:
        return cls(None, 0) if norm is None else cls(norm.weight.data_ptr(), norm.eps)


class _Layer(ctypes.Structure):
    _fields_ = [
        *((name, _Matrix) for name in ("qkv", "output", "gate_up", "down")),
        *((name, _Norm) for name in ("input", "post", "query", "key")),
        ("keys", _POINTER),
        ("values", _POINTER),
    ]

    @classmethod
    def of(cls, layer: Any) -> _Layer:
        """All but where its keys and values are."""
        matrices = (layer.qkv_proj, layer.o_proj, layer.gate_up_proj, layer.down_proj)
        norms = (layer.input_norm, layer.post_norm, layer.q_norm, layer.k_norm)
        return cls(*map(_Matrix.of, matrices), *map(_Norm.of, norms), None, None)


class _Step(ctypes.Structure):
    _fields_ = [
        *((name, _COUNT) for name in ("tokens", "heads", "kv_heads", "dim", "block_size")),
        *((name, _POINTER) for name in ("cos", "sin", "slots", "seen", "parts")),
        ("scale", _REAL),
    ]


class Stack(nn.Module):
    """Fused layers with compact weights, in order, that attend alike; it stands where a model has its layers."""

    def __init__(self, layers: Sequence[FusedLayer], kernels: NativeKernels) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self._kernels = kernels
        self._table = (_Layer * len(layers))(*map(_Layer.of, layers))
        self._pool: tuple[int, torch.Size] | None = None  # where the first layer's K of the table is, and its shape

    def forward(self, hidden_states: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        """[1, tokens, width] → [1, tokens, width], as its layers would one after the other."""
        paged = attention.current()
        if paged is not None and paged.kernels is self._kernels and paged.all_few:
            return self._decode(paged, hidden_states[0].clone(), options["position_embeddings"])[None]
        for layer in self.layers:
            hidden_states = layer(hidden_states, *args, **options)
        return hidden_states

    def _decode(
        self, paged: attention.PagedContext, x: torch.Tensor, cos_sin: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        its: Any = self.layers[0]
        tokens, all_heads = x.shape[0], its.heads + 2 * its.kv_heads
        width, inner = its.qkv_proj.in_features, its.down_proj.in_features
        keys, _ = paged.layer(its.layer_idx)
        if self._pool != (keys.data_ptr(), keys.shape):
            self._find_pool(paged)
            self._pool = (keys.data_ptr(), keys.shape)
        cos, sin = (part[0].contiguous() for part in cos_sin)
        seen = paged.seen(its.options.get("sliding_window"))
        step = _Step(
            tokens, its.heads, its.kv_heads, its.head_dim, keys.shape[1],
            *(t.data_ptr() for t in (cos, sin, paged.write_slots, seen.spans, seen.parts)),
            its.options["scaling"],
        )  # fmt: skip
        numbers = tokens * ((2 * its.heads + all_heads) * its.head_dim + 2 * width + 3 * inner)
        floats = max(
            int(seen.parts[-1]) * its.heads * (its.head_dim + 2), tokens * max(width, inner, its.heads * its.head_dim)
        )
        self._kernels.decode(x, self._table, step, numbers, floats)
        return x

    def _find_pool(self, paged: attention.PagedContext) -> None:
        for layer, entry in zip(self.layers, self._table, strict=True):
            keys, values = paged.layer(cast(int, layer.layer_idx))
            entry.keys, entry.values = keys.data_ptr(), values.data_ptr()


def stack(model: Any, kernels: NativeKernels) -> bool:
    """Put a stack in the place of the layers of a causal language model, if they are such; whether they were."""
    decoder = model.get_decoder()
    layers = list(getattr(decoder, "layers", []))
    if not layers or not all(type(layer) is FusedLayer and _is_compact(layer) for layer in layers):
        return False
    first = layers[0]
    if any(_attending(layer) != _attending(first) or layer.layer_idx != i for i, layer in enumerate(layers)):
        return False
    queries, keys = torch.empty(1, first.heads, first.head_dim), torch.empty(1, 1, first.kv_heads, first.head_dim)
    if not kernels.attends(queries, keys):
        return False
    decoder.layers = nn.ModuleList([Stack(layers, kernels)])
    return True


def _is_compact(layer: Any) -> bool:
    return all(
        type(linear) is CompactLinear for linear in (layer.qkv_proj, layer.o_proj, layer.gate_up_proj, layer.down_proj)
    )


def _attending(layer: FusedLayer) -> tuple[Any, ...]:
    """What is the same for all layers of a stack."""
    shape = (layer.qkv_proj.in_features, layer.down_proj.in_features, layer.heads, layer.kv_heads, layer.head_dim)
    return (*shape, layer.options, kinds.layer_kind(layer.config, layer.layer_idx))
