"""What `make bench` makes of its figures: medians, ratios, goals met and missed, and what pip and servers said last."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.bench import comparison
from tests.bench.cache_report import Goal
from tests.bench.comparison import COLD, CROWD_P95, MEMORY, P95, Aim
from tests.bench.environments import MADE, Environment, PeerError, last_line
from tests.bench.launching import Launch, free_port, running
from tests.bench.workloads import Client, Reply, Sizes, sentences

DECODE = "decode at 512, tok/s"


def test_a_table_has_the_median_and_the_spread_of_each_server_and_nothing_where_it_was_not_measured() -> None:
    found = {"keepwarm": {DECODE: [40.0, 10.0, 60.0], COLD: [2.5]}, "vllm": {DECODE: [31.25]}}
    assert comparison.rows(found, ["keepwarm", "vllm"]) == [[DECODE, "40 (10–60)", "31.2"], [COLD, "2.5", ""]]


def test_ours_is_better_by_more_tokens_a_second_and_by_fewer_seconds_and_bytes() -> None:
    assert comparison.times_better(DECODE, [60.0, 10.0, 40.0], [20.0]) == 2.0
    assert comparison.times_better(COLD, [2.0], [50.0]) == 25.0
    assert comparison.times_better(MEMORY, [1000.0], [500.0]) == 0.5
    assert comparison.times_better(DECODE, [0.0], [20.0]) is None


def test_ratios_are_told_of_every_server_beside_ours_and_of_no_figure_without_a_unit() -> None:
    found = {
        "keepwarm": {DECODE: [30.0], COLD: [2.0], "replay: reused": [0.99]},
        "vllm": {COLD: [50.0], "replay: reused": [0.9]},
        "llama.cpp": {DECODE: [60.0]},
    }
    assert comparison.ratios(found, ["llama.cpp", "vllm"], "keepwarm") == [
        ["decode at 512", "0.50x", ""],
        ["start to first token", "", "25.00x"],
    ]


def test_a_goal_is_a_ratio_of_medians_that_its_limit_may_just_reach() -> None:
    more = Aim("decode", "keepwarm", DECODE, "vllm", DECODE, 1.5, at_most=False)
    less = Aim("start", "keepwarm", COLD, "vllm", COLD, 0.2, at_most=True)
    found = {"keepwarm": {DECODE: [45.0, 90.0, 1.0], COLD: [10.0]}, "vllm": {DECODE: [30.0], COLD: [50.0]}}
    assert more.of(found) == Goal("decode", 1.5, 1.5, at_most=False)
    assert less.of(found) == Goal("start", 0.2, 0.2, at_most=True)
    assert [more.of(found).met, less.of(found).met] == [True, True]  # type: ignore[union-attr]
    found = {"keepwarm": {DECODE: [44.9], COLD: [10.1]}, "vllm": {DECODE: [30.0], COLD: [50.0]}}
    assert [more.of(found).met, less.of(found).met] == [False, False]  # type: ignore[union-attr]


def test_a_goal_whose_peer_or_ours_is_missing_is_told_and_not_dropped() -> None:
    goals, sentences = comparison.judge({"keepwarm": {P95: [0.2], CROWD_P95: [0.3]}, "vllm": {P95: [0.4]}})
    assert [(goal.name, goal.value, goal.met) for goal in goals] == [
        ("replay: returning TTFT p95: keepwarm / vllm", 0.5, True),
        ("64 chats at 10%: returning TTFT p95: keepwarm / vllm, all resident", pytest.approx(0.75), True),
    ]
    assert len(goals) + len(sentences) == 15
    assert sentences[0] == "decode at 64: keepwarm-int4 / llama.cpp: not measured, there is no figure of keepwarm-int4"
    assert "start to first token: keepwarm / vllm: not measured, there is no figure of keepwarm" in sentences


def test_the_limits_are_those_that_were_set() -> None:
    limits = {aim.name: (aim.limit, aim.at_most) for aim in comparison.AIMS}
    assert limits == {
        "decode at 64: keepwarm-int4 / llama.cpp": (1.0, False),
        "decode at 512: keepwarm-int4 / llama.cpp": (1.0, False),
        "decode at 2048: keepwarm-int4 / llama.cpp": (1.0, False),
        "decode at 64: keepwarm / vllm": (1.5, False),
        "decode at 512: keepwarm / vllm": (1.5, False),
        "decode at 2048: keepwarm / vllm": (1.5, False),
        "prefill of 512: keepwarm / vllm": (0.9, False),
        "prefill of 2048: keepwarm / vllm": (0.9, False),
        "16 at once: keepwarm / vllm": (1.1, False),
        "replay: returning TTFT p50: keepwarm / vllm": (0.75, True),
        "replay: returning TTFT p95: keepwarm / vllm": (0.75, True),
        "64 chats at 10%: returning TTFT p50: keepwarm / vllm, all resident": (1.0, True),
        "64 chats at 10%: returning TTFT p95: keepwarm / vllm, all resident": (1.0, True),
        "start to first token: keepwarm / vllm": (0.2, True),
        "memory after the replay: keepwarm / vllm": (1.0, True),
    }
    assert (Sizes().contexts, Sizes().prompts) == (comparison.CONTEXTS, comparison.PROMPTS)


def test_what_went_wrong_is_the_last_line_with_words_and_pips_error_before_its_hints() -> None:
    assert (
        last_line("Usage: app.py\n╭─ Error ─╮\n│ No such option: --weights │\n╰────╯\n\n")
        == "│ No such option: --weights │"
    )
    assert (
        last_line("ERROR: No matching distribution\n[notice] A new release of pip\n")
        == "ERROR: No matching distribution"
    )
    assert last_line(" \n──\n") == "it said nothing"


def test_an_environment_that_pip_cannot_make_says_why_and_is_not_taken_for_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.bench.environments.ENVIRONMENTS", tmp_path)
    wanted = Environment("x", steps=(("--no-index", "--no-deps", "a-package-that-nobody-has"),), packages=("pip",))
    with pytest.raises(PeerError, match=r"ended with 1: ERROR: No matching distribution found for a-package"):
        wanted.make()
    assert not (wanted.folder / MADE).exists()


def test_a_server_that_ends_before_it_is_ready_is_told_with_what_it_said_last(tmp_path: Path) -> None:
    launch = Launch([sys.executable, "-c", "raise SystemExit('No such option: --weights')"])
    with (
        pytest.raises(PeerError, match=r"^it ended with 1: No such option: --weights$"),
        running(launch, free_port(), tmp_path / "log"),
    ):
        pass


def test_prompts_of_a_round_are_its_own_from_the_first_words() -> None:
    assert sentences("r0 decode", 512) == sentences("r0 decode", 512)
    assert sentences("r0 decode", 512)[:40] != sentences("r1 decode", 512)[:40]


def test_a_reply_that_ended_early_and_a_prompt_that_was_read_before_are_told() -> None:
    client = Client("", "", "r0")
    client.look_at(Reply(0.1, 1.0, prompt=517, cached=4, out=64, pieces=60), "decode", 512, 64)
    assert client.odd == []
    client.look_at(Reply(0.1, 1.0, prompt=400, cached=384, out=63, pieces=2), "decode", 512, 64)
    assert client.odd == [
        "decode: the reply ended after 63 of 64 tokens",
        "decode: 63 tokens came in 2 pieces",
        "decode: a prompt of 400 tokens, not of about 512",
        "decode: 384 tokens of a new prompt were said to be cached",
    ]
