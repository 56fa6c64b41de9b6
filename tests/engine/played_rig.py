"""The rig whose workers work when they are told to: a test says what was written, read or lost, and in which order."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.batch import Batch
from engine.cache import clerk, disk_tier
from tests.engine.cold_rig import ColdRig


class Job:
    """Something that an executor was given to do."""

    def __init__(self, work: Callable[[], None], executor: Later) -> None:
        self._work, self._executor = work, executor
        self.done = False

    def run(self) -> None:
        """Do it, whole."""
        self._work()
        self.done = True

    def result(self) -> None:
        """Have everything done up to this."""
        while not self.done:
            self._executor.do()


class Later:
    """Stands in for a `ThreadPoolExecutor`. Of as many jobs as it has threads, any may end first."""

    def __init__(self, threads: int, thread_name_prefix: str) -> None:
        self.name, self._threads = thread_name_prefix, threads
        self.jobs: list[Job] = []

    def submit(self, work: Callable[[], None]) -> Job:
        """Take on a job."""
        self.jobs.append(Job(work, self))
        return self.jobs[-1]

    def do(self, which: int = 0) -> bool:
        """Do one job; False: there is none."""
        if self.jobs:
            self.jobs.pop(which % min(self._threads, len(self.jobs))).run()
            return True
        return False

    def shutdown(self, wait: bool) -> None:
        """Do all that is left."""
        while self.do():
            pass


class PlayedRig(ColdRig):
    """At each step, `pace` blocks are read or written; which of two at a time ends first, the bits of `which` say.

    `staged` blocks have room on their way, or a few more. To throw it away without `close` is a kill: what its workers
    have not done never happens.
    """

    def __init__(self, folder: Path, *, staged: int = 24, **fields: Any) -> None:
        self.executors: list[Later] = []
        with pytest.MonkeyPatch.context() as patch:
            for module in (disk_tier, clerk):
                patch.setattr(module, "ThreadPoolExecutor", self._executor)
            patch.setattr(disk_tier, "STAGING_BYTES", staged * 256)
            super().__init__(folder, **fields)
        self.clerk, self.workers = self.executors
        self.pace, self.which = 2, 0

    def _executor(self, threads: int, thread_name_prefix: str) -> Later:
        self.executors.append(Later(threads, thread_name_prefix))
        return self.executors[-1]

    def work(self, jobs: int) -> int:
        """Have so many blocks read or written, and one record; how many blocks that were. Nobody has noticed yet."""
        self.clerk.do()
        return sum(self.workers.do(self.which >> turn & 1) for turn in range(jobs))

    def step(self) -> Batch | None:
        """As ever, beside some reading and writing."""
        self.work(self.pace)
        return super().step()

    def note_an_end(self) -> None:
        """Note the next copy or deletion that ends."""
        while self.posted.empty():
            assert self.clerk.do() or self.workers.do(self.which & 1), "nothing is on its way"
        self.posted.get_nowait()()

    @property
    def quiet(self) -> bool:
        """No block is on its way to or from a file, and no file is about to go."""
        disk = self.tiers.disk
        return not disk.saving and not disk.loading and not disk.deleting
