"""What the doctor reads out of a server's figures: literal figures, literal answers."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from chat.doctor import Finding
from chat.doctor_measures import Waits, by_concurrency, read_beside, reuse, together
from chat.doctor_questions import answers, duration, first_token, memory, per_token, seconds, throughput
from chat.doctor_server import examine
from chat.doctor_tiers import DISK_CHECK
from chat.figures import GoneBlocks, RecentReply, ServerFigures
from chat.misses import GONE as GONE_FOR_GOOD
from engine.cache.holdings import WHY
from engine.cache.nowhere import FAILING, SPENT
from engine.protocol import Capabilities, ModelUsage, Snapshot, TierUsage

MIB = 2**20


def reply(**changed: Any) -> RecentReply:
    """A reply of 11 tokens to a prompt of 100, 90 of them reused: 0.2 s to the first token, then 0.1 s each."""
    usual = {
        "ended_at": 100.0,
        "total_s": 1.2,
        "prompt_tokens": 100,
        "reused_tokens": 90,
        "computed_tokens": 10,
        "recomputed_tokens": 0,
        "output_tokens": 11,
        "ttft_s": 0.2,
        "tpot_s": 0.1,
        "queue_s": 0.02,
        "read_s": 0.16,
        "first": True,
    }
    return RecentReply(**{**usual, **changed})


def late(**changed: Any) -> RecentReply:
    """The same, but 2 s to the first token, most of it reading."""
    return reply(**{"ttft_s": 2.0, "total_s": 3.0, "read_s": 1.8, **changed})


def tiers(**budgets: int) -> list[TierUsage]:
    """Tiers of so many MiB, of which a quarter is used."""
    return [
        TierUsage(
            tier=tier,
            budget_bytes=budgets.get(tier, 0) * MIB,
            held_bytes=0,
            used_bytes=budgets.get(tier, 0) * MIB // 4,
            pinned_bytes=0,
            blocks=0,
        )
        for tier in ("device", "host", "disk")
    ]


def snapshot(**changed: Any) -> Snapshot:
    """A pool of 1,000 blocks: 100 are free, 300 held by replies, 600 kept for later; and a disk tier of 2 GiB."""
    blocks = {name: changed.pop(name, count) for name, count in
              {"total_blocks": 1000, "free_blocks": 100, "leased_blocks": 300, "idle_blocks": 600}.items()}  # fmt: skip
    model = ModelUsage(
        name="m", fingerprint="f", weights_loaded=True, weight_bytes=500 * MIB, block_bytes=360 * 1024, **blocks
    )
    usual = {
        "call_id": "",
        "models": [model],
        "budget_bytes": 352 * MIB,
        "pool_bytes": 352 * MIB,
        "used_bytes": 300 * MIB,
        "running": 2,
        "waiting": 0,
        "steps": 100,
        "forwarded_tokens": 1000,
        "reused_tokens": 0,
        "sampled_tokens": 200,
        "preemptions": 0,
        "evicted_blocks": 0,
        "sessions": {},
        "tiers": tiers(device=352, disk=2048),
    }
    return Snapshot(**{**usual, **blocks, **changed})


CAPABILITIES = Capabilities(
    model_name="m",
    model_path="/m",
    fingerprint="f",
    device="cpu",
    dtype="bfloat16",
    weights="int4",
    attention="paged SDPA",
    context_length=8192,
    vocab_size=49152,
    eos_ids=[2],
    block_size=32,
    total_blocks=1000,
    kv_bytes_per_token=11_520,
    threads=4,
    commands=[],
)


def server(replies: list[RecentReply] | None = None, **changed: Any) -> ServerFigures:
    """A server that is well, on four cores of which one is used."""
    usual = {
        "version": "0.1.0",
        "pid": 7,
        "now": 1000.0,
        "uptime_s": 7200.0,
        "phase": "ready",
        "stage": "",
        "message": "",
        "cores": 4,
        "load": 1.0,
        "capabilities": CAPABILITIES,
        "snapshot": snapshot(),
        "replies": replies if replies is not None else [reply()] * 4,
    }
    return ServerFigures(**{**usual, **changed})


def why(finding: Finding) -> tuple[str, str]:
    """The reason that a warning gives, and its fix."""
    assert finding.level == "warn"
    return finding.detail.rpartition("because ")[2], finding.fix


GONE = {"miss_cause": "evicted", "miss_detail": "disk: it was full"}
MORE = "raise --device-kv, which is 352 MiB now, for instance to 704MiB"


# --- without trouble --------------------------------------------------------------------------------------------------


def test_a_server_that_is_well() -> None:
    assert examine("http://127.0.0.1:7860", server()) == [
        Finding(
            "ok",
            "server",
            "Keepwarm 0.1.0 at http://127.0.0.1:7860, process 7, up for 2 hours, serves m in bfloat16 with int4 "
            "weights on cpu, 4 threads, paged SDPA",
        ),
        Finding(
            "ok",
            "first token (TTFT)",
            "median 0.20 s, 95% within 0.20 s over the last 4 replies: 10% waiting to be let in, 80% reading, 10% "
            "outside the engine; 90% of the prompts were reused",
        ),
        Finding(
            "ok",
            "each token (TPOT)",
            "median 0.10 s, 95% within 0.10 s over the last 4 replies, 4.0 at a time on average; every step reads "
            "500 MiB of weights, which makes 4.9 GiB/s",
        ),
        Finding(
            "ok",
            "memory",
            "90% of the device's 352 MiB holds chats, 30% is held by replies being written; host is off, disk holds "
            "512 MiB of 2 GiB; 2 run, 0 wait; of the last 4 prompts, 90% came from the device, 0% from host and 0% "
            "from disk; since the start 0 replies had to step back",
        ),
        Finding(
            "ok",
            "throughput",
            "not enough data yet: it takes replies alone and replies at the same time to compare",
        ),
    ]


def test_without_replies_there_is_nothing_to_say() -> None:
    for count, word in ((0, "no replies"), (1, "1 reply"), (2, "2 replies")):
        for finding in (first_token(server([reply()] * count)), per_token(server([reply()] * count))):
            assert finding.level == "ok"
            assert finding.detail == (
                f"not enough data yet: {word} since the server started 2 hours ago, and 3 are needed"
            )


def test_replies_without_text_or_with_one_token_count_where_they_can() -> None:
    silent = reply(ttft_s=None, tpot_s=None, read_s=None, output_tokens=0)
    found = answers(server([silent] * 5))
    assert [finding.level for finding in found] == ["ok"] * 4
    assert found[0].detail.startswith("not enough data yet: no replies")


def test_further_replies_to_one_prompt_do_not_count_as_reuse() -> None:
    forked = reply(first=False, prompt_tokens=100, reused_tokens=100, computed_tokens=0)
    assert "over the last 3 replies" in first_token(server([reply()] * 3 + [forked] * 9)).detail


# --- the first token --------------------------------------------------------------------------------------------------


def test_late_because_the_cache_is_full() -> None:
    figures = server([late(queue_s=1.7, read_s=0.2)] * 3, snapshot=snapshot(free_blocks=10, idle_blocks=40, waiting=3))
    assert why(first_token(figures)) == ("the cache is full, so that requests wait for each other", MORE)


def test_late_because_of_others_prompts() -> None:
    figures = server([late(queue_s=1.7, read_s=0.2)] * 3)
    assert why(first_token(figures)) == (
        "the prompts of others are read first",
        "send fewer requests at the same time, or shorter prompts",
    )


def test_late_because_the_machine_is_busy() -> None:
    figures = server([late()] * 3, load=6.5)
    assert why(first_token(figures)) == (
        "the machine is busy: in the last minute 6.5 threads wanted 4 cores on average",
        "close other programs, or give Keepwarm more cores",
    )


def test_late_because_of_what_is_not_the_engine() -> None:
    reason, fix = why(first_token(server([late(read_s=0.1)] * 3)))
    assert reason == "finding the chat, making tokens of it and storing it takes that long"
    assert "--data-dir" in fix


def test_late_though_most_is_reused() -> None:
    long = late(prompt_tokens=4000, reused_tokens=3100, computed_tokens=900)
    assert why(first_token(server([long] * 3))) == (
        "900 tokens of each prompt are read at 500 tokens/s, though the rest is reused",
        "a smaller model, or a GPU (--device), needs less time for the same",
    )


def test_late_because_chats_gave_way() -> None:
    figures = server([late(reused_tokens=10, computed_tokens=90, **GONE)] * 3)
    assert why(first_token(figures)) == (
        "90 tokens of each prompt are read at 50 tokens/s; 3 of the last 3 prompts missed what had been there "
        "(disk: it was full)",
        "raise --disk-kv, which is 2 GiB now, for instance to 4096MiB",
    )


def test_late_because_everything_is_new() -> None:
    reason, fix = why(first_token(server([late(reused_tokens=10, computed_tokens=90)] * 3)))
    assert reason == "90 tokens of each prompt are read at 50 tokens/s, most of it for the first time"
    assert fix.startswith("begin all chats with the same system prompt")


def test_the_shares_of_the_time_to_the_first_token() -> None:
    assert Waits.of([late(ttft_s=2.0, queue_s=0.5, read_s=1.0)]) == Waits(0.25, 0.5, 0.25)
    assert Waits.of([late(ttft_s=1.0, queue_s=0.5, read_s=1.0)]) == Waits(1 / 3, 2 / 3, 0.0)  # two clocks may disagree
    assert Waits.of([]) == Waits(0.0, 0.0, 0.0)


# --- each token -------------------------------------------------------------------------------------------------------


def slow(number: int = 0, **changed: Any) -> RecentReply:
    """0.4 s a token, one reply after the other."""
    return reply(**{"tpot_s": 0.4, "total_s": 4.2, "ended_at": 100.0 + 10 * number, **changed})


def test_slow_because_tokens_are_read_again() -> None:
    figures = server([slow(number, recomputed_tokens=21) for number in range(3)])
    assert why(per_token(figures)) == (
        "the cache is too small for all replies at once, and 50% of what the model reads and writes is read again",
        MORE,
    )


def test_slow_because_the_machine_is_busy() -> None:
    reason, _ = why(per_token(server([slow(number) for number in range(3)], load=9, cores=1)))
    assert reason == "the machine is busy: in the last minute 9.0 threads wanted 1 core on average"


def test_slow_because_of_too_few_threads() -> None:
    figures = server(
        [slow(number) for number in range(3)], capabilities=msgspec.structs.replace(CAPABILITIES, threads=1)
    )
    assert why(per_token(figures)) == (
        "the model computes on 1 of 4 cores",
        "take OMP_NUM_THREADS out of the environment and start again",
    )


def test_slow_because_prompts_are_read_meanwhile() -> None:
    reading = reply(ended_at=134.0, total_s=18.0, ttft_s=17.9, read_s=17.0, queue_s=0.0, tpot_s=None, output_tokens=1)
    reason, _ = why(per_token(server([*(slow(number) for number in range(4)), reading])))
    assert reason == "others' prompts are read in 50% of the time"


def test_slow_because_replies_share_each_step() -> None:
    assert why(per_token(server([slow()] * 3)))[0] == "3.0 replies share every step"


def test_slow_because_of_the_number_format_and_at_last_of_the_model() -> None:
    replies = [slow(number) for number in range(3)]
    wide = msgspec.structs.replace(CAPABILITIES, dtype="float32")
    reason, fix = why(per_token(server(replies, capabilities=wide)))
    assert reason == "the weights are read in float32"
    assert fix.startswith("--dtype bfloat16 halves that")
    assert why(per_token(server(replies)))[0] == "the model is large for this device"
    on_gpu = msgspec.structs.replace(wide, device="cuda:0", threads=1)
    assert why(per_token(server(replies, capabilities=on_gpu)))[0] == "the model is large for this device"


def test_the_rate_of_weights_is_said_only_where_one_model_is_served() -> None:
    two = snapshot()
    two = msgspec.structs.replace(two, models=two.models * 2)
    assert "of weights" not in per_token(server(snapshot=two)).detail
    assert "serves m and 1 other model in bfloat16" in examine("http://h", server(snapshot=two))[0].detail


# --- memory and throughput --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (
            {"waiting": 3, "free_blocks": 0, "leased_blocks": 950, "idle_blocks": 50},
            "It is full: requests wait for room",
        ),
        ({"preemptions": 4}, "It was too small for all replies at once"),
    ],
)
def test_memory_that_is_too_small(changed: dict[str, int], words: str) -> None:
    finding = memory(server(snapshot=snapshot(**changed)))
    assert finding.level == "warn"
    assert finding.detail.endswith(f". {words}")
    assert finding.fix == MORE


def test_the_tiers_are_told_with_what_came_from_them_and_what_left_them() -> None:
    replies = [reply(host_tokens=30, disk_tokens=10), reply(), reply(first=False, disk_tokens=90)]
    gone = [
        GoneBlocks(tier="disk", reason="its time there was over", blocks=7),
        GoneBlocks(tier="disk", reason="it was full", blocks=1200),
    ]
    held = snapshot(tiers=tiers(device=352, host=1024, disk=2048))
    assert memory(server(replies, snapshot=held, gone=gone)).detail.partition("; ")[2] == (
        "host holds 256 MiB of 1 GiB, disk holds 512 MiB of 2 GiB; 2 run, 0 wait; of the last 2 prompts, 70% came from "
        "the device, 15% from host and 5% from disk; since the start 0 replies had to step back, 1,200 blocks left "
        "disk (it was full), 7 blocks left disk (its time there was over)"
    )


@pytest.mark.parametrize(
    ("detail", "held", "fix"),
    [
        ("disk: it was full", {"disk": 2048}, "raise --disk-kv, which is 2 GiB now, for instance to 4096MiB"),
        (GONE_FOR_GOOD, {"disk": 2048}, "raise --disk-kv, which is 2 GiB now, for instance to 4096MiB"),
        (f"host: {WHY['ttl']}", {"host": 10}, "raise --host-ttl"),
        ("disk: its time there was over", {"disk": 2048}, "raise --disk-ttl"),
        (
            "host: it was full",
            {"host": 512},
            "give chats a place on disk with --disk-kv, or raise --host-kv, which is 512 MiB now, for instance to "
            "1024MiB",
        ),
        (
            "host: it was full",
            {"host": 512, "disk": 1},
            "raise --host-kv, which is 512 MiB now, for instance to 1024MiB",
        ),
        (f"device: it had no room; host is off, and the disk {SPENT}", {"disk": 2048}, "raise --disk-writes"),
        (f"device: it had no room; host had no room, and the disk {FAILING}", {"host": 1, "disk": 2048}, DISK_CHECK),
        (
            "device: it had no room, and host and disk had no room",
            {},
            "give chats a place on disk with --disk-kv, or raise --device-kv, which is 352 MiB now, for instance to "
            "704MiB",
        ),
    ],
)
def test_chats_that_are_gone_when_they_come_back(detail: str, held: dict[str, int], fix: str) -> None:
    replies = [reply(miss_cause="evicted", miss_detail=detail), *[reply(miss_cause="new")] * 9]
    finding = memory(server(replies, snapshot=snapshot(tiers=tiers(device=352, **held))))
    assert finding.level == "warn"
    assert finding.detail.endswith(f". 1 of the last 10 prompts missed what had been there ({detail})")
    assert finding.fix == fix
    assert memory(server([*replies, reply()])).level == "ok"  # now and then is no trouble


def test_blocks_that_cannot_be_read_are_the_disks_fault() -> None:
    damaged = reply(miss_cause="unreadable", miss_detail="its checksum is another")
    finding = memory(server([damaged] * 3))
    assert finding.detail.endswith("3 of the last 3 prompts missed what had been there (its checksum is another)")
    assert finding.fix == "check the disk of the data directory, or name another with --data-dir"


def test_memory_of_an_engine_that_is_away_or_has_no_model() -> None:
    for nothing in (None, snapshot(total_blocks=0, free_blocks=0, leased_blocks=0, idle_blocks=0)):
        assert memory(server(snapshot=nothing)).detail == "not enough data yet: the engine is not ready"


def alone_and_together(factor: float) -> list[RecentReply]:
    """100 tokens alone in 10 s, and then two replies at once that get `factor` times as many together."""
    alone = reply(ended_at=10.2, total_s=10.2, ttft_s=0.2, output_tokens=101)
    both = reply(ended_at=100.2, total_s=10.2, ttft_s=0.2, output_tokens=int(50 * factor) + 1)
    return [alone, both, both]


def test_more_at_once_brings_more() -> None:
    assert throughput(server(alone_and_together(1.8))) == Finding(
        "ok", "throughput", "1 at a time: 10 tokens/s; 2 at a time: 18 tokens/s"
    )


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({}, "one alone keeps the device busy"),
        ({"load": 8.0}, "the machine is busy: in the last minute 8.0 threads wanted 4 cores on average"),
        ({"snapshot": snapshot(preemptions=1)}, "the cache is full, and replies wait for each other"),
    ],
)
def test_more_at_once_brings_hardly_more(changed: dict[str, Any], words: str) -> None:
    reason, _ = why(throughput(server(alone_and_together(1.1), **changed)))
    assert reason == words


def test_throughput_is_flat_where_prompts_are_read_all_the_time() -> None:
    reading = reply(ended_at=101.0, total_s=12.0, ttft_s=11.9, read_s=11.5, queue_s=0.0, output_tokens=1)
    reason, fix = why(throughput(server([*alone_and_together(1.0), reading])))
    assert reason == "others' prompts are read in 67% of the time"
    assert fix.startswith("begin all chats with the same system prompt")


def test_replies_are_counted_by_how_many_run_at_once() -> None:
    first = reply(ended_at=10.0, total_s=10.0, ttft_s=0.0, output_tokens=101)
    second = reply(ended_at=8.0, total_s=4.0, ttft_s=0.0, output_tokens=21)
    assert by_concurrency([first, second]) == {1: (6.0, 60.0), 2: (4.0, pytest.approx(60.0))}
    assert together([first, second]) == pytest.approx(1.4)
    assert by_concurrency([]) == {}
    assert together([]) == 1.0
    assert reuse([]) == 0.0


def test_a_prompt_is_read_beside_others_but_not_beside_itself() -> None:
    writing = reply(ended_at=10.0, total_s=10.0, ttft_s=0.0, queue_s=0.0, read_s=0.0)
    two = [reply(ended_at=8.0, total_s=6.0, ttft_s=6.0, queue_s=0.0, read_s=4.0, output_tokens=1)] * 2
    assert read_beside([writing]) == 0.0
    assert read_beside([writing, *two]) == pytest.approx(0.4)  # two at the same time count once
    assert read_beside([]) == 0.0


# --- servers that do not serve ----------------------------------------------------------------------------------------


def test_a_server_that_loads_or_failed_is_said_to() -> None:
    (loading,) = examine("http://h", server(phase="loading", stage="loading weights"))
    assert (loading.level, loading.fix) == ("warn", "ask again when it is ready")
    assert loading.detail.endswith("the model is loading (loading weights)")
    (failed,) = examine("http://h", server(phase="failed", message="no GGUF file at /x"))
    assert failed.level == "problem"
    assert failed.detail.endswith(": no GGUF file at /x")
    assert "app.py doctor" in failed.fix


def test_times_are_said_in_words_that_fit() -> None:
    assert [seconds(value) for value in (0.0123, 0.1, 1.234, 12.3)] == ["12 ms", "0.10 s", "1.23 s", "12 s"]
    assert [duration(value) for value in (5, 119, 120, 7200, 86400, 864000)] == [
        "5 s", "119 s", "2 minutes", "2 hours", "24 hours", "10 days",
    ]  # fmt: skip
