"""A request and its samples as ledgers: integers, and what follows from them. No I/O, no tensors, no decisions."""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from engine.batch import Draw
from engine.cache.block import Lease, Scope, common_prefix
from engine.lookup import Lookup
from engine.protocol import Finished, FinishReason, Miss, Progress, Submit, Usage

if TYPE_CHECKING:
    from engine.cache.restores import Restore, Restored  # whose tiers need torch


def sample_seed(seed: int | None, index: int) -> int:
    """The 63-bit seed of sample `index`: the same for the same `seed`, fresh when that is None."""
    if seed is None:
        return secrets.randbits(63)
    return int.from_bytes(hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=8).digest()) >> 1


@dataclass(eq=False)
class Sequence:
    """One sample of a request: its tokens, how many are in the pool, and what that took.

    `token_ids` is the prompt and then `reply_ids`. The token sampled last has no K/V yet. `seen` is the first position
    that this sequence has never had in the pool: what is forwarded below it is recomputed. Running means having a
    lease; `read_to` tokens are there to be read, more than one at once, since the lease was made. With a `restore`,
    blocks are on their way from the tiers below, and nothing is forwarded. `lookup` guesses how it goes on.
    """

    request: Request
    index: int
    seed: int
    token_ids: list[int]
    reply_ids: list[int] = field(default_factory=list)
    lease: Lease | None = None
    read_to: int = 0
    seen: int = 0
    restore: Restore | None = None
    restore_s: float = 0.0
    miss: Miss | None = None
    device_tokens: int = 0
    host_tokens: int = 0
    disk_tokens: int = 0
    computed_tokens: int = 0
    recomputed_tokens: int = 0
    preemptions: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    lookup: Lookup = field(default_factory=Lookup)
    admitted_at: float | None = None
    first_token_at: float | None = None
    announced: bool = False  # that it waits
    ended: bool = False

    @property
    def order(self) -> tuple[int, int, int]:
        """Lower goes first: by priority, then arrival, then sample. The last to go is the first to be preempted."""
        return (-self.request.submit.priority, self.request.arrival, self.index)

    @property
    def held(self) -> Lease:
        """The lease of a running sequence; raises `RuntimeError` when it is not running."""
        if self.lease is None:
            raise RuntimeError(f"sample {self.index} of {self.request.submit.request_id} is not running")
        return self.lease

    @property
    def reading(self) -> bool:
        """Running, and not yet where the next token is sampled from what was sampled last."""
        return self.lease is not None and self.lease.computed < self.read_to

    @property
    def tokens_left(self) -> int:
        """How many tokens the reply may still get."""
        return self.request.max_tokens - len(self.reply_ids)

    def admit(self, lease: Lease, now: float) -> None:
        """Start to run on `lease`, which may have found some of the tokens."""
        self.lease = lease
        self.read_to = len(self.token_ids)
        self.announced = False
        if self.admitted_at is None:
            self.admitted_at = now
        prompt = min(lease.reused, self.request.prompt_len)
        self.device_tokens += max(0, prompt - self.seen)
        self.seen = max(self.seen, lease.reused)

    def restored(self, part: Restored) -> None:
        """Account for tokens that came from a tier below."""
        first_time = max(0, min(part.end, self.request.prompt_len) - max(part.start, self.seen))
        if part.tier == "host":
            self.host_tokens += first_time
        else:
            self.disk_tokens += first_time
        self.seen = max(self.seen, part.end)

    def forwarded(self, start: int, count: int) -> None:
        """Account for tokens `start` … `start + count - 1`, which went through the model."""
        end = start + count
        again = max(0, min(end, self.seen) - start)
        first_time = max(0, min(end, self.request.prompt_len) - start - again)
        self.recomputed_tokens += again
        self.computed_tokens += first_time
        self.seen = max(self.seen, end)

    def checked(self, drafted: int, accepted: int) -> None:
        """Account for guessed tokens, which went through the model, and for those that came true."""
        self.drafted_tokens += drafted
        self.accepted_tokens += accepted

    def sampled(self, token_ids: list[int], now: float) -> None:
        """Append what a step has sampled."""
        self.token_ids += token_ids
        self.reply_ids += token_ids
        if self.first_token_at is None:
            self.first_token_at = now

    def draw(self, guessed: list[int] | None = None) -> Draw:
        """The next token to be sampled; with `guessed`, the one behind these."""
        submit, reply, position = self.request.submit, self.reply_ids, len(self.token_ids)
        if guessed:
            reply, position = [*reply, *guessed], position + len(guessed)
        return Draw(submit.sampling, self.seed, position, submit.token_ids, reply)

    def could_share(self, leader: Sequence, block_size: int) -> int:
        """How many of this sequence's leading tokens a leader that is reading has, or will have, in the pool.

        A leader of lower priority counts for nothing: waiting for it would turn the order around.
        """
        if leader.request.submit.priority < self.request.submit.priority:
            return 0
        limit = self.request.scope.reach(leader.request.scope, block_size)
        return common_prefix(self.token_ids[:-1][:limit], leader.token_ids[: leader.read_to])

    def progress(self, state: Literal["waiting", "reading"]) -> Progress:
        """How much of the prompt is in the pool, and how much of that was there when the lease was made."""
        total = self.request.prompt_len
        reused = min(self.lease.reused, total) if self.lease is not None else 0
        there = min(self.lease.computed, total) if self.lease is not None else 0
        request_id = self.request.submit.request_id
        return Progress(request_id=request_id, state=state, reused=reused, read=there - reused, total=total)

    def finished(self, reason: FinishReason, now: float, detail: str) -> Finished:
        """The end of this sample, with what it cost."""
        request_id = self.request.submit.request_id
        return Finished(request_id=request_id, index=self.index, reason=reason, usage=self.usage(now), detail=detail)

    def usage(self, now: float) -> Usage:
        """What it cost so far. `prompt_tokens` counts as much of the prompt as was found or computed."""
        arrived = self.request.arrived_at
        first = self.first_token_at
        return Usage(
            prompt_tokens=self.device_tokens + self.host_tokens + self.disk_tokens + self.computed_tokens,
            device_tokens=self.device_tokens,
            host_tokens=self.host_tokens,
            disk_tokens=self.disk_tokens,
            computed_tokens=self.computed_tokens,
            recomputed_tokens=self.recomputed_tokens,
            output_tokens=len(self.reply_ids),
            preemptions=self.preemptions,
            drafted_tokens=self.drafted_tokens,
            accepted_tokens=self.accepted_tokens,
            queue_s=(now if self.admitted_at is None else self.admitted_at) - arrived,
            restore_s=self.restore_s,
            miss=self.miss,
            first_token_s=None if first is None else first - arrived,
            total_s=now - arrived,
        )


