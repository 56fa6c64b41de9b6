"""The time to the first token of a turn whose history lies in one tier, beside what it could not be faster than."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from engine.config import CacheConfig, EngineConfig
from tests.bench.cache_engine import MESSAGE, MODELS, Driven, Text, Turn
from tests.bench.cache_floors import Floors
from tests.bench.cache_report import Report, at_least, at_most, ms

COLUMNS = ("cold", "device", "host", "disk", "restart")
FOUND_IN = {"cold": "computed", "device": "device", "host": "host", "disk": "disk", "restart": "disk"}
OF_FLOOR = {"device": 1.2, "host": 1.5, "disk": 2.0, "restart": 2.0}
OF_COLD, OF_COLD_AT = {"device": 25, "host": 18, "disk": 10, "restart": 10}, 4096
OF_MEMCPY = 70  # percent
SPARE = 16  # messages' worth of tokens beside the longest history
MIB = 2**20


@dataclass(frozen=True)
class Measured:
    """One turn of `MESSAGE` new tokens after `history` tokens that lay where the column says."""

    column: str
    history: int
    ttft_s: float
    floor_s: float
    forward_s: float
    move_s: float
    copies_s: float
    restore_s: float
    sources: dict[str, int]


class TierBench:
    """Measures all columns, one history at a time, so that no other one is in the way."""

    def __init__(self, report: Report, engine: Driven, floors: Floors, text: Text) -> None:
        self._report, self._engine, self._floors, self._text = report, engine, floors, text
        self.measured: list[Measured] = []
        self.demotions: list[float] = []  # bytes a second
        self.starts: list[float] = []

    async def round(self, number: int, history: int) -> None:
        """Every column once. The salt is this round's own, so that nothing of others is found."""
        engine, session = self._engine, f"{history}-{number}"
        salt, ids = session.encode(), self._text.part(0, history)
        messages = self._text.messages(history)
        await self._measure("cold", session, salt, ids, messages)
        await self._measure("device", session, salt, ids, messages)
        await engine.client.demote(session, "host")
        await self._measure("host", session, salt, ids, messages)
        await engine.client.demote(session, "disk")
        await self._measure("disk", session, salt, ids, messages)
        self.starts.append(await engine.restart())
        await self._measure("restart", session, salt, ids, messages)
        await engine.client.drop(session)

    async def _measure(
        self, column: str, session: str, salt: bytes, ids: list[int], texts: Iterator[list[int]]
    ) -> None:
        message, history, floors = next(texts), len(ids), self._floors
        await self._engine.saved(session)
        forward_s = floors.forward_s(history, message) if column != "cold" else 0.0
        move_s = copies_s = 0.0
        if column == "host":
            move_s, copies_s = floors.memcpy_s(history), floors.copies_s(history)
        elif column in ("disk", "restart"):
            move_s = floors.read_s(history)
        turn = await self._engine.turn(session, [*ids, *message], salt)
        await self._engine.saved(session)
        self._require_source(column, history, turn)
        usage = turn.usage
        self.measured.append(
            Measured(
                column,
                history,
                turn.ttft_s,
                forward_s + move_s,
                forward_s,
                move_s,
                copies_s,
                usage.restore_s,
                turn.sources,
            )
        )

    def _require_source(self, column: str, history: int, turn: Turn) -> None:
        expected = {FOUND_IN[column]: history}
        expected["computed"] = expected.get("computed", 0) + MESSAGE
        if turn.sources != expected:
            self._report.wrong.append(
                f"{history} tokens, column {column}: the tokens came from {turn.sources}, not {expected}; "
                f"restore failed: {turn.usage.miss}"
            )


