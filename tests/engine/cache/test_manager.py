"""Finding, leasing and forgetting, on a manager with no pool under it (blocks of 4 tokens)."""

from __future__ import annotations

import subprocess
import sys

import pytest

from engine.cache import Scope, block

A = list(range(10, 22))  # three full blocks
B = list(range(30, 42))


# --- eviction order --------------------------------------------------------------------------------------------------


def test_a_chains_end_goes_before_its_beginning(make_books):
    books = make_books()
    books.keep([*A, 22])
    assert books.order() == [[22], [18, 19, 20, 21], [14, 15, 16, 17], [10, 11, 12, 13]]


def test_chains_go_in_the_order_in_which_they_were_left(make_books):
    books = make_books()
    books.keep(A[:8])
    books.keep(B[:8])
    books.keep([*A[:8], 1])
    assert books.order() == [[34, 35, 36, 37], [30, 31, 32, 33], [1], [14, 15, 16, 17], [10, 11, 12, 13]]


def test_a_branch_leaves_the_other_branch_to_go_first(make_books):
    books = make_books()
    books.keep(A)
    books.keep([*A[:8], 1, 2, 3, 4])
    assert books.order() == [[18, 19, 20, 21], [1, 2, 3, 4], [14, 15, 16, 17], [10, 11, 12, 13]]


def test_what_is_evicted_is_the_front_of_the_order(make_books):
    books = make_books(blocks=6)
    books.keep(A)
    books.keep(B)
    books.keep([1, 2, 3, 4, 5])
    assert books.order() == [[10, 11, 12, 13], *[B[8:], B[4:8], B[:4]], [5], [1, 2, 3, 4]]
    assert books.manager.evicted_blocks == 2


def test_looking_is_not_using(make_books):
    books = make_books()
    books.keep(A)
    books.keep(B)
    before = books.state()
    assert books.found(A) == 12
    assert books.manager.match(Scope("s"), []).reused == 0
    assert books.state() == before


def test_popitem_agrees_with_the_order_that_is_shown(make_books):
    books = make_books()
    books.keep(A)
    books.keep(B[:8])
    shown = books.order()
    assert [books.manager.idle.popitem()[1].token_ids for _ in shown] == shown
    for entry in list(books.manager.blocks.values()):  # put them back, for the law
        entry.leases += 1
    books.manager._let_go([*books.manager.blocks.values()])


# --- what is found ---------------------------------------------------------------------------------------------------


def test_the_last_prompt_token_is_never_reused(make_books):
    books = make_books()
    books.keep(A)
    for length, reused in [(1, 0), (4, 3), (5, 4), (11, 10), (12, 11)]:
        assert books.manager.match(Scope("s"), A[:length]).reused == reused


def test_a_prompt_that_ends_with_a_cached_block_copies_the_rest_of_it(make_books):
    books = make_books()
    books.keep(A[:8])
    last = books.manager.match(Scope("s"), [*A[:8], 0]).full[1]
    lease = books.manager.acquire(Scope("s"), A[:8])
    assert (lease.computed, lease.reused) == (7, 7)
    private = lease.blocks[1]
    assert private is not last and private.token_ids == A[4:7] and last.token_ids == A[4:8]
    assert books.copies == [(last.id, private.id, 3)]
    books.manager.commit(lease, A[7:8])
    assert lease.blocks[1] is last, "the equal full block was there first"
    books.manager.release(lease)


def test_a_divergence_inside_a_block_copies_the_tokens_before_it(make_books):
    books = make_books()
    books.keep(A)
    lease = books.manager.acquire(Scope("s"), [*A[:6], 1, 2, 3])
    assert lease.reused == 6
    assert [count for _, _, count in books.copies] == [2]
    books.manager.release(lease)
    assert books.found(A) == 12


def test_the_longest_of_several_tails_is_taken(make_books):
    books = make_books(blocks=12)
    for tail in ([1], [1, 2, 3], [1, 2]):
        books.keep([*A[:4], *tail, 9], session=f"s{tail}")
    assert books.found([*A[:4], 1, 2, 3, 4], session="new") == 7


