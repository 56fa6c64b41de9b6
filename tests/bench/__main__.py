"""`make bench`: ours and the servers that people use otherwise, on the same model and prompts, in interleaved rounds.

One that cannot be set up or started is told with the reason. While one is measured, the others are stopped. Prints
tables of medians and goals, and writes everything as JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass, field, replace
from pathlib import Path

import httpx
import psutil

from tests.bench import comparison, workloads
from tests.bench.cache_engine import MODELS, ROOT
from tests.bench.cache_report import Report, facts
from tests.bench.comparison import COLD, MEMORY, Found
from tests.bench.crowd import crowd
from tests.bench.launching import Server, free_port, running
from tests.bench.peers import CORES, OURS, OURS_INT4, PEERS, Files, Peer, PeerError, Start, embedded_gguf
from tests.bench.workloads import WORKLOADS, Client, Sizes

FIRST = "very first start, s"
MIB = 2**20
FAILURES = (PeerError, RuntimeError, httpx.HTTPError, OSError, psutil.Error, ValueError, KeyError)


@dataclass
class Bench:
    """One run: what is asked for, what was found so far, and a folder for the servers' own files."""

    files: Files
    sizes: Sizes
    folder: Path
    report: Report
    quick: bool
    crowd: int  # chats of the run with a tenth of the room; 0 leaves it out
    found: Found = field(default_factory=lambda: defaultdict(lambda: defaultdict(list)))
    told: dict[str, dict[str, str]] = field(default_factory=dict)  # of each server: versions, or why there is none

    def start(self, peer: Peer, stack: contextlib.ExitStack) -> Server | None:
        """The peer's server, warm and stopped; None, and the reason told, where it cannot be had."""
        print(f"{peer.name}: starting", flush=True)
        own = self.folder / peer.name
        own.mkdir()
        told = {"weights": peer.weights, "threads": CORES, "note": peer.note}
        self.told[peer.name] = told
        try:
            peer.make()
            told["versions"] = peer.versions()
            if not self.quick:  # what is compiled, converted and measured at a first start is kept for the next ones
                with contextlib.ExitStack() as once:
                    _, seconds = self._begin(peer, own, once)
                self.found[peer.name][FIRST].append(seconds)
            server, seconds = self._begin(peer, own, stack)
            self.found[peer.name][COLD].append(seconds)
            with contextlib.suppress(*FAILURES):  # whoever cannot do this one says so when it counts
                warm = replace(self.sizes, sessions=2, turns=2)
                workloads.replay_summary(Client(server.url, server.model, "warm-up"), warm)
        except FAILURES as error:
            told["unavailable"] = str(error) or type(error).__name__
            print(f"{peer.name} is left out: {told['unavailable']}", flush=True)
            return None
        server.pause()
        return server

    def round(self, number: int, servers: dict[str, Server]) -> None:
        """All workloads, each on one server after the other, which has the machine to itself."""
        names = list(servers)
        turned = names[number % max(1, len(names)) :] + names[: number % max(1, len(names))]
        for workload in WORKLOADS:
            for name in turned:
                print(f"round {number + 1}, {workload}: {name}", flush=True)
                self._measure(workload, name, servers[name], f"r{number}")
        if OURS in servers and self.crowd:
            print(f"round {number + 1}, {self.crowd} chats on a tenth of the room: {OURS}", flush=True)
            self._crowd(number)

    def tell(self, names: list[str]) -> None:
        """Print and note everything: who was there, medians with their spread, ratios, goals."""
        report, here = self.report, [name for name in names if self.found.get(name)]
        report.results |= {"servers": self.told, "rounds": {name: dict(self.found[name]) for name in here}}
        rows = []
        for name in names:
            told = self.told[name]
            state = f"UNAVAILABLE: {told['unavailable']}" if "unavailable" in told else told["note"]
            rows.append([name, told["weights"], told.get("versions", ""), told["threads"], state])
        report.table("servers", ["", "weights", "versions", "threads", ""], rows)
        report.table("median (least–greatest)", ["", *here], comparison.rows(self.found, here))
        for ours in (OURS, OURS_INT4):
            others = [name for name in here if name not in (OURS, OURS_INT4)]
            if ours in here and others:
                table = comparison.ratios(self.found, others, ours)
                report.table(f"how many times better {ours} is than", ["", *others], table)
        if not self.quick:
            report.goals, report.unmeasured = comparison.judge(self.found)

    def _begin(self, peer: Peer, own: Path, stack: contextlib.ExitStack) -> tuple[Server, float]:
        """A server, and seconds from its start to the first piece of its first reply."""
        port = free_port()
        server = stack.enter_context(running(peer.launch(Start(self.files, port, own)), port, own / "log"))
        asked = time.perf_counter()
        first_s = workloads.first_reply(Client(server.url, server.model, "first"))
        return server, asked - server.began + first_s

    def _measure(self, workload: str, name: str, server: Server, nonce: str) -> None:
        client = Client(server.url, server.model, nonce)
        server.go_on()
        try:
            workloads.wake(client, workload)
            figures = WORKLOADS[workload](client, self.sizes)
            if workload == "replay":
                figures[MEMORY] = server.memory() / MIB
        except FAILURES as error:
            self.report.wrong.append(f"{nonce}, {workload}, {name}: {type(error).__name__}: {error}")
            return
        finally:
            server.pause()
        self._note(name, figures, client.odd)

    def _crowd(self, number: int) -> None:
        folder = self.folder / f"crowd-{number}"
        folder.mkdir()
        try:
            figures, odd = crowd(self.files, folder, f"r{number}", replace(self.sizes, sessions=self.crowd))
        except FAILURES as error:
            self.report.wrong.append(f"r{number}, {self.crowd} chats: {type(error).__name__}: {error}")
            return
        self._note(OURS, figures, odd)

    def _note(self, name: str, figures: dict[str, float], odd: list[str]) -> None:
        for figure, value in figures.items():
            self.found[name][figure].append(value)
        print("  " + "; ".join(f"{figure} {value:.4g}" for figure, value in figures.items()), flush=True)
        if odd:
            self.report.results.setdefault("odd", {}).setdefault(name, []).extend(odd)
            print(f"  odd: {'; '.join(odd)}", flush=True)


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
    parser.add_argument("--crowd", type=int, default=64, help="chats with a tenth of their room on the device; 0: none")
    parser.add_argument("--out", type=Path, default=ROOT / ".cache" / f"bench-{time.strftime('%Y%m%d-%H%M%S')}.json")
    args = parser.parse_args()
    sizes = Sizes(sessions=args.sessions, turns=args.turns, max_tokens=args.max_tokens)
    if args.quick:
        args.peers, args.rounds, args.crowd = [OURS, "generate"], 1, 0
        sizes = Sizes(contexts=(64,), prompts=(512,), counts=(4,), sessions=4, turns=3, max_tokens=16)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # by way of every server's end
    MODELS.mkdir(parents=True, exist_ok=True)
    report = Report(facts(model="smollm2", rounds=args.rounds, sizes=vars(sizes)))
    with tempfile.TemporaryDirectory(dir=ROOT / ".cache", prefix="bench-") as folder, contextlib.ExitStack() as stack:
        bench = Bench(Files(_model(), embedded_gguf(), MODELS), sizes, Path(folder), report, args.quick, args.crowd)
        started = {peer.name: bench.start(peer, stack) for peer in PEERS if peer.name in args.peers}
        servers = {name: server for name, server in started.items() if server is not None}
        for number in range(args.rounds):
            bench.round(number, servers)
        bench.tell(list(started))
    return report.end(args.out)


def _model() -> Path:
    """The embedded model in bfloat16, which all of them serve."""
    import torch

    from engine.model import sources

    return sources.prepare("smollm2", MODELS, lambda *_: None, dtype=torch.bfloat16).path


if __name__ == "__main__":
    raise SystemExit(main())
