"""A model whose K/V can be checked: it behaves like a real runner on a small real pool, and trusts nothing it reads.

The K of a token holds its id and position, its V a running digest of the whole prefix. Every pass reads back all
positions that attention would read, through the block table, and recomputes the digest from the ids that it finds:
stale, foreign, shifted or never written (NaN) data fails at once. The next token is a function of the digest, so that a
prefix which is consistent but another's gives another reply.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from engine.batch import Batch, Draw, Row
from engine.cache.copies import Copies, DirectCopies
from engine.cache.pool import KVPool
from engine.protocol import Sampling
from engine.sequence import sample_seed

VOCABULARY = 97
PRIME = 65_521
LAYERS = 2


class WrongCacheError(AssertionError):
    """Attention would have read something else than this sequence's own K/V."""


class StepError(RuntimeError):
    """A forward pass that was told to fail."""


def digest(state: int, token: int, position: int) -> int:
    """The running digest after one more token."""
    return (state * 31 + token * 7 + position + 1) % PRIME


def next_token(state: int, seed: int, last: int | None = None) -> int:
    """The sampled token: of the whole prefix, and of the seed where sampling is not greedy.

    With `last`, the token before it, the text repeats itself: it counts from 20 to 23, and now and then says something
    else.
    """
    if last is not None and state % 7:
        return 20 + (last + 1 + seed % 3) % 4
    return (state * 131 + seed * 17 + 5) % VOCABULARY


def expected_reply(
    prompt: Sequence[int],
    max_tokens: int,
    *,
    stop_ids: Sequence[int] = (),
    sampling: Sampling = Sampling(),  # noqa: B008 - frozen
    index: int = 0,
    repeats: bool = False,
) -> list[int]:
    """What sample `index` must say, without any cache; `repeats`: of a model whose text repeats itself."""
    seed = sample_seed(sampling.seed, index) if sampling.temperature > 0 else 0
    state = 0
    for position, token in enumerate(prompt):
        state = digest(state, token, position)
    reply: list[int] = []
    while len(reply) < max_tokens and not (reply and reply[-1] in stop_ids):
        last = (reply or prompt)[-1] if repeats else None
        reply.append(next_token(state, seed, last))
        state = digest(state, reply[-1], len(prompt) + len(reply) - 1)
    return reply


class FakeModel:
    """A `Runner` that counts steps and tokens at the forward call; `fail_next` makes one pass break half-way.

    With `repeats`, its text repeats itself.
    """

    def __init__(self, blocks: int, block_size: int, *, repeats: bool = False) -> None:
        self.repeats = repeats
        self.pool = KVPool(LAYERS, blocks, block_size, 1, 2, torch.float64, "cpu")
        self.steps = 0
        self.forwarded_tokens = 0
        self.copied_tokens = 0
        self.fail_next = False
        self.copies: Copies = DirectCopies()
        for block in range(blocks):
            self.pool.poison(block)

    def run(self, batch: Batch) -> list[list[int]]:
        """Write the rows' K/V, check everything that attention would read, sample."""
        self.copies.before_writes()
        if self.fail_next:
            self.fail_next = False
            for row in batch.rows:
                for position in range(row.start, row.start + len(row.token_ids)):
                    self._write(row, position, -1, 1)
            raise StepError("the pass failed after it had written garbage")
        self.steps += 1
        sampled = []
        for row in batch.rows:
            self.forwarded_tokens += len(row.token_ids)
            state, prefix = self._verify(row)
            states = []
            for position, token in enumerate(row.token_ids, row.start):
                state = digest(state, token, position)
                states.append(state)
                self._write(row, position, token, state)
            whole = [*prefix, *row.token_ids]
            first = len(states) - row.guessed  # tokens up to which the first draw looks
            ends = range(first, len(states) + 1) if row.guessed else [len(states)] * len(row.draws)
            sampled.append(
                [
                    self._draw(draw, whole[: row.start + end], states[end - 1])
                    for draw, end in zip(row.draws, ends, strict=True)
                ]
            )
        for row in batch.rows:  # another row of this pass may have written where it should not
            self._verify(row, upto=row.start + len(row.token_ids))
        return sampled

    def copy_tokens(self, source: int, target: int, count: int) -> None:
        """Copy between blocks of the pool."""
        self.copied_tokens += count
        self.copies.before_writes()
        self.pool.copy_tokens(source, target, count)

    def resize(self, blocks: int, moved: Mapping[int, int]) -> None:
        """Change the pool's size; what was not carried over is NaN, and so is what is left of the old one."""
        self.copies.before_moving()
        old = self.pool.data
        self.pool.resize(blocks, moved)
        old.fill_(float("nan"))
        for block in set(range(blocks)) - set(moved.values()):
            self.pool.poison(block)

    def _draw(self, draw: Draw, token_ids: list[int], state: int) -> int:
        if token_ids != [*draw.prompt_ids, *draw.reply_ids]:
            raise WrongCacheError(f"the pool holds the prefix {token_ids}, the sequence is {draw}")
        if draw.position != len(token_ids):
            raise WrongCacheError(f"position {draw.position} is drawn after {len(token_ids)} tokens")
        last = token_ids[-1] if self.repeats else None
        return next_token(state, draw.seed if draw.sampling.temperature > 0 else 0, last)

    def _slots(self, row: Row, count: int) -> torch.Tensor:
        """K and V of positions 0 … count - 1 as the layers see them: `[layers, 2, count, 2]`."""
        size = self.pool.block_size
        blocks = torch.tensor([row.block_ids[p // size] for p in range(count)], dtype=torch.long)
        offsets = torch.arange(count) % size
        return self.pool.data[:, :, blocks, offsets, 0]

    def _verify(self, row: Row, upto: int | None = None) -> tuple[int, list[int]]:
        state, token_ids = 0, []
        layers = self._slots(row, row.start if upto is None else upto).tolist()
        for position, (key, value) in enumerate(zip(*layers[0], strict=True)):
            if key[0] != key[0] or key[1] != position:
                raise WrongCacheError(f"position {position} reads token {key[0]} of position {key[1]}")
            token_ids.append(int(key[0]))
            state = digest(state, token_ids[-1], position)
            if value != [state, position]:
                raise WrongCacheError(f"position {position} reads the digest {value}, its prefix has {state}")
        if layers[1:] != layers[:1] * (LAYERS - 1):
            raise WrongCacheError("the layers differ")
        return state, token_ids

    def _write(self, row: Row, position: int, token: int, state: int) -> None:
        size = self.pool.block_size
        slot = (row.block_ids[position // size], position % size)
        for layer in range(LAYERS):
            key, value = self.pool.layer(layer)
            key[slot] = torch.tensor([[float(token), float(position)]], dtype=torch.float64)
            value[slot] = torch.tensor([[float(state), float(position)]], dtype=torch.float64)
