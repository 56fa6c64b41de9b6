"""`make bench-int8`: what int8 in host and disk costs in quality, as KL divergence of the next token's distribution.

Real text is read as a history, its blocks go through the images that the tiers keep, and a message is forwarded over
what came back: at each of its tokens the distribution is compared with that over the exact history. Beside it stands
what computing in the model's dtype costs at all: the same text in float32. Divergences are in thousandths of a nat.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import NamedTuple

import torch

from engine.batch import Batch, Draw, Row
from engine.cache.image import ImageCodec
from engine.model import loading, selfcheck, sources
from engine.model.runner import ModelRunner
from engine.protocol import Sampling
from tests.bench.cache_engine import MESSAGE, MODELS, ROOT, Text
from tests.bench.cache_report import Report, at_most, facts

BLOCK = 32
PART = 512  # tokens of a history that are forwarded at once
MOST = 10.0  # thousandths of a nat, on average
_DRAW = Draw(Sampling(), seed=0, position=0, prompt_ids=[], reply_ids=[])


class Loss(NamedTuple):
    """KL divergence in nats, over all positions, and at how many of them the likeliest token is the same."""

    mean: float
    worst: float
    agree: float


class Bench:
    """A model over a pool with room for one history of `longest` tokens and a message. `longest` ends a block."""

    def __init__(self, model: str, dtype: str, longest: int) -> None:
        device, kind = loading.choose("cpu", dtype)
        prepared = sources.prepare(model, MODELS, lambda *_: None, dtype=kind)
        loaded = loading.load(prepared, "cpu", dtype)
        shape = selfcheck.probe(loaded)
        self.path = str(prepared.path)
        self._blocks = range(-(-(longest + MESSAGE) // BLOCK))
        self._pool = shape.pool(len(self._blocks), BLOCK, kind, device)
        self._codec = ImageCodec(shape.layers, BLOCK, shape.kv_heads, shape.head_dim, kind, "int8")
        self._runner = ModelRunner(loaded, self._pool)

    def read(self, history: list[int]) -> None:
        """Compute a history's K and V."""
        for start in range(0, len(history), PART):
            self._runner.run(Batch([Row(history[start : start + PART], start, self._blocks, [])]))

    def quantize(self, history: list[int]) -> None:
        """Have a history's blocks as they come back from an int8 tier."""
        image = torch.empty(self._codec.size, dtype=torch.uint8)
        for block in range(len(history) // BLOCK):
            self._codec.store(self._pool.data, block, image)
            self._codec.load(image, self._pool.data, block)

    def follow(self, history: list[int], message: list[int]) -> torch.Tensor:
        """Log-probabilities after each token of a message, float64 [tokens, vocabulary]."""
        start = len(history)
        rows = [Row([token], start + i, self._blocks, [_DRAW]) for i, token in enumerate(message)]
        return self._runner.logits(Batch(rows)).double().log_softmax(-1)


def loss(exact: torch.Tensor, other: torch.Tensor) -> Loss:
    """How far `other` is from `exact`, both log-probabilities [positions, vocabulary]."""
    divergence = (exact.exp() * (exact - other)).sum(-1).clamp_min(0)
    agree = (exact.argmax(-1) == other.argmax(-1)).double().mean()
    return Loss(float(divergence.mean()), float(divergence.max()), float(agree))


def run(report: Report, model: str, lengths: list[int], texts: int, dtype: str = "bfloat16") -> None:
    """Measure and print; the figures go into the report as "int8"."""
    bench, finest = Bench(model, dtype, max(lengths)), Bench(model, "float32", max(lengths))
    text = Text(bench.path)
    rows, results = [], []
    for length in lengths:
        exact, restored, finer = [], [], []
        for number in range(texts):
            start = number * (length + MESSAGE)
            history, message = text.part(start, length), text.part(start + length, MESSAGE)
            bench.read(history)
            exact.append(bench.follow(history, message))
            bench.quantize(history)
            restored.append(bench.follow(history, message))
            finest.read(history)
            finer.append(finest.follow(history, message))
        pairs = {"int8 in a tier": (exact, restored), f"{dtype} at all": (finer, exact)}
        for name, (better, worse) in pairs.items():
            one = loss(torch.cat(better), torch.cat(worse))
            results.append({"history": length, "what": name, **one._asdict()})
            rows.append([f"{length:,}", name, *(f"{1000 * nats:.3f}" for nats in one[:2]), f"{one.agree:.1%}"])
        mean = loss(torch.cat(exact), torch.cat(restored)).mean
        report.goals.append(at_most(f"int8, mean KL over {length:,} tokens, 0.001 nats", 1000 * mean, MOST))
    report.results["int8"] = results
    heads = ["history", "what", "mean KL", "worst KL", "same token"]
    report.table(f"int8 in host and disk, {texts} texts, {MESSAGE} positions each, KL in 0.001 nats", heads, rows)


def main() -> int:
    """Run it; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048], help="tokens of history, whole blocks")
    parser.add_argument("--texts", type=int, default=4, help="different texts of each length")
    parser.add_argument(
        "--out", type=Path, default=ROOT / ".cache" / f"bench-int8-{time.strftime('%Y%m%d-%H%M%S')}.json"
    )
    args = parser.parse_args()
    if any(length % BLOCK for length in args.lengths):
        parser.error(f"lengths are whole blocks: multiples of {BLOCK}")
    MODELS.mkdir(parents=True, exist_ok=True)
    report = Report(facts(model=args.model, dtype=args.dtype, texts=args.texts))
    run(report, args.model, args.lengths, args.texts, args.dtype)
    return report.end(args.out)


if __name__ == "__main__":
    raise SystemExit(main())