def test_a_sessions_own_tail_is_continued_in_place(make_books):
    books = make_books()
    books.keep(A[:6])
    (tail,) = [entry for entry in books.manager.blocks.values() if entry.token_ids == A[4:6]]
    lease = books.manager.acquire(Scope("s"), A[:8])
    assert lease.blocks[1] is tail and lease.reused == 6 and books.copies == []
    books.manager.commit(lease, A[6:8])
    assert books.found(A[:8]) == 8
    books.manager.release(lease)


def test_a_part_of_a_rounded_block_is_rounded(make_books):
    books = make_books()
    books.keep(A[:8])
    for there in books.manager.blocks.values():
        there.lossy = True
    lease = books.take([*A[:6], 70, 71])
    assert [part.lossy for part in lease.blocks] == [True, True]
    books.manager.release(lease)


def test_anothers_tail_is_copied_and_stays_anothers(make_books):
    books = make_books()
    books.keep(A[:6], session="a")
    lease = books.manager.acquire(Scope("b"), A[:8])
    assert lease.reused == 6 and [count for _, _, count in books.copies] == [2]
    books.manager.commit(lease, A[6:8])
    books.manager.release(lease)
    assert books.manager.drop("a") == 1
    assert books.found(A[:8], session="b") == 8


def test_a_tail_that_is_being_written_is_copied_as_far_as_it_is_computed(make_books):
    books = make_books()
    writer = books.take(A[:6])
    reader = books.manager.acquire(Scope("s"), [*A, 0])
    assert reader.reused == 6 and reader.blocks[1] is not writer.blocks[1]
    books.manager.commit(writer, A[6:7])
    books.manager.release(reader)
    books.manager.release(writer)


def test_nothing_is_found_before_it_is_computed(make_books):
    books = make_books()
    lease = books.manager.acquire(Scope("s"), A)
    assert books.found(A) == 0
    books.manager.commit(lease, A[:5])
    assert books.found(A) == 5
    books.manager.release(lease)
    assert books.found(A) == 5
    assert len(books.manager.free) == 6, "the block that was never filled is free again"


def test_the_same_tokens_elsewhere_are_not_the_same(make_books):
    books = make_books(blocks=12)
    books.keep(A[:8])
    books.keep([1, 2, 3, 4, *A[4:8]])
    assert books.found(A[4:8]) == 0
    assert books.found([5, 6, 7, 8, *A[4:8]]) == 0
    assert len(books.manager.blocks) == 4


def test_another_model_finds_nothing(make_books):
    books, other = make_books(fingerprint=b"one"), make_books(fingerprint=b"two")
    books.keep(A)
    other.keep(A)
    assert not books.manager.index.hashes().keys() & other.manager.index.hashes().keys()


# --- salts -----------------------------------------------------------------------------------------------------------


def test_two_users_share_nothing_but_a_preset(make_books):
    books = make_books(blocks=16)
    prompt = [*A[:10], 1, 2]
    books.keep(prompt, session="a", salt=b"anna", shared_len=10)
    assert books.found(prompt, session="a2", salt=b"anna", shared_len=10) == 12
    assert books.found(prompt, session="b", salt=b"ben", shared_len=10) == 10
    assert books.found(prompt, session="b", salt=b"ben") == 0
    assert books.found(prompt, session="b") == 8
    books.keep(prompt, session="b", salt=b"ben", shared_len=10)
    assert books.found([*prompt, 3], session="b", salt=b"ben", shared_len=10) == 12
    salts = sorted((entry.salt, entry.token_ids) for entry in books.manager.index)
    assert salts == [(b"", A[:4]), (b"", A[4:8]), (b"anna", [*A[8:10], 1, 2]), (b"ben", [*A[8:10], 1, 2])]


def begun(books, scope: Scope, token_ids: list[int], computed: int) -> None:
    """A request that ended before all of it was computed."""
    lease = books.manager.acquire(scope, token_ids)
    books.manager.commit(lease, token_ids[:computed])
    books.manager.release(lease)


