#!/usr/bin/env python3
"""Replay multi-turn chats against any OpenAI-compatible server and report what a person would feel.

Sessions are interleaved round-robin: everybody's turn 1, then everybody's turn 2, and so on, so a
session returns only after all the others have spoken. The history sent is the server's own replies,
as a chat client sends it. With more sessions than the server's fast memory holds, the figures show
what its cache management is worth.

Needs only httpx. Works unchanged on this project, llama-server, `vllm serve` and `transformers serve`.

    replay.py --base-url http://127.0.0.1:7860/v1 --trace mt_bench.jsonl --sessions 16 --turns 6

Rounds against a server that remembers need --nonce: it goes into the session ids and the first line of the system
prompt, so that a later round does not merely hit what an earlier one left.

Prints a table and, last, one line of JSON. Reuse is cached tokens / (prompt + reply of the session's previous turn). TTFT is from sending the request to the first content
delta; TPOT is (last delta - first delta) / (output tokens - 1); all times in seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from pathlib import Path

import httpx


def load_sessions(path: Path, count: int, turns: int) -> list[list[str]]:
    """User messages per session, each of exactly `turns` turns, chained from the trace's dialogues in order."""
    dialogues = [json.loads(line)["turns"] for line in path.read_text().splitlines() if line.strip()]
    stream = [text for dialogue in dialogues for text in dialogue]
    sessions = []
    for i in range(count):
        start = (i * turns) % len(stream)
        sessions.append([stream[(start + k) % len(stream)] for k in range(turns)])
    return sessions


async def one_turn(client: httpx.AsyncClient, args: argparse.Namespace, session_id: str, messages: list[dict]) -> dict:
    body = {
        "model": args.model,
        "messages": messages,
        "max_tokens": args.max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    headers = {"X-Session-ID": session_id}
    if args.api_key:
        headers["Authorization"] = f"Bearer {args.api_key}"
    start = time.perf_counter()
    first = last = None
    text, usage, deltas = "", {}, 0
    async with client.stream("POST", f"{args.base_url}/chat/completions", json=body, headers=headers) as response:
        if response.status_code != 200:
            raise RuntimeError(f"{response.status_code}: {(await response.aread())[:300]!r}")
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line[6:])
            usage = event.get("usage") or usage
            for choice in event.get("choices", []):
                piece = choice.get("delta", {}).get("content")
                if piece:
                    last = time.perf_counter()
                    first = first or last
                    deltas += 1
                    text += piece
    out = usage.get("completion_tokens") or deltas
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return {
        "ttft": (first or time.perf_counter()) - start,
        "tpot": (last - first) / (out - 1) if first and out > 1 else None,
        "total": time.perf_counter() - start,
        "prompt": usage.get("prompt_tokens", 0),
        "cached": cached,
        "out": out,
        "text": text,
    }


async def replay(args: argparse.Namespace) -> list[dict]:
    sessions = load_sessions(Path(args.trace), args.sessions, args.turns)
    system = Path(args.system).read_text().strip() if args.system else None
    if args.nonce:
        system = f"Reference {args.nonce}.\n{system or ''}".strip()
    histories = [[{"role": "system", "content": system}] if system else [] for _ in sessions]
    gate, rows = asyncio.Semaphore(args.concurrency), []
    limits = httpx.Limits(max_keepalive_connections=0)  # some servers drop kept-alive connections
    async with httpx.AsyncClient(timeout=args.timeout, limits=limits) as client:
        for turn in range(args.turns):

            async def go(i: int) -> None:
                async with gate:
                    histories[i].append({"role": "user", "content": sessions[i][turn]})
                    row = await one_turn(client, args, f"replay-{args.nonce}-{i}", histories[i])
                    histories[i].append({"role": "assistant", "content": row["text"]})
                    rows.append({"turn": turn + 1, "session": i, **row})

            await asyncio.gather(*(go(i) for i in range(len(sessions))))
    return rows


def quantile(values: list[float], q: float) -> float:
    values = sorted(values)
    return values[min(len(values) - 1, int(q * len(values)))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-url", required=True, help="…/v1")
    parser.add_argument("--trace", required=True, help='JSON lines, each {"turns": [user text, …]}')
    parser.add_argument("--system", help="a file whose text is every session's system prompt")
    parser.add_argument("--sessions", type=int, default=16)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--concurrency", type=int, default=1)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--model", default="default")
    parser.add_argument("--api-key", default="")
    parser.add_argument("--timeout", type=float, default=600)
    parser.add_argument("--nonce", default="", help="makes this round's prompts and session ids its own")
    parser.add_argument("--dump", help="write every turn as JSON lines here (for comparing replies)")
    args = parser.parse_args()
    start = time.perf_counter()
    try:
        rows = asyncio.run(replay(args))
    except (httpx.HTTPError, RuntimeError) as error:
        raise SystemExit(f"replay failed: {type(error).__name__}: {error}") from None
    wall = time.perf_counter() - start
    if args.dump:
        Path(args.dump).write_text("".join(json.dumps(row) + "\n" for row in rows))
    first = [r for r in rows if r["turn"] == 1]
    later = [r for r in rows if r["turn"] > 1]
    by_turn = {(r["session"], r["turn"]): r for r in rows}
    before = [by_turn[r["session"], r["turn"] - 1] for r in later]
    tpots = [r["tpot"] for r in rows if r["tpot"]]
    summary = {
        "turns": len(rows),
        "wall_s": round(wall, 2),
        "ttft_first_p50": round(statistics.median(r["ttft"] for r in first), 4),
        "ttft_return_p50": round(statistics.median(r["ttft"] for r in later), 4) if later else None,
        "ttft_return_p95": round(quantile([r["ttft"] for r in later], 0.95), 4) if later else None,
        "tpot_p50": round(statistics.median(tpots), 5) if tpots else None,
        "out_tok_per_s": round(sum(r["out"] for r in rows) / wall, 2),
        "cached_share_return": round(sum(r["cached"] for r in later) / max(1, sum(r["prompt"] for r in later)), 4),
        "reuse_return": round(sum(r["cached"] for r in later) / max(1, sum(b["prompt"] + b["out"] for b in before)), 4),
        "prompt_tokens_mean_last_turn": round(statistics.mean(r["prompt"] for r in rows if r["turn"] == args.turns), 1),
    }
    for key, value in summary.items():
        print(f"{key:32} {value}")
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
