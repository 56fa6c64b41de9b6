"""Chats over one folder, through restarts: who asked what, what may be found of it, and what is true of every block.

What a block holds is compared with its image in RAM and in its file, and who holds it with who has said it.
"""

from __future__ import annotations

from collections import Counter
from itertools import count
from pathlib import Path
from typing import Any

from engine.cache.block import Scope
from engine.cache.cold import ColdBlock
from engine.cache.holdings import COLD, Leaving, size
from engine.cache.pins import PINNED_SHARE
from engine.protocol import Prefetch
from tests.engine.fake_model import VOCABULARY
from tests.engine.played_rig import PlayedRig
from tests.engine.said import Said

PRESET = [11, 12, 13, 14, 15, 16, 17, 18, 19]
SALTS = {"anna": b"anna's", "ben": b"ben's"}
CANARIES = {"anna": VOCABULARY, "ben": VOCABULARY + 1}  # no reply says them: none is ever sampled
CHATS = [f"{user}/{number}" for user in SALTS for number in range(2)]


def user_of(session: str) -> str:
    """Whose a chat or a session is."""
    return session.partition("/")[0]


class Life:
    """Two people with two chats each, over `PlayedRig(folder, **fields)`; `counts` gets what happens.

    A chat that was deleted is followed by another, a session with a name of its own.
    """

    def __init__(self, folder: Path, fields: dict[str, Any], counts: Counter[str]) -> None:
        self.folder, self.fields, self.counts = folder, fields, counts
        self.history: dict[str, list[int]] = {}  # the whole path of each session's last finished request
        self.prompts: dict[str, list[int]] = {}  # and its prompt
        self.damaged: set[str] = set()  # files, by name
        self._generations: Counter[str] = Counter()
        self._numbers = count()
        self._owed: dict[str, Leaving] = {}  # deleted sessions whose files may still be there
        self._looked: dict[str, tuple[int, int]] = {}  # files whose image was compared
        self._open(epoch=1e9)
        self._said = Said(self.rig.residency.space.root, self.rig.manager.block_size)

    def _open(self, epoch: float) -> None:
        """A rig over what lies in the folder, and nobody asks; deletions that are owed are told again."""
        self._epoch = epoch
        self.rig = PlayedRig(self.folder, epoch=epoch, **self.fields)
        self.asked: dict[str, Scope] = {}
        self.fetching: set[str] = set()
        self.pinned: set[str] = set()
        self._most: dict[str, int] = {}  # of each request, tokens that may have been found
        self.counts["blocks found at start"] += len(self.rig.cold())
        for session in list(self._owed):
            self.forget(session)
        self._found_some = bool(self.rig.cold())

    # --- chats ------------------------------------------------------------------------------------------------------

    def session(self, chat: str) -> str:
        """The session that a chat is now."""
        return f"{chat}#{self._generations[chat]}"

    def ask(self, name: str, session: str, prompt: list[int], max_tokens: int, priority: int = 0) -> None:
        """Submit a request."""
        self.counts[name] += 1
        scope, request = _scope(session, prompt), f"r{next(self._numbers)}"
        self.rig.submit(
            prompt,
            max_tokens,
            session,
            request_id=request,
            priority=priority,
            stop_ids=[5, 55],
            salt=scope.salt,
            shared_len=scope.shared_len,
        )
        if request in self.rig.rejected:
            self.counts["rejected"] += 1
        else:
            self.asked[request], self._most[request] = scope, 0
            self._said.add(request, scope, prompt)

    def prefetch(self, session: str, token_ids: list[int]) -> None:
        """Have the beginning of a session's path brought."""
        scope, call = _scope(session, token_ids), f"p{next(self._numbers)}"
        self.fetching.add(call)
        command = Prefetch(
            call_id=call, session_id=session, salt=scope.salt, shared_len=scope.shared_len, token_ids=token_ids
        )
        self._said.add(call, scope, token_ids)
        self.rig.note(self.rig.scheduler.prefetch(command))
        self.counts["prefetch"] += call not in self.rig.prefetched

    def drop(self, chat: str) -> None:
        """Delete a chat: its session is never used again."""
        self.remember()
        session = self.session(chat)
        self.counts["drop"] += bool(self.rig.tiers.index.held_by(session))
        self.forget(session)
        self._generations[chat] += 1
        self.remember()

    def forget(self, session: str) -> None:
        """Delete a session; that stays owed until the last of its files is gone."""
        leaving = self._owed[session] = self.rig.forget(session)
        self.counts["drop while it is written"] += any(cold.writing for cold in leaving.writing)
        self.history.pop(session, None)
        self.prompts.pop(session, None)
        self._said.forget(session)
        self.pinned.discard(session)

    def remember(self) -> None:
        """Note what was said, and of what has ended that nothing was found which nobody may have said."""
        for request, scope in list(self.asked.items()):
            prompt = self.rig.submits[request].token_ids
            path = prompt + self.rig.replies[request][0]
            if scope.session_id not in self._owed:
                self._said.add(request, scope, path)
            self._most[request] = max(self._most[request], self._said.most(request, scope, prompt))
            if request in self.rig.finished:
                self._ended(request, scope.session_id, prompt, path)
            elif request not in self.rig.rejected:
                continue
            del self.asked[request]
        self.fetching -= self.rig.prefetched.keys()
        assert self.rig.scheduler.idle or self.asked or self.fetching, "somebody runs whom nobody knows"

    def _ended(self, request: str, session: str, prompt: list[int], path: list[int]) -> None:
        end = self.rig.finished[request][0]
        usage = end.usage
        found = usage.device_tokens + usage.host_tokens + usage.disk_tokens
        assert found <= self._most[request], f"{found} tokens were found that nobody may have"
        if end.reason != "cancelled":
            self.history[session], self.prompts[session] = path, prompt
        for tier in ("device", "host", "disk"):
            self.counts[f"{tier} tokens"] += getattr(usage, f"{tier}_tokens")
        self.counts["disk tokens of earlier runs"] += usage.disk_tokens * self._found_some
        if usage.miss is not None:
            self.counts[f"missed: {usage.miss.cause}"] += 1

    # --- the end, and another beginning -----------------------------------------------------------------------------

    def again(self) -> None:
        """Another rig over the same folder; its clock starts at 0."""
        self._retire()
        self._open(self._epoch + self.rig.now)
        assert not list(self.folder.rglob(".tmp-*")), "a file that nobody has finished is left"

    def end(self) -> None:
        """All turns end, and all chats are deleted: nothing is left anywhere."""
        rig = self.rig
        rig.run()
        self.remember()
        assert self.asked == {}
        for session in [*map(self.session, CHATS), *self._owed]:
            rig.delete(session)
        rig.settle()
        assert rig.manager.counts()["free_blocks"] == rig.manager.total_blocks
        assert (rig.cold(), rig.tiers.host.held_bytes, rig.tiers.disk.bytes) == ([], 0, 0)
        assert rig.tiers.disk.staging.held_bytes == 0
        assert not self.files()
        assert not list((self.folder / "sessions").iterdir())
        self._retire()

    def _retire(self) -> None:
        """Count what has happened in a rig that ends."""
        for event in self.rig.tiers.journal.take():
            self.counts[f"{event.action} {event.source or ''}>{event.target or ''}"] += event.blocks
        self.counts["preempted"] += self.rig.scheduler.preemptions

    # --- what always holds ------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Every law: of the books, of who holds what, of what lies in host and on disk."""
        rig = self.rig
        rig.check()
        self.remember()
        self._owed = {session: left for session, left in self._owed.items() if not rig.tiers.holdings.has_gone(left)}
        for block in [*rig.manager.index, *rig.cold()]:
            users = {user_of(session) for session in block.holders}
            assert len(users) == 1 or block.preset, "two users share more than a preset"
            for session in block.holders:
                assert self._said.may_hold(session, block.key or b""), f"{session} has never said {block}"
            for user, canary in CANARIES.items():
                assert canary not in block.token_ids or users == {user}, f"others hold what {user} has said"
        for cold in rig.cold():
            if rig.has_come(cold):
                assert rig.ids_in_host(cold) == self._padded(cold), "another block's image is in host"
        if rig.scheduler.idle and not rig.tiers.disk.loading:
            assert not any(cold.reads for cold in rig.cold()), "somebody reads, and nobody runs"
            slots = rig.tiers.disk.staging.used_bytes // rig.image_bytes
            assert slots == rig.tiers.disk.saving, "a staging buffer leaks"
        if rig.quiet:
            self._check_files()

    def _check_files(self) -> None:
        """What is counted lies there, and holds what it should; nothing else does. Damaged files may be anything."""
        self.counts["looks at the disk"] += 1
        known = {cold.key.hex(): cold for cold in self.rig.cold() if cold.disk}
        self.damaged &= known.keys()
        status = {file.stem: file.stat() for file in self.files()}
        whole = status.keys() - self.damaged
        assert whole == known.keys() - self.damaged, "a file is unknown, or a block without one"
        assert self.rig.tiers.disk.bytes == sum(cold.disk for cold in known.values())
        for name in whole:
            assert status[name].st_size == known[name].disk
            version = (status[name].st_mtime_ns, status[name].st_ino)
            if self._looked.get(name) != version:
                self._looked[name] = version
                assert self.rig.ids_on_disk(known[name]) == self._padded(known[name]), "a file holds another's image"

    def _padded(self, cold: ColdBlock) -> list[int]:
        """The ids that a block's image should hold: nothing beyond its own tokens."""
        return [*cold.token_ids, *[0] * (self.rig.manager.block_size - len(cold.token_ids))]

    def files(self) -> list[Path]:
        """The files of all blocks."""
        return sorted(self.folder.glob("blocks-1/*/*/*.kv"))

    def resident(self, session: str) -> set[bytes]:
        """The keys of all blocks of a session, in whatever tier."""
        device = {block.key for block in self.rig.manager.index if session in block.holders}
        return {key for key in device if key is not None} | {b.key for b in self.rig.tiers.index.held_by(session)}

    def protected(self) -> set[bytes]:
        """The keys of pinned sessions' blocks in every tier where all of them take no more than their share."""
        books, tiers, keys = self.rig.manager, self.rig.tiers, set[bytes]()
        device = [block.key for block in books.index if self.pinned & block.holders]
        if len(device) <= books.total_blocks * PINNED_SHARE:
            keys |= {key for key in device if key is not None}
        for tier in COLD:
            cold = [cold for cold in self.rig.cold() if size(cold, tier) and self.pinned & cold.holders]
            if sum(size(each, tier) for each in cold) <= tiers.tier_limits(tier).budget * PINNED_SHARE:
                keys |= {each.key for each in cold}
        return keys


def _scope(session: str, prompt: list[int]) -> Scope:
    shared = len(PRESET) if prompt[: len(PRESET)] == PRESET else 0
    return Scope(session, SALTS[user_of(session)], shared)
