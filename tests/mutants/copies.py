"""Sabotages of copies to and from the device that go on beside its work: each fence and each wait left out."""

from __future__ import annotations

from tests.mutants.mutants import Mutant

COPIES = "engine/cache/copies.py"
DISK = "engine/cache/disk_tier.py"
HOST = "engine/cache/host.py"
LOCKS = "engine/cache/page_locks.py"
RUNNER = "engine/model/runner.py"

STREAMS = ("tests/engine/cache/test_copies.py",)
PAGES = ("tests/engine/cache/test_page_locks.py",)
BELOW = ("tests/engine/test_tiers.py",)
LATE = ("tests/engine/test_late_copies.py",)

MUTANTS: tuple[Mutant, ...] = (
    # --- between the streams
    Mutant("copy a block before it was filled", COPIES, "        self._side.wait_stream(self._current)\n", "", STREAMS),
    Mutant(
        "compute before what it needs has been copied in",
        COPIES,
        "        finally:\n            self._current.wait_event(copied.ended)\n",
        "        finally:\n            pass\n",
        BELOW,
    ),
    Mutant(
        "compute where a block is still copied out",
        COPIES,
        "        for copied in self._freed:\n            self._current.wait_event(copied.ended)\n",
        "",
        BELOW,
    ),
    Mutant("forget who is copied out", COPIES, "            self._freed.append(copied)\n", "            pass\n", BELOW),
    Mutant(
        "move a pool that is still copied from",
        COPIES,
        "        self._current.wait_stream(self._side)\n        self._outgoing",
        "        self._outgoing",
        LATE,
    ),
    Mutant(
        "have every copy out hold up the next pass",
        COPIES,
        "        self._queue(copied, [into],",
        "        self._freed.append(copied)\n        self._queue(copied, [into],",
        STREAMS,
    ),
    Mutant(
        "compute without a word", RUNNER, "        self._copies.before_writes()\n        with", "        with", LATE
    ),
    Mutant(
        "copy tokens without a word",
        RUNNER,
        "        self._copies.before_writes()\n        self._pool.copy",
        "        self._pool.copy",
        LATE,
    ),
    Mutant("move the pool without a word", RUNNER, "        self._copies.before_moving()\n", "", LATE),
    # --- host memory
    Mutant("read a slot that is still copied to", HOST, "        slot.copied.wait()\n", "", STREAMS),
    Mutant("write a file before its image has come", DISK, "                copied.wait()\n", "", BELOW),
    Mutant("read a file to where a copy still reads", DISK, "                before.wait()\n", "", LATE),
    Mutant(
        "let memory go that is still copied from",
        HOST,
        "        for copied in segment.copies:\n            copied.wait()\n",
        "",
        STREAMS,
    ),
    Mutant(
        "forget what a failed copy has begun",
        COPIES,
        "            finally:\n                copied.ended",
        "            except LookupError:\n                raise\n            else:\n                copied.ended",
        STREAMS,
    ),
    # --- page-locked memory
    Mutant("let memory go that is page-locked", HOST, "            segment.unlock()\n", "            pass\n", STREAMS),
    Mutant(
        "let memory go that is being page-locked",
        LOCKS,
        "if not locking.cancel() and locking.result():",
        "if not locking.cancel() and locking.done() and locking.result():",
        PAGES,
    ),
    Mutant("count what could not be page-locked", LOCKS, "memory.nbytes * locked", "memory.nbytes", PAGES),
)
