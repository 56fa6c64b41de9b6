"""Blocks on their way to the device: for sequences that wait for them, and ahead of time. Bounded work a step.

It knows leases and restores, and nothing of the order in which requests run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.cache.block import Lease, Scope
from engine.cache.manager import BlockManager
from engine.protocol import Prefetch, Prefetched
from engine.sequence import Sequence

if TYPE_CHECKING:
    from engine.cache.residency import Residency  # whose tiers need torch
    from engine.cache.restores import Restore

WAITED_FOR, AHEAD = (
    0.5,
    0.1,
)  # shares of a step's time, while others write, for what a turn waits for and what none does
SMOOTHING = 0.2


@dataclass(eq=False)
class _Prefetching:
    """A prefetch under way: it holds its blocks like a sequence, and gives them back for one."""

    command: Prefetch
    lease: Lease
    restore: Restore
    host_tokens: int = 0
    disk_tokens: int = 0


class Restoring:
    """The one owner of prefetches, and of how long a step may be held up for copies. Without a residency it is idle."""

    def __init__(self, residency: Residency | None, manager: BlockManager, clock: Callable[[], float]) -> None:
        self._residency, self._manager, self._clock = residency, manager, clock
        self._prefetches: dict[str, _Prefetching] = {}
        self._answers: list[Prefetched] = []
        self._step_s: float | None = None

    @property
    def idle(self) -> bool:
        """No prefetch is under way."""
        return not self._prefetches

    @property
    def leases(self) -> set[Lease]:
        """The leases of prefetches."""
        return {each.lease for each in self._prefetches.values()}

    def took(self, seconds: float) -> None:
        """A step has taken so long."""
        self._step_s = seconds if self._step_s is None else self._step_s + SMOOTHING * (seconds - self._step_s)

    # --- for sequences ------------------------------------------------------------------------------------------------

    def find(self, scope: Scope, token_ids: list[int], *, ahead: bool = False) -> Restore | None:
        """What the tiers below have for these tokens. It ends by `advance`, or must be given to `abandon`."""
        return self._residency.find(scope, token_ids, ahead=ahead) if self._residency is not None else None

    def abandon(self, restore: Restore | None) -> None:
        """Nobody waits for it any more."""
        if self._residency is not None and restore is not None:
            self._residency.restores.abandon(restore)

    def advance(self, sequences: Iterable[Sequence], *, others_write: bool) -> list[Sequence]:
        """Bring what these running sequences wait for, as far as the time goes; those that came further."""
        if self._residency is None:
            return []
        until = self._until(WAITED_FOR if others_write else math.inf)
        further: list[Sequence] = []
        for sequence in sequences:
            if (restore := sequence.restore) is None:
                continue
            came = self._residency.restores.advance(restore, sequence.held, sequence.token_ids, until)
            for part in came:
                sequence.restored(part)
            if not restore.pieces:
                sequence.restore_s += self._clock() - restore.began
                sequence.restore = None
                self.explain(sequence, restore)
            if came:
                further.append(sequence)
        return further

    def explain(self, sequence: Sequence, restore: Restore | None = None) -> None:
        """Note why the rest of a sequence's prompt has to be computed, where that is not known yet."""
        if self._residency is not None and sequence.preemptions == 0 and sequence.index == 0:
            prompt = sequence.token_ids[: sequence.request.prompt_len]
            scope, position = sequence.request.scope, sequence.held.computed
            sequence.miss = self._residency.outlook.miss(scope, prompt, position, restore)

    def ended(self, sequence: Sequence) -> None:
        """A running sequence ends: note what its turn has used."""
        if self._residency is not None and sequence.lease is not None:
            self._residency.ended(sequence.lease, sequence.usage(self._clock()))

    # --- ahead of time ------------------------------------------------------------------------------------------------

    def take_answers(self) -> list[Prefetched]:
        """The answers to prefetches that have ended since the last call."""
        answers, self._answers = self._answers, []
        return answers

    def prefetch(self, command: Prefetch) -> None:
        """Begin one."""
        scope, ids = Scope(command.session_id, command.salt, command.shared_len), command.token_ids
        restore = self.find(scope, [*ids, -1], ahead=True)
        there = self._manager.match(scope, [*ids, -1]).reused
        if restore is None:
            self._answer(command.call_id, there)
            return
        end = restore.pieces[-1].end if restore.pieces else 0
        lease = self._manager.acquire(scope, ids[:end], spare=0) if end else None
        if lease is None:
            self.abandon(restore)
            self._answer(command.call_id, there)
            return
        lease.counts = False
        self._prefetches[command.call_id] = _Prefetching(command, lease, restore)

    def run_ahead(self, *, others_run: bool) -> None:
        """Bring what nobody waits for yet, as far as the time goes."""
        until = self._until(AHEAD if others_run else math.inf)
        for call_id, each in list(self._prefetches.items()):
            if self._residency is None:
                continue
            for part in self._residency.restores.advance(each.restore, each.lease, each.command.token_ids, until):
                if part.tier == "host":
                    each.host_tokens += part.end - part.start
                else:
                    each.disk_tokens += part.end - part.start
            if not each.restore.pieces:
                self.stop(call_id)

    def stop(self, call_id: str) -> None:
        """End a prefetch, with what has come; an unknown one is ignored."""
        each = self._prefetches.pop(call_id, None)
        if each is None:
            return
        self.abandon(each.restore)
        there = each.lease.computed
        self._manager.release(each.lease)
        self._answer(call_id, there, each.host_tokens, each.disk_tokens)

    def stop_session(self, session_id: str) -> None:
        """End the prefetches of a session."""
        for call_id, each in list(self._prefetches.items()):
            if each.command.session_id == session_id:
                self.stop(call_id)

    def make_way(self) -> bool:
        """End all prefetches, for their room is needed; whether there were any."""
        calls = list(self._prefetches)
        for call_id in calls:
            self.stop(call_id)
        return bool(calls)

    def _until(self, share: float) -> float:
        if math.isinf(share):
            return math.inf
        return self._clock() + share * (self._step_s or 0.0)

    def _answer(self, call_id: str, there: int, host: int = 0, disk: int = 0) -> None:
        self._answers.append(Prefetched(call_id=call_id, device_tokens=there, host_tokens=host, disk_tokens=disk))
