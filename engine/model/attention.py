"""Attention over the paged pool: one function that transformers calls in every layer of any model it serves.

It writes the step's K and V into pool slots, then attends by block table. It knows rows, slots and lengths (a
`PagedContext`, built once a step), and nothing of requests, sessions or sampling.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from engine.batch import Batch
from engine.model.kernels import Kernels, Seen, TorchKernels

IMPLEMENTATION = "keepwarm_paged"
KERNEL = "paged SDPA"  # for people
FEW_QUERIES = 1  # of a row: as many or fewer are a kernel's
GROUPED_QUERIES = 64  # from more of them on, a row's own work outweighs reading its keys once per group of heads
Layer = Callable[
    [int], tuple[torch.Tensor, torch.Tensor]
]  # layer index → its K and V, [blocks, block_size, heads, dim]


@dataclass(frozen=True)
class Span:
    """One row of the step: `count` query tokens from packed offset `offset`, the last of `length` tokens in all.

    Its keys lie in the blocks of `table` [blocks], in RAM: in consecutive pool slots from `first_slot`, or, where they
    are scattered, also in `blocks`, where the pool is.
    """

    offset: int
    count: int
    length: int
    table: torch.Tensor
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
    """What every layer of one step needs: where to write, and what each row may read.

    Masks, and what single tokens see, are made once a step.
    """

    layer: Layer
    write_slots: torch.Tensor  # [tokens], the slot of each packed token
    spans: list[Span]
    kernels: Kernels = field(default_factory=TorchKernels)
    masks: dict[tuple[int, int | None, int], torch.Tensor | None] = field(default_factory=dict)
    few_seen: dict[int | None, Seen] = field(default_factory=dict)

    @classmethod
    def build(
        cls, batch: Batch, block_size: int, layer: Layer, device: torch.device, kernels: Kernels | None = None
    ) -> PagedContext:
        """The context of a batch whose block tables are `block_size` tokens a block."""
        spans: list[Span] = []
        writes: list[torch.Tensor] = []
        offset = 0
        for row in batch.rows:
            length = row.start + len(row.token_ids)
            ids = row.block_ids[: -(-length // block_size)]
            table = torch.tensor(ids, dtype=torch.long)
            scattered = any(b != ids[0] + i for i, b in enumerate(ids))
            blocks, first = table.to(device) if scattered else None, ids[0] * block_size
            spans.append(Span(offset, len(row.token_ids), length, table, first, blocks))
            writes.append(_slots(table[row.start // block_size :], block_size, row.start, length))
            offset += len(row.token_ids)
        return cls(layer, torch.cat(writes).to(device), spans, kernels or TorchKernels())

    @cached_property
    def few(self) -> list[Span]:
        """The rows with so few queries that each token of theirs is attended to by itself."""
        return [span for span in self.spans if span.count <= FEW_QUERIES]

    @property
    def all_few(self) -> bool:
        """Whether every row is such a row."""
        return len(self.few) == len(self.spans)

    @cached_property
    def few_tokens(self) -> torch.Tensor | None:
        """The packed tokens of those rows; None: they are all that there are."""
        if self.all_few:
            return None
        tokens = [span.offset + i for span in self.few for i in range(span.count)]
        return torch.tensor(tokens, device=self.write_slots.device)

    def seen(self, window: int | None) -> Seen:
        """What each token of the rows with few queries sees."""
        if window not in self.few_seen:
            ends = [(span, span.length - span.count + 1 + i) for span in self.few for i in range(span.count)]
            firsts = [0 if window is None else max(0, end - window) for _, end in ends]
            self.few_seen[window] = Seen.of([span.table for span, _ in ends], firsts, [end for _, end in ends])
        return self.few_seen[window]

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


def _slots(table: torch.Tensor, block_size: int, start: int, end: int) -> torch.Tensor:
    """The slots of the positions start <= j < end, of which the first is in the first block of `table`."""
    slots = (table[:, None] * block_size + torch.arange(block_size)).flatten()
    return slots[start % block_size :][: end - start]


def current() -> PagedContext | None:
    """The context of the step that is under way, if one is."""
    return _current.get(None)


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
    queries = query[0].transpose(0, 1)
    return attend(paged, queries, keys, values, scaling, sliding_window, softcap=softcap, sinks=s_aux)[None], None


def attend(  # noqa: PLR0917 - the tensors, and the two numbers that every layer has
    paged: PagedContext,
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scaling: float | None,
    window: int | None,
    *,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """What each packed token's queries [tokens, heads, dim] see of a layer's K and V, [tokens, heads, dim].

    Rows of few queries are the kernels', if they can; the others are SDPA's.
    """
    spans = list(enumerate(paged.spans))
    output: torch.Tensor | None = None
    if softcap is None and sinks is None and paged.few and paged.kernels.attends(queries, keys):
        tokens, scale = paged.few_tokens, queries.shape[2] ** -0.5 if scaling is None else scaling
        if tokens is None:
            return paged.kernels.attend(queries, keys, values, paged.seen(window), scale)
        output = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
        output[tokens] = paged.kernels.attend(queries[tokens], keys, values, paged.seen(window), scale)
        spans = [(index, span) for index, span in spans if span.count > FEW_QUERIES]
    if output is None:
        output = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
    for index, span in spans:
        q = queries[span.offset : span.offset + span.count].transpose(0, 1)[None]
        k, v = (span.keys(pool, window).transpose(0, 1)[None] for pool in (keys, values))
        if softcap is not None or sinks is not None:
            mask = paged.mask(index, window, 1, queries)
            result = _attend_explicitly(q, k, v, mask, scaling, softcap=softcap, sinks=sinks)
        elif span.count > GROUPED_QUERIES and window is None:
            result = _attend_causally(q, k, v, scaling)
        else:
            rows = _grouped(q, k) if span.count <= GROUPED_QUERIES else q
            mask = paged.mask(index, window, q.shape[1] // rows.shape[1], queries)
            gqa = rows.shape[1] != k.shape[1]
            result = F.scaled_dot_product_attention(rows, k, v, attn_mask=mask, scale=scaling, enable_gqa=gqa)
        output[span.offset : span.offset + span.count] = result.reshape(q.shape)[0].transpose(0, 1)
    return output


def _grouped(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """The heads that share K and V as rows of one query matrix, so that K and V are read once for all of them."""
    return q.reshape(1, k.shape[1], -1, q.shape[3])


def _attend_causally(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float | None) -> torch.Tensor:
    """Of causal attention: the last keys [1, kv_heads, keys, dim] are those of the queries [1, heads, count, dim].

    What came before is attended to apart, without a mask, and both are weighed by the sums of their scores' exponents:
    half the time of one mask over all, where that is long.
    """
    heads, count = q.shape[1:3]
    before = k.shape[2] - count
    gqa = heads != k.shape[1]
    if not before:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=gqa)
    if q.device.type != "cpu":
        mask = torch.ones(count, k.shape[2], dtype=torch.bool, device=q.device).tril(before)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling, enable_gqa=gqa)
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    old, old_sum = flash(_grouped(q, k), k[:, :, :before], v[:, :, :before], scale=scaling)
    new_k, new_v = (part[:, :, before:].repeat_interleave(heads // k.shape[1], dim=1) for part in (k, v))
    new, new_sum = flash(q, new_k, new_v, is_causal=True, scale=scaling)
    share = torch.sigmoid(old_sum.reshape(new_sum.shape) - new_sum)[..., None]
    return torch.lerp(new.float(), old.reshape(new.shape).float(), share.float()).to(q.dtype)


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
