"""What runs in which step, what is shared, what is told; on a fake model that verifies every read (blocks of 4)."""

from __future__ import annotations

import pytest

from engine.protocol import Finished, Progress, Sampling, Tokens
from engine.scheduler import Scheduler
from tests.engine.fake_model import expected_reply
from tests.engine.rig import RANDOM

PRESET = list(range(20, 50))


def shape(batch) -> list[tuple[int, int]]:
    """Start and length of each row."""
    return [(row.start, len(row.token_ids)) for row in batch.rows]


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
    assert rig.scheduler.estimate([*whole, 0]) == len(whole) - 1
    assert rig.manager.session_tokens() == {"s": len(whole) - 1}


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
    assert rig.scheduler.estimate(prompt) == 13
    assert rig.scheduler.estimate([]) == 0 and rig.scheduler.estimate([1]) == 0
    assert rig.scheduler.estimate(prompt, salt=b"other") == 0
    assert rig.evicted_next() == before
    request = rig.submit(prompt)
    rig.run()
    assert rig.usage(request)[0] == 13


def test_evicted_sessions_are_computed_again_and_say_the_same(make_rig):
    rig = make_rig(blocks=10)
    first = rig.reply([1] * 9, 6)
    for other in range(2, 6):
        rig.reply([other] * 12, 6, session=f"s{other}")
    assert rig.scheduler.estimate([1] * 9) == 0
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
    assert [rig.usage(request)[0] for request in (again, ben, nobody)] == [35, 28, 0]


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


# --- who runs --------------------------------------------------------------------------------------------------------


def test_eight_requests_of_32_tokens_take_at_most_40_steps(make_rig):
    rig = make_rig(blocks=256)
    for chat in range(8):
        rig.submit([*PRESET, chat], 32, session=f"s{chat}")
    assert rig.run() == 33


def test_replies_go_on_while_a_long_prompt_is_read(make_rig):
    rig = make_rig(max_batch_tokens=8)
    rig.submit([1, 2], 9, session="writer")
    rig.step()
    rig.submit(list(range(60, 80)), 2, session="reader")
    steps = [shape(rig.step()) for _ in range(4)]
    assert steps == [[(2, 1), (0, 7)], [(3, 1), (7, 7)], [(4, 1), (14, 6)], [(5, 1), (20, 1)]]
    rig.run()


def test_prompts_are_read_by_priority_and_then_in_order(make_rig):
    rig = make_rig(max_batch_tokens=4)
    names = {}
    for name, priority in [("a", 0), ("b", 0), ("urgent", 5), ("last", -1), ("c", 0)]:
        names[rig.submit([len(names) + 1] * 4, 1, session=name, priority=priority)] = name
    ends = []
    while not rig.scheduler.idle:
        rig.step()
        ends += [names[request] for request in rig.finished if names[request] not in ends]
    assert ends == ["urgent", "a", "b", "c", "last"]


@pytest.mark.parametrize("budget", [1, 2, 3])
def test_nobody_starves_under_the_smallest_budget(make_rig, budget):
    rig = make_rig(max_batch_tokens=budget)
    requests = [rig.submit([chat] * 5, 6, session=f"s{chat}", n=2) for chat in range(1, 5)]
    rig.run(limit=200)
    assert all(len(rig.finished[request]) == 2 for request in requests)


def test_a_request_comes_in_when_its_prompt_and_one_more_block_fit(make_rig):
    rig = make_rig(blocks=4)
    rig.submit([1] * 5, 3, session="a")
    rig.step()
    late = rig.submit([2] * 5, 3, session="b")
    assert shape(rig.step()) == [(5, 1)]
    assert [told.state for told in rig.progress[late]] == ["waiting"]
    rig.run()
    assert rig.scheduler.preemptions == 0


def test_nobody_overtakes_who_waits_for_room(make_rig):
    rig = make_rig(blocks=5)
    rig.submit([1] * 8, 8, session="a")
    rig.step()
    big, small = rig.submit([2] * 12, 1, session="big"), rig.submit([3], 1, session="small")
    while not rig.finished[big]:
        assert not rig.finished[small]
        rig.step()
    rig.run()


