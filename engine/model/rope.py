"""Hold rotary positions still: factors that follow the longest prompt at hand are fixed to those of the served context.

Kept keys stay right only if a position's angles never change. This module knows nothing of pools, batches or weights.
"""

from __future__ import annotations

from typing import Any

import torch

FROZEN = "frozen"  # a rope type that transformers never updates


def freeze(module: Any, context: int) -> None:
    """Let every rotary part of `module` choose its factors for `context` positions, and never choose again.

    `longrope` has long factors for a context beyond the original one, and short ones up to it; `dynamic` has one set
    up to the model's own maximum, which no served context exceeds.
    """
    for part in module.modules():
        types = getattr(part, "rope_type", None)
        if isinstance(types, dict):  # one for each kind of layer
            for layer_type in [kind for kind, rope_type in types.items() if _shifts(rope_type)]:
                _choose(part, context, layer_type)
                types[layer_type] = FROZEN
        elif _shifts(types):
            _choose(part, context)
            part.rope_type = FROZEN


def variant(config: Any, context: int) -> str | None:
    """Which of two sets of factors `freeze` fixes, "long" or "short"; None where the model has only one set."""
    originals = _originals(getattr(config, "rope_parameters", None))
    return ", ".join("long" if context > original else "short" for original in originals) or None


def _shifts(rope_type: Any) -> bool:
    return isinstance(rope_type, str) and ("dynamic" in rope_type or rope_type == "longrope")


def _choose(part: Any, context: int, *layer_type: str) -> None:
    """transformers chooses by the last position that it is shown."""
    device = next(part.buffers()).device
    part(torch.zeros(1, device=device), torch.tensor([[context - 1]], device=device), *layer_type)


def _originals(parameters: Any) -> list[int]:
    """The context before scaling of each `longrope` in a configuration, which may have one for each kind of layer."""
    if not isinstance(parameters, dict):
        return []
    if parameters.get("rope_type") == "longrope":
        return [parameters["original_max_position_embeddings"]]
    return [original for _, value in sorted(parameters.items()) for original in _originals(value)]
