"""`make scaling`: how a step grows with chats written at once, with their history, and with the chats that are stored.

One engine in this process for each part, its rounds taken by hand; the stored chats are real rows of a real database,
and turns of a tiny model whose blocks fill device and host. A page of the list is as long as there are chats, up to 50.
Each line is fitted by time = constant * size ^ exponent; an exponent of 1 is linear. Prints the figures, and plots them
into an SVG file.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from engine.config import CacheConfig, EngineConfig
from engine.hosting import ENGINE_ENVIRONMENT
from tests.bench.cache_engine import MODELS, ROOT
from tests.bench.cache_report import Report, at_most, facts
from tests.bench.scaling_plot import Line, Panel, draw

if TYPE_CHECKING:
    from tests.bench.cache_engine import Text
    from tests.bench.profile_parts import ByHand

SESSIONS = (1, 2, 4, 8, 16, 32, 64)
HISTORIES = (512, 1024, 2048, 4096, 7168)  # tokens
STORED = (10, 100, 1_000, 10_000)  # chats
BESIDE = 128  # tokens of history of each of many sessions
WARM_UP = 2  # steps that do not count
LINEAR = 1.0
MIB = 2**20


def main() -> int:
    """Measure, tell and plot; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--steps", type=int, default=15, help="a figure is the median of so many")
    parser.add_argument("--plot", type=Path, default=ROOT / "assets" / "scaling.svg")
    parser.add_argument("--out", type=Path, default=ROOT / ".cache" / f"scaling-{time.strftime('%Y%m%d-%H%M%S')}.json")
    args = parser.parse_args()
    for name, value in ENGINE_ENVIRONMENT.items():  # before torch is imported
        os.environ.setdefault(name, value)
    MODELS.mkdir(parents=True, exist_ok=True)
    report = Report(facts(model=args.model, steps=args.steps))
    with tempfile.TemporaryDirectory(dir=ROOT / ".cache", prefix="scaling-") as folder:
        panels = _run(args, report, Path(folder))
    for panel in panels:
        _tell(report, panel)
    draw(args.plot, panels)
    print(f"\n{args.plot}")
    return report.end(args.out)


def _run(args: argparse.Namespace, report: Report, folder: Path) -> list[Panel]:
    import torch

    from tests.bench import scaling_stored
    from tests.bench.cache_engine import Text
    from tests.bench.profile_parts import ByHand

    hand = ByHand(EngineConfig(cache_dir=str(MODELS), model=args.model, cache=CacheConfig(device_kv=1024 * MIB)))
    loaded = hand.served.loaded
    report.facts |= {"threads": torch.get_num_threads(), "dtype": str(loaded.dtype).removeprefix("torch.")}
    text = Text(str(loaded.prepared.path))
    try:
        histories = [_history(hand, text, length, args.steps) for length in HISTORIES]
        sessions = _sessions(hand, text, args.steps)
    finally:
        hand.close()
    stored = scaling_stored.engine(folder, STORED, 4 * args.steps)
    stored |= asyncio.run(scaling_stored.storage(folder, STORED, 2 * args.steps))
    return [
        Panel("chats written at once", SESSIONS, [Line("a step", sessions)]),
        Panel("tokens of history", HISTORIES, [Line("a step", histories)]),
        Panel("stored chats", STORED, [Line(name, seconds) for name, seconds in stored.items()]),
    ]


def _history(hand: ByHand, text: Text, length: int, steps: int) -> float:
    """The median step of one chat behind so many tokens, in seconds."""
    hand.submit("long", text.part(0, length), steps + WARM_UP + 4)
    hand.until_all_write()
    seconds = _median_step(hand, steps)
    hand.stop()
    return seconds


def _sessions(hand: ByHand, text: Text, steps: int) -> list[float]:
    """The median step of so many chats at once; those that write already go on while others come."""
    found, here = [], 0
    for count in SESSIONS:
        for number in range(here, count):
            hand.submit(f"chat-{number}", text.part(number * BESIDE, BESIDE), 1000)
        here = count
        hand.until_all_write()
        found.append(_median_step(hand, steps))
    hand.stop()
    return found


def _median_step(hand: ByHand, steps: int) -> float:
    taken = []
    for _ in range(WARM_UP + steps):
        began = time.perf_counter()
        hand.round()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken[WARM_UP:])


def exponent(sizes: Sequence[float], seconds: Sequence[float]) -> float:
    """Of size, by least squares over the logarithms."""
    return statistics.linear_regression([math.log(size) for size in sizes], [math.log(each) for each in seconds]).slope


def _tell(report: Report, panel: Panel) -> None:
    """Print a panel's lines, each with its exponent over all, and from its last size but one to the last."""
    rows = []
    for line in panel.lines:
        over_all = exponent(panel.sizes, line.seconds)
        at_end = exponent(panel.sizes[-2:], line.seconds[-2:])
        figures = [f"{1e3 * seconds:,.2f}" for seconds in line.seconds]
        rows.append([line.name, *figures, f"{over_all:.2f}", f"{at_end:.2f}"])
        report.goals.append(at_most(f"{line.name}, by {panel.title}: exponent", over_all, LINEAR))
        report.results[f"{line.name}, by {panel.title}"] = dict(zip(map(str, panel.sizes), line.seconds, strict=True))
    heads = [f"{size:,}" for size in panel.sizes]
    report.table(f"ms by {panel.title}", ["", *heads, "exponent", "at the end"], rows)


if __name__ == "__main__":
    raise SystemExit(main())
