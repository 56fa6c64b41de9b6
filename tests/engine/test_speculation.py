"""Guessed tokens in the scheduler: what they save, what they may take, and that nothing else changes.

The fake model compares every draw with the sequence, and every reply with what it says without a cache.
"""

from __future__ import annotations

import pytest

from engine.protocol import Sampling
from engine.scheduler import Scheduler
from engine.speculation import FEW, StepCosts
from tests.engine.fake_model import expected_reply
from tests.engine.rig import Rig

PROMPT = [20, 21, 22, 23, 20, 21]
SAYS = [22, 23, 20, 21, 22, 23, 32, 21, 22, 23, 73, 22, 23, 47, 20, 21]
Rows = list[tuple[int, int, int]]


def step(rig: Rig) -> Rows:
    """First position, tokens and guessed tokens of each row of the next step."""
    batch = rig.step()
    return [] if batch is None else [(row.start, len(row.token_ids), row.guessed) for row in batch.rows]


def test_what_was_guessed_right_comes_in_one_step(make_rig) -> None:
    rig = make_rig(speculate=3, repeats=True)
    request = rig.submit(PROMPT, 16)
    steps: list[Rows] = []
    said: list[int] = []
    while not rig.scheduler.idle:
        steps.append(step(rig))
        said.append(len(rig.replies[request][0]))
    assert rig.replies[request][0] == SAYS
    assert [row for rows in steps for row in rows] == [
        (0, 6, 0), (6, 4, 3), (10, 4, 3), (12, 1, 0), (13, 1, 0), (14, 4, 3),
        (16, 1, 0), (17, 1, 0), (18, 3, 2), (19, 1, 0), (20, 1, 0),
    ]  # fmt: skip
    assert said == [1, 5, 7, 8, 9, 11, 12, 13, 14, 15, 16]
    usage = rig.finished[request][0].usage
    assert (usage.output_tokens, usage.drafted_tokens, usage.accepted_tokens) == (16, 11, 5)
    assert rig.model.forwarded_tokens == 6 + 15 + 11 - 5
    counts = rig.scheduler.snapshot_fields()
    assert (counts["drafted_tokens"], counts["accepted_tokens"], counts["sampled_tokens"]) == (11, 5, 16)
    rig.scheduler.reset_counters()
    assert rig.scheduler.snapshot_fields()["drafted_tokens"] == 0


def test_only_what_came_true_can_be_found(make_rig) -> None:
    rig = make_rig(speculate=8, repeats=True)
    reply = rig.reply(PROMPT, 8)
    assert reply == SAYS[:8]
    assert rig.found([*PROMPT, *reply, 9]) == len(PROMPT) + 7  # the token sampled last has no K and V
    # The first step guessed 22, 23, 20, 21, 22, 23 and then 20, where 32 was said.
    assert rig.found([*PROMPT, *SAYS[:6], 20, 21, 9]) == len(PROMPT) + 6


def test_off_is_off(make_rig) -> None:
    rig = make_rig(repeats=True)
    request = rig.submit(PROMPT, 16)
    assert rig.run() == 16
    assert rig.finished[request][0].usage.drafted_tokens == 0


def test_a_number_below_nothing_is_refused(make_rig) -> None:
    with pytest.raises(ValueError, match="speculate is -1; it must be at least 0"):
        make_rig(speculate=-1)


def test_a_reply_ends_where_it_would_without_guesses(make_rig) -> None:
    rig = make_rig(speculate=8, repeats=True)
    for length in range(1, 17):
        request = rig.submit(PROMPT, length, session=f"s{length}")
        rig.run()
        assert (rig.replies[request][0], rig.finished[request][0].reason) == (SAYS[:length], "length")
        assert rig.finished[request][0].detail == ""
    stopped = rig.submit(PROMPT, 16, session="stop", stop_ids=[20])
    rig.run()
    assert (rig.replies[stopped][0], rig.finished[stopped][0].reason) == ([22, 23, 20], "stop")
    assert rig.found([*PROMPT, 22, 23, 20, 21, 9]) >= len(PROMPT) + 2
    assert rig.finished[stopped][0].usage.drafted_tokens == 1  # 23; 20 would end it, and is not guessed


def test_a_reply_that_fills_the_context_guesses_nothing_beyond(make_rig) -> None:
    rig = make_rig(speculate=8, repeats=True, context_length=12)
    request = rig.submit(PROMPT, 99)
    rig.run()
    assert rig.replies[request][0] == SAYS[:6]
    assert rig.finished[request][0].detail == "the context of 12 tokens is full"


def test_a_guess_takes_no_idle_block(make_rig) -> None:
    rig = make_rig(blocks=6, speculate=8, repeats=True)
    rig.reply([1] * 12, 1, session="other")  # three blocks, and one for the reply
    idle = len(rig.manager.idle)
    rig.submit(PROMPT, 16)
    step(rig)  # two blocks of the three that are free
    assert (len(rig.manager.free), len(rig.manager.idle)) == (6 - idle - 2, idle)
    rows = step(rig)
    assert rows == [(6, 6 - 4 + 4 * (6 - idle - 2), 1 + 4 * (6 - idle - 2))]
    assert (len(rig.manager.idle), rig.manager.evicted_blocks) == (idle, 0)


def test_what_a_wrong_guess_had_is_free_at_once(make_rig) -> None:
    rig = make_rig(speculate=8, repeats=True)
    rig.submit([20, 21, 22, 30, 20, 21], 16)
    step(rig)
    free = len(rig.manager.free)
    assert step(rig) == [(6, 9, 8)]  # over two blocks more
    assert len(rig.manager.free) == free


