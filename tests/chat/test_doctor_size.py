"""What a model takes on a machine: literal sizes, literal tables, and what to set so that sessions fit."""

from __future__ import annotations

import pytest

from chat.doctor import DoctorError, Finding
from chat.doctor_machine import Device
from chat.doctor_size import Question, Room, Sizes, report, verdict
from engine.model.selfcheck import KVShape
from engine.model.sizing import Sizing

MIB, GIB = 2**20, 2**30
SMALL = Sizing("smol", "llama", 134_515_008, KVShape(30, 3, 64), (None,) * 30, 8192)
WINDOWED = Sizing("gem", "gemma3_text", 1_000_000_000, KVShape(4, 1, 256), (1024, 1024, 1024, None), 32_768)
CPU = Device("cpu", "bfloat16", 16 * GIB, 8 * GIB)
ROOM = Room(None, 8 * GIB, host_kv=GIB, disk_kv=2 * GIB, disk=10 * GIB)


def answer(sized: Sizing, sessions: int | None, room: Room = ROOM, context: int | None = None, dtype: str = "bfloat16"):
    question = Question.of(sized, context, sessions)
    return verdict(Sizes.of(sized, dtype, question, room), question, room)


def test_sizes_of_the_embedded_model() -> None:
    sizes = Sizes.of(SMALL, "bfloat16", Question.of(SMALL, None, None), ROOM)
    assert sizes == Sizes(
        dtype="bfloat16",
        weights=269_030_016,
        token=23_040,
        session=188_743_680,
        seen=188_743_680,
        cold=188_743_680,
        budget=377_487_360,
        in_budget=2,
        in_memory=42,
        in_host=5,
        in_disk=11,
    )
    shorter = Sizes.of(SMALL, "float32", Question.of(SMALL, 1000, None), Room(GIB, 0))
    assert shorter.session == 1024 * 46_080  # whole blocks
    assert (shorter.budget, shorter.in_budget, shorter.in_memory, shorter.in_disk) == (GIB, 22, 0, 0)


def test_the_default_cache_takes_no_more_than_half_of_what_the_weights_leave() -> None:
    tight = Room(None, 269_030_016 + 600 * MIB)
    assert Sizes.of(SMALL, "bfloat16", Question.of(SMALL, None, None), tight).budget == 300 * MIB


def test_the_table() -> None:
    question = Question.of(SMALL, None, None)
    columns = [Sizes.of(SMALL, dtype, question, ROOM) for dtype in ("float32", "bfloat16")]
    assert report(SMALL, columns, question, ROOM, CPU) == (
        "smol: llama, 134,515,008 parameters, a context of 8,192 tokens\n"
        "\n"
        "                                        float32      bfloat16\n"
        "weights                                 513 MiB       257 MiB\n"
        "K and V of one token               46,080 bytes  23,040 bytes\n"
        "a session of 8,192 tokens               360 MiB       180 MiB\n"
        "device_kv, by default                   720 MiB       360 MiB\n"
        "  sessions in it                              2             2\n"
        "  sessions in the 8 GiB available            20            42\n"
        "host_kv, by default                       1 GiB         1 GiB\n"
        "  sessions in it                              2             5\n"
        "disk_kv, by default                       2 GiB         2 GiB\n"
        "  sessions in it                              5            11\n"
        "\n"
        "Here it would run on cpu in bfloat16.\n"
        "What device_kv has no room for goes to host_kv and disk_kv, and comes back from there."
    )


def test_windows_are_told_for_what_they_are() -> None:
    question, room = Question.of(WINDOWED, None, None), Room(4 * GIB, 8 * GIB, chosen=("device_kv",))
    shown = report(WINDOWED, [Sizes.of(WINDOWED, "bfloat16", question, room)], question, room, CPU)
    assert "\na session of 32,768 tokens             128 MiB\n" in shown
    assert "\n  of that within its windows            35 MiB\n" in shown
    assert "\ndevice_kv, as set                        4 GiB\n" in shown
    assert (
        "3 of 4 layers see only the last 1,024 tokens; there too, Keepwarm keeps the K and V of all tokens.\n" in shown
    )


