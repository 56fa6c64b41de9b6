"""The sampler: what each parameter does to a row, and that random numbers depend on seed and position alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from engine.batch import Draw
from engine.errors import StepError
from engine.model.sampler import sample, uniform
from engine.protocol import Sampling

LOGITS = torch.tensor([[1.0, 3.0, 2.0, -1.0, 2.9]])


def draw(
    position: int = 0, seed: int = 7, prompt: list[int] | None = None, reply: list[int] | None = None, **kw
) -> Draw:
    return Draw(sampling=Sampling(**kw), seed=seed, position=position, prompt_ids=prompt or [], reply_ids=reply or [])


def frequencies(count: int = 4000, **kw) -> list[float]:
    """How often each id is drawn over `count` positions."""
    drawn = sample(LOGITS.expand(count, -1), [draw(position=i, **kw) for i in range(count)])
    return (torch.bincount(torch.tensor(drawn), minlength=5) / count).tolist()


def test_greedy_takes_the_largest() -> None:
    assert sample(LOGITS, [draw()]) == [1]


@pytest.mark.parametrize("kw", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}, {"temperature": 1e-4}])
def test_each_warper_at_its_tightest_is_greedy(kw: dict) -> None:
    assert frequencies(50, **{"temperature": 1.0, **kw}) == [0, 1, 0, 0, 0]


def test_draws_follow_the_softmax() -> None:
    assert frequencies(temperature=1.0) == pytest.approx(LOGITS[0].softmax(0).tolist(), abs=0.02)
    assert frequencies(temperature=2.0) == pytest.approx((LOGITS[0] / 2).softmax(0).tolist(), abs=0.02)


def test_top_k_and_top_p_and_min_p_cut_the_tail() -> None:
    assert [f > 0 for f in frequencies(temperature=1.0, top_k=2)] == [False, True, False, False, True]
    assert [f > 0 for f in frequencies(temperature=1.0, top_p=0.8)] == [False, True, True, False, True]
    assert [f > 0 for f in frequencies(temperature=1.0, min_p=0.5)] == [False, True, False, False, True]


def test_penalties_move_the_choice() -> None:
    assert sample(LOGITS, [draw(reply=[1], presence_penalty=0.2)]) == [4]
    assert sample(LOGITS, [draw(reply=[1], frequency_penalty=0.2)]) == [4]
    assert sample(LOGITS, [draw(reply=[1, 4, 4], frequency_penalty=0.2)]) == [1]
    assert sample(LOGITS, [draw(prompt=[1], repetition_penalty=1.2)]) == [4]
    assert sample(LOGITS, [draw(prompt=[1], presence_penalty=2.0, frequency_penalty=2.0)]) == [1]  # the reply's only


def test_a_draw_depends_on_seed_and_position_alone() -> None:
    one = draw(position=3, temperature=1.0)
    others = [draw(position=i, seed=i, temperature=1.0) for i in range(5)]
    alone = sample(LOGITS, [one])
    among = sample(LOGITS.expand(6, -1), [*others[:2], one, *others[2:]])
    assert among[2] == alone[0]
    assert uniform(7, 3) == uniform(7, 3)
    assert len({uniform(seed, position) for seed in range(20) for position in range(20)}) == 400
    assert all(0 <= uniform(2**64 - 1, position) < 1 for position in range(100))


@pytest.mark.parametrize("temperature", [1e-5, 1e-45, 1e-300])
def test_a_temperature_too_small_to_divide_by_is_greedy(temperature: float) -> None:
    assert frequencies(20, temperature=temperature, top_p=0.9) == [0, 1, 0, 0, 0]


def test_the_most_extreme_values_let_through_still_draw_what_is_there() -> None:
    for kw in ({"top_p": 0.0}, {"min_p": 1.0}, {"repetition_penalty": 0.01}, {"temperature": 100.0}):
        drawn = sample(LOGITS, [draw(prompt=[0, 1], reply=[1], **{"temperature": 1e-4, **kw})])
        assert drawn[0] in range(5)
    assert sample(LOGITS, [draw(prompt=[1, 3], temperature=1e-4, repetition_penalty=0.01)]) == [1]
    assert sample(LOGITS, [draw(prompt=[3], temperature=1e-4, repetition_penalty=100.0)]) == [1]


def test_an_impossible_token_is_never_drawn() -> None:
    logits = torch.tensor([[float("-inf"), 0.0, float("-inf")]])
    drawn = sample(logits.expand(500, -1), [draw(position=i, temperature=1.0) for i in range(500)])
    assert set(drawn) == {1}


@pytest.mark.parametrize(
    "kw", [{}, {"temperature": 0.7}, {"temperature": 0.7, "top_p": 0.9}, {"presence_penalty": 1.0}]
)
def test_logits_that_are_not_numbers_are_an_error(kw: dict) -> None:
    with pytest.raises(StepError, match="NaN"):
        sample(torch.tensor([[0.0, 1.0], [0.0, float("nan")]]), [draw(**kw), draw(**kw)])


@pytest.mark.parametrize(
    "kw", [{}, {"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.9}, {"temperature": 1.0, "top_k": 2}]
)
def test_of_infinite_logits_the_first_is_drawn(kw: dict) -> None:
    logits = torch.tensor([[0.0, float("inf"), float("inf")]])
    assert {sample(logits, [draw(position=i, **kw)])[0] for i in range(20)} == {1}


def test_a_mixed_batch_keeps_its_order() -> None:
    draws = [draw(), draw(temperature=1.0, top_k=1), replace(draw(), reply_ids=[1])]
    rows = torch.stack([LOGITS[0], LOGITS[0].flip(0), LOGITS[0]])
    assert sample(rows, draws) == [1, 3, 1]


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.7},
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 2.0, "top_p": 0.5},
        {"temperature": 3.0, "top_p": 0.999},
        {"temperature": 1.5, "top_k": 19},
        {"temperature": 1.0, "top_k": 50},
        {"temperature": 1.0, "top_k": 20, "top_p": 0.8},
        {"temperature": 1.0, "top_k": 6000, "top_p": 0.99, "min_p": 0.02},
        {"temperature": 1.5, "min_p": 0.05},
        {"temperature": 0.9, "top_p": 0.95, "repetition_penalty": 1.3},
    ],
)
def test_what_transformers_would_leave_is_what_is_drawn_from(settings: dict) -> None:
    logits = torch.randn(1, 5003, generator=torch.Generator().manual_seed(5)) * 3
    penalty = settings.get("repetition_penalty")
    steps = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(penalty)] if penalty else [])
    steps.append(TemperatureLogitsWarper(settings["temperature"]))
    steps += [TopKLogitsWarper(settings["top_k"])] if "top_k" in settings else []
    steps += [TopPLogitsWarper(settings["top_p"])] if "top_p" in settings else []
    steps += [MinPLogitsWarper(settings["min_p"])] if "min_p" in settings else []
    probabilities = steps(torch.tensor([[*range(0, 5003, 3)]]), logits)[0].double().softmax(-1)
    points = torch.tensor([uniform(7, position) for position in range(200)], dtype=torch.float64)
    expected = torch.searchsorted(probabilities.cumsum(0), points, right=True).tolist()
    draws = [draw(position=position, prompt=[*range(0, 5003, 3)], **settings) for position in range(200)]
    assert sample(logits.expand(200, -1), draws) == expected
    assert len(set(expected)) >= 10


def test_of_equal_tokens_the_first_are_greedy_and_stay_longest() -> None:
    equal = torch.tensor([[-5.0, 1.0, 1.0, 1.0, 1.0]], dtype=torch.bfloat16)
    assert sample(equal, [draw()]) == [1]
    assert sample(equal, [draw(temperature=1.0, top_p=0.0)]) == [1]
    drawn = sample(equal.expand(200, -1), [draw(position=i, temperature=1.0, top_p=0.5) for i in range(200)])
    assert set(drawn) == {1, 2, 3}  # of the sum, 1 and 2 have a hair less than half
    drawn = sample(equal.expand(200, -1), [draw(position=i, temperature=1.0, top_k=2) for i in range(200)])
    assert set(drawn) == {1, 2, 3, 4}  # as in transformers, none that equals the last one goes


def test_of_a_large_vocabulary_all_that_equal_the_last_of_top_k_stay() -> None:
    logits = torch.zeros(1, 10_000)
    logits[0, [9, 700, 5000, 9999]] = torch.tensor([2.0, 1.0, 1.0, 1.0])
    for top_k in (2, 4):
        drawn = sample(logits.expand(200, -1), [draw(position=i, temperature=1.0, top_k=top_k) for i in range(200)])
        assert set(drawn) == {9, 700, 5000, 9999}


def test_of_many_alike_top_p_keeps_its_share_of_the_first() -> None:
    logits = torch.zeros(1, 5000)
    for top_p, share in ((0.0, 0), (0.3, 1500), (0.9, 4500), (0.9999999, 5000)):
        drawn = sample(logits.expand(300, -1), [draw(position=i, temperature=1.0, top_p=top_p) for i in range(300)])
        assert share * 0.97 <= max(drawn) < share + 2


def test_an_impossible_token_is_never_drawn_from_a_large_vocabulary() -> None:
    logits = torch.full((1, 10_000), float("-inf"))
    logits[0, [255, 256, 7000]] = 0.0
    drawn = sample(logits.expand(300, -1), [draw(position=i, temperature=1.0) for i in range(300)])
    assert set(drawn) == {255, 256, 7000}


def test_random_numbers_stay_as_they_are() -> None:
    assert uniform(7, 3) == 0.44205212947108785
    for seed in (0, 1, 2**32, 2**63 - 1, 2**64 - 1):
        for position in (0, 1, 4095, 2**31):
            philox = np.random.Philox(key=seed, counter=position)
            assert uniform(seed, position) == np.random.Generator(philox).random()


def test_any_number_of_rows_of_any_kind_is_drawn_as_each_alone() -> None:
    kinds = [{}, {"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.9}, {"temperature": 1.2, "top_p": 0.9}]
    kinds += [{"temperature": 1.0, "top_k": 3}, {"temperature": 1.0, "min_p": 0.1}, {"presence_penalty": 0.5}]
    draws = [draw(position=i, seed=i, reply=[1, 2], **kinds[i % len(kinds)]) for i in range(50)]
    for dtype in (torch.float32, torch.bfloat16):
        logits = (torch.randn(50, 3001, generator=torch.Generator().manual_seed(3)) * 3).to(dtype)
        with torch.inference_mode():
            together = sample(logits, draws)
        assert together == [sample(row[None], [one])[0] for row, one in zip(logits, draws, strict=True)]
        assert together == sample(logits.float(), draws)


def test_the_logits_stay_as_they_are() -> None:
    logits = LOGITS.clone()
    sample(logits, [draw(prompt=[1], reply=[1], temperature=1.0, repetition_penalty=1.2, presence_penalty=0.5)])
    assert torch.equal(logits, LOGITS)
