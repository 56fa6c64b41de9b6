"""The replay workload at device budgets that hold all, and ever less, of what the chats have in them."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import shutil
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx

from engine.config import EngineConfig
from tests.bench import replay
from tests.bench.cache_engine import HERE, MODELS, ROOT, Text
from tests.bench.cache_report import Report, at_most, ms
from tests.bench.serving import start

ONE_TURN = replay.one_turn
OF_ALL_RESIDENT = 1.3
OFF_P50, OFF_P95 = 1.3, 2.0  # times that an estimate is off, to either side
SOURCES = ("device", "host", "disk", "computed", "recomputed")
AROUND = 16  # tokens that a template puts around a message and its reply, at most
MIB = 2**20


@dataclass(frozen=True)
class Load:
    """The chats: how many, of how many turns, of how many written tokens each."""

    sessions: int
    turns: int
    max_tokens: int


class _Asking:
    """replay's own `one_turn`: before each turn the server is asked what it would cost; `seconds` has the answers."""

    def __init__(self) -> None:
        self.seconds: list[float | None] = []

    async def one_turn(
        self, client: httpx.AsyncClient, args: argparse.Namespace, session_id: str, messages: list[dict[str, Any]]
    ) -> dict[str, Any]:
        """Ask, then take the turn."""
        answer = await client.post(
            f"{args.base_url}/chat/completions/estimate",
            json={"model": args.model, "messages": messages},
            headers={"X-Session-ID": session_id},
        )
        self.seconds.append(answer.raise_for_status().json()["seconds"])
        return await ONE_TURN(client, args, session_id, messages)


