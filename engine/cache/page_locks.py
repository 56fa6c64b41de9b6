"""Page-locked host memory, which a GPU copies to and from by itself: locking takes long, and so is done beside."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # it needs torch
    from engine.cache.image import Tensor

log = logging.getLogger(__name__)


class PageLocks:
    """Memory that is page-locked, or is about to be. It can be used meanwhile, and whether or not that succeeds.

    `pin` page-locks memory and says whether it has, on a thread of its own; `unpin` undoes it. `bytes` are locked now,
    and `failed` pieces of memory could not be.
    """

    def __init__(self, pin: Callable[[Tensor], bool], unpin: Callable[[Tensor], None]) -> None:
        self.bytes = self.failed = 0
        self._pin, self._unpin = pin, unpin
        self._counting = threading.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="page-locks")

    def lock(self, memory: Tensor) -> Callable[[], None]:
        """Begin to page-lock `memory`. What is returned has to be called before the memory goes, once.

        It undoes the locking, or prevents it; where that is under way it waits for its end.
        """
        return partial(self._unlock, memory, self._thread.submit(self._lock, memory))

    def settle(self) -> None:
        """Wait for the end of what has been begun so far."""
        self._thread.submit(int).result()

    def _lock(self, memory: Tensor) -> bool:
        locked = False
        try:
            locked = self._pin(memory)
        except Exception as error:  # whatever it is, pageable memory does as well
            log.warning("page-locking failed: %s", error)
        if not locked:
            log.warning("%d bytes of host memory stay pageable", memory.nbytes)
        with self._counting:
            self.bytes += memory.nbytes * locked
            self.failed += not locked
        return locked

    def _unlock(self, memory: Tensor, locking: Future[bool]) -> None:
        if not locking.cancel() and locking.result():
            self._unpin(memory)
            with self._counting:
                self.bytes -= memory.nbytes
