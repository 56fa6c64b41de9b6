"""What is read once and found again, counted at the forward call (blocks of 4)."""

from __future__ import annotations

import pytest

from tests.engine.cache.books import session_tokens
from tests.engine.fake_model import expected_reply
from tests.engine.rig import shape

PRESET = list(range(20, 50))


# --- reuse, counted at the forward call ------------------------------------------------------------------------------


def test_the_next_turn_reads_only_what_is_new(make_rig):
    rig = make_rig()
    history = [1, 2, 3, 4, 5, 6, 7]
    for turn in range(5):
        before = rig.model.forwarded_tokens
        request = rig.submit(history, 6)
        rig.run()
        reused = len(history) - 3 if turn else 0
        assert rig.usage(request) == (reused, len(history) - reused, 0, 6)
        assert rig.model.forwarded_tokens - before == len(history) - reused + 5
        history = history + rig.replies[request][0] + [8, 9]


def test_the_token_sampled_last_is_not_recorded_as_cached(make_rig):
    rig = make_rig()
    prompt = [1, 2, 3, 4, 5]
    whole = prompt + rig.reply(prompt, 6)
    assert rig.found([*whole, 0]) == len(whole) - 1
    assert session_tokens(rig.manager) == {"s": len(whole) - 1}


def test_an_edited_and_a_branched_history_share_their_beginning(make_rig):
    rig = make_rig()
    prompt = list(range(1, 20))
    whole = prompt + rig.reply(prompt, 8)
    edited = rig.submit([*prompt[:9], 90, *prompt[10:]], 8)
    rig.run()
    again = rig.submit(prompt, 8)
    rig.run()
    longer = rig.submit([*whole, 91], 8)
    rig.run()
    assert [rig.usage(request)[:2] for request in (edited, again, longer)] == [(9, 10), (18, 1), (26, 2)]


def test_an_estimate_is_what_a_request_then_finds(make_rig):
    rig = make_rig()
    rig.reply(PRESET, 5)
    before = rig.evicted_next()
    prompt = [*PRESET[:13], 1, 2, 3]
    assert rig.found(prompt) == 13
    assert rig.found([]) == 0 and rig.found([1]) == 0
    assert rig.found(prompt, salt=b"other") == 0
    assert rig.evicted_next() == before
    request = rig.submit(prompt)
    rig.run()
    assert rig.usage(request)[0] == 13


def test_evicted_sessions_are_computed_again_and_say_the_same(make_rig):
    rig = make_rig(blocks=10)
    first = rig.reply([1] * 9, 6)
    for other in range(2, 6):
        rig.reply([other] * 12, 6, session=f"s{other}")
    assert rig.found([1] * 9) == 0
    assert rig.reply([1] * 9, 6) == first


def test_eviction_takes_the_oldest_chain_from_its_end(make_rig):
    rig = make_rig(blocks=8)
    rig.reply([1] * 8, 1, session="old")
    rig.reply([2] * 8, 1, session="new")
    rig.reply([1] * 4 + [3], 1, session="old")
    assert rig.evicted_next() == [[1] * 4, [2] * 4, [2] * 4, [3], [1] * 4]
    rig.reply([4] * 16, 1, session="big")
    assert rig.evicted_next() == [[2] * 4, [2] * 4, [3], [1] * 4, [4] * 4, [4] * 4, [4] * 4, [4] * 4][-8:]


def test_a_hash_collision_costs_time_and_never_a_wrong_reply(make_rig, monkeypatch):
    monkeypatch.setattr("engine.cache.block.block_hash", lambda parent, token_ids, salt: bytes([sum(token_ids) % 2]))
    rig = make_rig(blocks=24)
    for first in range(1, 9):  # the rig compares each reply
        rig.reply([first] * 9, 9, session=f"s{first}")
        rig.reply([first] * 5 + [9, 1], 9, session=f"s{first}")
    for first in range(1, 9):
        rig.submit([first, *PRESET], 5, session=f"s{first}")
    rig.run()
    assert rig.manager.reused_tokens > 0


# --- users -----------------------------------------------------------------------------------------------------------


def test_users_share_the_preset_and_nothing_else(make_rig):
    rig = make_rig()
    secret = [*PRESET, 1, 2, 3, 4, 5, 6]
    rig.reply(secret, 4, session="a", salt=b"anna", shared_len=30)
    again = rig.submit(secret, 4, session="a2", salt=b"anna", shared_len=30)
    rig.run()
    ben = rig.submit(secret, 4, session="b", salt=b"ben", shared_len=30)
    rig.run()
    nobody = rig.submit(secret, 4, session="n", salt=b"nobody")
    rig.run()
    assert [rig.usage(request)[0] for request in (again, ben, nobody)] == [35, 30, 0]


