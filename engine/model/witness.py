"""Run a few tokens through a model and write down what each layer hands to attention, and which rule masks it.

Nothing is attended to: a layer's output is zeros. This module judges nothing, and knows nothing of pools or batches.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from engine.model.attention import IMPLEMENTATION as PAGED
from engine.model.loading import LoadedModel

IMPLEMENTATION = "keepwarm_witness"


@dataclass(frozen=True)
class Rule:
    """A model's own mask rule, in the place of the mask that would be made of it."""

    visible: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

    def shows(self, query: int, keys: torch.Tensor) -> torch.Tensor:
        """Which of the positions `keys` [n] a token at position `query` may see, [n] bool, True is visible."""
        zero = keys.new_zeros(())
        return self.visible(zero, zero, keys.new_tensor(query), keys).expand(keys.shape)


@dataclass(frozen=True)
class Call:
    """One call of attention: `query` [heads, tokens, dim], `key` and `value` [kv_heads, tokens, dim] of one layer.

    `mask` is a `Rule` where the model leaves masking to transformers; `options` are the other arguments, by name.
    """

    layer: int | None
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: Any
    options: dict[str, Any]


_heard: ContextVar[list[Call]] = ContextVar("heard")


@torch.inference_mode()
def listen(loaded: LoadedModel, positions: list[int], **inputs: Any) -> list[Call]:
    """The calls of attention, in order, when one token is at each of `positions`: at the same one, the same token.

    `inputs` are further arguments of the model. Raises whatever the model raises.
    """
    calls: list[Call] = []
    vocabulary = loaded.module.get_input_embeddings().num_embeddings
    loaded.module.set_attn_implementation(IMPLEMENTATION)
    token = _heard.set(calls)
    try:
        loaded.module(
            input_ids=torch.tensor([[(p + 3) % vocabulary for p in positions]], device=loaded.device),
            position_ids=torch.tensor([positions], device=loaded.device),
            use_cache=False,
            logits_to_keep=torch.tensor([0], device=loaded.device),
            **inputs,
        )
    finally:
        _heard.reset(token)
        loaded.module.set_attn_implementation(PAGED)
    return calls


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: takes note, and returns zeros [1, tokens, heads, dim of the values]."""
    layer = getattr(module, "layer_idx", None)
    _heard.get().append(Call(layer, query[0], key[0], value[0], attention_mask, options))
    return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None


def _rule(*_: Any, mask_function: Callable[..., torch.Tensor], **__: Any) -> Rule:
    return Rule(mask_function)


AttentionInterface.register(IMPLEMENTATION, _attention)
AttentionMaskInterface.register(IMPLEMENTATION, _rule)
