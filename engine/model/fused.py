"""Decoder layers in fewer and larger operations, where that computes the same.

A layer as llama's has it (norm, attention with rotary positions, norm, gated MLP) becomes one that multiplies by Q, K
and V at once and by gate and up at once, and leaves what is between to `kernels`. Which layers are such is not told by
their names: whichever has the parts is tried beside its replacement, and stays as it is unless both do the same.
"""

from __future__ import annotations

import logging
import sys
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from engine.model import attention
from engine.model.kernels import Kernels, TorchKernels, rotated

TRIAL = "keepwarm_trial"
TRIAL_POSITIONS = [0, 1, 2, 5, 90]
CLOSE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}  # relative error of a norm
KNOWN_OPTIONS = {"scaling", "sliding_window"}
LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
HEAD_NORMS = {"q_norm", "k_norm"}
MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}

log = logging.getLogger(__name__)


class Norm(nn.Module):
    """An RMS norm's weight [width] and epsilon; `kernels` compute it."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight = norm.weight
        self.eps: float = norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps

    def of(self, kernels: Kernels, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        """x, to which y is added first, in place, normed; [rows, width]."""
        return kernels.norm(x, y, self.weight, self.eps)


class FusedLayer(nn.Module):
    """What a decoder layer computes for one packed text. `options` are what its attention is called with, by name."""

    def __init__(self, layer: Any, options: dict[str, Any]) -> None:
        super().__init__()
        its, mlp = layer.self_attn, layer.mlp
        self.config, self.layer_idx, self.options = its.config, its.layer_idx, options
        self.head_dim: int = its.head_dim
        self.heads, self.kv_heads = (p.out_features // its.head_dim for p in (its.q_proj, its.k_proj))
        self.num_key_value_groups = self.heads // self.kv_heads  # as transformers' eager attention wants it
        self._eager = getattr(sys.modules[type(its).__module__], "eager_attention_forward", None)
        self.qkv_proj, self.o_proj = _joined(its.q_proj, its.k_proj, its.v_proj), its.o_proj
        self.gate_up_proj, self.down_proj = _joined(mlp.gate_proj, mlp.up_proj), mlp.down_proj
        self.input_norm, self.post_norm = Norm(layer.input_layernorm), Norm(layer.post_attention_layernorm)
        self.q_norm, self.k_norm = (Norm(getattr(its, n)) if hasattr(its, n) else None for n in ("q_norm", "k_norm"))

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: Any = None,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """[1, tokens, width] → [1, tokens, width]; `position_embeddings` are cos and sin, each [1, tokens, dim]."""
        if position_embeddings is None:
            raise ValueError("a fused layer needs the cos and sin of its positions")
        paged = attention.current()
        kernels = TorchKernels() if paged is None else paged.kernels
        x, (cos, sin) = hidden_states[0], position_embeddings
        qkv = self._projected(kernels, self.input_norm.of(kernels, x))
        if paged is None:
            seen = self._attend_apart(qkv, cos[0], sin[0], attention_mask)
        else:
            seen = self._attend(paged, qkv, cos[0], sin[0])
        after = self.o_proj(seen)
        out: torch.Tensor = self.gate_up_proj(self.post_norm.of(kernels, after, x))  # `after` is x + attention then
        out = self.down_proj(kernels.gate(out))
        return out.add_(after)[None]

    def _projected(self, kernels: Kernels, x: torch.Tensor) -> torch.Tensor:
        """Queries, keys and values of x [tokens, width], as [tokens, heads + 2 kv_heads, head_dim]."""
        qkv: torch.Tensor = self.qkv_proj(x).view(x.shape[0], -1, self.head_dim)
        first = 0
        for norm, heads in ((self.q_norm, self.heads), (self.k_norm, self.kv_heads)):
            if norm is not None:
                part = qkv[:, first : first + heads]
                part.copy_(norm.of(kernels, part.reshape(-1, self.head_dim)).view(part.shape))
            first += heads
        return qkv

    def _attend(
        self, paged: attention.PagedContext, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        keys, values = paged.layer(self.layer_idx)
        paged.kernels.rotate(qkv, cos.contiguous(), sin.contiguous(), paged.write_slots, keys, values)
        queries, options = qkv[:, : self.heads], self.options
        seen = attention.attend(paged, queries, keys, values, options["scaling"], options.get("sliding_window"))
        return seen.flatten(1)

    def _attend_apart(self, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mask: Any) -> torch.Tensor:
        """As transformers would, without a pool: [tokens, heads * head_dim]."""
        queries, keys, values = qkv.tensor_split([self.heads, self.heads + self.kv_heads], dim=1)
        queries, keys = (rotated(part, cos[:, None], sin[:, None]) for part in (queries, keys))
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, self._eager)
        qkv_each = (part.transpose(0, 1)[None] for part in (queries, keys, values))
        seen: torch.Tensor = attend(self, *qkv_each, mask, **self.options)[0]
        return seen[0].flatten(1)


def fuse(model: Any) -> int:
    """Replace every layer of a causal language model that can be; how many that were.

    Its attention implementation is another one afterwards.
    """
    decoder = model.get_decoder()
    layers, rotary = getattr(decoder, "layers", None), getattr(decoder, "rotary_emb", None)
    if not isinstance(layers, nn.ModuleList) or rotary is None:
        return 0
    model.set_attn_implementation(TRIAL)
    fused = 0
    for index, layer in enumerate(layers):
        if (replacement := _replacement(layer, rotary)) is not None:
            layers[index] = replacement
            fused += 1
    return fused


@torch.no_grad()
def _replacement(layer: Any, rotary: Any) -> FusedLayer | None:
    """What can stand for the layer, on trial; None: nothing."""
    if not _has_the_parts(layer):
        return None
    try:
        weight = layer.input_layernorm.weight
        numbers = torch.Generator().manual_seed(layer.self_attn.layer_idx)
        x = torch.randn(1, len(TRIAL_POSITIONS), len(weight), generator=numbers).to(weight)
        cos_sin = rotary(x, torch.tensor([TRIAL_POSITIONS], device=x.device))
        called, expected = _tried(layer, x, cos_sin)
        options = {name: called[0].get(name) for name in KNOWN_OPTIONS}
        replacement = FusedLayer(layer, options).eval()
        also_called, result = _tried(replacement, x, cos_sin)
    except Exception as error:  # of whatever type: a layer that is called another way, or made of other things
        log.debug("a layer stays as it is: %s", error)
        return None
    same = all(_close(a, b) for a, b in zip([*also_called[1:], result], [*called[1:], expected], strict=True))
    return replacement if same and _knows(called[0]) else None


def _has_the_parts(layer: Any) -> bool:
    def parts(module: Any) -> set[str]:
        return {name for name, _ in module.named_children()}

    if parts(layer) != LAYER or parts(layer.mlp) != MLP:
        return False
    its = parts(layer.self_attn) - {"rotary_emb"}
    matrices = [getattr(layer.self_attn, name) for name in ATTENTION & its]
    matrices += [getattr(layer.mlp, name) for name in MLP - {"act_fn"}]
    return (its == ATTENTION or its == ATTENTION | HEAD_NORMS) and all(type(m) is nn.Linear for m in matrices)


_calls: ContextVar[list[Any]] = ContextVar("calls")


def _tried(layer: Any, x: torch.Tensor, cos_sin: Any) -> tuple[list[Any], torch.Tensor]:
    """What attention is called with, options first, then q, k and v; and what the layer returns for x."""
    calls: list[Any] = []
    token = _calls.set(calls)
    try:
        result = layer(x, attention_mask=None, position_embeddings=cos_sin)
    finally:
        _calls.reset(token)
    options, q, k, v = calls
    return [options, q, k, v], result[0] if isinstance(result, tuple) else result


def _trial_attention(
    _: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **options: Any
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: takes note; each token sees what it asks for and nothing else."""
    _calls.get().extend([{**options, "mask": mask}, query, key, value])
    return query.transpose(1, 2).contiguous(), None


def _knows(options: dict[str, Any]) -> bool:
    """Whether a fused layer hands on every option that says something."""
    said = {name for name, value in options.items() if value}
    return said <= KNOWN_OPTIONS and "scaling" in said


def _close(result: torch.Tensor, expected: torch.Tensor) -> bool:
    error = (result.float() - expected.float()).norm() / expected.float().norm()
    return result.shape == expected.shape and bool(error <= CLOSE.get(expected.dtype, 0))


def _joined(*linears: nn.Linear) -> nn.Linear:
    """One matrix for several of the same input: its output is theirs, one after the other."""
    first, rows = linears[0], sum(linear.out_features for linear in linears)
    joined = nn.Linear(first.in_features, rows, bias=first.bias is not None, device="meta")
    joined.weight = nn.Parameter(torch.cat([linear.weight for linear in linears]), requires_grad=False)
    if first.bias is not None:
        joined.bias = nn.Parameter(torch.cat([linear.bias for linear in linears]), requires_grad=False)
    return joined


AttentionInterface.register(TRIAL, _trial_attention)
