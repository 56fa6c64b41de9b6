"""How many threads torch computes with: as many as there are cores that other programs leave.

Threads wait for each other at every operation. With a core each they spin for a moment and lose nothing; beside a
program that wants the same core, each wait lasts until that one's turn is over. Measured on two cores, a step of one
token: 26 ms with two threads alone; beside one busy program 210 ms with two threads, and 80 with what this leaves.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import psutil
import torch

LOOK_SECONDS = 0.3  # between two looks at what others do
SPARE = 0.75  # of a core: so much may others want of the last one that is taken


def cpu_seconds() -> tuple[float, float]:
    """The seconds that all cores have worked since the machine started, and those that they did for this process."""
    times, own = psutil.cpu_times(), psutil.Process().cpu_times()
    idle = times.idle + getattr(times, "iowait", 0.0) + getattr(times, "steal", 0.0)
    guests = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)  # which are in user and nice already
    return sum(times) - idle - guests, own.user + own.system


class Threads:
    """Owner of torch's thread count, in the thread that computes; at most as many as it finds set."""

    def __init__(
        self,
        cores: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        worked: Callable[[], tuple[float, float]] = cpu_seconds,
    ) -> None:
        self._most = self._now = torch.get_num_threads()
        self._cores = cores or psutil.cpu_count() or self._most
        self._clock, self._worked = clock, worked
        self._seen_at, self._seen = clock(), worked()

    def adapt(self) -> None:
        """Look at what others did since the last look, and take what they left; not more often than is useful."""
        passed = self._clock() - self._seen_at
        if self._most == 1 or passed < LOOK_SECONDS:
            return
        everything, own = self._worked()
        others = (everything - self._seen[0] - (own - self._seen[1])) / passed
        self._seen_at, self._seen = self._clock(), (everything, own)
        free = int(self._cores - others + SPARE)
        threads = max(1, min(self._most, free))
        if threads != self._now:
            torch.set_num_threads(threads)
            self._now = threads
