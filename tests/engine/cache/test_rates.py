"""Rates are learned from synthetic measurements whose truth is known; no real clock is read."""

from __future__ import annotations

import math
import random

import pytest

from engine.cache.rates import MovingRate, Run, StepTimes, context_tokens, how_many_to_load

Truth = tuple[float, float, float, float]
CPU: Truth = (0.01, 0.0015, 1e-6, 0.002)  # seconds a step, a token, a context token, a row
GPU: Truth = (0.02, 0.0002, 1e-8, 0.0001)
BARE: Truth = (0.0, 0.002, 5e-7, 0.0)
SIZES = {  # tokens, context tokens, rows
    "one decoding": (1, 1000, 1),
    "eight decoding": (8, 16_000, 8),
    "a message": (40, context_tokens(1000, 40), 1),
    "a message, deep": (40, context_tokens(7000, 40), 1),
    "a chunk": (512, context_tokens(500, 512), 1),
    "a chunk, deep": (512, context_tokens(7500, 512), 1),  # deeper than any that is measured below
}


def takes(truth: Truth, tokens: int, context: int, rows: int) -> float:
    return truth[0] + truth[1] * tokens + truth[2] * context + truth[3] * rows


def chat(model: StepTimes, truth: Truth, *, seed: int = 0, noise: float = 0.0, outliers: float = 0.0) -> None:
    """Thirty prompts of up to 1,500 tokens over up to 4,000, in chunks beside up to three others, then 60 replies."""
    draw = random.Random(seed)

    def step(tokens: int, context: int, rows: int) -> None:
        seconds = takes(truth, tokens, context, rows) * draw.uniform(1 - noise, 1 + noise)
        model.observe(tokens, context, rows, seconds * (draw.choice([5, 30]) if draw.random() < outliers else 1))

    for _ in range(30):
        position, left = draw.randrange(4000), draw.randrange(20, 1500)
        while left:
            chunk, beside = min(512, left), draw.randrange(4)
            others = sum(draw.randrange(100, 4000) for _ in range(beside))
            step(chunk + beside, context_tokens(position, chunk) + others, beside + 1)
            position, left = position + chunk, left - chunk
        for _ in range(60):
            rows = draw.randrange(1, 9)
            step(rows, sum(draw.randrange(100, 4000) for _ in range(rows)), rows)


def errors(model: StepTimes, truth: Truth) -> dict[str, float]:
    """By how much each size is wrong, relative to the truth."""
    return {name: abs(model.seconds(*size) / takes(truth, *size) - 1) for name, size in SIZES.items()}


# --- steps ------------------------------------------------------------------------------------------------------------


def test_context_tokens_are_the_positions_that_are_read():
    assert context_tokens(0, 3) == 1 + 2 + 3
    assert context_tokens(10, 2) == 11 + 12
    assert context_tokens(999, 1) == 1000
    assert context_tokens(7, 0) == 0


def test_nothing_is_known_before_anything_was_measured():
    model = StepTimes()
    assert model.seconds(1, 1, 1) is None
    assert model.prefill_seconds(0, 10, 4) is None
    assert model.prefill_seconds(0, 0, 4) == 0.0


@pytest.mark.parametrize("truth", [CPU, GPU, BARE], ids=["cpu", "gpu", "bare"])
def test_steps_are_foretold_within_five_per_cent(truth):
    model = StepTimes()
    chat(model, truth)
    assert max(errors(model, truth).values()) < 0.05, errors(model, truth)


@pytest.mark.parametrize("truth", [CPU, GPU, BARE], ids=["cpu", "gpu", "bare"])
@pytest.mark.parametrize("seed", range(3))
def test_first_steps_and_pauses_spoil_nothing(truth, seed):
    model = StepTimes()
    model.observe(300, context_tokens(0, 300), 1, 40 * takes(truth, 300, context_tokens(0, 300), 1))
    chat(model, truth, seed=seed, noise=0.05, outliers=0.03)
    model.observe(1, 1000, 1, 3600.0)  # the lid was closed
    assert max(errors(model, truth).values()) < 0.1, errors(model, truth)


