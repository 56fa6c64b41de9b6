"""Who waits and who runs: two lines in `Sequence.order`, and the leases of those that run. It decides nothing."""

from __future__ import annotations

from bisect import insort
from operator import attrgetter

from engine.cache.block import Lease
from engine.cache.manager import BlockManager
from engine.sequence import Sequence

_order = attrgetter("order")


class Lines:
    """Every sequence stands in one line at most; running means having a lease."""

    def __init__(self, manager: BlockManager) -> None:
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self._manager = manager

    @property
    def someone_writes(self) -> bool:
        """Whether a running sequence has read its prompt."""
        return any(not sequence.reading for sequence in self.running)

    def wait(self, sequence: Sequence) -> None:
        """Join those who wait, at its place."""
        insort(self.waiting, sequence, key=_order)

    def run(self, sequence: Sequence, lease: Lease, now: float) -> None:
        """From those who wait to those who run."""
        self.waiting.remove(sequence)
        sequence.admit(lease, now)
        insort(self.running, sequence, key=_order)

    def leave(self, sequence: Sequence) -> None:
        """Out of whatever line it stands in, and its lease back."""
        if sequence.lease is not None:
            self.running.remove(sequence)
            self._manager.release(sequence.lease)
            sequence.lease = None
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def violations(self, other_leases: set[Lease]) -> list[str]:
        """What is wrong with lines and leases; `other_leases` belong to nobody in a line."""
        broken = []
        leases = {sequence.held for sequence in self.running}
        if leases | other_leases != self._manager.leases or len(leases) != len(self.running):
            broken.append(f"{len(self.running)} sequences run on {len(self._manager.leases)} leases")
        if any(sequence.lease is not None for sequence in self.waiting):
            broken.append("a waiting sequence holds a lease")
        if any(len(s.held.blocks) > self._manager.blocks_for(len(s.token_ids)) for s in self.running):
            broken.append("a running sequence holds blocks that it has no tokens for")
        for name, line in (("waiting", self.waiting), ("running", self.running)):
            if line != sorted(line, key=_order):
                broken.append(f"the {name} sequences are out of order")
        if set(self.waiting) & set(self.running):
            broken.append("a sequence waits and runs")
        return broken
