"""`make profile`: what a step of the engine takes beside the forward pass, part by part, and where the time goes.

A real engine with the embedded model in this process, its rounds taken by hand: no web side, no other process. The
forward pass is `ModelRunner.logits`; all else, sampling too, is the engine's overhead.
"""

from __future__ import annotations

import argparse
import cProfile
import io
import os
import pstats
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from engine.config import CacheConfig, EngineConfig
from engine.hosting import ENGINE_ENVIRONMENT
from engine.protocol import Sampling
from tests.bench.cache_engine import MODELS, ROOT
from tests.bench.cache_report import Report, at_most, facts

if TYPE_CHECKING:
    import torch

    from engine.batch import Batch
    from tests.bench.cache_engine import Text
    from tests.bench.profile_parts import ByHand

HISTORY = 512  # tokens
BATCHES, GOALS_MS = (1, 8, 16), {1: 1.0, 16: 3.0}
PREFILL = 512
MIB = 2**20


def main() -> int:
    """Measure and tell; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--steps", type=int, default=60, help="a figure is the median of so many")
    parser.add_argument("--top", type=int, default=12, help="functions and operations that are shown")
    parser.add_argument("--out", type=Path, default=ROOT / ".cache" / f"profile-{time.strftime('%Y%m%d-%H%M%S')}.json")
    args = parser.parse_args()
    for name, value in {**ENGINE_ENVIRONMENT, "KINETO_LOG_LEVEL": "99"}.items():  # before torch is imported
        os.environ.setdefault(name, value)
    MODELS.mkdir(parents=True, exist_ok=True)
    report = Report(facts(model=args.model, steps=args.steps, history=HISTORY))
    with tempfile.TemporaryDirectory(dir=ROOT / ".cache", prefix="profile-") as folder:
        _run(args, report, Path(folder))
    return report.end(args.out)


def _run(args: argparse.Namespace, report: Report, folder: Path) -> None:
    import torch

    from tests.bench.cache_engine import Text
    from tests.bench.profile_parts import ByHand

    kinds = {"greedy": Sampling(), "temperature 0.7, top-p 0.9": Sampling(temperature=0.7, top_p=0.9, seed=1)}
    cache = CacheConfig(device_kv=512 * MIB)
    hand = ByHand(EngineConfig(cache_dir=str(MODELS), model=args.model, cache=cache, kv_dir=str(folder / "kv")))
    loaded = hand.served.loaded
    report.facts |= {"threads": torch.get_num_threads(), "dtype": str(loaded.dtype).removeprefix("torch.")}
    text = Text(str(loaded.prepared.path))
    try:
        for kind, sampling in kinds.items():
            found = {batch: _steps(hand, text, batch, args.steps, sampling) for batch in BATCHES}
            _tell(report, kind, found)
        _functions(hand, text, args.steps, args.top)
        _operations(hand, text, args.top)
    finally:
        hand.close()


def _begin(hand: ByHand, text: Text, batch: int, tokens: int, sampling: Sampling) -> None:
    """Have so many chats be written, each behind a history of its own."""
    for i in range(batch):
        hand.submit(f"chat-{i}", text.part(i * HISTORY, HISTORY), tokens + 4 * batch, sampling)
    hand.until_all_write()


def _steps(hand: ByHand, text: Text, batch: int, steps: int, sampling: Sampling) -> list[dict[str, float]]:
    """Seconds by part of so many steps that write one token for each of `batch` chats."""
    _begin(hand, text, batch, steps, sampling)
    found = []
    for _ in range(steps):
        hand.watch.seconds.clear()
        hand.round()
        found.append(dict(hand.watch.seconds))
    hand.stop()
    return found


def _tell(report: Report, kind: str, found: dict[int, list[dict[str, float]]]) -> None:
    from tests.bench.profile_parts import FORWARD, PARTS, REST, SEND

    rows = {part: [part] for part in (*PARTS, SEND, REST)}
    total, forward = ["ENGINE OVERHEAD PER STEP"], rows.pop(FORWARD)
    for batch, steps in found.items():
        for part, row in rows.items():
            row.extend(_figures([step.get(part, 0.0) for step in steps]))
        beside = [sum(step.values()) - step[FORWARD] for step in steps]
        total += _figures(beside)
        forward += _figures([step[FORWARD] for step in steps])
        if batch in GOALS_MS:
            name = f"overhead per step at batch {batch}, {kind}, ms"
            report.goals.append(at_most(name, 1e3 * statistics.median(beside), GOALS_MS[batch]))
    heads = [f"{name} at {batch}" for batch in found for name in ("median", "p95")]
    report.table(
        f"{kind}, after {HISTORY} tokens; ms of a step, by chats written at once",
        ["", *heads],
        [*rows.values(), total, forward],
    )
    report.results[kind] = {str(batch): steps for batch, steps in found.items()}


def _figures(seconds: list[float]) -> list[str]:
    """Median and 95th percentile, in milliseconds."""
    ranked = sorted(seconds)
    return [f"{1e3 * statistics.median(ranked):.3f}", f"{1e3 * ranked[int(0.95 * (len(ranked) - 1))]:.3f}"]


def _functions(hand: ByHand, text: Text, steps: int, top: int) -> None:
    """Python's own view of what is no forward pass: the functions that take most time themselves, at batch 16."""
    _begin(hand, text, BATCHES[-1], steps, Sampling())
    runner, profiler = hand.served.runner, cProfile.Profile()
    forward = runner.logits

    def unseen(batch: Batch) -> torch.Tensor:
        profiler.disable()
        try:
            return forward(batch)
        finally:
            profiler.enable()

    runner.logits = unseen  # type: ignore[method-assign]
    profiler.enable()
    for _ in range(steps):
        hand.round()
    profiler.disable()
    runner.logits = forward  # type: ignore[method-assign]
    hand.stop()
    told = io.StringIO()
    pstats.Stats(profiler, stream=told).strip_dirs().sort_stats("tottime").print_stats(top)
    print(f"\nfunctions beside the forward pass, {steps} steps at batch {BATCHES[-1]}, greedy (profiling slows them)")
    print("\n".join(line for line in told.getvalue().splitlines()[4:] if line.strip()))


def _operations(hand: ByHand, text: Text, top: int) -> None:
    """torch's view of the forward pass: its operations, at a step that writes and one that reads."""
    from torch.profiler import ProfilerActivity, profile

    def show(title: str) -> None:
        hand.round()
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            hand.round()
        print(f"\ntorch's operations, {title} (profiling slows them)")
        print(seen.key_averages().table(sort_by="self_cpu_time_total", row_limit=top, max_name_column_width=40))

    for batch in (BATCHES[0], BATCHES[-1]):
        _begin(hand, text, batch, 8, Sampling())
        show(f"one token for each of {batch} chats")
        hand.stop()
    hand.submit("reader", text.part((BATCHES[-1] + 1) * HISTORY, 2 * PREFILL + 8), 1)
    show(f"{PREFILL} tokens read")
    hand.stop()


if __name__ == "__main__":
    raise SystemExit(main())
