"""Prove at load that paged attention does what the model's own attention does, and learn the shape of its K and V.

A model that our attention would serve wrongly is refused here, with a sentence, before anybody chats with it. Two
proofs complete each other: a few dozen tokens computed both ways, and each layer's mask rule up to the whole context.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from engine.batch import Batch, Draw, Row
from engine.cache.pool import KVPool
from engine.errors import ModelLoadError
from engine.model import attention, kinds, witness
from engine.model.files import one_line
from engine.model.kernels import Kernels
from engine.model.loading import LoadedModel
from engine.model.runner import ModelRunner
from engine.protocol import Sampling

CHECK_TOKENS = 48
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 6e-2, torch.float16: 2e-2}  # relative error of the logits' norm
POSITIONS = [0, 1, 2, 3]
HONOURED = {"scaling", "sliding_window", "softcap", "s_aux"}
# `is_causal` is what the mask rule says too; options that ask for an output have no effect either.
WITHOUT_EFFECT = {"dropout", "position_ids", "use_cache", "return_dict", "is_causal"}


@dataclass(frozen=True)
class KVShape:
    """K (and V) of one token: `layers` x `kv_heads` x `head_dim`."""

    layers: int
    kv_heads: int
    head_dim: int

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes that one token's K and V take over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * dtype.itemsize

    def pool(self, blocks: int, block_size: int, dtype: torch.dtype, device: torch.device) -> KVPool:
        """An empty pool of this shape. Raises what torch raises when there is no memory for it."""
        return KVPool(self.layers, blocks, block_size, self.kv_heads, self.head_dim, dtype, device)


def probe(loaded: LoadedModel) -> KVShape:
    """The shape of K and V, read off what each layer hands to attention.

    Raises `ModelLoadError`, with the model's name and the reason, for a model that paged attention cannot serve right
    up to its whole context.
    """
    calls = _listen(loaded, POSITIONS)
    shape = _shape(loaded, calls)
    for call in calls:
        _require_known_options(loaded, call)
    _require_equal_rules(loaded, calls)
    _require_still_positions(loaded, calls)
    return shape


def outline(loaded: LoadedModel) -> tuple[KVShape, tuple[int | None, ...]]:
    """As much of `probe` as takes no numbers, for a model on the meta device: the shape, and each layer's window.

    A window is how many last tokens the layer sees; None: all. Raises `ModelLoadError` as `probe` does.
    """
    # with a mask, even one that hides nothing, transformers does not look for several texts in the positions
    everything = torch.ones(1, len(POSITIONS), dtype=torch.long, device=loaded.device)
    with _running(loaded):
        calls = witness.listen(loaded, POSITIONS, attention_mask=everything)
    shape = _shape(loaded, calls)
    for call in calls:
        _require_known_options(loaded, call)
    return shape, tuple(call.options.get("sliding_window") for call in calls)


def _refusal(loaded: LoadedModel, why: str) -> ModelLoadError:
    return kinds.refusal(loaded.prepared.name, why)


@contextmanager
def _running(loaded: LoadedModel) -> Iterator[None]:
    """Within it, whatever a model raises makes it refused: it cannot be called as ours are. Lack of memory does not."""
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # models raise types of their own
        its = kinds.attention(loaded.module.config)
        raise _refusal(loaded, f"its {its} cannot be replaced by Keepwarm's ({one_line(error)})") from error


def _listen(loaded: LoadedModel, positions: list[int]) -> list[witness.Call]:
    with _running(loaded):
        return witness.listen(loaded, positions)


def _shape(loaded: LoadedModel, calls: list[witness.Call]) -> KVShape:
    its = kinds.attention(loaded.module.config)
    if not calls:
        raise _refusal(loaded, f"its {its} cannot be replaced by Keepwarm's")
    layers = [call.layer for call in calls]
    if layers != list(range(len(layers))):
        raise _refusal(loaded, f"its {its} is not called once for each layer, in order, but for layers {layers}")
    keys = sorted({(call.key.shape[0], call.key.shape[2]) for call in calls})
    values = sorted({(call.value.shape[0], call.value.shape[2]) for call in calls})
    if len(keys) > 1 or keys != values:
        raise _refusal(loaded, f"its {its} keeps K and V of unlike shapes: {keys} and {values} (heads, dimensions)")
    ((kv_heads, head_dim),) = keys
    return KVShape(layers=len(layers), kv_heads=kv_heads, head_dim=head_dim)


def _require_known_options(loaded: LoadedModel, call: witness.Call) -> None:
    """Refuse what paged attention would silently ignore."""
    for name, value in call.options.items():
        ignored = name in WITHOUT_EFFECT or name.startswith("output_")
        if value is not None and not ignored and name not in HONOURED:
            its = kinds.attention(loaded.module.config)
            raise _refusal(loaded, f"its {its} needs {name!r}, which Keepwarm's does not know")


def _require_equal_rules(loaded: LoadedModel, calls: list[witness.Call]) -> None:
    """Compare, for each layer, which tokens the model's mask shows with which ones paged attention shows."""
    config, seen = loaded.module.config, set()
    keys = torch.arange(loaded.context, device=loaded.device)
    for index, call in enumerate(calls):
        kind, window = kinds.layer_kind(config, index), call.options.get("sliding_window")
        if not isinstance(call.mask, witness.Rule):
            raise _refusal(loaded, f"layer {index} ({kind}) makes a mask of its own, which cannot be checked")
        if (id(call.mask), window) in seen:
            continue
        seen.add((id(call.mask), window))
        for query in _boundaries(kinds.text_config(config), loaded.context):
            theirs = call.mask.shows(query, keys)
            ours = attention.visible(keys.new_tensor(query), keys, window)
            if not torch.equal(theirs, ours):
                key = int((theirs != ours).nonzero()[0])
                does = "looks ahead" if key > query else "looks elsewhere than Keepwarm's"
                seen_or_not = "sees" if theirs[key] else "does not see"
                raise _refusal(loaded, f"layer {index} ({kind}) {does}: token {query} {seen_or_not} token {key}")