def test_sessions_that_fit() -> None:
    assert answer(SMALL, 2) == Finding(
        "ok", "fit", "2 sessions of 8,192 tokens in bfloat16 take 360 MiB of cache, and device_kv is 360 MiB"
    )
    assert answer(SMALL, None).detail.startswith("1 session of 8,192 tokens in bfloat16 takes 180 MiB")


def test_sessions_that_stay_warm_below_the_device() -> None:
    finding = answer(SMALL, 11)
    assert (finding.level, finding.detail) == (
        "ok",
        "11 sessions of 8,192 tokens in bfloat16 take 1.9 GiB of cache; device_kv, 360 MiB, holds 2 of them at a time, "
        "and the others stay warm in host_kv and disk_kv",
    )
    in_ram = Room(None, 8 * GIB, host_kv=GIB)
    assert answer(SMALL, 7, in_ram).level == "ok"
    assert answer(SMALL, 8, in_ram).level == "warn"
    assert answer(SMALL, 3, Room(100 * MIB, 8 * GIB, disk_kv=2 * GIB)).level == "warn"  # not one fits on the device


def test_int8_makes_host_and_disk_hold_more() -> None:
    question = Question.of(SMALL, None, None)
    room = Room(None, 8 * GIB, host_kv=GIB, disk_kv=2 * GIB, cold_dtype="int8", chosen=("host_kv",))
    sizes = Sizes.of(SMALL, "bfloat16", question, room)
    assert sizes.cold == 8192 * 30 * 2 * 3 * (64 + 4)  # a byte a number, and a scale for each head's vector
    assert (sizes.session, sizes.in_host, sizes.in_disk) == (188_743_680, 10, 21)
    shown = report(SMALL, [sizes], question, room, CPU)
    assert "\n  the same in int8                       96 MiB\n" in shown
    assert "\nhost_kv, as set                           1 GiB\n" in shown


def test_sessions_that_fit_once_it_is_set() -> None:
    finding = answer(SMALL, 12)
    assert (finding.level, finding.fix) == ("warn", "start with --device-kv 2160MiB; the memory has room for it")


def test_sessions_that_do_not_fit() -> None:
    finding = answer(SMALL, 100)
    assert finding.level == "problem"
    assert finding.detail == (
        "100 sessions of 8,192 tokens in bfloat16 take 18 GiB of cache, and beside the weights 7.5 GiB of memory are "
        "available"
    )
    assert finding.fix == (
        "at most 42 such sessions, or at most 3,488 tokens each (--context 3488), or a smaller model"
    )
    assert answer(SMALL, 50).fix.startswith("--disk-kv 9000MiB keeps them all warm, or at most 42 such sessions, or ")
    assert answer(SMALL, 100, context=3488).level == "warn"
    assert answer(SMALL, 100, context=3489).level == "problem"
    assert answer(SMALL, 42).level == "warn"
    assert answer(SMALL, 43).level == "problem"
    assert "--dtype bfloat16" in answer(SMALL, 100, dtype="float32").fix


def test_weights_that_do_not_fit_at_all() -> None:
    finding = answer(SMALL, 1, Room(None, 300 * MIB), dtype="float32")
    assert (finding.level, finding.detail) == (
        "problem",
        "the weights alone are 513 MiB, and 300 MiB of memory are available",
    )
    assert finding.fix == "choose a smaller model, or --dtype bfloat16"


def test_a_budget_that_the_memory_does_not_have_does_not_count() -> None:
    assert answer(SMALL, 2, Room(100 * GIB, 8 * GIB)).level == "warn"


@pytest.mark.parametrize(
    ("context", "sessions", "words"),
    [
        (8193, None, "--context 8193: smol was made for 1 to 8192 tokens"),
        (None, 0, "--sessions 0: ask for at least 1"),
        (None, -5, "--sessions -5: ask for at least 1"),
    ],
)
def test_numbers_that_make_no_sense(context: int | None, sessions: int | None, words: str) -> None:
    with pytest.raises(DoctorError) as error:
        Question.of(SMALL, context, sessions)
    assert str(error.value) == words