def test_what_a_chat_adds_to_its_own_block_is_no_preset(make_books):
    """The block was begun under a longer preset than the chat has when it goes on."""
    books = make_books(blocks=16)
    begun(books, Scope("a", b"anna", 7), A[:7], 6)
    books.keep([*A[:6], 1, 2], session="a", salt=b"anna", shared_len=5)
    assert books.found([*A[:6], 1, 2], session="b", salt=b"ben", shared_len=7) == 5


def test_a_block_of_a_preset_is_not_continued_with_what_is_none(make_books):
    books = make_books(blocks=16)
    begun(books, Scope("a", b"anna", 8), A[:8], 6)
    lease = books.manager.acquire(Scope("a", b"anna", 6), [*A[:6], 1, 2])
    assert (lease.reused, lease.blocks[1].salt) == (6, b"anna")
    books.manager.release(lease)


def test_part_of_a_block_does_not_cross_salts(make_books):
    books = make_books()
    books.keep([1, 2, 3], session="a", salt=b"anna")
    assert books.found([1, 2, 3], session="b", salt=b"ben") == 0
    lease = books.manager.acquire(Scope("b", b"ben"), [1, 2, 3, 4])
    assert lease.reused == 0 and books.copies == []
    books.manager.release(lease)


# --- collisions ------------------------------------------------------------------------------------------------------


def test_a_collision_is_a_miss_and_keeps_nothing_wrong(make_books, monkeypatch):
    monkeypatch.setattr(block, "block_hash", lambda parent, token_ids, salt: b"always this")
    books = make_books()
    books.keep(A[:4])
    assert books.found(A[:4]) == 4
    assert books.found(B[:4]) == 0
    lease = books.take([*B, 1, 2])
    assert books.found([*B, 1, 2]) == 0, "behind a collision nothing is published"
    assert books.found(A[:4], salt=b"other") == 0
    books.manager.release(lease)
    assert books.order() == [A[:4]]
    assert len(books.manager.free) == 7


def test_a_chain_that_collides_with_itself(make_books, monkeypatch):
    monkeypatch.setattr(block, "block_hash", lambda parent, token_ids, salt: b"always this")
    books = make_books()
    books.keep([*A[:4], *A[:4], 1])
    assert books.found([*A[:4], *A[:4], 1]) == 4
    assert books.order() == [A[:4]]


# --- leases ----------------------------------------------------------------------------------------------------------


def test_no_room_changes_nothing(make_books):
    books = make_books(blocks=6)
    running = books.take(B)
    books.keep(A[:10], session="a")
    before = books.state()
    assert books.manager.acquire(Scope("c"), [*A[:8], 1, 2, 3, 4, 5, 6]) is None
    assert books.manager.acquire(Scope("a"), A, spare=1) is None
    assert books.manager.extend(running, 100) is False
    assert books.state() == before and books.copies == [] and books.freed == []
    assert books.manager.reused_tokens == 0
    books.manager.release(running)


def test_what_a_lease_finds_is_held_before_anything_is_evicted(make_books):
    books = make_books(blocks=6)
    books.keep(A)  # would be the first to go
    books.keep(B)
    lease = books.take([*A, 1, 2, 3, 4, 5])
    assert lease.reused == 12
    assert books.order() == [B[:4]]
    books.manager.release(lease)


def test_a_tail_is_held_until_it_has_been_copied(make_books):
    books = make_books(blocks=3)
    books.keep(A[:6], session="a")
    lease = books.manager.acquire(Scope("b"), [*A[:6], 7], spare=0)
    assert lease.reused == 6 and books.freed == [] and [count for *_, count in books.copies] == [2]
    books.manager.release(lease)


def test_where_a_copy_does_not_fit_its_tokens_are_computed_again(make_books):
    books = make_books(blocks=2)
    books.keep(A[:8])
    lease = books.take(A[:8])
    assert lease.reused == 4 and books.copies == []
    books.manager.release(lease)


