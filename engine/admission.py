"""Who comes in: requests that wait get blocks and what is there of their prompts, in order, where there is room."""

from __future__ import annotations

from collections.abc import Callable

from engine.cache.block import Lease
from engine.cache.manager import BlockManager
from engine.limits import Limits
from engine.lines import Lines
from engine.requests import Requests
from engine.restoring import Restoring
from engine.sequence import Sequence
from engine.step import Step


class Admission:
    """From those who wait to those who run. `admitting` is whom it is about, should something go wrong meanwhile."""

    def __init__(
        self,
        manager: BlockManager,
        lines: Lines,
        requests: Requests,
        restoring: Restoring,
        clock: Callable[[], float],
    ) -> None:
        self._manager, self._lines, self._clock = manager, lines, clock
        self._requests, self._restoring = requests, restoring
        self.admitting: Sequence | None = None

    def admit(self, step: Step, limits: Limits, most: int) -> None:
        """Let in who waits, in order, while there is budget and room for it among at most `most` that run.

        Nobody overtakes one who waits for room.
        """
        for sequence in list(self._lines.waiting):
            if step.budget <= 0 or len(self._lines.running) >= most:
                return
            if self._is_being_read(sequence):
                continue
            self.admitting = sequence
            restore = sequence.restore = self._restoring.find(sequence.request.scope, sequence.token_ids)
            lease = self._lease(sequence)
            self.admitting = None
            if lease is None:
                self._restoring.abandon(restore)
                sequence.restore = None
            if lease is None and (self._lines.running or limits.may_grow):
                return
            if lease is None:
                self._requests.finish(sequence, "length", limits.pool_full)
                continue
            self._lines.run(sequence, lease, self._clock())
            self._requests.progress(sequence, "reading")
            if restore is None:
                self._restoring.explain(sequence)
            self.restore([sequence])
            if sequence.restore is None:
                step.add(sequence)

    def restore(self, sequences: list[Sequence]) -> None:
        """Bring from the tiers below what these sequences wait for, as far as the time goes."""
        for sequence in self._restoring.advance(list(sequences), others_write=self._lines.someone_writes):
            self._requests.progress(sequence, "reading")

    def _lease(self, sequence: Sequence) -> Lease | None:
        """Blocks for all that the sequence has; None where there is no room, even when nothing is fetched ahead."""
        scope, spare = sequence.request.scope, 1 if self._lines.running else 0
        lease = self._manager.acquire(scope, sequence.token_ids, spare)
        if lease is None and self._restoring.make_way():
            lease = self._manager.acquire(scope, sequence.token_ids, spare)
        return lease

    def _is_being_read(self, sequence: Sequence) -> bool:
        """Another is computing what this one wants next: waiting for that beats computing it twice."""
        for leader in self._lines.running:
            shared = sequence.could_share(leader, self._manager.block_size) if leader.reading else 0
            if leader.held.computed < shared > self._manager.match(sequence.request.scope, sequence.token_ids).reused:
                return True
        return False
