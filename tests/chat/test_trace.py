"""The trace that a real engine leaves: replayed over a tier that holds everything, it finds what the engine found."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from engine.cache.policy import policy_named
from engine.protocol import TurnTrace
from tests.bench.policies import BLOCK, compare
from tests.bench.policies_tier import Tier
from tests.chat.test_real_engine import ask, running

pytestmark = pytest.mark.timeout(240)
SYSTEM = "You are the librarian of a small town, and you answer in a word or two. " * 4


async def traced(service, turns: int) -> list[TurnTrace]:
    async with asyncio.timeout(30):
        while len(records := await service.cache.trace(100)) < turns:  # noqa: ASYNC110 - it is told once a second
            await asyncio.sleep(0.05)
    return [TurnTrace(**dataclasses.asdict(record)) for record in records]


async def test_a_trace_replays_to_what_the_engine_found(store, tiny_model, tmp_path):
    async with running(store, tiny_model, tmp_path) as (service, _):
        chats = [(await service.create_session(service.user.id, SYSTEM)).id for _ in range(3)]
        done = [await ask(service, chat, f"{turn} of {chat}", max_tokens=9) for turn in range(3) for chat in chats]
        turns = await traced(service, len(done))
    assert [turn.session_id for turn in turns] == chats * 3
    tier = Tier(policy_named("lru"), None, BLOCK)
    for number, (turn, reply) in enumerate(zip(turns, done, strict=True)):
        found = tier.turn(turn)
        assert found.prompt == reply.figures.prompt_tokens
        assert found.returning == (number >= 3)
        if found.returning:
            assert found.reused == reply.figures.reused_tokens > 0
        else:  # the engine also copies what of a block is the same
            assert 0 <= reply.figures.reused_tokens - found.reused < BLOCK
            assert number == 0 or found.reused >= BLOCK  # the system prompt is there for all
    assert {one.policy for one in compare(turns, (0.5,))} == {"lru", "cost", "hindsight"}
