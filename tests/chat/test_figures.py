"""A running server tells its figures: real turns on a real engine, read back over HTTP."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest

from chat.doctor_server import examine, fetch
from chat.figures import PATH, RecentReplies
from chat.views import Figures
from engine.protocol import Sampling, Usage
from tests.chat.serving import serving
from tests.chat.test_real_engine import ask, running

pytestmark = pytest.mark.timeout(240)


async def test_what_replies_cost_is_told_as_it_was(store, tiny_model, tmp_path):
    async with running(store, tiny_model, tmp_path) as (service, _), serving(service) as url:
        chat = (await service.create_session(service.user.id)).id
        done = [await ask(service, chat, f"turn {n}", sampling=Sampling(), max_tokens=8) for n in range(2)]
        body = {"model": "default", "messages": [{"role": "user", "content": "hi"}], "n": 2, "max_tokens": 8}
        async with httpx.AsyncClient(base_url=url, timeout=60) as http:
            await http.post("/v1/chat/completions", json=body)
            answer = await http.get(PATH)
            assert answer.status_code == 200
            assert "turn 1" not in answer.text
            foreign = await http.get(PATH, headers={"Host": "evil.example"})
            assert foreign.status_code == 403
        figures = await asyncio.to_thread(fetch, url)
    assert figures.phase == "ready"
    assert figures.uptime_s >= 0
    assert [reply.first for reply in figures.replies] == [True, True, True, False]
    for reply, turn in zip(figures.replies, done, strict=False):
        assert turn.figures is not None
        told = (reply.prompt_tokens, reply.reused_tokens, reply.computed_tokens, reply.output_tokens)
        assert told == (
            turn.figures.prompt_tokens,
            turn.figures.reused_tokens,
            turn.figures.computed_tokens,
            turn.figures.output_tokens,
        )
        assert reply.ttft_s == turn.figures.ttft_s
        assert (reply.miss_cause, reply.miss_detail) == (turn.figures.miss.cause, "")
        assert 0 <= reply.queue_s + reply.read_s <= reply.total_s
    times = [reply.ended_at for reply in figures.replies]
    assert times == sorted(times)
    assert times[-1] <= figures.now
    assert figures.snapshot is not None
    assert figures.snapshot.sessions == {}
    assert figures.snapshot.sampled_tokens == sum(reply.output_tokens for reply in figures.replies)
    found = examine(url, figures)
    assert [finding.what for finding in found] == [
        "server", "first token (TTFT)", "each token (TPOT)", "memory", "throughput",
    ]  # fmt: skip
    assert "over the last 3 replies" in found[1].detail


async def test_an_engine_that_is_gone_is_told_too(store, tiny_model, tmp_path):
    async with running(store, tiny_model, tmp_path) as (service, engine), serving(service) as url:
        await engine.close()
        async with httpx.AsyncClient(base_url=url) as http:
            told = json.loads((await http.get(PATH)).text)
    assert (told["phase"], told["snapshot"], told["replies"]) == ("stopped", None, [])


def test_only_the_last_replies_are_remembered():
    recent = RecentReplies(clock=iter(range(1000)).__next__)
    usage = Usage(
        prompt_tokens=1,
        device_tokens=0,
        computed_tokens=1,
        recomputed_tokens=0,
        output_tokens=1,
        preemptions=0,
        queue_s=0.5,
        first_token_s=None,
        total_s=1.0,
    )
    for _ in range(250):
        recent.note(Figures(1, 0, 1, 1, None, None), usage, 2.0, first=True)
    assert [reply.ended_at for reply in recent.all()] == list(range(51, 251))
    assert {(reply.queue_s, reply.read_s, reply.total_s) for reply in recent.all()} == {(0.5, None, 2.0)}
