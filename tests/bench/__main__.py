"""`make bench`: ours and the servers that people use otherwise, on the same model and prompts, in interleaved rounds.

One that cannot be started is told with the reason. While one is measured, the others are stopped. Prints a table of
medians and writes everything as JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import httpx

from tests.bench import workloads
from tests.bench.cache_engine import MODELS, ROOT
from tests.bench.cache_report import Report, facts
from tests.bench.peers import PEERS, PeerError, Server, running

CONTEXTS, PROMPTS, COUNTS = [64, 512, 2048], [512, 2048], [8, 16]
OURS = "keepwarm"
MIB = 2**20
LESS_IS_BETTER = ("s", "MiB")

Found = dict[str, dict[str, list[float]]]  # server → figure → its rounds


def main() -> int:
    """Run what is wanted; the exit code."""
    names = [peer.name for peer in PEERS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", nargs="+", choices=names, default=names, help="servers to measure")
    parser.add_argument("--rounds", type=int, default=3, help="a figure is the median of so many")
    parser.add_argument("--quick", action="store_true", help="ours beside plain generate, one short round")
    parser.add_argument("--sessions", type=int, default=12, help="chats of the replay")
    parser.add_argument("--turns", type=int, default=6, help="turns of each")
    parser.add_argument("--max-tokens", type=int, default=32, help="tokens of a reply there")
    parser.add_argument("--out", type=Path, default=ROOT / ".cache" / f"bench-{time.strftime('%Y%m%d-%H%M%S')}.json")
    args = parser.parse_args()
    if args.quick:
        args.peers, args.rounds, args.sessions, args.turns, args.max_tokens = [OURS, "generate"], 1, 4, 3, 16
    MODELS.mkdir(parents=True, exist_ok=True)
    report = Report(facts(model="smollm2", rounds=args.rounds, weights={peer.name: peer.weights for peer in PEERS}))
    found: Found = defaultdict(lambda: defaultdict(list))
    with tempfile.TemporaryDirectory(dir=ROOT / ".cache", prefix="bench-") as folder, contextlib.ExitStack() as stack:
        servers = _start(args, report, found, Path(folder), stack)
        for number in range(args.rounds):
            for server in servers:
                _round(args, report, found, server, number)
    _tell(report, found)
    return report.end(args.out)


def _start(
    args: argparse.Namespace, report: Report, found: Found, folder: Path, stack: contextlib.ExitStack
) -> list[Server]:
    """Every server, ready and stopped; those that cannot be had are told."""
    model, servers = _model(), []
    for peer in PEERS:
        if peer.name not in args.peers:
            continue
        print(f"{peer.name}: starting", flush=True)
        try:
            server = stack.enter_context(running(peer, model, folder))
            first = workloads.measure(server.url, server.model, "first", [], [16], [])
        except (PeerError, RuntimeError, httpx.HTTPError) as error:
            report.results.setdefault("unavailable", {})[peer.name] = str(error)
            print(f"{peer.name} is left out: {error}", flush=True)
            continue
        found[peer.name]["start to first token, s"].append(server.start_s + 1 / max(1e-9, *first.values()))
        with contextlib.suppress(RuntimeError):
            workloads.replay(server.url, server.model, "warm-up", 2, 2, args.max_tokens)
        server.pause()
        servers.append(server)
    return servers


def _model() -> Path:
    """The embedded model in bfloat16, which all of them serve."""
    import torch

    from engine.model import sources

    return sources.prepare("smollm2", MODELS, lambda *_: None, dtype=torch.bfloat16).path


def _round(args: argparse.Namespace, report: Report, found: Found, server: Server, number: int) -> None:
    """All workloads on one server, which has the machine to itself."""
    name, nonce = server.peer.name, f"r{number}"
    print(f"round {number + 1} of {args.rounds}: {name}", flush=True)
    server.go_on()
    contexts, prompts, counts = ([64], [512], [4]) if args.quick else (CONTEXTS, PROMPTS, COUNTS)
    try:
        figures = workloads.measure(server.url, server.model, nonce, contexts, prompts, counts)
        summary = workloads.replay(server.url, server.model, nonce, args.sessions, args.turns, args.max_tokens)
        figures |= {
            "replay: returning TTFT p50, s": summary["ttft_return_p50"],
            "replay: returning TTFT p95, s": summary["ttft_return_p95"],
            "replay: first TTFT p50, s": summary["ttft_first_p50"],
            "replay: TPOT p50, s": summary["tpot_p50"],
            "replay: reused": summary["reuse_return"],
            "memory after it, MiB": server.rss() / MIB,
        }
        for figure, value in figures.items():
            found[name][figure].append(value)
    except (RuntimeError, httpx.HTTPError) as error:
        report.wrong.append(f"round {number + 1}, {name}: {error}")
    finally:
        server.pause()


def _tell(report: Report, found: Found) -> None:
    """Medians of all, and beside those of others ours as a ratio: above 1 is better than they are."""
    report.results["rounds"] = {name: dict(figures) for name, figures in found.items()}
    names = [peer.name for peer in PEERS if peer.name in found]
    weights = {peer.name: peer.weights for peer in PEERS}
    rows = []
    for figure in dict.fromkeys(figure for name in names for figure in found[name]):
        row = [figure]
        ours = found[OURS].get(figure)
        for name in names:
            values = found[name].get(figure)
            if not values:
                row.append("")
                continue
            middle = statistics.median(values)
            text = f"{middle:,.4g}"
            if name != OURS and ours and middle:
                ratio = statistics.median(ours) / middle
                less = figure.endswith(tuple(f", {unit}" for unit in LESS_IS_BETTER))
                text += f" ({1 / ratio if less and ratio else ratio:.2f}x)"
            row.append(text)
        rows.append(row)
    report.table(
        "medians; in brackets how many times better ours is",
        ["", *(f"{name} ({weights[name]})" for name in names)],
        rows,
    )


if __name__ == "__main__":
    raise SystemExit(main())