def test_one_measurement_foretells_its_like():
    model = StepTimes()
    model.observe(100, context_tokens(0, 100), 1, 0.5)
    assert model.seconds(100, context_tokens(0, 100), 1) == pytest.approx(0.5, rel=1e-3)
    assert 0.5 <= model.seconds(200, context_tokens(0, 200), 1) <= 2.0


def test_a_slow_first_step_is_forgotten_with_the_second():
    model = StepTimes()
    for seconds in (9.0, 0.5):
        model.observe(100, context_tokens(0, 100), 1, seconds)
    assert model.seconds(100, context_tokens(0, 100), 1) == pytest.approx(0.5, rel=1e-3)


def test_a_machine_that_becomes_slower_is_believed():
    model = StepTimes()
    chat(model, CPU)
    slower: Truth = (0.03, 0.0045, 3e-6, 0.006)
    chat(model, slower, seed=1)
    assert max(errors(model, slower).values()) < 0.1, errors(model, slower)


def test_hours_of_decoding_do_not_unlearn_prefill():
    model = StepTimes()
    chat(model, CPU)
    for step in range(50_000):
        model.observe(2, 1000 + step % 1000, 2, takes(CPU, 2, 1000 + step % 1000, 2))
    assert max(errors(model, CPU).values()) < 0.05, errors(model, CPU)


def test_what_was_measured_counts_soon_and_a_new_size_at_once():
    model = StepTimes()
    for _ in range(1000):
        model.observe(1, 1000, 1, 0.02)
        model.seconds(1, 1000, 1)
    model.observe(500, context_tokens(0, 500), 1, 2.0)
    assert model.seconds(500, context_tokens(0, 500), 1) == pytest.approx(2.0, rel=0.01)
    for _ in range(40):
        model.observe(1, 1000, 1, 0.04)
        model.seconds(1, 1000, 1)
    assert model.seconds(1, 1000, 1) == pytest.approx(0.04, rel=0.01)


@pytest.mark.parametrize("seconds", [-1.0, 0.0, math.nan, math.inf, -math.inf])
def test_a_clock_that_went_back_or_stood_still_is_ignored(seconds):
    model = StepTimes()
    model.observe(1, 1000, 1, seconds)
    assert model.seconds(1, 1000, 1) is None
    model.observe(1, 1000, 1, 0.02)
    for _ in range(20):
        model.observe(1, 1000, 1, seconds)
    assert model.seconds(1, 1000, 1) == pytest.approx(0.02, rel=1e-3)


def test_no_rate_is_negative_whatever_was_measured():
    model = StepTimes()
    for tokens, seconds in [(1, 9.0), (10, 5.0), (100, 3.0), (1000, 1.0)]:  # more takes less, which cannot be
        model.observe(tokens, tokens * 50, 1, seconds)
    assert all(model.seconds(*size) > 0 for size in SIZES.values())
    assert model.seconds(1000, 50_000, 1) >= model.seconds(1, 50, 1)


def test_steps_of_a_thousand_sizes_take_no_more_memory():
    model = StepTimes()
    draw = random.Random(0)
    for _ in range(5000):
        tokens, rows = int(2 ** draw.uniform(0, 14)), int(2 ** draw.uniform(0, 8))
        context = int(tokens * 2 ** draw.uniform(0, 17))
        model.observe(tokens, context, rows, takes(CPU, tokens, context, rows))
    assert len(model._cells) == 64
    assert max(errors(model, CPU).values()) < 0.1, errors(model, CPU)


def test_a_prefill_is_the_sum_of_its_chunks():
    model = StepTimes()
    chat(model, CPU)
    steps = [
        model.seconds(512, context_tokens(1000, 512), 1),
        model.seconds(512, context_tokens(1512, 512), 1),
        model.seconds(176, context_tokens(2024, 176), 1),
    ]
    assert model.prefill_seconds(1000, 1200, 512) == pytest.approx(sum(steps))
    assert model.prefill_seconds(1000, 1200, 0) == pytest.approx(model.prefill_seconds(1000, 1200, 1))


# --- copies -----------------------------------------------------------------------------------------------------------


def test_a_rate_weighs_by_amount():
    rate = MovingRate()
    assert rate.seconds_for(100) is None
    rate.observe(1000, 1.0)
    assert rate.seconds_for(500) == 0.5
    rate.observe(10, 0.02)  # half as fast, but little
    assert rate.seconds_for(1000) == pytest.approx(1000 * (0.9 * 1.0 + 0.02) / (0.9 * 1000 + 10))
    assert rate.seconds_for(0) == 0.0