def test_leased_blocks_are_neither_evicted_nor_reused(make_books):
    books = make_books(blocks=4)
    running = books.take(A)
    assert books.manager.evict_idle(10) == 0
    assert books.manager.acquire(Scope("b"), [1, 2, 3, 4, 5], spare=0) is None
    with pytest.raises(RuntimeError, match="leased and cannot be evicted"):
        books.manager.evict(running.blocks[2])
    books.manager.release(running)


def test_a_block_goes_after_those_that_continue_it(make_books):
    books = make_books()
    books.keep(A[:8])
    first = books.manager.match(Scope("s"), A).full[0]
    with pytest.raises(RuntimeError, match="before the blocks that continue it"):
        books.manager.evict(first)


def test_spare_is_room_that_must_be_left(make_books):
    books = make_books(blocks=3)
    assert books.manager.acquire(Scope("s"), A, spare=1) is None
    lease = books.manager.acquire(Scope("s"), A[:8], spare=1)
    assert len(lease.blocks) == 2
    books.manager.release(lease)
    assert len(books.manager.free) == 3


def test_two_that_compute_the_same_end_up_with_one(make_books):
    books = make_books()
    one, two = (books.manager.acquire(Scope(name), A[:8]) for name in "ab")
    books.manager.commit(one, A[:8])
    books.manager.commit(two, A[:8])
    assert one.blocks == two.blocks
    assert [entry.leases for entry in one.blocks] == [2, 2] and len(books.manager.free) == 6
    assert [sorted(entry.holders) for entry in one.blocks] == [["a", "b"]] * 2
    books.manager.release(one)
    assert books.order() == []
    books.manager.release(two)
    assert books.order() == [A[4:8], A[:4]]
    assert books.manager.evicted_blocks == 0, "giving way to an equal block is no eviction"


def test_a_lease_grows_into_the_neighbouring_block(make_books):
    books = make_books(blocks=32)
    first, second = books.take(A), books.take(B)
    for _ in range(3):
        assert books.manager.extend(first, 4 * len(first.blocks) + 1)
        assert books.manager.extend(second, 4 * len(second.blocks) + 1)
    for lease in (first, second):
        ids = [entry.id for entry in lease.blocks]
        assert ids == list(range(ids[0], ids[0] + 6))
        assert lease.block_ids(13, 4) == tuple(ids[:4])
        books.manager.release(lease)


def test_extending_to_what_is_there_already_takes_nothing(make_books):
    books = make_books(blocks=1)
    lease = books.take(A[:2])
    assert books.manager.extend(lease, 4) and books.manager.extend(lease, 1)
    assert len(lease.blocks) == 1
    books.manager.release(lease)


def test_a_copy_that_fails_leaves_no_lease_behind(make_books):
    books = make_books()
    books.keep(A[:8])

    def fail(source: int, target: int, count: int) -> None:
        raise MemoryError("no")

    books.manager._copy_tokens = fail
    with pytest.raises(MemoryError):
        books.manager.acquire(Scope("s"), [*A[:6], 1])
    assert books.manager.leased_blocks == 0 and books.manager.leases == set()
    assert books.found(A[:8]) == 8 and len(books.manager.free) == 6


def test_only_its_lease_fills_a_block(make_books):
    books = make_books()
    one, two = books.take(A[:8]), books.take(A[:6], session="b")
    two.computed = 4
    with pytest.raises(RuntimeError, match="not this lease's to fill"):
        books.manager.commit(two, [1])
    two.computed = 6
    for lease in (one, two):
        books.manager.release(lease)


# --- dropping --------------------------------------------------------------------------------------------------------


def test_dropping_a_session_frees_what_only_it_holds(make_books):
    books = make_books(blocks=16)
    books.keep([*A[:8], 1, 2], session="a")
    books.keep([*A[:8], 3, 4], session="b")
    books.keep(B, session="b")
    assert books.session_tokens() == {"a": 10, "b": 22}
    assert books.manager.drop("b") == 4
    assert books.session_tokens() == {"a": 10}
    assert books.found([*A[:8], 1, 2], session="a") == 10 and books.found(B) == 0
    assert books.manager.drop("a") == 3
    assert len(books.manager.free) == 16