def test_of_a_block_at_the_end_of_a_preset_users_share_the_presets_tokens_alone(make_rig):
    """Even where the next words agree, and where the one preset goes on for longer than the other."""
    rig = make_rig()
    words = [*PRESET, 1, 2, 3, 4, 5, 6]
    for user, shared_len, found in (
        ("anna", 30, 0),
        ("ben", 33, 30),
        ("cleo", 33, 33),
        ("dora", 29, 29),
        ("eve", 0, 0),
    ):
        request = rig.submit(words, 2, session=user, salt=user.encode(), shared_len=shared_len)
        rig.run()
        assert (user, rig.usage(request)[0]) == (user, found)


def test_users_do_not_wait_for_each_others_tokens(make_rig):
    rig = make_rig()
    secret = [*PRESET, 1, 2, 3, 4, 5, 6]
    for user in (b"anna", b"ben"):
        rig.submit(secret, 4, session=user.decode(), salt=user, shared_len=0)
    assert shape(rig.step()) == [(0, 36), (0, 28)]
    rig.run()


# --- arrivals at the same moment -------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [8, 64, 512])
def test_twelve_chats_at_once_compute_their_system_prompt_once(make_rig, budget):
    rig = make_rig(blocks=128, max_batch_tokens=budget)
    own = [[60 + chat] * (chat + 1) for chat in range(12)]
    requests = [rig.submit(PRESET + own[chat], 4, session=f"s{chat}") for chat in range(12)]
    rig.run()
    assert rig.model.forwarded_tokens == len(PRESET) + sum(map(len, own)) + 12 * 3
    assert [rig.usage(request)[:2] for request in requests] == [
        (30 if chat else 0, len(own[chat]) + (0 if chat else 30)) for chat in range(12)
    ]


def test_equal_prompts_at_once_are_read_once(make_rig):
    rig = make_rig()
    requests = [rig.submit(PRESET, 4, session=f"s{chat}") for chat in range(4)]
    rig.run()
    assert [rig.usage(request)[1] for request in requests] == [30, 1, 1, 1]


def test_who_shares_nothing_overtakes_who_waits_for_a_prompt_being_read(make_rig):
    rig = make_rig(max_batch_tokens=40)
    leader = rig.submit(PRESET, 4, session="leader")
    follower = rig.submit([*PRESET, 1], 4, session="follower")
    other = rig.submit([1, 2, 3], 4, session="other")
    assert shape(rig.step()) == [(0, 30), (0, 3)]
    assert shape(rig.step()) == [(30, 1), (3, 1), (30, 1)]
    assert [rig.progress[request][0].state for request in (leader, follower, other)] == [
        "reading",
        "waiting",
        "reading",
    ]
    rig.run()


def test_followers_go_as_soon_as_what_they_share_is_there(make_rig):
    rig = make_rig(max_batch_tokens=10)
    rig.submit(PRESET, 4, session="leader")
    rig.submit([*PRESET[:12], 1], 4, session="follower")
    assert [shape(rig.step()) for _ in range(4)] == [[(0, 10)], [(10, 10)], [(20, 10)], [(30, 1), (12, 1)]]
    rig.run()


@pytest.mark.parametrize("end", ["cancel", "fail", "drop"])
def test_followers_go_on_without_their_leader(make_rig, end):
    rig = make_rig(max_batch_tokens=10)
    leader = rig.submit(PRESET, 4, session="leader")
    followers = [rig.submit([*PRESET, chat], 4, session=f"s{chat}") for chat in (1, 2)]
    rig.step()
    if end == "cancel":
        rig.cancel(leader)
    elif end == "drop":
        rig.drop("leader")
    else:
        rig.model.fail_next = True
        rig.step()
    rig.run()
    found = 0 if end == "drop" else 10
    assert [rig.usage(request)[:2] for request in followers] == [(found, 31 - found), (30, 1)]


def test_nobody_waits_for_a_reply_being_written(make_rig):
    rig = make_rig()
    prompt = [1, 2, 3]
    rig.submit(prompt, 12, session="writer")
    rig.step()
    rig.submit([*prompt, *expected_reply(prompt, 9)], 2, session="reader")
    assert shape(rig.step()) == [(3, 1), (3, 9)]
    rig.run()


def test_an_urgent_request_does_not_wait_for_a_lesser_one(make_rig):
    rig = make_rig(max_batch_tokens=10)
    rig.submit(PRESET, 1, session="leader")
    rig.step()
    rig.submit([*PRESET, 1], 1, session="urgent", priority=1)
    assert shape(rig.step()) == [(10, 10)]  # it had the budget; the urgent one comes in behind
    rig.run()
