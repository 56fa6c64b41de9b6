"""The engine's housekeeping: what a person asks of the cache, and what happens to it while time goes by.

It decides when; what goes where is the policies' and the tiers' affair. For the engine's thread.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from engine.cache.block import Scope
from engine.cache.holdings import COLD, TIERS, Leaving
from engine.cache.pins import PINNED_SHARE
from engine.config import Tier
from engine.errors import EngineError
from engine.ledger import residencies, snapshot
from engine.protocol import (
    CacheLog,
    Configure,
    Configured,
    Demote,
    Demoted,
    Drop,
    Dropped,
    Estimate,
    Estimated,
    Event,
    GetSnapshot,
    Pin,
    Pinned,
    Rejected,
)
from engine.residents import Residents
from engine.words import size

LAST_SECONDS = 0.2  # for copying what is unsaved at the end
GRACE_S = 60.0  # after the start, in which the web side says what is pinned, before anything expires
LOG_SECONDS = 1.0  # between two messages of what happened
DISK_SECONDS = 10.0  # between two looks, at rest, at whether others need the disk's room
IDLE_SLICE, BUSY_SHARE = 0.005, 0.1  # seconds at a time while nothing runs; of a step's time while something does
OFTEN, SELDOM, PARTS = 1.0, 60.0, 20  # a ttl's end is looked for that many times in it, within these seconds
Asked = Drop | Pin | Demote | Configure | Estimate | GetSnapshot


class Keeper:
    """Answers commands about the cache, and tends it between steps."""

    def __init__(self, residents: Residents, clock: Callable[[], float]) -> None:
        self._residents, self._tiers, self._clock = residents, residents.tiers, clock
        now = clock()
        self._look_at = dict.fromkeys(TIERS, now + GRACE_S)
        self._log_at = 0.0
        self._more = False  # something can be saved at once
        self._moving: list[Demote] = []  # not all of it has left yet
        self._leaving: list[tuple[Dropped, Leaving]] = []

    # --- while time goes by -------------------------------------------------------------------------------------------

    def tend(self, step_s: float) -> list[Event]:
        """Save, demote and expire for a part of the time that the last step took; what there is to tell."""
        now = self._clock()
        idle = all(served.scheduler.idle for served in self._residents)
        until = now + (IDLE_SLICE if idle else BUSY_SHARE * step_s)
        self._more = False
        expired = self._due("device", now)
        for served in self._residents:
            self._more = served.residency.saver.save(until) or self._more
            served.residency.relieve(until, expired=expired)
        for tier in COLD:
            if self._due(tier, now):
                self._tiers.enforce(tier)
        self._tiers.settle()
        self._moving = [demote for demote in self._moving if not self._move_down(demote)[2]]
        return [*self._gone(), *self._news(now)]

    def rest_seconds(self) -> float | None:
        """How long nothing has to be done while nothing runs; None: until something comes."""
        if self._more:
            return 0.0
        unsaved = any(served.residency.saver.unsaved for served in self._residents)
        if unsaved or self._moving or self._leaving or self._tiers.journal.pending:
            return LOG_SECONDS
        waits = [_interval(ttl) for tier in TIERS if (ttl := self._ttl(tier)) is not None]
        if self._tiers.disk.bytes:
            waits.append(DISK_SECONDS)
        return min(waits, default=None)

    def close(self) -> None:
        """Begin to save what is unsaved, as far as a moment goes, and end the workers."""
        for served in self._residents:
            served.residency.saver.save(self._clock() + LAST_SECONDS)
        self._tiers.close()

    def _due(self, tier: Tier, now: float) -> bool:
        """Whether it is time to look for what has expired in a tier; then the next time is some way off."""
        ttl = self._ttl(tier)
        if ttl is None or now < self._look_at[tier]:
            return False
        self._look_at[tier] = now + _interval(ttl)
        return True

    def _ttl(self, tier: Tier) -> float | None:
        """The shortest time after which something may leave a tier."""
        own = getattr(self._tiers.limits, f"{tier}_ttl")
        return min((ttl for ttl in (own, self._tiers.sessions.shortest_ttl()) if ttl is not None), default=None)

    def _news(self, now: float) -> list[Event]:
        if not self._tiers.journal.pending or now < self._log_at:
            return []
        self._log_at = now + LOG_SECONDS
        return [CacheLog(events=self._tiers.journal.take(), turns=self._tiers.journal.take_turns())]

    def _gone(self) -> list[Event]:
        """The answers to drops whose last files have been written, and deleted."""
        ready = [each for each in self._leaving if self._tiers.holdings.has_gone(each[1])]
        self._leaving = [each for each in self._leaving if each not in ready]
        return [replace(answer, complete=leaving.whole is True) for answer, leaving in ready]

    # --- what is asked ------------------------------------------------------------------------------------------------

    def handle(self, command: Asked) -> list[Event]:
        """Do it, and answer; a `Dropped` may come later, from `tend`."""
        match command:
            case Drop():
                return self._drop(command)
            case Pin():
                return [self._pin(command)]
            case Demote():
                return [self._demote(command)]
            case Configure():
                return [self._configure(command)]
            case Estimate():
                return [self._estimate(command)]
            case GetSnapshot():
                return [snapshot(command.call_id, self._residents, self._clock())]

    def _drop(self, drop: Drop) -> list[Event]:
        self._moving = [demote for demote in self._moving if demote.session_id != drop.session_id]
        events: list[Event] = []
        blocks = taken = 0
        for served in self._residents:
            freed, ended = served.drop(drop.session_id)
            blocks, taken = blocks + freed, taken + freed * served.measures.block_bytes
            events += ended
        leaving = self._tiers.holdings.drop(drop.session_id)
        answer = Dropped(call_id=drop.call_id, blocks=blocks + leaving.blocks, bytes=taken + leaving.bytes)
        self._leaving.append((answer, leaving))
        return events

    def _pin(self, pin: Pin) -> Pinned:
        sessions, now = self._tiers.sessions, self._clock()
        known = sessions.get(pin.session_id)
        again = pin.again or (known is not None and known.pinned)
        refusal = self._cannot_pin(pin.session_id) if pin.pinned and not again else ""
        pinned = pin.pinned and not refusal
        if not refusal:
            sessions.wish(pin.session_id, now, pinned=pinned, ttl=pin.ttl)
            for served in self._residents:
                served.residency.reconsider()
            self._tiers.settle()
        return Pinned(call_id=pin.call_id, pinned=pinned, message=refusal)

    def _cannot_pin(self, session_id: str) -> str:
        """Why a session's blocks may not be pinned too; empty when they may. What it has by then, it may outgrow."""
        every = residencies(self._residents, self._clock())
        budgets: dict[Tier, int] = {
            "device": self._residents.budget,
            "host": self._tiers.tier_limits("host").budget,
            "disk": self._tiers.tier_limits("disk").budget,
        }
        for tier, budget in budgets.items():
            own = getattr(every[session_id], f"{tier}_bytes") if session_id in every else 0
            others = sum(
                getattr(residency, f"{tier}_bytes")
                for name, residency in every.items()
                if residency.pinned and name != session_id
            )
            most = int(budget * PINNED_SHARE)
            if own and own + others > most:
                return (
                    f"this chat takes {size(own)} of {tier} and pinned chats {size(others)} already; they may take "
                    f"{size(most)} of {size(budget)}. Unpin another, or raise {tier}_kv"
                )
        return ""

    def _demote(self, demote: Demote) -> Demoted:
        blocks, taken, done = self._move_down(demote)
        if not done:
            self._moving.append(demote)
        return Demoted(call_id=demote.call_id, blocks=blocks, bytes=taken)

    def _move_down(self, demote: Demote) -> tuple[int, int, bool]:
        """Blocks and bytes that left a tier, and whether all have that are to; the others wait for the disk."""
        blocks = taken = 0
        done = True
        for served in self._residents:
            if demote.to != "device":
                count, all_went = served.residency.demote(demote.session_id, demote.to)
                blocks, taken, done = blocks + count, taken + count * served.measures.block_bytes, done and all_went
        count, freed, all_went = self._tiers.demote(demote.session_id, demote.to)
        return blocks + count, taken + freed, done and all_went

    def _configure(self, configure: Configure) -> Configured:
        try:
            self._residents.configure(configure.cache)
        except EngineError as error:
            return Configured(call_id=configure.call_id, cache=self._tiers.limits, message=str(error))
        return Configured(call_id=configure.call_id, cache=self._tiers.limits)

    def _estimate(self, estimate: Estimate) -> Estimated:
        served = self._residents.get(estimate.model)
        total = len(estimate.token_ids)
        if served is None:
            return Estimated(call_id=estimate.call_id, prompt_tokens=total, device_tokens=0, computed_tokens=total)
        scope = Scope(estimate.session_id, estimate.salt, estimate.shared_len)
        cost = served.residency.outlook.estimate(scope, estimate.token_ids)
        too_much = served.scheduler.too_much(total)
        return Estimated(
            call_id=estimate.call_id,
            prompt_tokens=total,
            device_tokens=cost.device_tokens,
            host_tokens=cost.host_tokens,
            disk_tokens=cost.disk_tokens,
            computed_tokens=total - cost.device_tokens - cost.host_tokens - cost.disk_tokens,
            seconds=cost.seconds,
            refused=Rejected(request_id="", code=too_much[0], message=too_much[1]) if too_much else None,
        )


def _interval(ttl: float) -> float:
    return min(SELDOM, max(OFTEN, ttl / PARTS))
