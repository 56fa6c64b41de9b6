"""How much of its file system the disk tier may take, so that the database and all else there can go on."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from pathlib import Path

from engine.budgets import disk_reserve
from engine.cache.block_file import DiskFull
from engine.cache.journal import Journal
from engine.errors import EngineError
from engine.room import disk_size, free_disk
from engine.words import size

LOOK_S = 1.0  # from one look to the next
PATIENCE_S = 10.0  # the same once something has to go: some file systems take seconds to free what was deleted
PAUSE_S = 60.0  # after a write that failed, until the next is tried
RESERVED = "the disk is nearly full, and some of it stays free for all else"

log = logging.getLogger(__name__)


def space_at(folder: Path) -> tuple[int, int]:
    """Bytes of the file system of `folder`, which may be gone, and those that are free. Raises `OSError`."""
    return disk_size(folder), free_disk(folder)


class DiskSpace:
    """The one owner of what the file system of `folder` allows; None: there is no tier. A change is told once."""

    def __init__(self, folder: Path | None, clock: Callable[[], float], journal: Journal) -> None:
        self._folder, self._clock, self._journal = folder, clock, journal
        self._most: float = math.inf
        self._look_at = self._writes_from = -math.inf
        self._told = False

    def most(self, wanted: int, held: int) -> int:
        """The budget: `wanted` bytes, or what the file system allows where `held` lie there now, if that is less.

        What it allows is looked at now and then. In between it stays: as much as is held more, is free less.
        """
        if self._folder is not None and self._clock() >= self._look_at:
            self._look(self._folder, held)
        most = int(min(wanted, self._most))
        if most < wanted and not self._told:
            self._told = True
            log.warning("%s: %s of it may be taken now, not %s", RESERVED, size(most), size(wanted))
            self._journal.note("skipped", RESERVED, size=wanted - most, target="disk", blocks=0)
        elif self._told and self._most >= 1.1 * wanted:  # not at once, or it would be told again and again
            self._told = False
        return most

    def _look(self, folder: Path, held: int) -> None:
        try:
            total, free = space_at(folder)
        except OSError as error:
            log.debug("%s cannot be asked how much is free: %s", folder, error)
            self._most, spare = math.inf, 0
        else:
            spare = free - disk_reserve(total)
            self._most = max(0, held + spare)
        self._look_at = self._clock() + (LOOK_S if spare >= 0 else PATIENCE_S)

    def require(self, amount: int) -> None:
        """Raise `DiskFull` where so many bytes more would leave too little. Any thread may call."""
        if self._folder is None:
            return
        try:
            total, free = space_at(self._folder)
        except OSError:
            return  # whoever writes finds out
        if free - amount < disk_reserve(total):
            raise DiskFull(RESERVED)

    @property
    def paused(self) -> bool:
        """Whether a write failed so lately that none is tried."""
        return self._clock() < self._writes_from

    def failed(self, error: Exception, amount: int, held: int) -> EngineError:
        """A write of so many bytes failed while `held` lie there: what to tell of it, once for all of the same kind.

        Where there was no room, whatever the file system says, less than is held has to do for a while.
        """
        first = not self.paused  # of all that were on their way together
        self._writes_from = self._clock() + PAUSE_S
        if first:
            log.warning("the disk tier could not keep a block: %s", error)
        if isinstance(error, DiskFull):
            if first:
                self._most, self._look_at = max(0, min(self._most, held - amount)), self._writes_from
            self._told = True  # by this
            return error if error.__cause__ is None else DiskFull("the disk is full")
        return error if isinstance(error, EngineError) else EngineError(str(error))
