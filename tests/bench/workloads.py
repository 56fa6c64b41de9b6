"""What is asked of every server, and how long it took as its client sees it. Knows nothing of which server it is."""

from __future__ import annotations

import asyncio
import itertools
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

HERE = Path(__file__).resolve().parent
TEXT = "the harbour keeps its lamps burning while slow boats carry salt and timber past the old stone pier"
LONG = "Write a very long story about it, in many paragraphs, and do not stop."
DECODED, TOGETHER = 64, 64  # tokens of a reply: alone, and of each of several
TIMEOUT = 600.0


@dataclass(frozen=True)
class Reply:
    """One streamed reply. Seconds are from sending the request: to its first and its last piece of text."""

    first_s: float
    last_s: float
    prompt: int
    out: int


class Client:
    """Asks one server. `nonce` makes every prompt of a round its own."""

    def __init__(self, url: str, model: str, nonce: str) -> None:
        self._url, self._model, self._nonce = url, model, nonce

    async def ask(self, client: httpx.AsyncClient, text: str, tokens: int) -> Reply:
        """Have `tokens` written at most. Raises `RuntimeError` for an answer that is none."""
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        began, first, last, pieces = time.perf_counter(), 0.0, 0.0, 0
        usage: dict[str, Any] = {}
        async with client.stream("POST", f"{self._url}/chat/completions", json=body) as response:
            if response.status_code != 200:
                raise RuntimeError(f"{response.status_code}: {(await response.aread())[:200]!r}")
            async for line in response.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                event = json.loads(line[6:])
                usage = event.get("usage") or usage
                if any(choice.get("delta", {}).get("content") for choice in event.get("choices", [])):
                    last = time.perf_counter() - began
                    first, pieces = first or last, pieces + 1
        if not pieces:
            raise RuntimeError("a reply without text")
        return Reply(first, last, usage.get("prompt_tokens") or 0, usage.get("completion_tokens") or pieces)

    def prompt(self, name: str, tokens: int) -> str:
        """About so many tokens of text, of which no other prompt has the beginning."""
        words = itertools.islice(itertools.cycle(TEXT.split()), max(1, tokens - 64))  # a word of these is a token
        return f"{self._nonce} {name}: {' '.join(words)}. {LONG}"

    async def alone(self, name: str, context: int, tokens: int) -> Reply:
        """One reply after a prompt of about `context` tokens."""
        async with httpx.AsyncClient(timeout=TIMEOUT) as client:
            return await self.ask(client, self.prompt(name, context), tokens)

    async def together(self, count: int) -> float:
        """Tokens a second that so many sessions at once are written."""
        limits = httpx.Limits(max_connections=count)
        async with httpx.AsyncClient(timeout=TIMEOUT, limits=limits) as client:
            began = time.perf_counter()
            asked = [self.ask(client, self.prompt(f"{count}-{i}", 128), TOGETHER) for i in range(count)]
            replies = await asyncio.gather(*asked)
        return sum(reply.out for reply in replies) / (time.perf_counter() - began)


def measure(
    url: str, model: str, nonce: str, contexts: list[int], prompts: list[int], counts: list[int]
) -> dict[str, float]:
    """Decode at each context, prefill of each prompt, sessions at once: tokens a second by name."""

    async def run() -> dict[str, float]:
        client, found = Client(url, model, nonce), {}
        for context in contexts:
            reply = await client.alone(f"decode {context}", context, DECODED)
            found[f"decode at {context}, tok/s"] = (reply.out - 1) / max(1e-9, reply.last_s - reply.first_s)
        for length in prompts:
            reply = await client.alone(f"prefill {length}", length, 1)
            found[f"prefill of {length}, tok/s"] = (reply.prompt or length) / reply.first_s
        for count in counts:
            found[f"{count} at once, tok/s"] = await client.together(count)
        return found

    return asyncio.run(run())


def replay(url: str, model: str, nonce: str, sessions: int, turns: int, tokens: int) -> dict[str, float]:
    """One run of the replay workload, one request at a time; its summary."""
    command = [
        sys.executable, str(HERE / "replay.py"), "--base-url", url, "--trace", str(HERE / "mt_bench.jsonl"),
        "--system", str(HERE / "system_prompt.txt"), "--sessions", str(sessions), "--turns", str(turns),
        "--max-tokens", str(tokens), "--model", model, "--nonce", nonce,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "the replay failed")
    summary: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return summary
