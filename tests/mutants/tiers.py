"""Sabotages of host and disk: what is copied, named, kept and given back there."""

from __future__ import annotations

from tests.mutants.mutants import Mutant

BLOCK = "engine/cache/block.py"
FILE = "engine/cache/block_file.py"
COLD = "engine/cache/cold.py"
DISK = "engine/cache/disk_tier.py"
EARLIER = "engine/cache/earlier.py"
HOLDERS = "engine/cache/holders.py"
HOLDINGS = "engine/cache/holdings.py"
KEEPER = "engine/keeper.py"
PINS = "engine/cache/pins.py"
POLICY = "engine/cache/policy.py"
RESIDENTS = "engine/residents.py"
RESIDENCY = "engine/cache/residency.py"
RESTORES = "engine/cache/restores.py"
SAVER = "engine/cache/saver.py"
SEGMENTS = "engine/cache/segments.py"
SERVED = "engine/served.py"
SESSIONS = "engine/cache/sessions.py"
TIERS = "engine/cache/tiers.py"

BELOW = tuple(f"tests/engine/test_{part}.py" for part in ("tiers", "tiers_truth", "tiers_limits"))
RACES = tuple(f"tests/engine/test_{part}_race.py" for part in ("copy", "host"))
POLICIES = ("tests/engine/cache/test_policy.py",)
PINNED, ENGINE_PINS = ("tests/engine/cache/test_pins.py",), ("tests/engine/test_pins.py",)
FAULTS = ("tests/engine/cache/test_disk_faults.py",)
PRESSURE = ("tests/engine/test_models_under_pressure.py",)
RECORDS = ("tests/engine/test_disk_records.py",)
OTHERS = ("tests/engine/test_invalidation.py",)