class Request:
    """A submit and its samples. The first one reads the prompt; the others start from what it has read."""

    def __init__(self, submit: Submit, arrival: int, arrived_at: float, max_tokens: int) -> None:
        self.submit, self.arrival, self.arrived_at, self.max_tokens = submit, arrival, arrived_at, max_tokens
        self.prompt_len = len(submit.token_ids)
        self.scope = Scope(submit.session_id, submit.salt, submit.shared_len)
        self.stop_ids = frozenset(submit.stop_ids)
        seeds = [sample_seed(submit.sampling.seed, index) for index in range(submit.n)]
        self.samples = [Sequence(self, index, seed, list(submit.token_ids)) for index, seed in enumerate(seeds)]

    @property
    def ended(self) -> bool:
        """All samples have ended."""
        return all(sample.ended for sample in self.samples)

    def drawing(self, sequence: Sequence) -> list[Sequence]:
        """The samples that take a token from this sequence's logits: all of them where the prompt ends."""
        return [sequence] if sequence.reply_ids else self.samples

    def fork(self) -> list[Sequence]:
        """The samples after the first, which share its prompt: all of it counts as found."""
        for sample in self.samples[1:]:
            sample.device_tokens = sample.seen = self.prompt_len
            sample.admitted_at = self.samples[0].admitted_at
        return self.samples[1:]