class _Noting:
    """replay's own `json`: it stays as it is on every server, so what it does not look at is noted where it reads."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def loads(self, text: str) -> Any:
        value = json.loads(text)
        if isinstance(value, dict) and "keepwarm" in value:
            self.seen.append(value["keepwarm"])
        return value

    dumps = staticmethod(json.dumps)


def run(report: Report, model: str, load: Load, shares: list[float], text: Text, bytes_per_token: int) -> None:
    """Measure with all of the working set on the device, then with these `shares`; print and judge."""
    block = EngineConfig(cache_dir="").block_size * bytes_per_token
    found = [_at(report, model, load, "all", _bound(load, text) * bytes_per_token, 0, 0)]
    longest, shared, rest = found[0].pop("blocks")
    working = (shared + rest) * block
    least = 2 * longest * block
    report.results["replay"] = {"working_set_bytes": working, "least_bytes": least, "runs": found}
    plenty = 2 * working + 256 * MIB
    for tier in ("host", "disk"):
        for share in shares:
            device = max(int(share * working), least)
            kept = {"host": (plenty, 0), "disk": (0, plenty)}[tier]
            found.append(_at(report, model, load, f"{share:.0%}, {tier}", device, *kept))
            found[-1].pop("blocks")
    _tell(report, load, found, working, least)


def _at(report: Report, model: str, load: Load, name: str, device: int, host: int, disk: int) -> dict[str, Any]:
    """One fresh server with these budgets, and the workload on it."""
    print(f"replay with {name} of the working set on the device", flush=True)
    budgets = zip(("device", "host", "disk"), (device, host, disk), strict=True)
    flags = [part for tier, size in budgets for part in (f"--{tier}-kv", f"{-(-size // MIB)}MiB" if size else "0")]
    with tempfile.TemporaryDirectory(dir=ROOT / ".cache") as folder:
        data = Path(folder) / "data"
        shutil.copytree(MODELS, data / "models", copy_function=os.link)  # no server converts the model again
        server, url = start(data, ["--model", model, "--dtype", "bfloat16", *flags])
        try:
            _replay(url, Load(2, 2, load.max_tokens), "warm-up", Path(folder) / "warm-up.jsonl")
            summary, costs, rows, estimates = _replay(url, load, "measured", Path(folder) / "turns.jsonl")
        finally:
            server.terminate()
            server.wait()
    if len(costs) != len(rows):
        report.wrong.append(f"replay, {name}: {len(costs)} of {len(rows)} responses said where their tokens came from")
    print(f"  {json.dumps(summary)}", flush=True)  # it takes an hour in all, and something may end it
    later = costs[load.sessions :]  # one turn at a time, the first turns of all come first
    tokens = {source: sum(cost["tokens"].get(source, 0) for cost in later) for source in SOURCES}
    causes = Counter(cost["miss"]["cause"] for cost in later if cost.get("miss"))
    return {
        "name": name,
        "device_bytes": device,
        "host_bytes": host,
        "disk_bytes": disk,
        **summary,
        "tokens_return": tokens,
        "restore_s_return": sum(cost.get("restore_s", 0.0) for cost in later),
        "misses_return": dict(causes),
        "off": _off(rows, estimates),
        "blocks": _blocks(rows, load),
    }


def _replay(
    url: str, load: Load, nonce: str, dump: Path
) -> tuple[dict[str, Any], list[Any], list[Any], list[float | None]]:
    """The summary, the `keepwarm` object of every response, every turn, and what each was to take until its reply."""
    noting, asking, printed = _Noting(), _Asking(), io.StringIO()
    arguments = [
        "replay.py", "--base-url", f"{url}/v1", "--trace", str(HERE / "mt_bench.jsonl"),
        "--system", str(HERE / "system_prompt.txt"), "--sessions", str(load.sessions), "--turns", str(load.turns),
        "--max-tokens", str(load.max_tokens), "--nonce", nonce, "--dump", str(dump),
    ]  # fmt: skip
    argv, reading = patch.object(sys, "argv", arguments), patch.object(replay, "json", noting)
    with argv, reading, patch.object(replay, "one_turn", asking.one_turn), contextlib.redirect_stdout(printed):
        replay.main()
    rows = [json.loads(line) for line in dump.read_text("utf-8").splitlines()]
    return json.loads(printed.getvalue().splitlines()[-1]), noting.seen, rows, asking.seconds


def _off(rows: list[Any], estimates: list[float | None]) -> dict[str, Any]:
    """How many times the measured TTFT is off the estimated one, to either side."""
    pairs = [(row["ttft"], seconds) for row, seconds in zip(rows, estimates, strict=True) if seconds]
    ratios = [measured / seconds for measured, seconds in pairs]
    off = [max(ratio, 1 / ratio) for ratio in ratios]
    unknown = len(rows) - len(pairs)
    return {"p50": replay.quantile(off, 0.5), "p95": replay.quantile(off, 0.95), "ratios": ratios, "unknown": unknown}


def _bound(load: Load, text: Text) -> int:
    """Tokens that hold all chats however long the replies are, the system prompt counted for each."""
    sessions = replay.load_sessions(HERE / "mt_bench.jsonl", load.sessions, load.turns)
    each = AROUND + load.max_tokens
    return sum(2 * len(text.system) + sum(len(text.encode(said)) + each for said in said_in) for said_in in sessions)


def _blocks(rows: list[Any], load: Load) -> tuple[int, int, int]:
    """Blocks of the longest session, of the system prompt that all share, and of all the rest."""
    size = EngineConfig(cache_dir="").block_size
    last = [row["prompt"] + row["out"] - 1 for row in rows if row["turn"] == load.turns]
    shared = min(row["prompt"] for row in rows if row["turn"] == 1) // size
    blocks = [-(-tokens // size) for tokens in last]
    return max(blocks), shared, sum(count - shared for count in blocks)


def _tell(report: Report, load: Load, found: list[dict[str, Any]], working: int, least: int) -> None:
    rows = []
    for run in found:
        tokens, p50 = run["tokens_return"], run["ttft_return_p50"]
        word = ""
        if run["name"].startswith("10%"):
            ratio = p50 / found[0]["ttft_return_p50"]
            goal = at_most(f"replay, {run['name']}: returning TTFT of that with all resident", ratio, OF_ALL_RESIDENT)
            report.goals.append(goal)
            word = f"{ratio:.2f} {goal.word}"
        off = run["off"]
        for share, most in (("p50", OFF_P50), ("p95", OFF_P95)):
            report.goals.append(at_most(f"replay, {run['name']}: the estimate is off, {share}", off[share], most))
        rows.append(
            [
                run["name"],
                f"{run['device_bytes'] / MIB:.0f}",
                ms(p50),
                ms(run["ttft_return_p95"]),
                word,
                f"{run['reuse_return']:.4f}",
                f"{off['p50']:.2f}",
                f"{off['p95']:.2f}",
                *(f"{tokens[source]:,}" for source in SOURCES),
            ]
        )
    report.table(
        f"replay of {load.sessions} sessions x {load.turns} turns x {load.max_tokens} tokens, returning turns; "
        f"the working set is {working / MIB:.0f} MiB, two longest sessions {least / MIB:.0f} MiB; TTFT in milliseconds",
        ["device holds", "MiB", "TTFT p50", "p95", "", "reuse", "off p50", "p95", *SOURCES],
        rows,
    )
