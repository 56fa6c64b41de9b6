"""Findings as values, and how they are shown: aligned, wrapped, coloured only where somebody looks."""

from __future__ import annotations

import json

from chat import doctor_text
from chat.doctor import Finding, count, exit_code, guarded, ok
from engine.words import size

FINE = ok("port", "7860 is free")
WARN = Finding("warn", "data directory", "/data; its mode 755 lets others in", "chmod 700 /data")
BAD = Finding("problem", "model", "no GGUF file at /models/a.gguf: check the path", "name another with --model")


def test_only_problems_make_the_exit_code_one() -> None:
    assert [exit_code(findings) for findings in ([], [FINE], [FINE, WARN], [FINE, WARN, BAD])] == [0, 0, 0, 1]


def test_findings_are_shown_in_columns_with_their_fix_below() -> None:
    assert doctor_text.as_text([FINE, WARN, BAD], width=60, colour=False) == (
        "ok       port            7860 is free\n"
        "warn     data directory  /data; its mode 755 lets others in\n"
        "                         fix: chmod 700 /data\n"
        "problem  model           no GGUF file at /models/a.gguf:\n"
        "                         check the path\n"
        "                         fix: name another with --model\n"
        "\n"
        "1 problem and 1 warning; what to do is said below each."
    )
    assert doctor_text.as_text([FINE], width=60, colour=False) == "ok  port  7860 is free\n\nNo problems."
    assert doctor_text.summary([WARN, WARN]) == "2 warnings; what to do is said below each."


def test_colours_change_the_level_and_nothing_else() -> None:
    plain = doctor_text.as_text([FINE, BAD], width=80, colour=False)
    coloured = doctor_text.as_text([FINE, BAD], width=80, colour=True)
    assert "\x1b[31m\x1b[1mproblem\x1b[0m" in coloured
    for code in ("\x1b[31m", "\x1b[32m", "\x1b[1m", "\x1b[0m"):
        coloured = coloured.replace(code, "")
    assert coloured == plain


def test_no_colours_without_a_terminal() -> None:
    assert not doctor_text.colours_here()


def test_long_words_are_never_cut() -> None:
    path = "/a/very/long/path/that/somebody/may/want/to/copy/in/one/piece/keepwarm.sqlite3"
    shown = doctor_text.as_text(
        [Finding("problem", "database", f"{path} is damaged", "move it")], width=60, colour=False
    )
    assert path in shown


def test_json_has_everything() -> None:
    told = json.loads(doctor_text.as_json([FINE, BAD], model="m"))
    assert told == {
        "model": "m",
        "findings": [
            {"level": "ok", "what": "port", "detail": "7860 is free", "fix": ""},
            {"level": "problem", "what": "model", "detail": BAD.detail, "fix": BAD.fix},
        ],
    }


def test_a_check_that_fails_is_a_finding() -> None:
    def broken():
        yield FINE
        raise ZeroDivisionError("no\nluck")

    (finding,) = guarded("cores", broken)
    assert (finding.level, finding.what) == ("warn", "cores")
    assert finding.detail == "this check failed: ZeroDivisionError: no luck"
    assert guarded("port", lambda: [FINE]) == [FINE]


def test_sizes_are_said_in_the_unit_that_fits() -> None:
    counts = (0, 512, 1024, 360 * 2**20, 1.5 * 2**30, 24 * 2**30, 3 * 2**40)
    assert [size(count) for count in counts] == [
        "0 bytes", "512 bytes", "1 KiB", "360 MiB", "1.5 GiB", "24 GiB", "3 TiB",
    ]  # fmt: skip


def test_things_are_counted_in_words() -> None:
    assert [count(number, "chat") for number in (0, 1, 1200)] == ["no chats", "1 chat", "1,200 chats"]


def test_a_table_has_its_first_column_to_the_left_and_numbers_to_the_right() -> None:
    assert doctor_text.table([["", "a", "bc"], ["weights", "1", "200"]]) == "         a   bc\nweights  1  200"
