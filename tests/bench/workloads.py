"""What is asked of every server, and how long it took as its client sees it. Knows nothing of which server it is.

Every prompt begins with its own words and is read from its start: nothing of it was kept from another. Only the replay
asks for what a server has read before. Nobody is told to write on beyond an end of its own: not every server can be.
The prompts are such that the model goes on; a reply that ended early all the same is noted.
"""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

HERE = Path(__file__).resolve().parent
# Each a token of the embedded model, drawn at random into sentences, so that nobody can guess what comes next.
THINGS = (
    "harbour lamp river stone winter garden letter window bridge market morning shadow forest captain island music "
    "kitchen mountain paper summer village doctor horse ocean candle road teacher cloud fire castle evening field "
    "glass house journey king light machine night orange people queen rain school table tower valley water animal "
    "bread city door earth family hand knife leaf moon office park rock ship tree voice wheel apple basket coffee "
    "dragon engine flower ghost honey iron jewel kettle lemon mirror needle oak pencil rabbit salt thunder violin"
)
DEEDS = "saw met took left found kept lost held knew sold"
LONG = "Write a very long story about a voyage by sea, in many paragraphs, and do not stop."
SENTENCE, AROUND = 9, 44  # tokens of a sentence, and of a prompt beside them
DECODED, TOGETHER, TWICE = 64, 64, 2  # tokens of a reply alone, and of each of several; replies that a figure is of
TOGETHER_PROMPT = 128
TIMEOUT = 600.0
UNSHARED = httpx.Limits(max_keepalive_connections=0)  # one server closes connections that were used before
WAKES = 4  # times that a server is tried to be woken


@dataclass(frozen=True)
class Reply:
    """One streamed reply. Seconds are from sending the request: to its first and its last piece of text."""

    first_s: float
    last_s: float
    prompt: int
    cached: int
    out: int
    pieces: int


@dataclass(frozen=True)
class Sizes:
    """How much is asked for: tokens of context and of prompts, sessions at once, and the replay's chats."""

    contexts: tuple[int, ...] = (64, 512, 2048)
    prompts: tuple[int, ...] = (512, 2048)
    counts: tuple[int, ...] = (8, 16)
    sessions: int = 12
    turns: int = 6
    max_tokens: int = 32


