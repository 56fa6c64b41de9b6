"""What host and disk hold and for which chats, and each way in which a block leaves them. It decides nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from engine.cache.cold import ColdBlock, ColdIndex
from engine.cache.disk_tier import DiskTier
from engine.cache.host import HostSlab
from engine.cache.journal import Journal
from engine.cache.policy import Reason
from engine.cache.sessions import Sessions
from engine.config import Tier
from engine.events import CacheAction
from engine.words import size as in_words

log = logging.getLogger(__name__)

TIERS: tuple[Tier, ...] = ("device", "host", "disk")
NOTE_AGAIN_S = 60.0  # after what a session holds could not be written down
COLD: tuple[Tier, ...] = ("host", "disk")
WISHED = "a person wished it"
GOES_ON, AHEAD = "a chat goes on", "a chat is likely to go on"
WHY: dict[Reason, str] = {"ttl": "its time there was over", "watermark": "it was full", "pressure": "it had no room"}


@dataclass
class Leaving:
    """What goes with a dropped session: blocks and bytes, those whose files may be on the way, and its record."""

    blocks: int = 0
    bytes: int = 0
    writing: list[ColdBlock] = field(default_factory=list)
    whole: bool | None = None  # nothing is left of it; None: that is not known yet

    def forgotten(self, whole: bool) -> None:
        """All that could be deleted has been; whether that was all there was."""
        self.whole = whole


class Holdings:
    """The one owner of the index of cold blocks, and of which chats have to be noted on disk again."""

    def __init__(
        self, sessions: Sessions, journal: Journal, host: HostSlab, disk: DiskTier, clock: Callable[[], float]
    ) -> None:
        self.index = ColdIndex()
        self._sessions, self._journal, self._host, self._disk, self._clock = sessions, journal, host, disk, clock
        self._unnoted: set[str] = set()  # sessions that hold more, or less, than is written down
        self._owed: set[str] = set()  # those of whom that could not be written down
        self._note_from = 0.0  # when it is tried again
        disk.on_removal = self.leave_missing
        disk.on_unnoted = self._owe

    # --- who holds what -----------------------------------------------------------------------------------------------

    def show(self, cold: ColdBlock) -> None:
        """A block is in a tier, or on its way to one: it can be found."""
        if self.index.get(cold.key) is None:
            self.index.add(cold)
        self._unnoted |= cold.holders
        self._journal.revive(cold.key)

    def hold(self, cold: ColdBlock, session_id: str) -> None:
        """A session holds a block from now on."""
        if self.index.hold(cold, session_id):
            self._unnoted.add(session_id)

    def note(self, session_id: str) -> None:
        """Have written down what a session holds on disk."""
        use = self._sessions.get(session_id)
        self._unnoted.discard(session_id)
        self._owed.discard(session_id)
        if use is not None:
            self._disk.note(session_id, use.last_used, self.index.held_by(session_id))

    def note_changes(self, session_id: str) -> None:
        """The same, if that is not what was written down last."""
        if session_id in self._unnoted:
            self.note(session_id)

    def _owe(self, session_id: str) -> None:
        if self._sessions.get(session_id) is not None:  # it may have been deleted meanwhile
            self._owed.add(session_id)
            self._note_from = self._clock() + NOTE_AGAIN_S

    def note_owed(self, *, now: bool = False) -> None:
        """Try again to have written down what could not be, after a while or `now`."""
        if self._owed and (now or self._clock() >= self._note_from):
            for session_id in list(self._owed):
                self.note(session_id)

    def drop(self, session_id: str) -> Leaving:
        """Forget a session, and what only it holds."""
        leaving = Leaving()
        held = self.index.held_by(session_id)
        unnoted = self._unnoted | self._owed
        for other in {holder for cold in held for holder in cold.holders} & unnoted - {session_id}:
            self.note(other)  # or nothing would say after a restart that it holds what the two share
        self._unnoted.discard(session_id)
        self._owed.discard(session_id)
        for cold in held:
            if cold.holders == {session_id}:
                leaving.blocks += 1
                leaving.bytes += sum(size(cold, tier) for tier in COLD)
                leaving.writing.append(cold)
                self._remove(cold)
            else:
                self.index.let_go(cold, session_id)
        self._sessions.forget(session_id)
        self._journal.forget(session_id)
        self._disk.forget(session_id, {cold.key for cold in leaving.writing}, leaving.forgotten)
        return leaving

    def has_gone(self, leaving: Leaving) -> bool:
        """Whether no file of a dropped session is left."""
        on_the_way = any(cold.writing or cold.key in self._disk.deleting for cold in leaving.writing)
        return leaving.whole is not None and not on_the_way

    # --- ways out -----------------------------------------------------------------------------------------------------

    def take_from_host(self, cold: ColdBlock, reason: str) -> None:
        """A block leaves host; `reason` is a policy's, or says it in words."""
        if cold.host is None:
            return
        self._host.give_back(cold.host)
        cold.host = None
        kept: Tier | None = "disk" if cold.disk or cold.writing else None
        action: CacheAction = "demoted" if kept else "expired" if reason == "ttl" else "evicted"
        self._tell_gone(cold, action, reason, "host", kept)

    def take_from_disk(self, cold: ColdBlock, reason: str) -> None:
        """A block's file goes."""
        self._disk.delete(cold)
        self._tell_gone(cold, "expired" if reason == "ttl" else "evicted", reason, "disk", None)

    def leave_missing(self) -> None:
        """Somebody has removed files of the disk tier, and may: nothing is found there any more."""
        lost, gone = self._disk.leave_missing(self.index)
        if not gone:
            return
        why = "its folder was removed"
        log.warning("the disk tier has lost %s: %s", in_words(gone), why)
        self._journal.note("evicted", why, size=gone, source="disk", blocks=len(lost))
        for cold in lost:
            self._unnoted |= cold.holders
            self.hide_if_nowhere(cold, f"disk: {why}")

    def _tell_gone(self, cold: ColdBlock, action: CacheAction, reason: str, tier: Tier, kept: Tier | None) -> None:
        why = next((words for name, words in WHY.items() if name == reason), reason)
        age = self._clock() - cold.last_used
        self._journal.note(
            action, why, size=cold.space.codec.size, source=tier, target=kept, holders=cold.holders, age_s=age
        )
        self.hide_if_nowhere(cold, f"{tier}: {why}")

    def hide_if_nowhere(self, cold: ColdBlock, why: str) -> None:
        """A block of which no copy is left, or on its way, cannot be found any more."""
        if cold.host is None and not cold.disk and not cold.writing and self.index.get(cold.key) is cold:
            self.index.remove(cold)
            self._journal.bury(cold.key, why, cold.holders)

    def remove_beginnings(self, cold: ColdBlock) -> None:
        """Part-filled blocks whose tokens this one begins with are of no more use."""
        for tail in self.index.children(cold.parent):
            count = len(tail.token_ids)
            begins = count < len(cold.token_ids) and tail.token_ids == cold.token_ids[:count]
            if begins and tail.holders <= cold.holders and not tail.reads:
                self._remove(tail)

    def _remove(self, cold: ColdBlock) -> None:
        """Out of every tier, without a word: it is of no more use, or its owner deleted it."""
        if cold.host is not None:
            self._host.give_back(cold.host)
            cold.host = None
        self._disk.delete(cold)
        self.index.remove(cold)

    def quarantine(self, cold: ColdBlock, why: str) -> None:
        """A block whose file cannot be trusted is not read again."""
        self._journal.note("quarantined", why, size=cold.disk, source="disk", holders=cold.holders)
        self._disk.quarantine(cold, why)
        self.hide_if_nowhere(cold, f"unreadable: {why}")


def size(cold: ColdBlock, tier: Tier) -> int:
    """Bytes that a block takes in host or on disk; 0: it is not there."""
    if tier == "disk":
        return cold.disk
    return cold.space.codec.size if cold.host is not None else 0
