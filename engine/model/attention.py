"""Attention over the paged pool: one function that transformers calls in every layer of any model it serves.

It writes the step's K and V into pool slots, then attends by block table. It knows rows, slots and lengths (a
`PagedContext`, built once a step), and nothing of requests, sessions or sampling.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from engine.batch import Batch

IMPLEMENTATION = "keepwarm_paged"
KERNEL = "paged SDPA"  # for people
GROUPED_QUERIES = 64  # from more of them on, a row's own work outweighs reading its keys once per group of heads
Layer = Callable[
    [int], tuple[torch.Tensor, torch.Tensor]
]  # layer index → its K and V, [blocks, block_size, heads, dim]


@dataclass(frozen=True)
class Span:
    """One row of the step: `count` query tokens from packed offset `offset`, the last of `length` tokens in all.

    Its keys lie in consecutive pool slots from `first_slot`, or, where its blocks are scattered, in `blocks` [blocks].
    """

    offset: int
    count: int
    length: int
    first_slot: int
    blocks: torch.Tensor | None

    def first_key(self, window: int | None) -> int:
        """Position of the first key that any of the row's queries sees."""
        return 0 if window is None else max(0, self.length - self.count + 1 - window)

    def keys(self, pool: torch.Tensor, window: int | None) -> torch.Tensor:
        """The keys, or values, from `first_key` to the last one, out of [blocks, block_size, heads, dim].

        A view where they are consecutive. Whole blocks are gathered where not: far fewer pieces than tokens.
        """
        first = self.first_key(window)
        if self.blocks is None:
            return pool.flatten(0, 1)[self.first_slot + first : self.first_slot + self.length]
        whole, rest = divmod(first, pool.shape[1])
        return pool.index_select(0, self.blocks[whole:]).flatten(0, 1)[rest : rest + self.length - first]


@dataclass
class PagedContext:
    """What every layer of one step needs: where to write, and what each row may read. Masks are made once a step."""

    layer: Layer
    write_slots: torch.Tensor  # [tokens], the slot of each packed token
    spans: list[Span]
    masks: dict[tuple[int, int | None, int], torch.Tensor | None] = field(default_factory=dict)

    @classmethod
    def build(cls, batch: Batch, block_size: int, layer: Layer, device: torch.device) -> PagedContext:
        """The context of a batch whose block tables are `block_size` tokens a block."""
        spans: list[Span] = []
        writes: list[torch.Tensor] = []
        offset = 0
        for row in batch.rows:
            length = row.start + len(row.token_ids)
            ids = row.block_ids[: -(-length // block_size)]
            blocks = torch.tensor(ids, dtype=torch.long)
            scattered = any(b != ids[0] + i for i, b in enumerate(ids))
            first = ids[0] * block_size
            spans.append(Span(offset, len(row.token_ids), length, first, blocks.to(device) if scattered else None))
            writes.append(_slots(blocks, block_size)[row.start : length])
            offset += len(row.token_ids)
        return cls(layer=layer, write_slots=torch.cat(writes).to(device), spans=spans)

    def mask(self, index: int, window: int | None, group: int, like: torch.Tensor) -> torch.Tensor | None:
        """What is added to the scores of row `index`, [group * count, keys]: 0 or, for what it may not see, -inf.

        None when it sees all its `Span.keys`. `like` gives dtype and device.
        """
        key = (index, window, group)
        if key not in self.masks:
            hidden = _hidden(self.spans[index], window, like.device)
            self.masks[key] = (
                None
                if hidden is None
                else like.new_zeros(hidden.shape).masked_fill_(hidden, float("-inf")).repeat(group, 1)
            )
        return self.masks[key]


_current: ContextVar[PagedContext] = ContextVar("paged")


@contextmanager
def attending(paged: PagedContext) -> Iterator[None]:
    """Within it, attention reads and writes `paged`: not every model hands an argument of ours down to its layers."""
    token = _current.set(paged)
    try:
        yield
    finally:
        _current.reset(token)


def _slots(blocks: torch.Tensor, block_size: int) -> torch.Tensor:
    return (blocks[:, None] * block_size + torch.arange(block_size)).flatten()


def _hidden(span: Span, window: int | None, device: torch.device) -> torch.Tensor | None:
    """The keys that a row's queries may not see, [count, keys]; None: they see all."""
    if span.count == 1:
        return None
    keys = torch.arange(span.first_key(window), span.length, device=device)
    queries = torch.arange(span.length - span.count, span.length, device=device)[:, None]
    return ~visible(queries, keys, window)


def visible(queries: torch.Tensor, keys: torch.Tensor, window: int | None) -> torch.Tensor:
    """Whether each of the positions `queries` may see each of `keys`: no later one, and only the last `window`."""
    causal = keys <= queries
    return causal if window is None else causal & (keys > queries - window)


def paged_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface for a packed step: query [1, heads, tokens, dim], key, value [1, kv_heads, …].

    Works on the `PagedContext` that is being attended to, and raises `LookupError` where there is none.
    Returns [1, tokens, heads, dim] and no weights. `scaling` multiplies the scores (None: 1/sqrt(dim)), `softcap` bends
    them by tanh, `sliding_window` hides all but that many last keys, `s_aux` [heads] are the attention sinks.
    """
    paged = _current.get()
    keys, values = paged.layer(module.layer_idx)
    for pool, new in ((keys, key), (values, value)):
        pool.flatten(0, 1)[paged.write_slots] = new[0].transpose(0, 1)
    output = torch.empty_like(query[0].transpose(0, 1))
    for index, span in enumerate(paged.spans):
        q = query[:, :, span.offset : span.offset + span.count]
        k, v = (span.keys(pool, sliding_window).transpose(0, 1)[None] for pool in (keys, values))
        explicit = softcap is not None or s_aux is not None
        # The heads that share K and V become rows of one query matrix, so that K and V are read once for all of them.
        group = q.shape[1] // k.shape[1] if span.count <= GROUPED_QUERIES and not explicit else 1
        rows = q.reshape(1, q.shape[1] // group, -1, q.shape[3])
        mask = paged.mask(index, sliding_window, group, query)
        if explicit:
            result = _attend_explicitly(rows, k, v, mask, scaling, softcap=softcap, sinks=s_aux)
        else:
            gqa = rows.shape[1] != k.shape[1]
            result = F.scaled_dot_product_attention(rows, k, v, attn_mask=mask, scale=scaling, enable_gqa=gqa)
        result = result.reshape(q.shape)
        output[span.offset : span.offset + span.count] = result[0].transpose(0, 1)
    return output[None], None


def _attend_explicitly(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None,
    *,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """The textbook formula in float32, for what fused kernels do not take: softcap (gemma2) and sinks (gpt-oss)."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    scores = (q @ k.transpose(2, 3)).float() * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores + mask
    if sinks is None:
        return scores.softmax(dim=-1).to(v.dtype) @ v
    sink_column = sinks.float().view(1, -1, 1, 1).expand(1, -1, q.shape[2], 1)
    weights = torch.cat([scores, sink_column], dim=-1).softmax(dim=-1)[..., :-1]
    return weights.to(v.dtype) @ v


def _no_mask(*_: Any, **__: Any) -> None:
    """transformers' mask interface: masks are made per row, from lengths, by the attention function itself."""


AttentionInterface.register(IMPLEMENTATION, paged_attention)
AttentionMaskInterface.register(IMPLEMENTATION, _no_mask)
