"""What runs next: replies being written, then prompts being read, then newcomers, under one token budget.

One step, said aloud: every reply gets its next token; prompts are read in order as far as the budget goes; who waits
and fits comes in. When blocks run out, idle ones go, then the newest running sequence steps back. It knows nothing of
tensors, text or the pipe.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, Any, Literal

from engine.batch import Batch, Row
from engine.cache.block import Lease
from engine.cache.laws import violations
from engine.cache.manager import BlockManager
from engine.limits import RAISE_IT, Limits
from engine.lines import Lines
from engine.protocol import Event, FinishReason, Prefetch, RejectCode, Rejected, Submit, Tokens
from engine.restoring import Restoring
from engine.sequence import Request, Sequence

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
    ) -> None:
        if max_batch_tokens < 1:
            raise ValueError(f"max_batch_tokens is {max_batch_tokens}; it must be at least 1")
        self.context_length, self.max_batch_tokens = context_length, max_batch_tokens
        self._manager, self._clock = manager, clock
        self._residency, self._restoring = residency, Restoring(residency, manager, clock)
        self._planned_at = 0.0
        blocks = manager.total_blocks
        self._limits = Limits(context_length, vocab_size, manager.block_size, blocks, blocks)
        self._requests: dict[str, Request] = {}
        self._lines = Lines(manager)
        self._step: list[tuple[Sequence, Row]] = []
        self._budget = 0  # tokens that the step being planned has left
        self._admitting: Sequence | None = None
        self._arrivals = count()
        self._events: list[Event] = []
        self.reset_counters()

    # --- what comes in ----------------------------------------------------------------------------------------------

    def submit(self, submit: Submit) -> list[Event]:
        """Let a request wait for its turn, or say why it never can."""
        refusal = self._limits.refusal(submit)
        if submit.request_id in self._requests:
            refusal = ("invalid", f"request id {submit.request_id} is already running")
        if refusal is not None:
            return [Rejected(request_id=submit.request_id, code=refusal[0], message=refusal[1])]
        request = Request(submit, next(self._arrivals), self._clock(), self._limits.max_tokens(submit))
        self._requests[submit.request_id] = request
        self._lines.wait(request.samples[0])
        return self.take_events()

    def cancel(self, request_id: str, index: int | None = None) -> list[Event]:
        """End what is left of a request, in whatever state, or one sample that is being written; else nothing."""
        self._between_steps()
        self._restoring.stop(request_id)
        request = self._requests.get(request_id)
        for sequence in request.samples if request is not None else []:
            wanted = index is None or (sequence.index == index and sequence.reply_ids)
            if wanted and not sequence.ended:
                self._finish(sequence, "cancelled")
        return self.take_events()

    def drop(self, session_id: str) -> tuple[int, list[Event]]:
        """Cancel a session's requests and forget it: how many blocks that freed, and the events of the cancelling."""
        self._between_steps()
        self._restoring.stop_session(session_id)
        events: list[Event] = []
        for request in list(self._requests.values()):
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
                self._reject(sequence.request, *refusal)

    # --- one step ---------------------------------------------------------------------------------------------------

    def schedule(self) -> Batch | None:
        """The next forward pass; None when nothing can run. End it with `commit` or `fail`."""
        self._between_steps()
        self._budget = self.max_batch_tokens
        for sequence in [s for s in self._lines.running if not s.reading]:
            if sequence.lease is not None and self._make_room(sequence):
                self._plan(sequence)
        self._restore(self._lines.running)
        for sequence in [s for s in self._lines.running if s.reading and s.restore is None]:
            if self._budget > 0:
                self._plan(sequence)
        self._admit()
        self._announce()
        if not self._lines.waiting:
            self._restoring.run_ahead(others_run=bool(self._lines.running))
        self._planned_at = self._clock()
        return Batch([row for _, row in self._step]) if self._step else None

    def commit(self, batch: Batch, sampled: list[list[int]]) -> list[Event]:
        """The step is computed: publish its K/V, deliver its tokens, end what is complete."""
        if [len(ids) for ids in sampled] != [len(row.draws) for row in batch.rows] or len(sampled) != len(self._step):
            raise RuntimeError("the runner's answer does not fit the batch")
        step, self._step = self._step, []
        self._restoring.took(self._clock() - self._planned_at)
        for (sequence, row), ids in zip(step, sampled, strict=True):
            self._manager.commit(sequence.held, row.token_ids)
            sequence.forwarded(row.start, len(row.token_ids))
            if row.start < sequence.read_to:
                self._progress(sequence, "reading")
            if ids:
                self._deliver(sequence, ids)
        return self.take_events()

    def fail(self, message: str) -> list[Event]:
        """The step went wrong: its requests end, nothing that it computed is published, all others go on.

        When `schedule` itself raised, the request that it was letting in ends too.
        """
        step, self._step = [sequence for sequence, _ in self._step], []
        if self._admitting is not None:
            step.append(self._admitting)
            self._admitting = None
        for request in dict.fromkeys(sequence.request for sequence in step):
            self._reject(request, "internal", message, retryable=True)
        return self.take_events()

    def take_events(self) -> list[Event]:
        """The events since the last call that returned some."""
        events, self._events = [*self._events, *self._restoring.take_answers()], []
        return events

    # --- what can be seen -------------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """No request is waiting or running, and nothing is fetched ahead of one."""
        return not self._requests and self._restoring.idle

    def violations(self) -> list[str]:
        """Every broken law of blocks, index and leases, and of who runs and who waits; empty when all hold."""
        broken = violations(self._manager)
        broken += self._lines.violations(self._restoring.leases)
        known = {sequence for request in self._requests.values() for sequence in request.samples if not sequence.ended}
        if not known >= {*self._lines.waiting, *self._lines.running}:
            broken.append("a sequence waits or runs that has ended")
        return broken

    def snapshot_fields(self) -> dict[str, Any]:
        """The fields of `protocol.Snapshot` that blocks and requests account for."""
        return {
            **self._manager.counts(),
            "running": len(self._lines.running),
            "waiting": len(self._lines.waiting),
            "sampled_tokens": self.sampled_tokens,
            "preemptions": self.preemptions,
        }

    def reset_counters(self) -> None:
        """Start counting from zero, so that a warm-up does not show."""
        self.sampled_tokens = self.preemptions = 0
        self._manager.reused_tokens = self._manager.evicted_blocks = 0

    # --- inside: planning -------------------------------------------------------------------------------------------

    def _plan(self, sequence: Sequence) -> None:
        """Put as many of the sequence's next tokens into the step as the budget allows."""
        lease = sequence.held
        start = lease.computed
        token_ids = sequence.token_ids[start : start + self._budget]
        end = start + len(token_ids)
        drawing = sequence.request.drawing(sequence) if end == len(sequence.token_ids) else []
        blocks = lease.block_ids(end, self._manager.block_size)
        self._step.append((sequence, Row(token_ids, start, blocks, [sample.draw() for sample in drawing])))
        self._budget -= len(token_ids)

    def _make_room(self, sequence: Sequence) -> bool:
        """Room for the sequence's next token. False when it had to step back, or to end because it has all there is."""
        while not self._manager.extend(sequence.held, len(sequence.token_ids)):
            if self._restoring.make_way():
                continue
            newest = self._lines.running[-1]
            if len(self._lines.running) == 1 and not self._limits.may_grow:
                self._finish(sequence, "length", self._limits.pool_full)
            else:
                self._preempt(newest)
            if newest is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Step back: what it has computed stays as idle blocks for as long as nobody needs them."""
        self._take_out(sequence)
        sequence.preemptions += 1
        self.preemptions += 1
        self._lines.wait(sequence)

    def _admit(self) -> None:
        """Let in who waits, in order, while there is budget and room. Nobody overtakes one who waits for room."""
        for sequence in list(self._lines.waiting):
            # as many sequences as tokens in a step: then one that reads always finds a token left beside the writers
            if self._budget <= 0 or len(self._lines.running) >= self.max_batch_tokens:
                return
            if self._is_being_read(sequence):
                continue
            self._admitting = sequence
            restore = sequence.restore = self._restoring.find(sequence.request.scope, sequence.token_ids)
            lease = self._lease(sequence)
            self._admitting = None
            if lease is None:
                self._restoring.abandon(restore)
                sequence.restore = None
            if lease is None and (self._lines.running or self._limits.may_grow):
                return
            if lease is None:
                self._finish(sequence, "length", self._limits.pool_full)
                continue
            self._lines.run(sequence, lease, self._clock())
            self._progress(sequence, "reading")
            if restore is None:
                self._restoring.explain(sequence)
            self._restore([sequence])
            if sequence.restore is None:
                self._plan(sequence)

    def _lease(self, sequence: Sequence) -> Lease | None:
        """Blocks for all that the sequence has; None where there is no room, even when nothing is fetched ahead."""
        scope, spare = sequence.request.scope, 1 if self._lines.running else 0
        lease = self._manager.acquire(scope, sequence.token_ids, spare)
        if lease is None and self._restoring.make_way():
            lease = self._manager.acquire(scope, sequence.token_ids, spare)
        return lease

    def _restore(self, sequences: list[Sequence]) -> None:
        """Bring from the tiers below what these sequences wait for, as far as the time goes."""
        for sequence in self._restoring.advance(list(sequences), others_write=self._lines.someone_writes):
            self._progress(sequence, "reading")

    def _is_being_read(self, sequence: Sequence) -> bool:
        """Another is computing what this one wants next: waiting for that beats computing it twice."""
        for leader in self._lines.running:
            shared = sequence.could_share(leader, self._manager.block_size) if leader.reading else 0
            if leader.held.computed < shared > self._manager.match(sequence.request.scope, sequence.token_ids).reused:
                return True
        return False

    # --- inside: ending and telling ---------------------------------------------------------------------------------

    def _deliver(self, sequence: Sequence, ids: list[int]) -> None:
        """Hand each sample its token; the samples that share this prompt's end start to wait for their turn."""
        request = sequence.request
        drawing = request.drawing(sequence)
        forked = request.fork() if len(drawing) > 1 else []
        for sample, token_id in zip(drawing, ids, strict=True):
            sample.sampled(token_id, self._clock())
            self.sampled_tokens += 1
            self._events.append(Tokens(request_id=request.submit.request_id, index=sample.index, token_ids=[token_id]))
            if token_id in request.stop_ids:
                self._finish(sample, "stop")
            elif len(sample.reply_ids) == request.max_tokens:
                clipped = request.max_tokens < request.submit.max_tokens
                self._finish(sample, "length", self._limits.context_full if clipped else "")
            elif sample in forked:
                self._lines.wait(sample)

    def _finish(self, sequence: Sequence, reason: FinishReason, detail: str = "") -> None:
        self._restoring.ended(sequence)
        self._take_out(sequence)
        sequence.ended = True
        self._events.append(sequence.finished(reason, self._clock(), detail))
        if sequence.request.ended:
            del self._requests[sequence.request.submit.request_id]

    def _reject(self, request: Request, code: RejectCode, message: str, *, retryable: bool = False) -> None:
        for sequence in request.samples:
            self._take_out(sequence)
        request_id = request.submit.request_id
        del self._requests[request_id]
        self._events.append(Rejected(request_id=request_id, code=code, message=message, retryable=retryable))

    def _take_out(self, sequence: Sequence) -> None:
        """Out of whatever line it stands in, and its lease back."""
        self._restoring.abandon(sequence.restore)
        sequence.restore = None
        self._lines.leave(sequence)

    def _announce(self) -> None:
        """Tell each request once that it waits."""
        for sequence in self._lines.waiting:
            if not sequence.announced:
                sequence.announced = True
                self._progress(sequence, "waiting")

    def _progress(self, sequence: Sequence, state: Literal["waiting", "reading"]) -> None:
        if sequence.index == 0:  # the others have no prompt of their own to read
            self._events.append(sequence.progress(state))

    def _between_steps(self) -> None:
        if self._step:
            raise RuntimeError("a step is planned; commit it or let it fail first")
