"""Findings and tables as plain text for a terminal: aligned, wrapped, and coloured where a person looks.

Knows nothing of what they say.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import asdict

import typer

from chat.doctor import Finding, Level, count

COLOURS: dict[Level, str] = {"ok": "green", "warn": "yellow", "problem": "red"}
WIDTHS = range(60, 121)  # of a line: no narrower, no wider
FIX = "fix: "


def width_here() -> int:
    """The width of the terminal, within reason."""
    return min(max(shutil.get_terminal_size((100, 24)).columns, WIDTHS.start), WIDTHS.stop - 1)


def colours_here() -> bool:
    """Whether somebody looks who may like colours."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def as_text(findings: Sequence[Finding], *, width: int, colour: bool) -> str:
    """The findings in columns, each fix below its finding, and what they come to."""
    levels = max((len(finding.level) for finding in findings), default=0)
    names = max((len(finding.what) for finding in findings), default=0)
    indent = " " * (levels + names + 4)
    lines: list[str] = []
    for finding in findings:
        level = finding.level.ljust(levels)
        shown = typer.style(level, fg=COLOURS[finding.level], bold=finding.level != "ok" or None) if colour else level
        head = f"{level}  {finding.what.ljust(names)}  "
        text = _wrapped(finding.detail, width, head, indent)
        lines.append(shown + text[0][levels:])
        lines.extend(text[1:])
        if finding.fix:
            lines.extend(_wrapped(finding.fix, width, indent + FIX, indent + " " * len(FIX)))
    return "\n".join([*lines, "", summary(findings)])


def summary(findings: Sequence[Finding]) -> str:
    """How many problems and warnings there are."""
    problems, warnings = (sum(finding.level == level for finding in findings) for level in ("problem", "warn"))
    words = [count(number, noun) for number, noun in ((problems, "problem"), (warnings, "warning")) if number]
    return f"{' and '.join(words)}; what to do is said below each." if words else "No problems."


def as_json(findings: Sequence[Finding], **more: object) -> str:
    """The same for machines: `findings`, and whatever else belongs to the answer."""
    return json.dumps({**more, "findings": [asdict(finding) for finding in findings]}, indent=2)


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows in columns: the first to the left, the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if number else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def _wrapped(text: str, width: int, first: str, rest: str) -> list[str]:
    wrapper = textwrap.TextWrapper(
        width=width, initial_indent=first, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False
    )
    return wrapper.wrap(text) or [first.rstrip()]