def test_others_go_on_before_anything_is_guessed(make_rig) -> None:
    rig = make_rig(speculate=8, repeats=True, max_batch_tokens=10)
    for session in ("a", "b"):
        rig.submit(PROMPT, 12, session=session)
    assert [step(rig) for _ in range(3)] == [[(0, 6, 0)], [(6, 9, 8), (5, 1, 0)], [(12, 1, 0), (6, 9, 8)]]
    rig.submit([1] * 30, 1, session="reads")
    rows = step(rig)
    assert rows[2] == (0, 8, 0)  # all that two writers leave
    assert [row[2] for row in rows] == [0, 0, 0]


def test_a_guess_fits_the_budget(make_rig) -> None:
    rig = make_rig(speculate=8, repeats=True, max_batch_tokens=6)
    rig.submit(PROMPT, 12)
    assert [step(rig) for _ in range(2)] == [[(0, 6, 0)], [(6, 6, 5)]]


def test_cancelling_and_preempting_leave_nothing_behind(make_rig) -> None:
    rig = make_rig(blocks=6, speculate=8, repeats=True)
    prompts = {"a": PROMPT, "b": [21, 22, 23, 20, 21, 22]}
    requests = {session: rig.submit(prompt, 14, session=session) for session, prompt in prompts.items()}
    gone = rig.submit([22, 23, 20, 21, 22, 23], 14, session="c")
    for _ in range(3):
        step(rig)
    rig.cancel(gone)
    rig.run()
    for session, prompt in prompts.items():
        assert rig.replies[requests[session]][0] == expected_reply(prompt, 14, repeats=True)
    assert rig.scheduler.preemptions == 1
    assert rig.scheduler.snapshot_fields()["accepted_tokens"] > 0
    for session in "abc":
        rig.drop(session)
    assert len(rig.manager.free) == 6


def test_a_failed_step_leaves_nothing_of_a_guess(make_rig) -> None:
    rig = make_rig(speculate=8, repeats=True)
    request = rig.submit(PROMPT, 14)
    step(rig)
    rig.model.fail_next = True
    assert step(rig) == [(6, 9, 8)]
    assert rig.rejected[request].code == "internal"
    assert rig.found([*PROMPT, *SAYS]) == len(PROMPT)


def test_samples_guess_each_for_itself(make_rig) -> None:
    rig = make_rig(speculate=8, repeats=True)
    request = rig.submit(PROMPT, 30, n=3, sampling=Sampling(temperature=1.0, seed=2))
    assert rig.run() == 20
    ends = [rig.finished[request][index].usage for index in range(3)]
    assert [(end.drafted_tokens, end.accepted_tokens) for end in ends] == [(46, 10), (40, 11), (39, 13)]
    assert [rig.replies[request][index][-1] for index in range(3)] == [
        expected_reply(PROMPT, 30, sampling=Sampling(temperature=1.0, seed=2), index=index, repeats=True)[-1]
        for index in range(3)
    ]


# --- when it pays -----------------------------------------------------------------------------------------------------


def paced(rig: Rig, cost: float) -> None:
    """Have a step of `rig` take 1 s, and `cost` s for each token beyond the first."""
    scheduler: Scheduler = rig.scheduler
    commit = scheduler.commit

    def late(batch, sampled):
        rig.now += 1 + cost * (batch.tokens - 1)
        return commit(batch, sampled)

    scheduler.commit = late


def test_guesses_are_long_where_they_cost_nothing_and_few_where_they_cost_much(make_rig) -> None:
    drafted = {}
    for cost in (0.0, 0.05, 0.5):
        rig = make_rig(speculate=None, repeats=True, blocks=200)
        paced(rig, cost)
        request = rig.submit(PROMPT, 300)
        rig.run()
        drafted[cost] = rig.finished[request][0].usage.drafted_tokens
    assert drafted[0.0] > drafted[0.05] > drafted[0.5] > 0


def test_no_time_is_lost_on_a_text_that_hardly_repeats_itself(make_rig) -> None:
    seconds = {}
    for speculate in (0, None):
        rig = make_rig(speculate=speculate, blocks=200)
        paced(rig, 0.1)
        rig.submit([1, 2, 3] * 4, 400)
        rig.run()
        seconds[speculate] = rig.now
    assert seconds[None] < seconds[0] * 1.02


def test_many_that_run_guess_nothing(make_rig) -> None:
    rig = make_rig(speculate=None, repeats=True)
    requests = [rig.submit(PROMPT, 16, session=f"s{number}") for number in range(FEW + 1)]
    rig.run()
    assert [rig.finished[request][0].usage.drafted_tokens for request in requests] == [0] * (FEW + 1)
    rig.submit(PROMPT, 16, session="one")
    assert rig.run() < 16


def test_the_costs_of_steps_are_measured_and_forgotten() -> None:
    costs = StepCosts()
    assert costs.seconds(1, 1) == 0.0
    costs.observe(1, 1, 1.0)
    assert costs.seconds(1, 9) == 1.0  # so it is tried
    costs.observe(1, 9, 3.0)
    assert costs.seconds(1, 5) == 2.0
    assert costs.seconds(2, 2) == 0.0
    for seconds in (9.0, 1.2, 1.1, 1.3):  # one was held up
        costs.observe(1, 1, seconds)
    assert costs.seconds(1, 1) == 1.2
    for seconds in (0.0, -1.0, float("inf"), float("nan")):
        costs.observe(1, 1, seconds)
    assert costs.seconds(1, 1) == 1.2
    for _ in range(300):
        costs.observe(1, 1, 1.0)
    assert costs.seconds(1, 9) == 1.0
