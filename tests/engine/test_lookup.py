"""Guesses by looking up the last tokens: what is found, what is not, and what is learned from how they ended."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.lookup import LENGTHS, Guess, Lookup


def test_what_followed_the_last_tokens_is_guessed() -> None:
    assert Lookup().guess([1, 2, 3, 4, 5, 6, 7, 1, 2, 3, 4], 3) == Guess([5, 6, 7], 4)
    assert Lookup().guess([9, 2, 3, 4, 5, 6, 7, 1, 2, 3, 4], 2) == Guess([5, 6], 3)
    assert Lookup().guess([9, 8, 3, 4, 5, 6, 7, 1, 2, 3, 4], 1) == Guess([5], 2)
    assert Lookup().guess([9, 8, 7, 4, 5, 6, 7, 1, 2, 3, 4], 8) is None  # one token alone says too little


def test_the_longest_run_goes_first_and_of_equal_ones_the_last() -> None:
    assert Lookup().guess([1, 2, 3, 4, 50, 9, 2, 3, 4, 60, 1, 2, 3, 4], 1) == Guess([50], 4)
    assert Lookup().guess([1, 2, 50, 1, 2, 60, 1, 2], 1) == Guess([60], 2)


def test_a_text_that_has_just_begun_to_repeat_itself_goes_on_so() -> None:
    assert Lookup().guess([7, 8, 9, 7, 8], 8) == Guess([9, 7, 8, 9, 7, 8, 9, 7], 2)
    assert Lookup().guess([5, 5, 5], 4) == Guess([5, 5, 5, 5], 2)


def test_a_guess_ends_before_what_would_end_the_reply() -> None:
    assert Lookup().guess([1, 2, 3, 4, 5, 1, 2], 4, {4}) == Guess([3], 2)
    assert Lookup().guess([1, 2, 3, 4, 5, 1, 2], 4, {3}) is None


def test_nothing_is_found_in_too_few_tokens() -> None:
    for length in range(3):
        assert Lookup().guess([1] * length, 4) is None


def test_a_long_prompt_is_noted_bit_by_bit() -> None:
    ids, lookup = list(range(3000)), Lookup()
    assert lookup.guess([*ids, 500, 501], 2) == Guess([502, 503], 2)
    assert lookup.guess([*ids, 500, 501, 2998, 2999], 1) is None  # not yet
    assert lookup.guess([*ids, 500, 501, 2998, 2999, 2998, 2999], 2) == Guess([2998, 2999], 2)


def by_hand(ids: list[int], most: int) -> Guess | None:
    for length in LENGTHS:
        for end in reversed(range(length, len(ids))):
            if ids[end - length : end] == ids[-length:]:
                found = list(ids)
                for index in range(most):
                    found.append(found[end + index])
                return Guess(found[len(ids) :], length)
    return None


@given(ids=st.lists(st.integers(1, 3), min_size=1, max_size=40), steps=st.integers(1, 5), most=st.integers(1, 6))
def test_the_index_finds_what_a_search_finds(ids: list[int], steps: int, most: int) -> None:
    lookup = Lookup()
    for length in range(1, len(ids) + 1, steps):
        assert lookup.guess(ids[:length], most) == by_hand(ids[:length], most)


def test_the_share_follows_what_came_true() -> None:
    lookup = Lookup()
    assert lookup.share(4) == 0.5
    lookup.learn(4, 3, missed=True)
    assert lookup.share(4) == pytest.approx(3.9 / 5.8)
    for _ in range(40):
        lookup.learn(4, 0, missed=True)
    assert lookup.share(4) < 0.02
    assert lookup.share(2) == 0.5
    for _ in range(8):
        lookup.learn(4, 8, missed=False)
    assert lookup.share(4) > 0.8
