"""`make stress`: 200 chats at once, and tiers that hold a tenth of them each; no wrong token, no hang, no leak.

Exits 1 at the first law that does not hold, and says which, with the seed and what was being done.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from pathlib import Path

from tests.stress.operations import LawBrokenError
from tests.stress.run import GROWTH, Outcome, Settings, Stress

MIB = 2**20


def tell(outcome: Outcome) -> None:
    """Print what happened."""
    counts = outcome.counts
    print(f"{sum(counts.operations.values()):,} operations in {outcome.seconds:.0f} s, {outcome.steps:,} steps")
    for title, counter in (
        ("operations", counts.operations),
        ("tokens", counts.tokens),
        ("misses", counts.misses),
        ("blocks", counts.moved_blocks),
    ):
        print(f"{title}: {', '.join(f'{name} {count:,}' for name, count in counter.most_common() if count)}")
    print(f"greedy replies compared: {counts.judged:,}, all right ({counts.ties} tokens were ties)")
    print(f"preemptions: {counts.preemptions:,}")
    print(f"after a restart: {outcome.restarted_from_disk:,} tokens from disk")
    share = outcome.budget_bytes / outcome.working_bytes
    print(f"working set {outcome.working_bytes / MIB:.0f} MiB; each tier held {share:.0%} of it")
    warm, end = outcome.warm, outcome.end
    print(f"the engine's memory: {warm.total / MIB:.0f} MiB halfway, {end.total / MIB:.0f} MiB at the end")
    rest = f"{warm.rest / MIB:.0f} MiB and {end.rest / MIB:.0f} MiB"
    print(f"without pool and host tier: {rest}, a growth by {outcome.growth:.1%} of all")


def main() -> int:
    """Run it; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--people", type=int, default=24, help="who do something at the same time")
    parser.add_argument("--chats", type=int, default=200)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="stress-") as folder:
        stress = Stress(Settings(args.seconds, args.seed, args.people, args.chats), Path(folder))
        try:
            outcome = asyncio.run(stress.run())
        except LawBrokenError as broken:
            print("the last operations, oldest first:", *stress.recent, sep="\n  ")
            print(f"BROKEN with --seed {args.seed}: {broken}")
            return 1
    tell(outcome)
    if outcome.growth > GROWTH:
        print(f"BROKEN: memory has grown by more than {GROWTH:.0%}")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