def test_a_rate_follows_what_changes():
    rate = MovingRate()
    for _ in range(30):
        rate.observe(100, 1.0)
    for _ in range(60):
        rate.observe(100, 10.0)
    assert rate.seconds_for(100) == pytest.approx(10.0, rel=0.05)


def test_a_copy_that_was_interrupted_spoils_no_rate():
    rate = MovingRate()
    for _ in range(30):
        rate.observe(100, 1.0)
    rate.observe(100, 3600.0)
    assert rate.seconds_for(100) < 1.5


@pytest.mark.parametrize(("amount", "seconds"), [(5, -1.0), (5, 0.0), (5, math.nan), (5, math.inf), (0, 1.0)])
def test_what_no_clock_can_have_measured_changes_no_rate(amount, seconds):
    rate = MovingRate()
    rate.observe(amount, seconds)
    assert rate.seconds_for(1) is None
    rate.observe(10, 1.0)
    rate.observe(amount, seconds)
    assert rate.seconds_for(10) == 1.0


# --- load or recompute ------------------------------------------------------------------------------------------------

HOST, DISK = Run("host", 10, 0.5), Run("disk", 10, 3.0)


def a_block_takes(seconds: float):
    return lambda first, blocks: seconds * blocks


@pytest.mark.parametrize(
    ("runs", "block_s", "expected"),
    [
        ([HOST, DISK], 0.4, 20),  # 3.5 < 0.5 + 4.0 < 8.0
        ([HOST, DISK], 0.2, 10),  # 0.5 + 2.0 < 3.5 < 4.0
        ([HOST, DISK], 0.04, 0),  # 0.8 < 0.5 + 0.4
        ([DISK, HOST], 0.2, 20),  # 3.5 < 4.0, and 3.0 + 2.0 is the most
        ([DISK, HOST], 0.1, 0),
        ([HOST, DISK], 0.3, 20),  # 3.5 = 0.5 + 3.0: of equals, more
        ([], 0.1, 0),
        ([Run("host", 0, 0.0)], 0.1, 0),
    ],
)
def test_the_cheaper_is_taken(runs, block_s, expected):
    assert how_many_to_load(runs, a_block_takes(block_s)) == expected


def test_it_is_asked_for_the_blocks_that_are_left():
    asked: list[tuple[int, int]] = []

    def compute_seconds(first: int, blocks: int) -> float:
        asked.append((first, blocks))
        return blocks * 0.2

    how_many_to_load([HOST, DISK], compute_seconds)
    assert asked == [(0, 20), (10, 10), (20, 0)]


def test_within_a_run_the_middle_is_never_the_best():
    truth = StepTimes()
    chat(truth, CPU)

    def compute_seconds(first: int, blocks: int) -> float:
        return truth.prefill_seconds(first * 32, blocks * 32, 10_000)

    for block_s in (0.01, 0.03, 0.05, 0.06, 0.08, 0.2):
        costs = {count: count * block_s + compute_seconds(count, 128 - count) for count in range(129)}
        chosen = how_many_to_load([Run("disk", 128, 128 * block_s)], compute_seconds)
        assert costs[chosen] == pytest.approx(min(costs.values()))


@pytest.mark.parametrize(
    ("runs", "compute_seconds"),
    [
        ([HOST, DISK], lambda first, blocks: None),
        ([HOST, DISK], lambda first, blocks: 0.0 if first == 0 else None),
        ([HOST, DISK], lambda first, blocks: 0.0 if first > 0 else None),
        ([Run("host", 10, None), DISK], a_block_takes(0.0)),
        ([HOST, Run("disk", 10, None)], a_block_takes(0.0)),
    ],
)
def test_what_is_unknown_is_loaded(runs, compute_seconds):
    assert how_many_to_load(runs, compute_seconds) == 20


def test_either_can_be_forced():
    assert how_many_to_load([HOST, DISK], a_block_takes(0.0), force="load") == 20
    assert how_many_to_load([HOST, DISK], a_block_takes(99.0), force="recompute") == 0
