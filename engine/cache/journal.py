"""What happened to blocks: a log for people, and a memory of where evicted ones ended. No torch, no I/O."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from engine.config import Tier
from engine.events import CacheAction, CacheEvent, TurnTrace, Usage

GHOSTS = 100_000  # evicted keys that are remembered
TRACED = 8  # bytes of a key in a trace: enough to tell blocks apart


@dataclass
class _Total:
    blocks: int = 0
    bytes: int = 0
    age_s: float = 0.0


@dataclass
class _Ghost:
    why: str
    holders: set[str]


class Journal:
    """Collects events until they are taken; equal ones are counted together. `wall` is Unix time.

    A *ghost* is a key that was resident and is no longer: why a prompt misses can be said for as long as it is kept. It
    goes with the last session that held it.
    """

    def __init__(self, wall: Callable[[], float]) -> None:
        self._wall = wall
        self._totals: dict[tuple[CacheAction, str, Tier | None, Tier | None, str], _Total] = {}
        self._turns: list[TurnTrace] = []
        self._ghosts: OrderedDict[bytes, _Ghost] = OrderedDict()
        self._held: dict[str, set[bytes]] = {}  # the ghosts of each session

    def note(
        self,
        action: CacheAction,
        reason: str,
        *,
        size: int,
        source: Tier | None = None,
        target: Tier | None = None,
        holders: Iterable[str] = (),
        age_s: float = 0.0,
        blocks: int = 1,
    ) -> None:
        """Something happened to `blocks` blocks of `size` bytes in all, last used `age_s` seconds ago."""
        holders = list(holders)
        session_id = holders[0] if len(holders) == 1 else ""
        total = self._totals.setdefault((action, session_id, source, target, reason), _Total())
        total.blocks += blocks
        total.bytes += size
        total.age_s = max(total.age_s, age_s)

    @property
    def pending(self) -> bool:
        """Whether anything happened since it was taken last."""
        return bool(self._totals or self._turns)

    def take(self) -> list[CacheEvent]:
        """What happened since the last call."""
        now, totals, self._totals = self._wall(), self._totals, {}
        return [
            CacheEvent(
                at=now,
                action=action,
                session_id=session_id,
                source=source,
                target=target,
                blocks=total.blocks,
                bytes=total.bytes,
                reason=reason,
                age_s=total.age_s,
            )
            for (action, session_id, source, target, reason), total in totals.items()
        ]

    def turn(self, session_id: str, model: str, keys: Iterable[bytes], usage: Usage) -> None:
        """A turn has ended on these blocks."""
        trace = TurnTrace(
            at=self._wall(),
            session_id=session_id,
            model=model,
            blocks=b"".join(key[:TRACED] for key in keys),
            device_tokens=usage.device_tokens,
            host_tokens=usage.host_tokens,
            disk_tokens=usage.disk_tokens,
            computed_tokens=usage.computed_tokens,
            output_tokens=usage.output_tokens,
        )
        self._turns.append(trace)

    def take_turns(self) -> list[TurnTrace]:
        """The turns that have ended since the last call."""
        turns, self._turns = self._turns, []
        return turns

    def forget(self, session_id: str) -> None:
        """Say nothing more of a session that is gone, and of what only it held."""
        self._totals = {name: total for name, total in self._totals.items() if name[1] != session_id}
        self._turns = [turn for turn in self._turns if turn.session_id != session_id]
        for key in self._held.pop(session_id, set()):
            self._ghosts[key].holders.remove(session_id)
            if not self._ghosts[key].holders:
                del self._ghosts[key]

    def bury(self, key: bytes, why: str, holders: Iterable[str]) -> None:
        """No tier holds this block any more, which these sessions held, and those that held it before."""
        ghost = _Ghost(why, {*holders, *(self._ghosts[key].holders if key in self._ghosts else ())})
        if not ghost.holders:
            return
        self._ghosts[key] = ghost
        self._ghosts.move_to_end(key)
        for session_id in ghost.holders:
            self._held.setdefault(session_id, set()).add(key)
        while len(self._ghosts) > GHOSTS:
            self.revive(next(iter(self._ghosts)))

    def revive(self, key: bytes) -> None:
        """Some tier holds it again, or it is too long ago."""
        ghost = self._ghosts.pop(key, None)
        for session_id in ghost.holders if ghost is not None else ():
            self._held[session_id].discard(key)
            if not self._held[session_id]:
                del self._held[session_id]

    def fate(self, key: bytes) -> str | None:
        """Why a block that was there is gone; None: it never was, or nobody remembers."""
        ghost = self._ghosts.get(key)
        return ghost.why if ghost is not None else None
