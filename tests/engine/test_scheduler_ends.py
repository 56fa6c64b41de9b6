"""Samples, and how requests end: by themselves, cancelled, or with a failed step (blocks of 4)."""

from __future__ import annotations

import pytest

from engine.protocol import Sampling
from tests.engine.fake_model import expected_reply
from tests.engine.rig import RANDOM

PRESET = list(range(20, 50))


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
    usages = [rig.finished[request][index].usage for index in range(4)]
    assert [(usage.queue_s, usage.first_token_s) for usage in usages] == [(1, 1)] * 4


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


def test_one_sample_is_cancelled_and_the_others_go_on(make_rig):
    rig = make_rig()
    request = rig.submit([1, 2, 3], 6, n=3, sampling=RANDOM)
    rig.cancel(request, 1)  # nothing is written yet
    rig.step()
    rig.step()
    rig.cancel(request, 1)
    assert {index: end.reason for index, end in rig.finished[request].items()} == {1: "cancelled"}
    rig.run()
    assert [rig.finished[request][index].reason for index in range(3)] == ["length", "cancelled", "length"]
    assert [len(rig.replies[request][index]) for index in range(3)] == [6, 2, 6]


def test_cancelling_what_nobody_knows_changes_nothing(make_rig):
    rig = make_rig()
    assert rig.scheduler.cancel("nobody") == []


def test_cancelled_tokens_stay_to_be_found(make_rig):
    rig = make_rig(max_batch_tokens=6)
    request = rig.submit(PRESET, 9)
    rig.step()
    rig.step()
    rig.cancel(request)
    assert rig.found(PRESET) == 12
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
    beside = rig.submit([2] * 9, 5, session="other")
    rig.model.fail_next = True
    rig.step()
    assert rig.rejected[ran].code == "internal" and rig.rejected[ran].retryable
    assert "garbage" in rig.rejected[ran].message
    assert set(rig.rejected) == {ran, beside} and rig.scheduler.idle
    assert rig.found([1] * 6) == rig.found([2] * 9) == 0
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
    assert rig.found(PRESET) == 6
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