def test_alone_a_request_may_fill_the_pool(make_rig):
    rig = make_rig(blocks=3)
    request = rig.submit([1] * 12, 1)
    rig.run()
    assert rig.finished[request][0].detail == ""


# --- when blocks run out ---------------------------------------------------------------------------------------------


def test_the_newest_steps_back_and_says_the_same(make_rig):
    rig = make_rig(blocks=8)
    old, new = (rig.submit([chat] * 7, 16, session=f"s{chat}") for chat in (1, 2))
    rig.run()
    assert rig.scheduler.preemptions == 1
    assert [rig.finished[request][0].usage.preemptions for request in (old, new)] == [0, 1]
    assert len(rig.replies[new][0]) == 16
    found, computed, recomputed, sampled = rig.usage(new)
    assert (found, computed, sampled) == (0, 7, 16) and recomputed > 0
    usages = [rig.usage(request) for request in (old, new)]
    assert rig.model.forwarded_tokens == sum(c + r + s - 1 for _, c, r, s in usages)


def test_what_steps_back_goes_before_the_others_who_wait(make_rig):
    rig = make_rig(blocks=8)
    _, second, late = (rig.submit([chat] * 7, 16, session=f"s{chat}") for chat in (1, 2, 3))
    while not rig.scheduler.preemptions:
        rig.step()
    before = len(rig.events)
    rig.run()
    reads = [
        event.request_id for event in rig.events[before:] if isinstance(event, Progress) and event.state == "reading"
    ]
    assert list(dict.fromkeys(reads)) == [second, late]


def test_idle_blocks_go_before_anyone_steps_back(make_rig):
    rig = make_rig(blocks=8)
    rig.reply([9] * 8, 1, session="idle")
    rig.submit([1] * 7, 10, session="a")
    rig.submit([2] * 7, 6, session="b")
    rig.run()
    assert rig.scheduler.preemptions == 0 and rig.manager.evicted_blocks >= 1


def test_a_reply_that_the_pool_cannot_hold_ends_and_says_so(make_rig):
    rig = make_rig(blocks=3)
    request = rig.submit([1] * 5, 50)
    rig.run()
    end = rig.finished[request][0]
    assert (end.reason, end.detail) == ("length", "the pool of 3 blocks (12 tokens) is full")
    assert end.usage.output_tokens == 8


def test_samples_that_can_never_fit_beside_their_prompt_end_too(make_rig):
    rig = make_rig(blocks=2)
    request = rig.submit([1] * 8, 9, n=3, sampling=RANDOM)
    rig.run()
    ends = rig.finished[request]
    assert {end.detail for end in ends.values()} == {"the pool of 2 blocks (8 tokens) is full"}
    assert [len(rig.replies[request][index]) for index in range(3)] == [1, 1, 1]


def test_the_context_ends_a_reply_and_says_so(make_rig):
    rig = make_rig(context_length=10)
    clipped, exact = rig.submit([1] * 7, 9), rig.submit([2] * 7, 3)
    rig.run()
    assert [len(rig.replies[request][0]) for request in (clipped, exact)] == [3, 3]
    assert rig.finished[clipped][0].detail == "the context of 10 tokens is full"
    assert rig.finished[exact][0].detail == ""
    assert {rig.finished[request][0].reason for request in (clipped, exact)} == {"length"}


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "fields", "code", "said"),
    [
        ([], {}, "invalid", "the prompt is empty"),
        ([1], {"max_tokens": 0}, "invalid", "max_tokens is 0"),
        ([1], {"n": 0}, "invalid", "n is 0; it must be 1 to 128"),
        ([1], {"n": 129}, "invalid", "n is 129"),
        ([1, 97], {}, "invalid", "token id 97 is outside the vocabulary of 97"),
        ([1, -1], {}, "invalid", "token id -1"),
        ([1], {"shared_len": 2}, "invalid", "shared_len is 2; it must be 0 to the prompt's 1"),
        ([1], {"shared_len": -1}, "invalid", "shared_len is -1"),
        ([1] * 40, {}, "too_long", "the prompt has 40 tokens; the model's context holds 40"),
        ([1] * 33, {}, "never_fits", "has 33 tokens and needs 9 blocks; the pool holds 8 (32 tokens)"),
    ],
)
def test_what_can_never_run_is_refused_with_the_numbers(make_rig, tokens, fields, code, said):
    rig = make_rig(blocks=8, context_length=40)
    request = rig.submit(tokens, **fields)
    assert rig.rejected[request].code == code and said in rig.rejected[request].message
    assert not rig.rejected[request].retryable
    assert rig.scheduler.idle and rig.step() is None