@dataclass
class Client:
    """Asks one server. `nonce` makes every prompt of a round its own; `odd` tells what was not as it was asked for."""

    url: str
    model: str
    nonce: str
    odd: list[str] = field(default_factory=list)

    async def ask(self, client: httpx.AsyncClient, name: str, prompt: int, tokens: int) -> Reply:
        """Have `tokens` written after a prompt of about `prompt`. Raises `RuntimeError` for an answer that is none."""
        body = {
            "model": self.model,
            "messages": [
                {"role": "system", "content": f"{self.nonce}, {name}. {sentences(f'{self.nonce} {name}', prompt)}"},
                {"role": "user", "content": LONG},
            ],
            "max_tokens": tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        began, first, last, pieces = time.perf_counter(), 0.0, 0.0, 0
        usage: dict[str, Any] = {}
        async with client.stream("POST", f"{self.url}/chat/completions", json=body) as response:
            if response.status_code != 200:
                raise RuntimeError(f"{response.status_code}: {(await response.aread())[:200]!r}")
            async for line in response.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                event = json.loads(line[6:])
                usage = event.get("usage") or usage
                if any(choice.get("delta", {}).get("content") for choice in event.get("choices") or []):
                    last = time.perf_counter() - began
                    first, pieces = first or last, pieces + 1
        if not pieces:
            raise RuntimeError("a reply without text")
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        reply = Reply(
            first, last, usage.get("prompt_tokens") or 0, cached, usage.get("completion_tokens") or pieces, pieces
        )  # fmt: skip
        self.look_at(reply, name, prompt, tokens)
        return reply

    def look_at(self, reply: Reply, name: str, prompt: int, tokens: int) -> None:
        """Tell what is not as it was asked for: tokens of the prompt, of the reply, and of what was there before."""
        if reply.out < tokens:
            self.odd.append(f"{name}: the reply ended after {reply.out} of {tokens} tokens")
        if reply.pieces < reply.out // 2:  # a server that sends many at once hides when they were written
            self.odd.append(f"{name}: {reply.out} tokens came in {reply.pieces} pieces")
        if abs(reply.prompt - prompt) > 8:
            self.odd.append(f"{name}: a prompt of {reply.prompt} tokens, not of about {prompt}")
        if reply.cached > 32:
            self.odd.append(f"{name}: {reply.cached} tokens of a new prompt were said to be cached")

    async def alone(self, name: str, context: int, tokens: int) -> list[Reply]:
        """Replies, one after the other, to prompts of about `context` tokens."""
        async with httpx.AsyncClient(timeout=TIMEOUT, limits=UNSHARED) as client:
            return [await self.ask(client, f"{name} {i}", context, tokens) for i in range(TWICE)]

    async def together(self, count: int) -> float:
        """Tokens a second that so many sessions at once are written, from the first request to the last reply's end."""
        async with httpx.AsyncClient(timeout=TIMEOUT, limits=UNSHARED) as client:
            began = time.perf_counter()
            asked = [
                self.ask(client, f"{count} at once {i}", TOGETHER_PROMPT, TOGETHER) for i in range(count)
            ]  # fmt: skip
            replies = await asyncio.gather(*asked)
        return sum(reply.out for reply in replies) / (time.perf_counter() - began)


def sentences(seed: str, tokens: int) -> str:
    """Sentences that make a prompt of about so many tokens, others for each seed."""
    drawn, things, deeds = random.Random(seed), THINGS.split(), DEEDS.split()
    return " ".join(
        f"The {drawn.choice(things)} {drawn.choice(deeds)} the {drawn.choice(things)} by the {drawn.choice(things)}."
        for _ in range(max(1, round((tokens - AROUND) / SENTENCE)))
    )


def first_reply(client: Client) -> float:
    """Seconds to the first piece of the first reply that a server gives."""

    async def ask() -> float:
        async with httpx.AsyncClient(timeout=TIMEOUT) as connection:
            return (await client.ask(connection, "first", 64, 2)).first_s

    return asyncio.run(ask())


def wake(client: Client, workload: str) -> None:
    """Replies that nobody times, so that the workload does not begin with what a stop has cost.

    A server that was stopped may close connections that it believes to have waited too long.
    """
    for attempt in range(WAKES):
        try:
            asyncio.run(client.alone(f"wake {attempt} for {workload}", 64, 4))
        except httpx.TransportError:
            if attempt == WAKES - 1:
                raise
        else:
            return


def decode(client: Client, sizes: Sizes) -> dict[str, float]:
    """Tokens a second after the first one, by context."""
    found = {}
    for context in sizes.contexts:
        replies = asyncio.run(client.alone(f"decode {context}", context, DECODED))
        took = sum(reply.last_s - reply.first_s for reply in replies)
        found[f"decode at {context}, tok/s"] = sum(reply.out - 1 for reply in replies) / max(1e-9, took)
    return found


def prefill(client: Client, sizes: Sizes) -> dict[str, float]:
    """Tokens of a prompt a second until the first piece of the reply, by length."""
    found = {}
    for length in sizes.prompts:
        replies = asyncio.run(client.alone(f"prefill {length}", length, 1))
        read = sum((reply.prompt or length) - reply.cached for reply in replies)
        found[f"prefill of {length}, tok/s"] = read / sum(reply.first_s for reply in replies)
    return found


def together(client: Client, sizes: Sizes) -> dict[str, float]:
    """Tokens a second of all of several sessions, by their count."""
    return {f"{count} at once, tok/s": asyncio.run(client.together(count)) for count in sizes.counts}


def replay(client: Client, sizes: Sizes) -> dict[str, float]:
    """The replay workload, one request at a time: seconds that a person waits, and what was said to be reused."""
    summary = replay_summary(client, sizes)
    return {
        "replay: returning TTFT p50, s": summary["ttft_return_p50"],
        "replay: returning TTFT p95, s": summary["ttft_return_p95"],
        "replay: first TTFT p50, s": summary["ttft_first_p50"],
        "replay: TPOT p50, s": summary["tpot_p50"],
        "replay: reused": summary["reuse_return"],
        "replay: prompt tokens of the last turn": summary["prompt_tokens_mean_last_turn"],
    }


def replay_summary(client: Client, sizes: Sizes) -> dict[str, float]:
    """What `replay.py` says of its run. Raises `RuntimeError`."""
    command = [
        sys.executable, str(HERE / "replay.py"), "--base-url", client.url, "--trace", str(HERE / "mt_bench.jsonl"),
        "--system", str(HERE / "system_prompt.txt"), "--sessions", str(sizes.sessions), "--turns", str(sizes.turns),
        "--max-tokens", str(sizes.max_tokens), "--model", client.model, "--nonce", client.nonce,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "the replay failed")
    summary: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return summary


WORKLOADS = {"decode": decode, "prefill": prefill, "together": together, "replay": replay}
