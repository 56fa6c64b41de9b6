"""Who runs in which step, and what happens when blocks run out (blocks of 4)."""

from __future__ import annotations

import pytest

from engine.protocol import Progress, Sampling
from engine.scheduler import Scheduler
from tests.engine.fake_model import expected_reply
from tests.engine.rig import RANDOM, shape

PRESET = list(range(20, 50))


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
        ([1], {"sampling": Sampling(temperature=-1.0)}, "invalid", "temperature is -1.0; it must be 0 to 100"),
        ([1], {"sampling": Sampling(top_p=float("nan"))}, "invalid", "top_p is nan; it must be 0 to 1"),
        (
            [1],
            {"sampling": Sampling(repetition_penalty=1e-30)},
            "invalid",
            "repetition_penalty is 1e-30; it must be 0.01",
        ),
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


def test_alone_a_request_waits_for_room_that_others_may_give_back(make_rig):
    rig = make_rig(blocks=3)
    rig.scheduler.allow(8)
    request = rig.submit([1, 2, 3, 4, 5, 6], 20)
    while rig.step() is not None:
        pass
    assert rig.finished[request] == {}
    assert (rig.scheduler.snapshot_fields()["waiting"], rig.scheduler.needed_blocks) == (1, 4)
    rig.scheduler.resize(8, rig.model.resize)
    rig.run()
    assert (rig.finished[request][0].reason, rig.finished[request][0].detail) == ("length", "")
    assert len(rig.replies[request][0]) == 20


def test_a_prompt_that_fits_once_others_give_way_waits(make_rig):
    rig = make_rig(blocks=2)
    rig.scheduler.allow(6)
    request = rig.submit(list(range(1, 18)), 2)
    assert rig.step() is None
    assert request not in rig.rejected
    assert rig.scheduler.needed_blocks == 5
    rig.scheduler.resize(6, rig.model.resize)
    rig.run()
    assert rig.finished[request][0].reason == "length"
    assert rig.submit(list(range(1, 30)), 2) in rig.rejected