def test_an_id_that_is_still_running_is_refused(make_rig):
    rig = make_rig()
    rig.submit([1, 2], request_id="same")
    rig.submit([3, 4], request_id="same")
    assert "same is already running" in rig.rejected["same"].message
    rig.run()
    assert rig.replies["same"][0] == expected_reply([1, 2], 4)


def test_a_pool_of_no_blocks_refuses_everything(make_rig):
    rig = make_rig(blocks=0)
    assert rig.rejected[rig.submit([1])].code == "never_fits"


def test_a_budget_of_no_tokens_is_refused(make_rig):
    with pytest.raises(ValueError, match="max_batch_tokens is 0"):
        Scheduler(make_rig().manager, context_length=8, vocab_size=8, max_batch_tokens=0)


# --- samples ---------------------------------------------------------------------------------------------------------


def test_samples_share_their_prompt(make_rig):
    rig = make_rig()
    request = rig.submit([1] * 10, 5, n=4, sampling=RANDOM)
    rig.run()
    assert [rig.usage(request, index) for index in range(4)] == [(0, 10, 0, 5)] + [(10, 0, 0, 5)] * 3
    assert rig.model.forwarded_tokens == 10 + 4 * 4
    replies = [rig.replies[request][index] for index in range(4)]
    assert replies == [expected_reply([1] * 10, 5, sampling=RANDOM, index=index) for index in range(4)]
    assert len({tuple(reply) for reply in replies}) == 4


def test_samples_of_a_seed_do_not_depend_on_what_else_runs(make_rig):
    alone, busy = make_rig(), make_rig(blocks=12)
    for chat in range(3):
        busy.submit([chat] * 6, 9, session=f"s{chat}")
    requests = [rig.submit([1] * 10, 5, n=3, sampling=RANDOM) for rig in (alone, busy)]
    alone.run()
    busy.run()
    assert alone.replies[requests[0]] == busy.replies[requests[1]]


def test_samples_without_a_seed_differ(make_rig):
    rig = make_rig()
    request = rig.submit([1] * 10, 8, n=2, sampling=Sampling(temperature=1.0))
    rig.run()
    assert rig.replies[request][0] != rig.replies[request][1]


def test_samples_wait_with_their_own_tokens_when_there_is_no_room(make_rig):
    rig = make_rig(blocks=5)
    request = rig.submit([1] * 10, 6, n=4, sampling=RANDOM)
    rig.run()
    assert sorted(rig.finished[request]) == [0, 1, 2, 3]
    assert {end.reason for end in rig.finished[request].values()} == {"length"}
    assert {end.detail for end in rig.finished[request].values()} == {""}


# --- ends ------------------------------------------------------------------------------------------------------------


def test_a_stop_id_ends_a_reply_and_is_its_last_token(make_rig):
    rig = make_rig()
    whole = expected_reply([1, 2, 3], 8)
    request = rig.submit([1, 2, 3], 8, stop_ids=[whole[3], 96])
    rig.run()
    assert rig.replies[request][0] == whole[:4]
    assert rig.finished[request][0].reason == "stop"


def test_a_reply_of_one_token_takes_one_step(make_rig):
    rig = make_rig()
    request = rig.submit([1, 2, 3], 1)
    assert rig.run() == 1
    assert rig.usage(request) == (0, 3, 0, 1)


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 4, 6])
def test_cancelling_ends_a_request_in_any_state(make_rig, steps):
    rig = make_rig(max_batch_tokens=4)
    request = rig.submit([1] * 10, 9, n=3, sampling=RANDOM)
    other = rig.submit([2] * 6, 3, session="other")
    for _ in range(steps):
        rig.step()
    rig.cancel(request)
    assert [end.reason for end in rig.finished[request].values()] == ["cancelled"] * 3
    rig.cancel(request)
    batch = rig.step()
    assert all(row.token_ids[0] in [2, *rig.replies[other][0]] for row in batch.rows)
    rig.run()
    assert rig.manager.leased_blocks == 0


