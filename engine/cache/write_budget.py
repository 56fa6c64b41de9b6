"""How much may be written in a day, so that a cache does not wear out the disk that it is kept on."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

from engine.cache.records import read_record, write_record

log = logging.getLogger(__name__)

HOUR = 3600
HOURS = 24


class WriteBudget:
    """At most `bytes_per_day` in any 24 hours (None: no limit), counted by the hour in a small file at `path`.

    An hour counts in whole until it has left those 24 in whole: the limit is never passed, and room comes back up to
    an hour late. `clock` gives Unix time. Where it is set back, what lies in its future counts as of now; where it
    jumps ahead, what was written is forgotten early. A file that is damaged or cannot be written only forgets.
    Any thread may call.
    """

    def __init__(self, path: Path, bytes_per_day: int | None, clock: Callable[[], float] = time.time) -> None:
        self.bytes_per_day = bytes_per_day
        self._path, self._clock = path, clock
        self._lock = threading.Lock()
        self._hours: dict[int, int] = {}  # hour since 1970 -> bytes
        try:
            self._hours = read_record(path, dict[int, int])
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as error:
            log.warning("how much was written today is forgotten: %s", error)

    def allows(self, size: int) -> bool:
        """Whether so many bytes more stay within the limit."""
        return self.bytes_per_day is None or self.spent() + size <= self.bytes_per_day

    def spend(self, size: int) -> None:
        """So many bytes are written; to be noted whether or not that succeeds."""
        self.count(size)
        self.keep()

    def count(self, size: int) -> None:
        """Note it for now."""
        with self._lock:
            self._slide()
            hour = self._hour()
            self._hours[hour] = self._hours.get(hour, 0) + size

    def keep(self) -> None:
        """Write down what was counted, for the next start; takes milliseconds."""
        with self._lock:
            try:
                self._path.parent.mkdir(mode=0o700, exist_ok=True)  # a person may remove it at any time
                write_record(self._path, self._hours, durable=False)
            except OSError as error:
                log.warning("how much was written today is not kept: %s", error)

    def spent(self) -> int:
        """Bytes of the last 24 hours."""
        with self._lock:
            self._slide()
            return sum(self._hours.values())

    def _hour(self) -> int:
        return int(self._clock() // HOUR)

    def _slide(self) -> None:
        now = self._hour()
        kept: dict[int, int] = {}
        for hour, size in self._hours.items():
            if hour >= now - HOURS:
                kept[min(hour, now)] = kept.get(min(hour, now), 0) + size
        self._hours = kept
