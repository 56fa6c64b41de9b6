"""The conservation law of host and disk as code: what must hold between any two calls."""

from __future__ import annotations

from collections.abc import Iterator

from engine.cache.holdings import size
from engine.cache.pins import PINNED_SHARE
from engine.cache.tiers import ColdTiers


def cold_violations(tiers: ColdTiers) -> list[str]:
    """Every broken law as a sentence; empty when all hold. Changes nothing."""
    return [*tiers.host.violations(), *tiers.disk.staging.violations(), *_budgets(tiers), *_blocks(tiers)]


def _budgets(tiers: ColdTiers) -> Iterator[str]:
    held = sum(size(cold, "host") for cold in tiers.index)
    if held != tiers.host.used_bytes:
        yield f"blocks take {held} bytes of host, which counts {tiers.host.used_bytes}"
    disk = tiers.tier_limits("disk").budget
    kept = sum(size(cold, "disk") for cold in tiers.index if cold.reads)
    pinned = sum(size(cold, "disk") for cold in tiers.index if not cold.reads and tiers.sessions.pinned(cold.holders))
    kept += min(pinned, int(disk * PINNED_SHARE))
    if tiers.has_disk and tiers.used("disk") > max(disk, kept + tiers.disk.writing_bytes):
        yield f"the files take {tiers.used('disk')} bytes of a budget of {disk}, and {kept} of them must stay"
    files = sum(size(cold, "disk") for cold in tiers.index)
    if files > tiers.disk.bytes:
        yield f"blocks have files of {files} bytes, and {tiers.disk.bytes} are counted"


def _blocks(tiers: ColdTiers) -> Iterator[str]:
    for cold in tiers.index:
        name = cold.key.hex()
        if not (cold.host or cold.disk or cold.writing):
            yield f"block {name} is in the index and in no tier"
        if cold.reads < 0:
            yield f"block {name} has {cold.reads} readers"
        if not cold.holders:
            yield f"block {name} has no holder"