def test_cancelling_what_nobody_knows_changes_nothing(make_rig):
    rig = make_rig()
    assert rig.scheduler.cancel("nobody") == []


def test_cancelled_tokens_stay_to_be_found(make_rig):
    rig = make_rig(max_batch_tokens=6)
    request = rig.submit(PRESET, 9)
    rig.step()
    rig.step()
    rig.cancel(request)
    assert rig.scheduler.estimate(PRESET) == 12
    assert rig.usage(request) == (0, 12, 0, 0)


def test_dropping_a_session_cancels_it_first(make_rig):
    rig = make_rig()
    request = rig.submit(PRESET, 9, session="gone")
    rig.step()
    assert rig.drop("gone") == 8
    assert rig.finished[request][0].reason == "cancelled"
    assert rig.manager.counts()["free_blocks"] == rig.manager.total_blocks
    assert rig.drop("nobody") == 0


# --- a step that fails -----------------------------------------------------------------------------------------------


def test_a_failed_step_ends_its_requests_and_publishes_nothing(make_rig):
    rig = make_rig(max_batch_tokens=8)
    ran = rig.submit([1] * 6, 9, n=2, sampling=RANDOM)
    waits = rig.submit([2] * 9, 5, session="other")
    rig.model.fail_next = True
    rig.step()
    assert rig.rejected[ran].code == "internal" and rig.rejected[ran].retryable
    assert "garbage" in rig.rejected[ran].message
    assert rig.rejected.get(waits) is not None or rig.scheduler.estimate([1] * 6) == 0
    rig.run()
    assert rig.reply([1] * 6, 9) == expected_reply([1] * 6, 9)


def test_a_failed_step_spares_who_was_not_in_it(make_rig):
    rig = make_rig(max_batch_tokens=6)
    ran, waits = rig.submit([1] * 6, 9), rig.submit([2] * 9, 5, session="other")
    rig.model.fail_next = True
    rig.step()
    assert list(rig.rejected) == [ran]
    rig.run()
    assert rig.finished[waits][0].reason == "length"


def test_tokens_of_earlier_steps_survive_a_failed_one(make_rig):
    rig = make_rig(max_batch_tokens=6)
    rig.submit(PRESET, 9)
    rig.step()
    rig.model.fail_next = True
    rig.step()
    assert rig.scheduler.estimate(PRESET) == 6
    assert rig.reply(PRESET, 9) == expected_reply(PRESET, 9)


def test_a_copy_that_fails_ends_only_the_request_that_wanted_it(make_rig):
    rig = make_rig()
    rig.reply(PRESET, 2)
    running = rig.submit([1, 2, 3], 9, session="running")
    rig.step()
    culprit = rig.submit([*PRESET[:6], 1], 2)
    rig.manager._copy_tokens = lambda *_: (_ for _ in ()).throw(MemoryError("no memory"))
    with pytest.raises(MemoryError):
        rig.scheduler.schedule()
    rig.note(rig.scheduler.fail("no memory"))
    assert culprit in rig.rejected and running in rig.rejected  # both were in the step
    rig.check()
    assert rig.scheduler.idle


def test_an_answer_that_does_not_fit_the_batch_is_not_taken(make_rig):
    rig = make_rig()
    rig.submit([1, 2, 3], 2)
    batch = rig.scheduler.schedule()
    with pytest.raises(RuntimeError, match="does not fit"):
        rig.scheduler.commit(batch, [[1, 2]])
    rig.note(rig.scheduler.commit(batch, rig.model.run(batch)))
    rig.run()


def test_between_plan_and_commit_nothing_is_taken_away(make_rig):
    rig = make_rig()
    request = rig.submit([1, 2, 3], 2)
    batch = rig.scheduler.schedule()
    for call in (lambda: rig.scheduler.cancel(request), lambda: rig.scheduler.drop("s"), rig.scheduler.schedule):
        with pytest.raises(RuntimeError, match="a step is planned"):
            call()
    rig.note(rig.scheduler.commit(batch, rig.model.run(batch)))
    rig.run()