def _boundaries(config: Any, context: int) -> list[int]:
    """The positions from which to look: the ends, the middle, and around whatever the configuration calls a limit."""
    facts = config.to_dict().items()
    limits = [v for name, v in facts if isinstance(v, int) and ("window" in name or "chunk" in name)]
    near = {limit + step for limit in limits for step in (-1, 0, 1)}
    return sorted(q for q in {0, 1, context // 2, context - 2, context - 1} | near if 0 <= q < context)


def _require_still_positions(loaded: LoadedModel, calls: list[witness.Call]) -> None:
    """Refuse a model whose keys and queries at a position depend on what is before or beside it in the step."""
    others = _listen(loaded, [*POSITIONS[1:], loaded.context - 1])
    for call, other in zip(calls, others, strict=True):
        for expected, result in ((call.query, other.query), (call.key, other.key)):
            if _error(result[:, :-1], expected[:, 1:]) > TOLERANCE[loaded.dtype] / 10:
                kind = loaded.module.config.model_type
                raise _refusal(loaded, f"its positions ({kind}) depend on what else is read in the same step")


def _error(result: torch.Tensor, expected: torch.Tensor) -> float:
    """The norm of the difference relative to what is expected; NaN where either is."""
    return float((result.float() - expected.float()).norm() / expected.float().norm())


def check(loaded: LoadedModel, pool: KVPool, kernels: Kernels | None = None) -> None:
    """Forward a few dozen tokens paged, in three uneven chunks over scattered blocks, against eager attention.

    Needs a pool of which nothing is in use. Raises `ModelLoadError` when the logits differ by more than rounding.
    """
    vocabulary = loaded.module.get_input_embeddings().num_embeddings
    count = min(CHECK_TOKENS, loaded.context)
    ids = [(7919 * (i + 1)) % vocabulary for i in range(count)]
    ends = sorted({-(-count // 3), max(1, count - 1), count})
    with _running(loaded):
        paged = _paged(ModelRunner(loaded, pool, kernels=kernels), pool, ids, ends)
        eager = _eager(loaded, ids)[[end - 1 for end in ends]]
    error = _error(paged, eager)
    if not error <= TOLERANCE[loaded.dtype]:
        raise _refusal(
            loaded,
            f"paged attention differs from the model's own by {error:.2g} "
            f"(at most {TOLERANCE[loaded.dtype]:.2g} in {str(loaded.dtype).removeprefix('torch.')})",
        )


def _paged(runner: ModelRunner, pool: KVPool, ids: list[int], ends: list[int]) -> torch.Tensor:
    """Logits before each of `ends`, where a chunk ends, [ends, vocabulary]; every other block is used, backwards."""
    needed = -(-len(ids) // pool.block_size)
    blocks = list(range(pool.blocks))[: 2 * needed : 2][::-1] if pool.blocks >= 2 * needed else list(range(needed))
    draw = Draw(sampling=Sampling(), seed=0, position=0, prompt_ids=[], reply_ids=[])
    rows = [
        Row(token_ids=ids[start:end], start=start, block_ids=blocks, draws=[draw])
        for start, end in itertools.pairwise([0, *ends])
    ]
    return torch.cat([runner.logits(Batch(rows=[row])) for row in rows])


@torch.inference_mode()
def _eager(loaded: LoadedModel, ids: list[int]) -> torch.Tensor:
    """The model's own logits after each of `ids`, [ids, vocabulary]."""
    loaded.module.set_attn_implementation("eager")
    try:
        logits: torch.Tensor = loaded.module(
            input_ids=torch.tensor([ids], device=loaded.device), use_cache=False
        ).logits[0]
    finally:
        loaded.module.set_attn_implementation(attention.IMPLEMENTATION)
    return logits
