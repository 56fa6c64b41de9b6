"""`make bench`: replay interleaved multi-turn chats against a fresh server, and say what a person would feel.

Starts `python app.py` on a data directory of its own, waits until it is ready, runs the replay workload with everything
resident, and prints the table and one line of JSON with the versions and the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import httpx

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
START_LIMIT = 300.0  # seconds, with the conversion of the weights


def start(data_dir: Path, flags: list[str]) -> tuple[subprocess.Popen[str], str]:
    """A server and its address, ready."""
    command = [sys.executable, "app.py", "--no-browser", "--port", "0", "--data-dir", str(data_dir), *flags]
    server = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    for line in server.stdout:
        if line.startswith("Ready") and (found := re.search(r"http://\S+:\d+", line)):
            return server, found[0]
    raise SystemExit(f"the server ended with {server.wait()} before it was ready")


def replay(url: str, args: argparse.Namespace, sessions: int, turns: int, nonce: str) -> dict[str, float]:
    """One run of the replay workload; its summary."""
    command = [
        sys.executable, str(HERE / "replay.py"), "--base-url", f"{url}/v1", "--trace", str(HERE / "mt_bench.jsonl"),
        "--system", str(HERE / "system_prompt.txt"), "--sessions", str(sessions), "--turns", str(turns),
        "--max-tokens", str(args.max_tokens), "--concurrency", str(args.concurrency), "--nonce", nonce,
    ]  # fmt: skip
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Run the workload and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=12)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--concurrency", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--flags", default="", help="flags for app.py, as one string")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        begun = time.monotonic()
        server, url = start(Path(folder), args.flags.split())
        started = time.monotonic() - begun
        try:
            model = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
            replay(url, args, sessions=2, turns=2, nonce="warm-up")
            rounds = [replay(url, args, args.sessions, args.turns, f"round-{i}") for i in range(args.rounds)]
        finally:
            server.terminate()
            server.wait()
    print(f"{model}: {args.sessions} sessions x {args.turns} turns x {args.max_tokens} tokens, {args.rounds} rounds")
    print(f"{'':32} {'median':>9} {'least':>9} {'most':>9}")
    summary = {}
    for key in rounds[0]:
        values = sorted(float(row[key]) for row in rounds)
        summary[key] = statistics.median(values)
        print(f"{key:32} {summary[key]:9.4f} {values[0]:9.4f} {values[-1]:9.4f}")
    facts = {
        "model": model,
        "start_s": round(started, 2),
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "transformers": version("transformers"),
        "flags": args.flags,
    }
    print(json.dumps({**facts, **summary}))


if __name__ == "__main__":
    main()