# --- what is told ----------------------------------------------------------------------------------------------------


def test_the_whole_life_of_a_request_as_it_is_told(make_rig):
    rig = make_rig(max_batch_tokens=4)
    said = rig.scheduler.submit(rig_submit := _submit("r", [1, 2, 3, 4, 5, 6], 2))
    while not rig.scheduler.idle:
        rig.now += 1
        batch = rig.scheduler.schedule()
        said += rig.scheduler.take_events() + rig.scheduler.commit(batch, rig.model.run(batch))
    reply = expected_reply(rig_submit.token_ids, 2)

    def reading(read: int) -> Progress:
        return Progress(request_id="r", state="reading", reused=0, read=read, total=6)

    assert said[:5] == [
        reading(0),
        reading(4),
        reading(6),
        Tokens(request_id="r", index=0, token_ids=reply[:1]),
        Tokens(request_id="r", index=0, token_ids=reply[1:]),
    ]
    (end,) = said[5:]
    assert isinstance(end, Finished) and (end.reason, end.index, end.detail) == ("length", 0, "")
    assert (end.usage.queue_s, end.usage.first_token_s, end.usage.total_s) == (1, 2, 3)


def _submit(request_id, token_ids, max_tokens):
    from engine.protocol import Submit

    return Submit(request_id=request_id, session_id="s", token_ids=token_ids, max_tokens=max_tokens)


def test_waiting_is_told_once_and_reading_each_step(make_rig):
    rig = make_rig(max_batch_tokens=10)
    rig.reply(PRESET[:13], 1)
    first = rig.submit([1] * 25, 2, session="a")
    second = rig.submit(PRESET, 1, session="b")
    rig.run()
    told = [(event.state, event.reused, event.read) for event in rig.progress[first]]
    assert told == [("reading", 0, 0), ("reading", 0, 10), ("reading", 0, 20), ("reading", 0, 25)]
    told = [(event.state, event.reused, event.read) for event in rig.progress[second]]
    assert told == [("waiting", 0, 0), ("reading", 13, 0), ("reading", 13, 5), ("reading", 13, 14), ("reading", 13, 17)]


def test_a_request_cancelled_while_it_waits_has_cost_nothing(make_rig):
    rig = make_rig()
    request = rig.submit([1, 2, 3], 2)
    rig.now += 5
    rig.cancel(request)
    usage = rig.finished[request][0].usage
    assert rig.usage(request) == (0, 0, 0, 0)
    assert (usage.prompt_tokens, usage.queue_s, usage.first_token_s, usage.total_s) == (0, 5, None, 5)


def test_a_snapshot_counts_blocks_and_requests(make_rig):
    rig = make_rig(blocks=16)
    rig.reply([1] * 9, 4, session="a")
    rig.submit([1] * 5 + [2] * 5, 4, session="b")
    rig.submit([1] * 5 + [2] * 5, 4, session="c")
    rig.step()
    assert rig.scheduler.snapshot_fields() == {
        "total_blocks": 16,
        "free_blocks": 11,
        "leased_blocks": 3,
        "idle_blocks": 2,
        "running": 1,
        "waiting": 1,
        "reused_tokens": 5,
        "sampled_tokens": 5,
        "preemptions": 0,
        "evicted_blocks": 0,
        "session_tokens": {"a": 12, "b": 10},
    }
    rig.run()
    rig.scheduler.reset_counters()
    fields = rig.scheduler.snapshot_fields()
    assert [fields[name] for name in ("reused_tokens", "sampled_tokens", "preemptions", "evicted_blocks")] == [0] * 4


def test_an_empty_scheduler_has_nothing_to_say(make_rig):
    rig = make_rig()
    assert rig.scheduler.idle and rig.scheduler.schedule() is None and rig.scheduler.take_events() == []
    assert rig.scheduler.fail("nothing ran") == []
    assert rig.scheduler.snapshot_fields()["session_tokens"] == {}
