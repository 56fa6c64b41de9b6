"""A law that cannot be broken says nothing: each is broken here on purpose, and must be named."""

from __future__ import annotations

import pytest

from engine.cache import Block, BlockManager, Lease, violations
from tests.engine.cache.books import Books

A = list(range(10, 22))


def block_of(manager: BlockManager, token_ids: list[int]) -> Block:
    return next(entry for entry in manager.blocks.values() if entry.token_ids == token_ids)


def lose_a_block(manager: BlockManager, lease: Lease) -> None:
    manager.free.take(1)


def use_a_free_block(manager: BlockManager, lease: Lease) -> None:
    manager.free.add(lease.blocks[0].id)


def forget_an_idle_block(manager: BlockManager, lease: Lease) -> None:
    manager.idle.popitem()


def idle_while_leased(manager: BlockManager, lease: Lease) -> None:
    manager.idle.give_back([lease.blocks[0]])


def count_a_lease_too_many(manager: BlockManager, lease: Lease) -> None:
    lease.blocks[0].leases += 1


def share_a_tail(manager: BlockManager, lease: Lease) -> None:
    manager.leases.add(Lease(lease.scope, lease.blocks, lease.computed))
    for entry in lease.blocks:
        entry.leases += 1


def count_a_token_without_kv(manager: BlockManager, lease: Lease) -> None:
    lease.computed += 1


def swap_the_salt(manager: BlockManager, lease: Lease) -> None:
    lease.blocks[0].salt = b"other"


def lose_a_holder(manager: BlockManager, lease: Lease) -> None:
    lease.blocks[0].holders.clear()


def hide_a_block(manager: BlockManager, lease: Lease) -> None:
    manager.index.remove(block_of(manager, [99]))


def index_a_stranger(manager: BlockManager, lease: Lease) -> None:
    manager.index.add(Block(77, b"", {"s"}, [1]), manager.index.root)


def cut_a_full_block(manager: BlockManager, lease: Lease) -> None:
    block_of(manager, A[4:8]).token_ids.pop()


def rename_a_block(manager: BlockManager, lease: Lease) -> None:
    block_of(manager, A[4:8]).hash = b"wrong"


def hold_more_than_the_parent(manager: BlockManager, lease: Lease) -> None:
    block_of(manager, A[8:]).holders.add("stranger")


def turn_the_order_around(manager: BlockManager, lease: Lease) -> None:
    chain = manager.idle.order()
    for entry in chain:
        del manager.idle[entry.id]
    manager.idle.give_back(chain)


@pytest.mark.parametrize(
    ("sabotage", "said"),
    [
        (lose_a_block, "are not 12"),
        (use_a_free_block, "do not make up the pool once"),
        (forget_an_idle_block, "is neither free, leased nor idle"),
        (idle_while_leased, "is idle and leased 1 times"),
        (count_a_lease_too_many, "counts 2 leases, 1 name it"),
        (share_a_tail, "is not full and has 2 leases"),
        (count_a_token_without_kv, "computed 7 tokens, its blocks hold 6"),
        (swap_the_salt, "has another salt than its lease asks for"),
        (lose_a_holder, "has no holder"),
        (hide_a_block, "is idle but cannot be found"),
        (index_a_stranger, "the index knows block 77, which is not in use"),
        (cut_a_full_block, "holds 3 tokens and its hash is"),
        (rename_a_block, "the hashes of the index are not those of its full blocks"),
        (hold_more_than_the_parent, "is held by ['stranger'], its parent"),
        (turn_the_order_around, "would be evicted before block"),
    ],
)
def test_a_broken_law_is_named(sabotage, said):
    books = Books(12, 4, b"test")
    books.keep([*A, 99])
    lease = books.take([1, 2, 3, 4, 5, 6])
    assert violations(books.manager) == []
    sabotage(books.manager, lease)
    assert [law for law in violations(books.manager) if said in law], violations(books.manager)