def test_dropping_what_runs_is_a_mistake(make_books):
    books = make_books()
    lease = books.take(A)
    with pytest.raises(RuntimeError, match="session s was dropped while it runs"):
        books.manager.drop("s")
    books.manager.release(lease)


def test_dropping_one_who_shares_with_a_running_one(make_books):
    books = make_books()
    books.keep(A[:8], session="a")
    lease = books.take([*A[:8], 1], session="b")
    assert books.manager.drop("a") == 0
    assert [sorted(entry.holders) for entry in lease.blocks] == [["b"]] * 3
    books.manager.release(lease)


def test_dropping_an_unknown_session_frees_nothing(make_books):
    books = make_books()
    books.keep(A)
    assert books.manager.drop("nobody") == 0 and books.manager.drop("") == 0


def test_an_emptied_manager_equals_a_new_one(make_books):
    books = make_books()
    books.keep([*A, 1], session="a")
    books.keep(B, session="b", salt=b"x")
    books.manager.drop("a")
    books.manager.evict_idle(99)
    assert books.state() == make_books().state()
    assert books.manager.index._children == {}


# --- edges -----------------------------------------------------------------------------------------------------------


def test_a_pool_of_no_blocks_has_no_room(make_books):
    books = make_books(blocks=0)
    assert books.manager.acquire(Scope("s"), [1], spare=0) is None
    assert books.manager.evict_idle(3) == 0
    assert books.session_tokens() == {}
    assert books.manager.counts() == {
        "total_blocks": 0,
        "free_blocks": 0,
        "leased_blocks": 0,
        "idle_blocks": 0,
        "reused_tokens": 0,
        "evicted_blocks": 0,
    }


def test_a_lease_of_nothing_holds_nothing(make_books):
    books = make_books()
    lease = books.manager.acquire(Scope("s"), [])
    assert lease.blocks == [] and lease.computed == 0
    books.manager.commit(lease, [])
    books.manager.release(lease)


def test_blocks_of_one_token(make_books):
    books = make_books(block_size=1)
    books.keep([1, 2, 3])
    assert books.found([1, 2, 3]) == 3 and books.found([1, 3]) == 1
    assert books.order() == [[3], [2], [1]]


def test_the_books_are_kept_without_torch():
    code = "import sys, engine.cache, engine.scheduler; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# --- another size -----------------------------------------------------------------------------------------------------


def resize(books, blocks):
    moved = books.manager.make_fit(blocks)
    books.manager.renumber(blocks, moved)
    assert books.violations() == []
    return moved


def test_a_smaller_size_evicts_in_order_and_keeps_the_rest_findable(make_books):
    books = make_books(blocks=12)
    books.keep(A)
    books.keep(B)
    order = books.order()
    resize(books, 4)
    assert books.order() == order[2:]
    assert (books.found(A), books.found(B)) == (4, 12)
    assert len(books.manager.free) == 0


def test_a_lease_goes_on_under_new_ids(make_books):
    books = make_books(blocks=12)
    books.keep(B)
    lease = books.take([*A, 22])
    moved = resize(books, 4)
    assert [block.id for block in lease.blocks] == sorted(moved.values()) == [0, 1, 2, 3]
    assert not books.manager.extend(lease, 17)
    resize(books, 8)
    assert books.manager.extend(lease, 17)
    books.manager.commit(lease, [23, 24, 25, 26])
    books.manager.release(lease)
    assert books.found([*A, 22, 23, 24, 25, 26]) == 17


def test_leased_blocks_are_never_too_many_for_the_new_size(make_books):
    books = make_books(blocks=12)
    books.take(A)
    with pytest.raises(RuntimeError, match="3 blocks are leased; 2 cannot hold them"):
        books.manager.make_fit(2)
    assert books.violations() == []


def test_where_nothing_has_to_move_nothing_does(make_books):
    books = make_books(blocks=12)
    books.keep(A)
    ids = sorted(books.manager.blocks)
    assert resize(books, 20) == {block: block for block in ids}
