"""What a check finds, as a value: how bad it is, what was looked at, what was seen, and what to do about it.

Knows no check and no way of showing findings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warn", "problem"]


class DoctorError(Exception):
    """What was asked cannot be answered at all. `str()` is one line that names the fix."""


class WrongQuestion(DoctorError):  # noqa: N818 - it says what is wrong
    """What was typed makes no question."""


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's report. `what` is a word or two, `detail` and `fix` are sentences without a full stop.

    "problem": Keepwarm cannot run, or not as it is set; "warn": it runs, but worse than it could. Both have a `fix`.
    """

    level: Level
    what: str
    detail: str
    fix: str = ""


def ok(what: str, detail: str) -> Finding:
    """All is well."""
    return Finding("ok", what, detail)


def exit_code(findings: Iterable[Finding]) -> int:
    """0, or 1 when there is a problem."""
    return int(any(finding.level == "problem" for finding in findings))


def guarded(what: str, check: Callable[[], Iterable[Finding]]) -> list[Finding]:
    """What `check` finds; a check that itself fails is a finding and does not keep the others from being made."""
    try:
        return list(check())
    except Exception as error:
        detail = f"this check failed: {type(error).__name__}: {' '.join(str(error).split())}"
        return [Finding("warn", what, detail, "report it, with this line")]


def count(number: int, noun: str) -> str:
    """A number of things for people: 1 chat, no chats, 1,200 chats."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}" if number else f"no {noun}s"
