"""How much pinned sessions may keep from others: a pure decision over plain values. Knows no session and no tier."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from engine.cache.policy import Entry, Key, Value

PINNED_SHARE = 0.5  # of a tier's budget
OUTGROWN = "pinned chats have outgrown their share"


def protect(entries: Sequence[Entry], ranks: Mapping[Key, int], most: int) -> list[Entry]:
    """The entries, those of pinned sessions as `PINNED` and without an end as far as `most` bytes go.

    `ranks` tells them by key: a session that was pinned earlier has a lower rank, and a block of several the lowest of
    theirs. The lower rank comes first, then what is worth more, then the beginning of a chain; from the first that no
    longer fits on, all are what they are without a pin. So the end of the last pinned session goes first. What leads to
    a protected block would stay for it, and so counts with it, whoever holds it.
    """
    chains = {entry.key: entry for entry in entries}
    pinned = [entry for entry in entries if entry.key in ranks]
    kept: set[Key] = set()
    for entry in sorted(pinned, key=lambda entry: (ranks[entry.key], -entry.value, entry.depth, entry.key)):
        path, above = [], chains.get(entry.key)
        while above is not None and above.key not in kept:
            path.append(above)
            above = chains.get(above.parent)
        most -= sum(block.bytes for block in path)
        if most < 0:
            break
        kept.update(block.key for block in path)
    return [replace(entry, value=Value.PINNED, expires_at=None) if entry.key in kept else entry for entry in entries]
