"""`make bench-cache`: what the tiers are worth, and how close they come to what this machine can do at most.

Three parts: the time to the first token from each tier beside its floor, the replay workload at shrinking budgets, and
how many sessions fit. Prints tables and goals, writes all of it as JSON, and says where.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import time
from pathlib import Path

import psutil

from engine.errors import EngineError
from engine.hosting import ENGINE_ENVIRONMENT
from tests.bench.cache_engine import MODELS, ROOT
from tests.bench.cache_report import Report, facts

PARTS = ("tiers", "sessions", "replay")


def main() -> int:
    """Run the parts that are wanted; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="parts to run")
    parser.add_argument("--rounds", type=int, default=5, help="a figure is the median of so many")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048, 4096, 7168], help="tokens of history")
    parser.add_argument("--sessions", type=int, default=64, help="chats of the replay")
    parser.add_argument("--turns", type=int, default=4, help="turns of each")
    parser.add_argument("--max-tokens", type=int, default=32, help="tokens of a reply")
    parser.add_argument(
        "--shares",
        type=float,
        nargs="+",
        default=[0.5, 0.25, 0.1],
        help="of the working set, on the device of a replay",
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument(
        "--out", type=Path, default=ROOT / ".cache" / f"bench-cache-{time.strftime('%Y%m%d-%H%M%S')}.json"
    )
    args = parser.parse_args()
    for name, value in ENGINE_ENVIRONMENT.items():  # before torch is imported: the floors under the engine's conditions
        os.environ.setdefault(name, value)
    MODELS.mkdir(parents=True, exist_ok=True)
    report = Report(facts(model=args.model, dtype="bfloat16", rounds=args.rounds))
    with tempfile.TemporaryDirectory(dir=ROOT / ".cache", prefix="kv-") as folder:  # on a disk, which /tmp may not be
        _run(args, report, Path(folder))
    return report.end(args.out)


def _run(args: argparse.Namespace, report: Report, folder: Path) -> None:
    """Each part by itself: what one has measured is not lost with another."""
    import torch

    from engine.model import sizing, sources
    from tests.bench import cache_replay, cache_sessions, cache_tiers
    from tests.bench.cache_engine import Text

    def tiers() -> None:
        asyncio.run(cache_tiers.run(report, args.model, args.lengths, args.rounds, folder))

    def sessions() -> None:
        asyncio.run(cache_sessions.run(report, args.model, args.rounds, folder))

    def replay() -> None:
        prepared = sources.prepare(args.model, MODELS, lambda *_: None, dtype=torch.bfloat16)
        load = cache_replay.Load(args.sessions, args.turns, args.max_tokens)
        size = sizing.size(args.model).kv_bytes(torch.bfloat16)
        cache_replay.run(report, args.model, load, args.shares, Text(str(prepared.path)), size)

    report.facts["threads"] = torch.get_num_threads()
    for part in (tiers, sessions, replay):
        if part.__name__ not in args.only:
            continue
        print(f"{part.__name__}: {args.model}, bfloat16, load of the machine {psutil.getloadavg()[0]:.1f}", flush=True)
        try:
            part()
        except (EngineError, RuntimeError, SystemExit) as error:
            report.wrong.append(f"{part.__name__} ended with {type(error).__name__}: {error}")


if __name__ == "__main__":
    raise SystemExit(main())
