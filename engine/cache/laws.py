"""The conservation law as code: what must hold of blocks, index and leases between any two calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from engine.cache.block import Block
from engine.cache.manager import BlockManager


def violations(manager: BlockManager) -> list[str]:
    """Every broken law as a sentence; empty when all hold. Changes nothing."""
    return [*_conserved(manager), *_leased(manager), *_indexed(manager), *_descended(manager)]


def _conserved(manager: BlockManager) -> Iterator[str]:
    free, used, idle = manager.free.ids(), manager.blocks, manager.idle
    if len(free) != len(manager.free):
        yield f"{len(free)} blocks are free, {len(manager.free)} are counted as free"
    counts = (len(free), manager.leased_blocks, len(idle))
    if sum(counts) != manager.total_blocks:
        yield "free {} + leased {} + idle {} blocks are not {}".format(*counts, manager.total_blocks)
    if sorted([*free, *used]) != list(range(manager.total_blocks)):
        yield f"free blocks {free} and used blocks {sorted(used)} do not make up the pool once"
    for block in idle.order():
        if used.get(block.id) is not block:
            yield f"idle block {block.id} is not in use"
        if block.leases:
            yield f"block {block.id} is idle and leased {block.leases} times"
        if block.parent_hash is None:
            yield f"block {block.id} is idle but cannot be found"
    for block_id, block in used.items():
        if block.id != block_id:
            yield f"block {block.id} is kept as {block_id}"
        if not block.leases and block_id not in idle:
            yield f"block {block_id} is neither free, leased nor idle"


def _leased(manager: BlockManager) -> Iterator[str]:
    named = Counter(block.id for lease in manager.leases for block in lease.blocks)
    for block in manager.blocks.values():
        if block.leases != named[block.id]:
            yield f"block {block.id} counts {block.leases} leases, {named[block.id]} name it"
        if block.leases > 1 and block.hash is None:
            yield f"block {block.id} is not full and has {block.leases} leases"
    for lease in manager.leases:
        held = [token for block in lease.blocks for token in block.token_ids]
        if len(held) != lease.computed:
            yield f"a lease of {lease.scope.session_id} computed {lease.computed} tokens, its blocks hold {len(held)}"
        for number, block in enumerate(lease.blocks):
            if manager.blocks.get(block.id) is not block:
                yield f"leased block {block.id} is not in use"
            if block.salt != lease.scope.salt_at(number, manager.block_size):
                yield f"block {block.id} has another salt than its lease asks for"
            if lease.scope.session_id not in block.holders:
                yield f"block {block.id} is leased by {lease.scope.session_id}, which does not hold it"


def _indexed(manager: BlockManager) -> Iterator[str]:
    entries = list(manager.index)
    if len({block.id for block in entries}) != len(entries):
        yield "a block is in the index twice"
    for block in entries:
        if manager.blocks.get(block.id) is not block:
            yield f"the index knows block {block.id}, which is not in use"
        if not block.token_ids:
            yield f"block {block.id} is in the index without tokens"
        if (block.hash is not None) != (len(block.token_ids) == manager.block_size):
            yield f"block {block.id} holds {len(block.token_ids)} tokens and its hash is {block.hash!r}"
    published = {block.id for block in manager.blocks.values() if block.parent_hash is not None}
    if published != {block.id for block in entries}:
        yield f"blocks {sorted(published)} say they are published, the index knows {sorted(b.id for b in entries)}"
    named = {block.hash: block for block in entries if block.hash is not None}
    if named != manager.index.hashes():
        yield "the hashes of the index are not those of its full blocks"


def _descended(manager: BlockManager) -> Iterator[str]:
    age = {block.id: number for number, block in enumerate(manager.idle.order())}
    for block in manager.blocks.values():
        if not block.holders:
            yield f"block {block.id} has no holder"
    for block in manager.index:
        if block.parent_hash is None or block.parent_hash == manager.index.root:
            continue
        parent = manager.index.named(block.parent_hash)
        if parent is None:
            yield f"block {block.id} continues one that is not in the index"
        else:
            yield from _inherited(block, parent, age)


def _inherited(block: Block, parent: Block, age: dict[int, int]) -> Iterator[str]:
    if not block.holders <= parent.holders:
        yield f"block {block.id} is held by {sorted(block.holders - parent.holders)}, its parent {parent.id} is not"
    if parent.id in age and age.get(block.id, len(age)) > age[parent.id]:
        yield f"block {parent.id} would be evicted before block {block.id}, which continues it"
