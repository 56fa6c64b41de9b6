"""Figures as tables and goals, for people and as JSON. It measures nothing."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Goal:
    """What a figure was to be: at most `limit`, or at least that."""

    name: str
    value: float
    limit: float
    at_most: bool

    @property
    def met(self) -> bool:
        """Whether it was reached."""
        return self.value <= self.limit if self.at_most else self.value >= self.limit

    @property
    def word(self) -> str:
        """`ok` or `missed`."""
        return "ok" if self.met else "missed"


def at_most(name: str, value: float, limit: float) -> Goal:
    """A goal that a small figure meets."""
    return Goal(name, value, limit, at_most=True)


def at_least(name: str, value: float, limit: float) -> Goal:
    """A goal that a large figure meets."""
    return Goal(name, value, limit, at_most=False)


@dataclass
class Report:
    """What was found so far. `wrong` are measurements that are none: the tokens came from elsewhere.

    `unmeasured` are goals for which a figure is missing, each a sentence that says which.
    """

    facts: dict[str, Any]
    results: dict[str, Any] = field(default_factory=dict)
    goals: list[Goal] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    unmeasured: list[str] = field(default_factory=list)

    def table(self, title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Print a table, its first column to the left and the others to the right."""
        widths = [max(len(row[i]) for row in [heads, *rows]) for i in range(len(heads))]
        print(f"\n{title}")
        for row in [heads, *rows]:
            cells = [text.rjust(width) for text, width in zip(row, widths, strict=True)]
            print("  ".join([row[0].ljust(widths[0]), *cells[1:]]))

    def end(self, out: Path) -> int:
        """Print the goals, write everything down, and say where; the exit code."""
        rows = [
            [goal.name, f"{goal.value:.2f}", f"{'<=' if goal.at_most else '>='} {goal.limit:g}", goal.word]
            for goal in self.goals
        ]
        self.table("goals", ["", "found", "goal", ""], rows)
        for sentence in self.unmeasured:
            print(sentence)
        for sentence in self.wrong:
            print(f"WRONG: {sentence}")
        everything = {
            "facts": self.facts,
            **self.results,
            "goals": [{**asdict(goal), "met": goal.met} for goal in self.goals],
            "unmeasured": self.unmeasured,
            "wrong": self.wrong,
        }
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(everything, indent=1) + "\n", "utf-8")
        print(f"\n{out}")
        return 1 if self.wrong else 0


def facts(**more: Any) -> dict[str, Any]:
    """The machine and the versions, and more."""
    return {
        "at": time.strftime("%Y-%m-%d %H:%M:%S"),
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "transformers": version("transformers"),
        **more,
    }


def ms(seconds: float) -> str:
    """Seconds as milliseconds."""
    return f"{seconds * 1000:,.1f}"