MUTANTS: tuple[Mutant, ...] = (
    # --- names
    Mutant(
        "ignore the salt of a block below", COLD, "block_hash(parent, ids, salt)", 'block_hash(parent, ids, b"")', BELOW
    ),
    Mutant("ignore whose a block below is", COLD, " and _is_named(cold, salt, session_id)", "", BELOW),
    Mutant("name a tail without its session", BLOCK, "len(whose), whose)", "len(whose), bytes(len(whose)))", BELOW),
    Mutant(
        "name a tail without its salt",
        BLOCK,
        "len(salt), salt, len(whose)",
        "len(salt), bytes(len(salt)), len(whose)",
        BELOW,
    ),
    Mutant("skip the token comparison below", COLD, " and list(cold.token_ids) == list(ids)", "", BELOW),
    Mutant("skip the parent comparison below", COLD, " and cold.parent == parent", "", BELOW),
    Mutant(
        "count a whole block where a part of it is shared",
        COLD,
        "Piece(best.cold, position + best.end)",
        "Piece(best.cold, min(limit, position + len(best.cold.token_ids)))",
        BELOW,
    ),
    Mutant("one fingerprint for exact and rounded copies", SERVED, "{model}/{cold_dtype}/", "{model}/", OTHERS),
    Mutant("forget that a copy was rounded", RESTORES, "block.lossy or piece.cold.lossy", "block.lossy", BELOW),
    # --- copies
    Mutant(
        "publish before the file was read",
        DISK,
        "        self._workers.submit(work)\n        return True\n\n    def delete",
        '        self._post(lambda: finish(""))\n'
        "        self._workers.submit(blocks.read, cold.space.fingerprint, cold.key, image)\n"
        "        return True\n\n    def delete",
        RACES,
    ),
    Mutant(
        "count as saved what is being written",
        DISK,
        "result = files.blocks.write(header, image)",
        "self._post(lambda: finish(file_bytes(size)))\n"
        "                return (files.blocks.write(header, image), None)[1]",
        RACES,
    ),
    Mutant(
        "copy to the file when its turn comes",
        DISK,
        "            copied = fill(slot)\n",
        "            copied = slot.copied\n            self._workers.submit(fill, slot)\n",
        RACES,
    ),
    Mutant(
        "write from a buffer that others get",
        DISK,
        "        def finish(result: int | Exception) -> None:\n            self.staging.give_back(slot)\n",
        "        self.staging.give_back(slot)\n\n        def finish(result: int | Exception) -> None:\n",
        RACES,
    ),
    Mutant(
        "take the image beside the right one",
        SEGMENTS,
        "start = self.place * self.home.stride\n",
        "start = max(0, self.place - 1) * self.home.stride\n",
        BELOW,
    ),
    Mutant(
        "take the images in the wrong order",
        RESTORES,
        "for piece in pieces]\n        load_many",
        "for piece in reversed(pieces)]\n        load_many",
        BELOW,
    ),
    Mutant(
        "copy to the blocks after the right ones",
        RESTORES,
        "first, began = lease.computed // self._space.block_size,",
        "first, began = lease.computed // self._space.block_size + 1,",
        BELOW,
    ),
    Mutant("keep what else a tail's slot held", RESIDENCY, "tokens=len(block.token_ids)", "tokens=None", BELOW),
    Mutant(
        "wait for a disk for ever",
        RESTORES,
        "if restore.pieces and self._clock() - restore.moved_at >",
        "if False and self._clock() - restore.moved_at >",
        RACES,
    ),
    # --- files
    Mutant("skip the checksum of an image", FILE, "if crc32(into) != head.image_crc:", "if False:", BELOW),
    Mutant("skip the checksum of a header", FILE, "!= head_crc:", "== -1:", FAULTS),
    Mutant(
        "believe a file's name", FILE, "if (header.fingerprint, header.key) != (fingerprint, key):", "if False:", BELOW
    ),
    Mutant(
        "believe a file's tokens",
        DISK,
        '"" if header.token_ids == list(cold.token_ids) else "its file holds other tokens"',
        '""',
        BELOW,
    ),
    Mutant(
        "keep a file that cannot be read",
        DISK,
        "            self.files.blocks.quarantine(cold.space.fingerprint, cold.key, why)",
        "            pass",
        BELOW,
    ),
    Mutant(
        "leave the files of a deleted chat",
        HOLDINGS,
        "        self._disk.delete(cold)\n        self.index.remove(cold)",
        "        self.index.remove(cold)",
        BELOW,
    ),
    Mutant(
        "keep what a longer block begins with",
        HOLDINGS,
        "if begins and tail.holders",
        "if False and tail.holders",
        BELOW,
    ),
    Mutant("remove what another chat still needs", HOLDINGS, " and tail.holders <= cold.holders", "", BELOW),
    Mutant(
        "keep a file whose chat was deleted while it was written",
        TIERS,
        "elif self.index.get(cold.key) is not cold:",
        "elif False:",
        BELOW,
    ),
    Mutant(
        "leave what was written beyond a limit",
        TIERS,
        "beginnings(cold)\n            self.settle()",
        "beginnings(cold)",
        BELOW,
    ),
    Mutant(
        "leave what was read beyond a limit",
        RESTORES,
        "        self._tiers.settle()\n        return came",
        "        return came",
        BELOW,
    ),
    Mutant(
        "leave what is read no more beyond a limit",
        RESTORES,
        "restore.pieces.popleft())\n        self._tiers.settle()\n",
        "restore.pieces.popleft())\n",
        BELOW,
    ),
    Mutant("give up a chat whose writes failed", SAVER, "if self._tiers.disk.paused:", "if False:", RECORDS),
    Mutant(
        "never begin again what could not be written",
        SAVER,
        "                turn.begun.clear()\n",
        "",
        RECORDS,
    ),
    Mutant("try for ever what cannot be written", SAVER, "if turn.failed >= TRIES:", "if False:", RECORDS),
    Mutant("write what had to go again and again", SAVER, "if key in turn.begun:", "if False:", BELOW),
    # --- who holds what
    Mutant("note nothing that is being written", DISK, "if cold.disk or cold.writing:", "if cold.disk:", RECORDS),
    Mutant(
        "note nobody who holds what was pushed out",
        HOLDINGS,
        "self.index.add(cold)\n        self._unnoted |= cold.holders",
        "self.index.add(cold)",
        RECORDS,
    ),
    Mutant("leave what only a header names unnoted", EARLIER, "earlier.unnoted |= whose.keys()", "pass", RECORDS),
    Mutant(
        "believe headers that name a deleted chat",
        EARLIER,
        "filter(records.lives, stored.header.holders)",
        "stored.header.holders",
        RECORDS,
    ),
    Mutant("leave on disk what is nobody's", DISK, "self._unheld = self.earlier.drop_unheld()", "pass", RECORDS),
    Mutant("take a damaged record for a deleted chat", HOLDERS, "self._removed.add(path.name)", "pass", RECORDS),
    Mutant("name a chat in a file without a record", DISK, "self.clerk.introduce(header.holders)", "pass", RECORDS),
    Mutant("note only once what could not be noted", HOLDINGS, "self._owed.add(session_id)", "pass", RECORDS),
    Mutant(
        "note nobody as a holder on disk",
        SAVER,
        "        self._tiers.holdings.note(session_id)",
        "        pass",
        BELOW,
    ),
    Mutant(
        "trust the holders in a file's header", EARLIER, "whose = holders.get(stored.header.key)", "whose = None", BELOW
    ),
    Mutant(
        "note nobody who reads what is below",
        RESIDENCY,
        "                self.tiers.holdings.hold(cold, session_id)\n",
        "                pass\n",
        BELOW,
    ),
    Mutant(
        "drop below what others hold too",
        HOLDINGS,
        "if cold.holders == {session_id}:\n                leaving",
        "if session_id in cold.holders:\n                leaving",
        BELOW,
    ),
    # --- giving back
    Mutant(
        "give back a slot in host that is being read",
        TIERS,
        "not cold.reads and not cold.writing and cold.key",
        "not cold.writing and cold.key",
        RACES,
    ),
    Mutant("demote what is being read", TIERS, "if cold.reads or cold.writing or (to", "if cold.writing or (to", RACES),
    Mutant("remove a tail that is being read", HOLDINGS, " and not tail.reads:", ":", RACES),
    Mutant(
        "lose slots in host",
        HOLDINGS,
        "        self._host.give_back(cold.host)\n        cold.host = None\n        kept",
        "        cold.host = None\n        kept",
        BELOW,
    ),
    Mutant(
        "lose buffers of a turn that was cancelled",
        RESTORES,
        "        if slot is not None:\n            self._tiers.disk.staging.give_back(slot)",
        "        if slot is None:\n            self._tiers.disk.staging.give_back(slot)",
        BELOW,
    ),
    Mutant("never say that a block was read", RESTORES, "        piece.cold.reads -= 1\n", "", BELOW),
    # --- policies
    Mutant("expire with the first holder", POLICY, "latest = max(latest, ", "latest = min(latest, ", POLICIES),
    Mutant(
        "let time take what is pinned",
        POLICY,
        "if entry.key not in lasting and entry.key not in pinned]",
        "if entry.key not in lasting]",
        POLICIES,
    ),
    Mutant(
        "count no pins",
        SESSIONS,
        "        return protect(entries, ranks, int(",
        "        return protect(entries, {}, int(",
        BELOW,
    ),
    Mutant("protect all that is pinned", SESSIONS, "int(budget * PINNED_SHARE))", "2**62)", BELOW),
    Mutant(
        "protect the end of a chain first",
        PINS,
        "-entry.value, entry.depth, entry.key",
        "-entry.value, -entry.depth, entry.key",
        PINNED,
    ),
    Mutant(
        "protect what was pinned last",
        PINS,
        "key=lambda entry: (ranks[entry.key],",
        "key=lambda entry: (-ranks[entry.key],",
        PINNED,
    ),
    Mutant(
        "refuse a pin that was taken", KEEPER, "if pin.pinned and not again else", "if pin.pinned else", ENGINE_PINS
    ),
    Mutant(
        "repeat a pin as if it were new",
        "chat/cache_service.py",
        "session.ttl_s, again=True)",
        "session.ttl_s)",
        ("tests/chat/test_cache_service.py",),
    ),
    Mutant("write without end", DISK, "self.files.writes.allows(", "bool(", BELOW),
    Mutant(
        "write beyond the disk's budget",
        TIERS,
        '            if not self.tier_limits("disk").fits(self.disk.bytes + taken):  # what',
        "            if False:  # what",
        BELOW,
    ),
    Mutant(
        "start with more than the disk's budget",
        TIERS,
        '            self.enforce("disk")\n        return len(blocks)',
        "            pass\n        return len(blocks)",
        BELOW,
    ),
    Mutant(
        "evict from host what could go to disk",
        TIERS,
        'if move.to == "disk" and not self.copy_down(cold) and',
        "if False and",
        BELOW,
    ),
    # --- memory
    Mutant(
        "promise a pool that the memory cannot hold",
        RESIDENTS,
        "if share > last.pool_bytes and not _has_memory(",
        "if False and not _has_memory(",
        PRESSURE,
    ),
    Mutant("take memory that is not there", RESIDENTS, "memory.require(served.loaded.device, size)", "pass", PRESSURE),
    Mutant("wait for a pool that cannot grow", RESIDENTS, "short=short and not others_run)", "short=False)", PRESSURE),
    Mutant(
        "say for ever that there is no memory",
        RESIDENTS,
        "if served.fingerprint not in self._short:",
        "if True:",
        PRESSURE,
    ),
)