async def run(report: Report, model: str, lengths: list[int], rounds: int, folder: Path) -> None:
    """Measure, print and judge."""
    longest = max(lengths) + SPARE * MESSAGE
    config = EngineConfig(
        model=model,
        cache_dir=str(MODELS),
        dtype="bfloat16",
        cache=CacheConfig(device_kv=512 * MIB, host_kv=1024 * MIB, disk_kv=4096 * MIB),
        kv_dir=str(folder),
        force="load",
    )
    async with Driven(config) as engine:
        block_size = engine.capabilities.block_size
        floors = Floors(model, MODELS, "bfloat16", block_size, longest, folder)
        bench = TierBench(report, engine, floors, Text(engine.capabilities.model_path))
        await bench.round(-1, min(lengths))  # pages, files and threads are there from then on
        bench.measured.clear()
        for number in range(rounds):
            for history in lengths:
                print(f"round {number + 1} of {rounds}: {history} tokens", flush=True)
                await bench.round(number, history)
        _tell(report, bench, floors)


def _tell(report: Report, bench: TierBench, floors: Floors) -> None:
    cells: dict[tuple[int, str], list[Measured]] = defaultdict(list)
    for each in bench.measured:
        cells[each.history, each.column].append(each)
    middle = {place: {name: _middle(these, name) for name in FIGURES} for place, these in cells.items()}
    report.results["tiers"] = [
        {"history": history, "column": column, **figures, "sources": cells[history, column][-1].sources}
        for (history, column), figures in middle.items()
    ]
    report.results["tiers_raw"] = [asdict(each) for each in bench.measured]
    report.results["start_s"] = statistics.median(bench.starts)
    rows = []
    for (history, column), figures in middle.items():
        ttft, floor, cold = figures["ttft_s"], figures["floor_s"], middle[history, "cold"]["ttft_s"]
        sources = ", ".join(f"{count} {name}" for name, count in cells[history, column][-1].sources.items())
        row = [f"{history}", column, ms(ttft), ms(floor) if floor else "", "", "", "", "", sources]
        if column in OF_FLOOR:
            goal = at_most(f"{history} tokens, {column}: of its floor", ttft / floor, OF_FLOOR[column])
            report.goals.append(goal)
            row[4:6] = [f"{goal.value:.2f}", goal.word]
            row[6] = f"{cold / ttft:.1f}"
            if history == OF_COLD_AT:
                quicker = at_least(f"{history} tokens, {column}: quicker than cold", cold / ttft, OF_COLD[column])
                report.goals.append(quicker)
                row[7] = quicker.word
        rows.append(row)
    report.table(
        f"time to the first token, {MESSAGE} new tokens, milliseconds (files may be in the system's cache)",
        ["history", "in", "TTFT", "floor", "ratio", "", "x cold", "", "tokens from"],
        rows,
    )
    _tell_copies(report, middle, floors)


def _tell_copies(report: Report, middle: dict[tuple[int, str], dict[str, float]], floors: Floors) -> None:
    """Bytes a second of the engine's copies alone and of whole restores, which all their bookkeeping is a part of,
    beside those of moving the same bytes in one piece.
    """
    rows, found = [], []
    for (history, column), figures in middle.items():
        if column not in ("host", "disk", "restart") or not figures["restore_s"]:
            continue
        size = history * floors.bytes_per_token
        whole, most = size / figures["restore_s"], size / figures["move_s"]
        each = {"history": history, "column": column, "bytes_s": whole, "plain_bytes_s": most}
        row = [
            f"{history}",
            column,
            f"{most / 1e9:.2f}",
            "",
            "",
            "",
            f"{whole / 1e9:.2f}",
            f"{100 * whole / most:.0f}%",
        ]
        if column == "host":
            copies = size / figures["copies_s"]
            goal = at_least(f"{history} tokens, host: copies, percent of memcpy", 100 * copies / most, OF_MEMCPY)
            report.goals.append(goal)
            row[3:6] = [f"{copies / 1e9:.2f}", f"{goal.value:.0f}%", goal.word]
            each["copies_bytes_s"] = copies
        rows.append(row)
        found.append(each)
    report.results["copies"] = found
    report.table(
        "GB/s of memcpy (host) or of reading one file (disk, restart), of copying blocks, and of restores as a whole",
        ["history", "from", "plain", "copies", "share", "", "restores", "share"],
        rows,
    )


FIGURES = ("ttft_s", "floor_s", "forward_s", "move_s", "copies_s", "restore_s")


def _middle(these: list[Measured], name: str) -> float:
    return statistics.median([float(getattr(each, name)) for each in these])
