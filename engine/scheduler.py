"""What runs next: replies being written, then prompts being read, then newcomers, under one token budget.

One step, said aloud: every reply gets its next token; prompts are read in order as far as the budget goes; who waits
and fits comes in; guesses take what is left. When blocks run out, idle ones go, then the newest running sequence steps
back. It knows nothing of tensors, text or the pipe.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, Any

from engine.admission import Admission
from engine.batch import Batch
from engine.cache.laws import violations
from engine.cache.manager import BlockManager
from engine.limits import RAISE_IT, Limits
from engine.lines import Lines
from engine.protocol import Event, Prefetch, RejectCode, Rejected, Submit
from engine.requests import Requests
from engine.restoring import Restoring
from engine.sequence import Request, Sequence
from engine.speculation import Speculation
from engine.step import Step

if TYPE_CHECKING:
    from engine.cache.residency import Residency  # whose tiers need torch


class Scheduler:
    """The one owner of requests. `schedule` plans a step, `commit` or `fail` ends it; nothing else between the two.

    Every sequence is waiting or running (it has a lease), both kept in `Sequence.order`; samples after the first are
    neither until the prompt has been read. Events come back from the call that caused them; those of `schedule` from
    `take_events`.
    """

    def __init__(
        self,
        manager: BlockManager,
        *,
        context_length: int,
        vocab_size: int,
        max_batch_tokens: int = 512,
        clock: Callable[[], float] = time.monotonic,
        residency: Residency | None = None,
        speculate: int | None = 0,
    ) -> None:
        """`speculate` is the most tokens of a sequence that are guessed at a time; None: as many as pay."""
        if max_batch_tokens < 1:
            raise ValueError(f"max_batch_tokens is {max_batch_tokens}; it must be at least 1")
        self.context_length, self.max_batch_tokens = context_length, max_batch_tokens
        self._manager, self._clock = manager, clock
        self._residency, self._restoring = residency, Restoring(residency, manager, clock)
        self._planned_at = 0.0
        blocks = manager.total_blocks
        self._limits = Limits(context_length, vocab_size, manager.block_size, blocks, blocks)
        self._lines = Lines(manager)
        self._requests = Requests(self._lines, self._restoring, clock)
        self._admission = Admission(manager, self._lines, self._requests, self._restoring, clock)
        self._speculation = Speculation(speculate, manager)
        self._step: Step | None = None  # that is planned, and not yet committed
        self._arrivals = count()
        self.reset_counters()

    # --- what comes in ----------------------------------------------------------------------------------------------

    def submit(self, submit: Submit) -> list[Event]:
        """Let a request wait for its turn, or say why it never can."""
        refusal = self._limits.refusal(submit)
        if self._requests.get(submit.request_id) is not None:
            refusal = ("invalid", f"request id {submit.request_id} is already running")
        if refusal is not None:
            return [Rejected(request_id=submit.request_id, code=refusal[0], message=refusal[1])]
        request = Request(submit, next(self._arrivals), self._clock(), self._limits.max_tokens(submit))
        self._requests.add(request)
        return self.take_events()

    def cancel(self, request_id: str, index: int | None = None) -> list[Event]:
        """End what is left of a request, in whatever state, or one sample that is being written; else nothing."""
        self._between_steps()
        self._restoring.stop(request_id)
        request = self._requests.get(request_id)
        for sequence in request.samples if request is not None else []:
            wanted = index is None or (sequence.index == index and sequence.reply_ids)
            if wanted and not sequence.ended:
                self._requests.finish(sequence, "cancelled")
        return self.take_events()

    def drop(self, session_id: str) -> tuple[int, list[Event]]:
        """Cancel a session's requests and forget it: how many blocks that freed, and the events of the cancelling."""
        self._between_steps()
        self._restoring.stop_session(session_id)
        events: list[Event] = []
        for request in self._requests:
            if request.submit.session_id == session_id:
                events += self.cancel(request.submit.request_id)
        return self._manager.drop(session_id), [*events, *self.take_events()]

    def prefetch(self, command: Prefetch) -> list[Event]:
        """Bring to the device what the tiers below have of a prompt; the answer may come later."""
        self._between_steps()
        self._restoring.prefetch(command)
        return self.take_events()

    def too_much(self, length: int) -> tuple[RejectCode, str] | None:
        """Why `submit` would refuse any prompt of so many tokens; None: it would not."""
        return self._limits.too_much(length)

    def allow(self, blocks: int, remedy: str = RAISE_IT) -> None:
        """The pool may come to have so many blocks: a request that needs no more can wait for them, others cannot.

        `remedy` is what people can do about it.
        """
        self._limits = replace(self._limits, most_blocks=blocks, remedy=remedy)
        self._refuse_what_never_fits()

    @property
    def needed_blocks(self) -> int:
        """Blocks that it takes for running sequences to get their next token, and for the first in the line to run."""
        count = self._manager.blocks_for
        needed = self._manager.leased_blocks
        needed += sum(max(0, count(len(s.token_ids)) - len(s.held.blocks)) for s in self._lines.running)
        if self._lines.waiting:
            needed += count(len(self._lines.waiting[0].token_ids)) + bool(self._lines.running)
        return min(needed, max(self._limits.total_blocks, self._limits.most_blocks))

    def resize(self, blocks: int, move: Callable[[int, Mapping[int, int]], None]) -> None:
        """Go on with `blocks` blocks: idle ones go where they are too many, `move` (`KVPool.resize`) carries the rest.

        Requests that no longer fit are refused. Raises what `move` raises; then only the idle blocks that had to go are
        gone.
        """
        self._between_steps()
        if blocks < self._manager.total_blocks:
            self._restoring.make_way()
        moved = self._manager.make_fit(blocks)
        move(blocks, moved)
        self._manager.renumber(blocks, moved)
        self._limits = replace(self._limits, total_blocks=blocks)
        self._refuse_what_never_fits()

    def _refuse_what_never_fits(self) -> None:
        for sequence in [s for s in self._lines.waiting if not s.reply_ids and s.request.samples[0] is s]:
            if (refusal := self._limits.refusal(sequence.request.submit)) is not None:
                self._requests.reject(sequence.request, *refusal)

    # --- one step ---------------------------------------------------------------------------------------------------

    def schedule(self) -> Batch | None:
        """The next forward pass; None when nothing can run. End it with `commit` or `fail`."""
        self._between_steps()
        step = self._step = Step(self.max_batch_tokens)
        for sequence in [s for s in self._lines.running if not s.reading]:
            if sequence.lease is not None and self._make_room(sequence):
                step.add(sequence)
        self._admission.restore(self._lines.running)
        for sequence in [s for s in self._lines.running if s.reading and s.restore is None]:
            if step.budget > 0:
                step.add(sequence)
        # as many sequences as tokens in a step: then one that reads always finds a token left beside the writers
        self._admission.admit(step, self._limits, most=self.max_batch_tokens)
        self._requests.announce()
        if not self._lines.waiting:
            self._restoring.run_ahead(others_run=bool(self._lines.running))
        self._speculation.draft(step)
        batch = step.batch(self._manager.block_size)
        if batch is None:
            self._step = None
        self._planned_at = self._clock()
        return batch

    def commit(self, batch: Batch, sampled: list[list[int]]) -> list[Event]:
        """The step is computed: publish its K/V, deliver its tokens, end what is complete.

        Of a guess only what came true counts; what was computed for the rest is written over by what comes instead.
        """
        parts = self._step.parts if self._step is not None else []
        if [len(ids) for ids in sampled] != [len(row.draws) for row in batch.rows] or len(sampled) != len(parts):
            raise RuntimeError("the runner's answer does not fit the batch")
        seconds = self._clock() - self._planned_at
        self._restoring.took(seconds)
        if self._step is not None:
            self._speculation.took(self._step, seconds)
        self._step = None
        for part, drawn in zip(parts, sampled, strict=True):
            sequence = part.sequence
            ids = self._speculation.checked(part, drawn) if part.writes else drawn
            forwarded = [*part.token_ids, *part.draft[: len(ids) - 1]]
            self._manager.commit(sequence.held, forwarded)
            if part.draft:
                self._manager.shrink(sequence.held, sequence.held.computed + 1)
            sequence.forwarded(part.start, len(forwarded))
            if part.start < sequence.read_to:
                self._requests.progress(sequence, "reading")
            if ids:
                self._requests.deliver(sequence, ids, self._limits)
        return self.take_events()

    def fail(self, message: str) -> list[Event]:
        """The step went wrong: its requests end, nothing that it computed is published, all others go on.

        When `schedule` itself raised, the request that it was letting in ends too.
        """
        step = [part.sequence for part in self._step.parts] if self._step is not None else []
        self._step = None
        if self._admission.admitting is not None:
            step.append(self._admission.admitting)
            self._admission.admitting = None
        for request in dict.fromkeys(sequence.request for sequence in step):
            self._requests.reject(request, "internal", message, retryable=True)
        return self.take_events()

    def take_events(self) -> list[Event]:
        """The events since the last call that returned some."""
        return self._requests.take_events()

    # --- what can be seen -------------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """No request is waiting or running, and nothing is fetched ahead of one."""
        return not self._requests and self._restoring.idle

    def violations(self) -> list[str]:
        """Every broken law of blocks, index and leases, and of who runs and who waits; empty when all hold."""
        broken = violations(self._manager)
        broken += self._lines.violations(self._restoring.leases)
        known = {sequence for request in self._requests for sequence in request.samples if not sequence.ended}
        if not known >= {*self._lines.waiting, *self._lines.running}:
            broken.append("a sequence waits or runs that has ended")
        return broken

    def snapshot_fields(self) -> dict[str, Any]:
        """The fields of `protocol.Snapshot` that blocks and requests account for."""
        return {
            **self._manager.counts(),
            "running": len(self._lines.running),
            "waiting": len(self._lines.waiting),
            "sampled_tokens": self._requests.sampled_tokens,
            "drafted_tokens": self._speculation.drafted_tokens,
            "accepted_tokens": self._speculation.accepted_tokens,
            "preemptions": self.preemptions,
        }

    def reset_counters(self) -> None:
        """Start counting from zero, so that a warm-up does not show."""
        self.preemptions = self._requests.sampled_tokens = 0
        self._speculation.drafted_tokens = self._speculation.accepted_tokens = 0
        self._manager.reused_tokens = self._manager.evicted_blocks = 0

    # --- inside: planning -------------------------------------------------------------------------------------------

    def _make_room(self, sequence: Sequence) -> bool:
        """Room for the sequence's next token. False when it had to step back, or to end because it has all there is."""
        while not self._manager.extend(sequence.held, len(sequence.token_ids)):
            if self._restoring.make_way():
                continue
            newest = self._lines.running[-1]
            if len(self._lines.running) == 1 and not self._limits.may_grow:
                self._requests.finish(sequence, "length", self._limits.pool_full)
            else:
                self._preempt(newest)
            if newest is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Step back: what it has computed stays as idle blocks for as long as nobody needs them."""
        self._requests.take_out(sequence)
        sequence.preemptions += 1
        self.preemptions += 1
        self._lines.wait(sequence)

    def _between_steps(self) -> None:
        if self._step is not None:
            raise RuntimeError("a step is planned; commit it or let it fail first")
