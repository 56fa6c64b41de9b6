"""Copies to and from files that take as long as a test likes, with their buffers watched meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from engine.cache import restores
from tests.engine.cold_rig import ColdRig


class Gate:
    """Stands in for a call whose last argument is a buffer; the first of them is held up until the gate is opened.

    A write is held before its file is there, a read after the buffer is full, or after it has failed.
    """

    def __init__(self, call: Callable[..., Any], *, writes: bool) -> None:
        self._call, self._writes = call, writes
        self._first = threading.Lock()
        self._open = threading.Event()
        self.reached = threading.Event()
        self.spoiled = False  # somebody has used the buffer meanwhile

    def __call__(self, *arguments: Any) -> Any:
        if not self._first.acquire(blocking=False):
            return self._call(*arguments)
        if self._writes:
            self._wait(arguments[-1])
            return self._call(*arguments)
        try:
            return self._call(*arguments)
        finally:
            self._wait(arguments[-1])

    def _wait(self, buffer: memoryview) -> None:
        before = bytes(buffer)
        self.reached.set()
        assert self._open.wait(30), "nobody has opened the gate"
        self.spoiled = bytes(buffer) != before

    def let_go(self) -> None:
        """Let the call go on."""
        self._open.set()

    def open(self, rig: ColdRig) -> None:
        """Let it go on, and all but the talker come to its end: then nothing may be left over."""
        self.let_go()
        rig.drop("talker")
        rig.run()
        rig.settle()
        rig.check()
        assert not self.spoiled, "the buffer of a copy was used before its end"
        assert rig.tiers.disk.staging.used_bytes == 0
        assert not any(cold.reads for cold in rig.cold())
        assert rig.tiers.disk.bytes == sum(cold.disk for cold in rig.cold())


class Slow:
    """Makes gates for the files of a rig."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self._gates: list[Gate] = []

    def write(self, rig: ColdRig, patience_s: float = 1e9) -> Gate:
        """The next write is slow; turns wait for it for so many seconds."""
        self._monkeypatch.setattr(restores, "PATIENCE_S", patience_s)
        return self._gate(rig, "write")

    def read(self, rig: ColdRig, patience_s: float = 1e9) -> Gate:
        """The next read is slow; turns wait for it for so many seconds."""
        self._monkeypatch.setattr(restores, "PATIENCE_S", patience_s)
        return self._gate(rig, "read")

    def end(self) -> None:
        """Leave no thread waiting, whatever has happened."""
        for gate in self._gates:
            gate.let_go()

    def _gate(self, rig: ColdRig, name: str) -> Gate:
        assert rig.tiers.disk.files is not None
        blocks = rig.tiers.disk.files.blocks
        gate = Gate(getattr(blocks, name), writes=name == "write")
        self._gates.append(gate)
        self._monkeypatch.setattr(blocks, name, gate)
        return gate
