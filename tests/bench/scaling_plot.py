"""Lines on logarithmic axes as one small SVG file, for light and dark pages alike. It measures nothing.

Written by hand because that makes a file of a few kilobytes which is the same for the same figures.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

WIDTH, HEIGHT, GAP = 280, 260, 16  # of a panel, and between two
LEFT, RIGHT, TOP, BOTTOM = 50, 14, 30, 66  # around its axes
COLOURS = ("#3b82f6", "#e08a00", "#1f9d63", "#c2549b")  # of middling lightness: legible on white and on black
INK, FAINT = "#7d8590", "#7d859055"


@dataclass(frozen=True)
class Line:
    """One thing that was timed, in seconds at each size."""

    name: str
    seconds: Sequence[float]


@dataclass(frozen=True)
class Panel:
    """Lines over the same sizes."""

    title: str
    sizes: Sequence[int]
    lines: Sequence[Line]


def draw(path: Path, panels: Sequence[Panel]) -> None:
    """Write the panels, side by side."""
    width = len(panels) * (WIDTH + GAP) - GAP
    body = [part for number, panel in enumerate(panels) for part in _panel(panel, number * (WIDTH + GAP))]
    font = "font-family='system-ui, sans-serif' font-size='11'"
    head = f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {HEIGHT}' {font} fill='{INK}'>"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([head, *body, "</svg>", ""]), "utf-8")


def _panel(panel: Panel, offset: int) -> Iterator[str]:
    millis = [[1e3 * seconds for seconds in line.seconds] for line in panel.lines]
    low = math.floor(math.log10(min(map(min, millis))))
    high = max(low + 1, math.ceil(math.log10(max(map(max, millis)))))
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    begin, span = math.log10(panel.sizes[0]), math.log10(panel.sizes[-1] / panel.sizes[0])

    def x(size: float) -> str:
        return f"{LEFT + (right - LEFT) * (math.log10(size) - begin) / span:.1f}"

    def y(value: float) -> str:
        return f"{bottom - (bottom - TOP) * (math.log10(value) - low) / (high - low):.1f}"

    yield f"<g transform='translate({offset} 0)'>"
    yield f"<text x='{(LEFT + right) / 2}' y='16' text-anchor='middle' font-weight='600'>ms by {panel.title}</text>"
    for power in range(low, high + 1):
        yield f"<path d='M{LEFT} {y(10**power)}H{right}' stroke='{FAINT}'/>"
        yield f"<text x='{LEFT - 6}' y='{y(10**power)}' dy='4' text-anchor='end'>{10**power:g}</text>"
    for size in panel.sizes:
        yield f"<text x='{x(size)}' y='{bottom + 16}' text-anchor='middle'>{_short(size)}</text>"
    size, value = panel.sizes[-1], millis[0][-1]
    least = max(panel.sizes[0], size * 10**low / value)
    slope = f"M{x(least)} {y(value * least / size)}L{x(size)} {y(value)}"
    yield f"<path d='{slope}' stroke='{INK}' stroke-dasharray='3 4'><title>linear growth</title></path>"
    for number, (line, values) in enumerate(zip(panel.lines, millis, strict=True)):
        colour = COLOURS[number % len(COLOURS)]
        points = [(x(size), y(value)) for size, value in zip(panel.sizes, values, strict=True)]
        path = " ".join(",".join(point) for point in points)
        yield f"<polyline points='{path}' fill='none' stroke='{colour}' stroke-width='2'/>"
        yield from (f"<circle cx='{at}' cy='{up}' r='3' fill='{colour}'/>" for at, up in points)
        column, row = number % 2, number // 2
        place = f"x='{LEFT - 30 + column * 128}' y='{bottom + 38 + row * 16}'"
        yield f"<text {place} fill='{colour}' font-weight='600'>{escape(line.name)}</text>"
    yield "</g>"


def _short(size: int) -> str:
    """A size in few characters: 512, 1k, 7k."""
    return str(size) if size < 1000 else f"{size // 1000}k"
