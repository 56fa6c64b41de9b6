"""The policy simulator: what a tier finds is counted by hand, and the same trace gives the same figures."""

from __future__ import annotations

import json
from dataclasses import asdict

import msgspec
import pytest

from engine.cache.policy import policy_named
from engine.protocol import TurnTrace
from storage.records import TraceRecord
from tests.bench.policies import Outcome, compare, made_up, read
from tests.bench.policies_tier import Found, Tier, hindsight, keys_of, prompt_tokens

LRU = policy_named("lru")


def turn(at: float, session: str, blocks: str, prompt: int, reply: int = 1) -> TurnTrace:
    """A turn on these blocks, each called by a letter."""
    return TurnTrace(
        at=at, session_id=session, model="m", blocks=b"".join(name.encode().ljust(8) for name in blocks),
        device_tokens=1, host_tokens=2, disk_tokens=3, computed_tokens=prompt - 6, output_tokens=reply,
    )  # fmt: skip


def found(tier: Tier, *turns: TurnTrace) -> list[int]:
    return [tier.turn(each).reused for each in turns]


def test_what_is_there_is_found_up_to_the_last_token_of_the_prompt() -> None:
    tier = Tier(LRU, None, 10)
    assert tier.turn(turn(0, "a", "AB", 20)) == Found(20, 0, returning=False)
    assert tier.turn(turn(1, "a", "AB", 20)) == Found(20, 19, returning=True)
    assert tier.turn(turn(2, "b", "AC", 20)) == Found(20, 10, returning=False)
    assert tier.turn(turn(3, "a", "ABD", 30)) == Found(30, 20, returning=True)
    assert tier.most == 4


def test_a_part_filled_block_is_found_where_its_own_session_goes_on_from_it() -> None:
    tier = Tier(LRU, None, 10)
    assert found(tier, turn(0, "a", "Ax", 14, reply=3)) == [0]  # 16 tokens of 17: the last was never read
    assert found(tier, turn(1, "b", "ACD", 30)) == [10]
    assert found(tier, turn(2, "a", "ABy", 25)) == [16]
    assert found(tier, turn(3, "a", "AEF", 30)) == [10]  # another branch
    assert tier.most == 7  # A C D B y E F: x was filled up


def test_who_gives_way_and_what_it_costs() -> None:
    tier = Tier(LRU, 6, 10)
    assert found(tier, turn(0, "a", "ABC", 30), turn(1, "b", "DEF", 30)) == [0, 0]
    assert found(tier, turn(2, "c", "GH", 20)) == [0]  # C and B go, the end first
    assert found(tier, turn(3, "b", "DEF", 30), turn(4, "a", "ABC", 30)) == [29, 10]


def test_a_chat_larger_than_all_pushes_nobody_out() -> None:
    tier = Tier(LRU, 3, 10)
    assert found(tier, turn(0, "a", "AB", 20), turn(1, "b", "CDEF", 40), turn(2, "a", "AB", 20)) == [0, 0, 19]


def test_hindsight_keeps_what_comes_back() -> None:
    turns = [turn(0, "a", "AB", 20), turn(1, "b", "CD", 20), turn(2, "c", "EF", 20), turn(3, "a", "ABG", 30)]
    assert found(Tier(LRU, 4, 10), *turns) == [0, 0, 0, 0]
    assert found(Tier(hindsight(turns), 4, 10), *turns) == [0, 0, 0, 20]


def test_a_made_up_trace_is_the_replay_workload() -> None:
    turns = made_up(3, 2, 32)
    assert [each.session_id for each in turns] == [f"session-{number}" for number in (0, 1, 2)] * 2
    assert [prompt_tokens(each) for each in turns] == [452, 483, 494, 509, 537, 548]
    chains = [keys_of(each) for each in turns]
    assert [len(chain) for chain in chains] == [16, 17, 17, 17, 18, 19]
    assert chains[0][:12] == chains[1][:12] == chains[3][:12]  # 413 tokens of system prompt
    assert chains[0][12] != chains[1][12]
    assert chains[3][:15] == chains[0][:15]
    assert chains[3][15] != chains[0][15]  # it was part-filled
    assert turns == made_up(3, 2, 32)
    habit = made_up(8, 4, 32, "habit")
    often = [sum(each.session_id == f"session-{number}" for each in habit) for number in range(8)]
    assert sum(often) == 32
    assert often[0] > often[7]


def test_the_comparison_is_fair_and_the_same_each_time() -> None:
    turns = made_up(16, 3, 32)
    outcomes = compare(turns, (0.25, 0.5, 1.1))
    assert outcomes == compare(turns, (0.25, 0.5, 1.1))
    assert [one.policy for one in outcomes] == ["cost", "lru", "hindsight"] * 3
    by_budget = [outcomes[at : at + 3] for at in (0, 3, 6)]
    for cost, lru, best in by_budget:
        assert cost.budget == lru.budget == best.budget
        assert best.recomputed <= min(cost.recomputed, lru.recomputed)
        assert best.hit_rate >= max(cost.hit_rate, lru.hit_rate)
    assert [one.recomputed for one in by_budget[2]] == [0, 0, 0]
    assert [one.in_full for one in by_budget[2]] == [1.0, 1.0, 1.0]
    assert by_budget[0][1].recomputed > by_budget[1][1].recomputed > 0


def test_nothing_to_replay() -> None:
    nothing = Outcome("lru", 0, 0, 0.0, 0.0)
    assert nothing in compare([], (0.5,))


def test_a_servers_lines_are_read_as_they_are_told() -> None:
    turns = made_up(2, 1, 8)
    records = [TraceRecord(**msgspec.structs.asdict(each)) for each in turns]
    lines = [json.dumps(asdict(record) | {"blocks": record.blocks.hex()}) for record in records]
    assert read([*lines, ""]) == turns
    for wrong in ('{"blocks": "00"}', "[]", "no JSON"):
        with pytest.raises(ValueError, match=r"no trace|Expecting"):
            read([wrong])
