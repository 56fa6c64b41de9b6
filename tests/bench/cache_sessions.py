"""How many chats fit into one budget, and what a system prompt that is read already is worth to a new one."""

from __future__ import annotations

import statistics
from pathlib import Path

from engine.config import CacheConfig, EngineConfig
from tests.bench.cache_engine import MESSAGE, MODELS, Driven, Text
from tests.bench.cache_report import Report, at_least, ms

BUDGET = 256 * 2**20
TOKENS = 1000  # of a session, the system prompt included
APART = 409  # tokens between the beginnings of two sessions' own texts
OF_STATIC, LOWER = 5, 70  # times; percent
ONLY_DEVICE = CacheConfig(device_kv=BUDGET, host_kv=0, disk_kv=0)


async def run(report: Report, model: str, rounds: int, kv_dir: Path) -> None:
    """Measure, print and judge."""
    config = EngineConfig(
        model=model, cache_dir=str(MODELS), dtype="bfloat16", cache=ONLY_DEVICE, kv_dir=str(kv_dir), force="load"
    )
    async with Driven(config) as engine:
        text, capabilities = Text(engine.capabilities.model_path), engine.capabilities
        static = BUDGET // (capabilities.context_length * capabilities.kv_bytes_per_token)
        apart = await _fit(engine, text, 0)
        shared = await _fit(engine, text, len(text.system))
        own, common = await _first_turns(report, engine, text, rounds)
    times = at_least(f"sessions of {TOKENS} tokens: of static allocation", shared / max(1, static), OF_STATIC)
    lower = at_least("new chat: percent less TTFT by sharing", 100 * (1 - common / own), LOWER)
    report.goals += [times, lower]
    report.results["sessions"] = {"budget_bytes": BUDGET, "static": static, "not_shared": apart, "shared": shared}
    report.results["new_chat"] = {"not_shared_s": own, "shared_s": common, "system_tokens": len(text.system)}
    report.table(
        f"sessions of {TOKENS:,} tokens in {BUDGET // 2**20} MiB, {len(text.system)} of them a system prompt",
        ["", "sessions", "of static", ""],
        [
            [f"static, {capabilities.context_length:,} tokens for each (arithmetic)", f"{static}", "1.0", ""],
            ["nothing shared (measured)", f"{apart}", f"{apart / max(1, static):.1f}", ""],
            ["system prompt shared (measured)", f"{shared}", f"{times.value:.1f}", times.word],
        ],
    )
    report.table(
        f"first TTFT of a new chat, system prompt and {MESSAGE} tokens, milliseconds, median of {rounds}",
        ["", "TTFT", "less", ""],
        [["nothing shared", ms(own), "", ""], ["system prompt shared", ms(common), f"{lower.value:.0f}%", lower.word]],
    )


async def _fit(engine: Driven, text: Text, shared_len: int) -> int:
    """How many sessions are whole on the device before the next one pushes a part of one out."""
    sessions: list[tuple[str, list[int], bytes]] = []
    while True:
        number = len(sessions)
        session = f"fit-{shared_len}-{number}"
        ids = [*text.system, *text.part(number * APART, TOKENS - len(text.system))]
        await engine.turn(session, ids, session.encode(), shared_len)
        sessions.append((session, ids, session.encode()))
        for name, there, salt in sessions:
            estimated = await engine.estimate(name, there, salt, shared_len)
            if estimated.device_tokens < TOKENS - 1:  # the last one is always computed
                for gone, _, _ in sessions:
                    await engine.client.drop(gone)
                return number


async def _first_turns(report: Report, engine: Driven, text: Text, rounds: int) -> tuple[float, float]:
    """The median TTFT of a new chat without and with its system prompt shared, in seconds."""
    times: dict[int, list[float]] = {0: [], len(text.system): []}
    messages = text.messages(0)
    await engine.turn("before", [*text.system, *next(messages)], b"before", len(text.system))
    for number in range(-1, rounds):
        for shared_len, found in times.items():
            session = f"new-{shared_len}-{number}"
            turn = await engine.turn(session, [*text.system, *next(messages)], session.encode(), shared_len)
            if turn.usage.device_tokens != shared_len:
                report.wrong.append(f"a new chat with {shared_len} shared tokens had them from {turn.sources}")
            if number >= 0:
                found.append(turn.ttft_s)
            await engine.client.drop(session)
    return statistics.median(times[0]), statistics.median(times[len(text.system)])
