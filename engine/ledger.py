"""Where every byte of K and V is, counted from the blocks themselves. Changes nothing."""

from __future__ import annotations

from collections import defaultdict

from engine.cache.holdings import COLD, size
from engine.cache.tiers import ColdTiers
from engine.config import Tier
from engine.protocol import Residency, Snapshot, TierUsage
from engine.residents import Residents


def residencies(residents: Residents, now: float) -> dict[str, Residency]:
    """Where each session's blocks are. A block counts its tokens in the best tier that holds it, its bytes in each."""
    tiers = residents.tiers
    tokens: defaultdict[str, dict[bytes, tuple[int, int]]] = defaultdict(dict)  # session → key → rank of tier, tokens
    sizes: defaultdict[str, defaultdict[str, int]] = defaultdict(lambda: defaultdict(int))

    def count(key: bytes, holders: set[str], amount: int, rank: int) -> None:
        for session_id in holders:
            best = tokens[session_id].get(key)
            if best is None or rank < best[0]:
                tokens[session_id][key] = (rank, amount)

    for served in residents:
        for block in served.residency.blocks():
            if block.key is not None:
                count(block.key, block.holders, len(block.token_ids), 0)
                for session_id in block.holders:
                    sizes[session_id]["device"] += served.measures.block_bytes
    for cold in tiers.index:
        for rank, tier in enumerate(COLD, start=1):
            if amount := size(cold, tier):
                count(cold.key, cold.holders, len(cold.token_ids), rank)
                for session_id in cold.holders:
                    sizes[session_id][tier] += amount
    found = {}
    for session_id, blocks in tokens.items():
        sums = [sum(amount for at, amount in blocks.values() if at == rank) for rank in range(3)]
        use = tiers.sessions.get(session_id)
        missing = max(0, use.tokens - sum(blocks[key][1] for key in use.chain if key in blocks)) if use else 0
        found[session_id] = Residency(
            device_tokens=sums[0],
            host_tokens=sums[1],
            disk_tokens=sums[2],
            evicted_tokens=missing,
            device_bytes=sizes[session_id]["device"],
            host_bytes=sizes[session_id]["host"],
            disk_bytes=sizes[session_id]["disk"],
            pinned=use is not None and use.pinned,
            idle_s=now - use.last_used if use is not None else 0.0,
        )
    for session_id in tiers.sessions:
        use = tiers.sessions.get(session_id)
        if use is not None and session_id not in found:
            found[session_id] = Residency(evicted_tokens=use.tokens, pinned=use.pinned, idle_s=now - use.last_used)
    return found


def device_usage(residents: Residents) -> TierUsage:
    """The ledger's line of the device: all pools together."""
    blocks = [(block, served) for served in residents for block in served.residency.blocks()]
    pinned = [served for block, served in blocks if residents.tiers.sessions.pinned(block.holders)]
    return TierUsage(
        tier="device",
        budget_bytes=residents.budget,
        held_bytes=sum(served.pool_bytes for served in residents),
        used_bytes=sum(served.measures.block_bytes for _, served in blocks),
        pinned_bytes=sum(served.measures.block_bytes for served in pinned),
        blocks=len(blocks),
    )


def cold_usage(tiers: ColdTiers, tier: Tier) -> TierUsage:
    """The ledger's line of host or disk."""
    blocks = [cold for cold in tiers.index if size(cold, tier)]
    pinned = sum(size(cold, tier) for cold in blocks if tiers.sessions.pinned(cold.holders))
    host = tier == "host"
    return TierUsage(
        tier=tier,
        budget_bytes=tiers.tier_limits(tier).budget,
        held_bytes=tiers.host.held_bytes if host else tiers.disk.bytes,
        used_bytes=tiers.used(tier),
        pinned_bytes=pinned,
        page_locked_bytes=tiers.host.page_locked_bytes if host else 0,
        blocks=len(blocks),
    )


def snapshot(call_id: str, residents: Residents, now: float) -> Snapshot:
    """Gauges and counters of everything."""
    models, tiers = list(residents), residents.tiers
    fields = [served.scheduler.snapshot_fields() for served in models]
    device = device_usage(residents)
    return Snapshot(
        call_id=call_id,
        models=[served.usage() for served in models],
        budget_bytes=device.budget_bytes,
        pool_bytes=device.held_bytes,
        used_bytes=device.used_bytes,
        steps=sum(served.runner.steps for served in models),
        forwarded_tokens=sum(served.runner.forwarded_tokens for served in models),
        tiers=[device, *(cold_usage(tiers, tier) for tier in COLD)],
        sessions=residencies(residents, now),
        staging_bytes=tiers.disk.staging.held_bytes,
        saving_blocks=tiers.disk.saving,
        loading_blocks=tiers.disk.loading,
        **{name: sum(field[name] for field in fields) for name in fields[0]},
    )
