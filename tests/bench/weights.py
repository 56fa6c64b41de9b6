"""`python -m tests.bench.weights`: what fewer bits of the weights cost in quality, and what they bring in time.

Real text is read as a history and then followed token by token, each given as it is, a few at a time so that the layers
multiply by their codes, and many at a time so that they take their copies. At each token the distribution of the next
one is compared with that of the same file's weights in float32: KL divergence in thousandths of a nat, and perplexity.
Plain bfloat16 stands beside it. Then every layer's matrix is multiplied by a few rows and by many. Where the processor
does not multiply bfloat16, all of this is computed in float32, with weights of fewer bits.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from engine.batch import Batch, Draw, Row
from engine.model import loading, selfcheck, sources
from engine.model.compact import CompactLinear
from engine.model.quantised import FEW_ROWS, QuantisedLinear
from engine.model.runner import ModelRunner
from engine.protocol import Sampling
from tests.bench.cache_engine import MODELS, ROOT, Text
from tests.bench.cache_report import Report, at_most, facts
from tests.bench.int8 import loss

BLOCK = 32
FEW, MANY = min(FEW_ROWS.values()), 64  # tokens that are followed at once
FORMS = ("bf16", "auto", "int8", "int4")
ROWS = (1, 2, 4, 8, 16, 32, 64, 512)
LIKE_BF16 = 1.5  # times what bfloat16 itself loses
_DRAW = Draw(Sampling(), seed=0, position=0, prompt_ids=[], reply_ids=[])


class Passage(NamedTuple):
    """Token ids: a history, and what follows it and is looked at."""

    history: list[int]
    followed: list[int]


class Loss(NamedTuple):
    """Divergence from float32 in nats, where the likeliest token is the same, and perplexity as a multiple."""

    mean: float
    worst: float
    agree: float
    perplexity: float


class Reader:
    """A model in one form, with a pool for one passage; `kernels_dir` as `loading.load` has it."""

    def __init__(
        self,
        prepared: sources.PreparedModel,
        dtype: str,
        weights: str,
        longest: int,
        kernels_dir: Path | None = None,
    ) -> None:
        began = time.perf_counter()
        loaded = loading.load(prepared, "cpu", dtype, None, weights, kernels_dir=kernels_dir)
        self.load_s = time.perf_counter() - began
        self.module = loaded.module
        self._blocks = range(-(-longest // BLOCK))
        pool = selfcheck.probe(loaded).pool(len(self._blocks), BLOCK, loaded.dtype, loaded.device)
        self._runner = ModelRunner(loaded, pool)

    def follow(self, passages: list[Passage], rows: int, read: int = 512) -> torch.Tensor:
        """Log-probabilities after each token that is followed, `rows` of them at once; float64 [tokens, vocabulary].

        Of the history `read` tokens are forwarded at once.
        """
        found = []
        for history, followed in passages:
            for first in range(0, len(history), read):
                self._runner.run(Batch([Row(history[first : first + read], first, self._blocks, [])]))
            for first in range(0, len(followed), rows):
                part = enumerate(followed[first : first + rows], len(history) + first)
                logits = self._runner.logits(Batch([Row([token], at, self._blocks, [_DRAW]) for at, token in part]))
                found.append(logits.double().log_softmax(-1))
        return torch.cat(found)


def passages_of(text: Text, count: int, history: int, followed: int) -> list[Passage]:
    """So many stretches of real text, one after the other."""
    starts = range(0, count * (history + followed), history + followed)
    return [Passage(text.part(start, history), text.part(start + history, followed)) for start in starts]


def compare(exact: torch.Tensor, other: torch.Tensor, passages: list[Passage]) -> Loss:
    """How far `other` is from `exact`, both log-probabilities after each token that was followed."""
    mean, worst, agree = loss(exact, other)
    length = len(passages[0].followed)
    known = torch.cat([torch.tensor(passage.followed[1:]) for passage in passages])  # the last one's next is not there
    before = torch.cat([torch.arange(length - 1) + number * length for number in range(len(passages))])
    surprise = [each[before].gather(1, known[:, None]).mean() for each in (exact, other)]
    return Loss(mean, worst, agree, math.exp(surprise[0] - surprise[1]))


def quality(report: Report, model: str, texts: int, history: int, followed: int) -> None:
    """Measure and print what each form loses, and how quick the last one, int4, is."""
    prepared = {
        dtype: sources.prepare(model, MODELS, lambda *_: None, dtype=loading.DTYPES[dtype])
        for dtype in ("float32", "bfloat16")
    }
    passages = passages_of(Text(str(prepared["float32"].path)), texts, history, followed)
    exact = Reader(prepared["float32"], "float32", "auto", history + followed).follow(passages, MANY)
    rows, results = [], []
    _, kind = loading.choose("cpu", "auto")
    dtype = str(kind).removeprefix("torch.")
    for form in FORMS:
        reader = Reader(prepared[dtype], dtype, form, history + followed, MODELS)
        size = sum(parameter.nbytes for parameter in reader.module.parameters())
        for at_once in (FEW, MANY):
            one = compare(exact, reader.follow(passages, at_once), passages)
            results.append({"weights": form, "rows": at_once, **one._asdict(), "load_s": reader.load_s, "bytes": size})
            nats = (f"{1000 * nats:.3f}" for nats in one[:2])
            rows.append(
                [form, f"{at_once}", *nats, f"{one.agree:.1%}", f"{one.perplexity:.4f}", f"{reader.load_s:.1f} s",
                 f"{size / 2**20:,.0f} MiB"]
            )  # fmt: skip
    report.results["weights"] = results
    found = {(each["weights"], each["rows"]): each["mean"] for each in results}
    for at_once in (FEW, MANY):
        times = found["auto", at_once] / found["bf16", at_once]
        report.goals.append(at_most(f"auto's mean KL, {at_once} rows, by bf16's", times, LIKE_BF16))
    heads = ["weights", "rows", "mean KL", "worst KL", "same token", "perplexity", "load", "memory"]
    report.table(
        f"against float32, {texts} texts, {followed} tokens each after {history}, KL in 0.001 nats", heads, rows
    )
    speed(report, reader.module)


@torch.inference_mode()
def speed(report: Report, module: Any) -> None:
    """Multiply by every layer's matrix, by codes and by whole numbers in turn; milliseconds for all of them."""
    layers = [each for each in module.modules() if isinstance(each, QuantisedLinear | CompactLinear)]
    whole = {each: each.many if isinstance(each, QuantisedLinear) else _plain(each) for each in layers}
    output = layers.pop()
    rows, results = [], []
    for count in ROWS:
        for name, some in (("all layers", layers), ("output layer", [output])):
            inputs = {each.in_features: torch.randn(count, each.in_features).to(module.dtype) for each in some}
            kinds: dict[str, Callable[[Any, torch.Tensor], object]] = {
                "codes": lambda layer, x: layer.by_codes(x) if isinstance(layer, QuantisedLinear) else layer(x),
                "whole": lambda layer, x: whole[layer](x),
            }
            times: dict[str, list[float]] = {kind: [] for kind in kinds}
            for _ in range(3 if count > MANY else 9):
                for kind, multiply in kinds.items():
                    began = time.perf_counter()
                    for each in some:
                        multiply(each, inputs[each.in_features])
                    times[kind].append(1000 * (time.perf_counter() - began))
            middle = {kind: statistics.median(each) for kind, each in times.items()}
            results.append({"rows": count, "what": name, "bits": some[0].bits, **middle})
            rows.append([name, f"{count}", f"{some[0].bits}", *(f"{ms:.1f}" for ms in middle.values())])
    report.results["speed"] = results
    report.table("milliseconds", ["", "rows", "bits", "codes", "whole numbers"], sorted(rows, key=lambda row: row[0]))


def _plain(layer: CompactLinear) -> torch.nn.Linear:
    """What torch computes with the same weight."""
    plain = torch.nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
    plain.weight = torch.nn.Parameter(layer.weight, requires_grad=False)
    return plain


def main() -> int:
    """Run it; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--texts", type=int, default=4)
    parser.add_argument("--history", type=int, default=256, help="tokens before those that are looked at")
    parser.add_argument("--followed", type=int, default=128, help="tokens that are looked at, of each text")
    parser.add_argument(
        "--out", type=Path, default=ROOT / ".cache" / f"bench-weights-{time.strftime('%Y%m%d-%H%M%S')}.json"
    )
    args = parser.parse_args()
    MODELS.mkdir(parents=True, exist_ok=True)
    report = Report(facts(model=args.model, texts=args.texts))
    quality(report, args.model, args.texts, args.history, args.followed)
    return report.end(args.out)


if __name__ == "__main__":
    raise SystemExit(main())
