"""Prove at load that paged attention and the model's own eager attention agree, and learn the shape of its K and V.

A model that our attention would serve wrongly is refused here, with a sentence, before anybody chats with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from engine.batch import Batch, Draw, Row
from engine.cache.pool import KVPool
from engine.errors import ModelLoadError
from engine.model.attention import IMPLEMENTATION
from engine.model.loading import LoadedModel
from engine.model.runner import ModelRunner
from engine.protocol import Sampling

CHECK_TOKENS = 48
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 6e-2, torch.float16: 2e-2}  # relative error of the logits' norm


@dataclass(frozen=True)
class KVShape:
    """K (and V) of one token: `layers` x `kv_heads` x `head_dim`."""

    layers: int
    kv_heads: int
    head_dim: int

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes that one token's K and V take over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * dtype.itemsize


@torch.inference_mode()
def probe(loaded: LoadedModel) -> KVShape:
    """Run two tokens eagerly and read the shapes off the cache that the model fills.

    Raises `ModelLoadError` for a model whose layers have unlike shapes, or that keeps a state other than K and V.
    """
    name = loaded.prepared.name
    module = loaded.module
    module.set_attn_implementation("eager")
    try:
        output = module(input_ids=torch.tensor([[0, 1]], device=loaded.device), use_cache=True)
        cache = output["cache"] if "cache" in output else output["past_key_values"]
        layers: list[tuple[Any, Any]] = [
            (getattr(layer, "keys", None), getattr(layer, "values", None)) for layer in cache.layers
        ]
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise ModelLoadError(f"{name} cannot be served: its cache is not one of keys and values ({error})") from error
    finally:
        module.set_attn_implementation(IMPLEMENTATION)
    if any(not isinstance(k, torch.Tensor) or not isinstance(v, torch.Tensor) or k.dim() != 4 for k, v in layers):
        raise ModelLoadError(f"{name} cannot be served: not every layer keeps keys and values")
    shapes = {(k.shape[1], k.shape[3]) for k, _ in layers} | {(v.shape[1], v.shape[3]) for _, v in layers}
    if len(shapes) != 1:
        raise ModelLoadError(f"{name} cannot be served: its layers keep K and V of unlike shapes {sorted(shapes)}")
    kv_heads, head_dim = shapes.pop()
    return KVShape(layers=len(layers), kv_heads=kv_heads, head_dim=head_dim)


@torch.inference_mode()
def check(loaded: LoadedModel, pool: KVPool) -> None:
    """Forward a few dozen tokens paged, in three uneven chunks over scattered blocks, against eager attention.

    Needs a pool of which nothing is in use. Raises `ModelLoadError` when the logits differ by more than rounding.
    """
    vocabulary = loaded.module.get_input_embeddings().num_embeddings
    ids = [(7919 * (i + 1)) % vocabulary for i in range(CHECK_TOKENS)]
    needed = -(-CHECK_TOKENS // pool.block_size)
    blocks = list(range(pool.blocks))[: 2 * needed : 2][::-1] if pool.blocks >= 2 * needed else list(range(needed))
    runner = ModelRunner(loaded, pool)
    draw = Draw(sampling=Sampling(), seed=0, position=0, prompt_ids=[], reply_ids=[])
    paged = []
    for start, end in ((0, 17), (17, CHECK_TOKENS - 1), (CHECK_TOKENS - 1, CHECK_TOKENS)):
        row = Row(token_ids=ids[start:end], start=start, block_ids=blocks, draws=[draw])
        paged.append(runner.logits(Batch(rows=[row]))[0])
    loaded.module.set_attn_implementation("eager")
    try:
        eager = loaded.module(input_ids=torch.tensor([ids], device=loaded.device), use_cache=False).logits[0]
    finally:
        loaded.module.set_attn_implementation(IMPLEMENTATION)
    expected = eager[[16, CHECK_TOKENS - 2, CHECK_TOKENS - 1]].float()
    error = float((torch.stack(paged).float() - expected).norm() / expected.norm())
    if not error <= TOLERANCE[loaded.dtype]:
        raise ModelLoadError(
            f"{loaded.prepared.name} cannot be served: paged attention differs from the model's own by {error:.2g} "
            f"(at most {TOLERANCE[loaded.dtype]:.2g} in {str(loaded.dtype).removeprefix('torch.')})"
        )
