"""Sizes, durations and shares as people write them: `256MiB`, `30m`, `25%`. Knows no setting.

Each is a number that prints as it would be written. The readers take what a flag, a variable or a TOML file holds, and
raise ValueError for whatever is none.
"""

from __future__ import annotations

import math
import re
from typing import Any

from pydantic import ByteSize, TypeAdapter, ValidationError

MOST_BYTES = 2**62
UNLIMITED, NEVER = "unlimited", "never"
_UNITS = (("TB", 10**12), ("TiB", 2**40), ("GB", 10**9), ("GiB", 2**30), ("MB", 10**6), ("MiB", 2**20), ("KiB", 2**10))
_SECONDS = {"d": 86400, "h": 3600, "m": 60, "s": 1}
_bytes = TypeAdapter(ByteSize)


class Bytes(int):
    """A number of bytes."""

    def __str__(self) -> str:
        for unit, factor in _UNITS:
            if self and self % factor == 0:
                return f"{self // factor}{unit}"
        return f"{int(self)}"


class Share(float):
    """A part of a whole, from 0 to 1."""

    def __str__(self) -> str:
        return f"{100 * self:g}%"

    def of(self, whole: int) -> int:
        """So much of `whole`, rounded down."""
        return int(self * whole)


class Duration(float):
    """Seconds; infinite for "never"."""

    def __str__(self) -> str:
        if math.isinf(self):
            return NEVER
        return next((f"{self / many:g}{unit}" for unit, many in _SECONDS.items() if self % many == 0), f"{self:g}s")


def read_bytes(value: Any) -> Bytes:
    """A size with its unit, or a number of bytes."""
    try:
        size = _bytes.validate_python("" if isinstance(value, bool) else value)  # Python counts True as a number
    except (ValidationError, OverflowError) as error:
        raise ValueError("not a size") from error
    nothing = isinstance(value, str) and re.search("[1-9]", value) and not size  # less than a byte
    if nothing or not 0 <= size < MOST_BYTES:
        raise ValueError("not a size")
    return Bytes(size)


def read_size(value: Any) -> Bytes | Share:
    """A size, or a share of what is free."""
    return read_share(value) if isinstance(value, str) and value.strip().endswith("%") else read_bytes(value)


def read_limit(value: Any) -> Bytes | None:
    """A size, or None for "unlimited"."""
    return None if value is None or _word(value) == UNLIMITED else read_bytes(value)


def read_share(value: Any) -> Share:
    """A percentage from 0 to 100."""
    if isinstance(value, Share):
        return value
    found = re.fullmatch(r"(\d{1,3}(?:\.\d+)?) ?%", _word(value))
    if found is None or float(found[1]) > 100:
        raise ValueError("not a share")
    return Share(float(found[1]) / 100)


def read_level(value: Any) -> Share:
    """How full a tier may be: a share, and more than nothing."""
    if not (level := read_share(value)):
        raise ValueError("not a level")
    return level


def read_duration(value: Any) -> Duration:
    """A number with its unit, of seconds where it has none, or "never"; more than nothing."""
    if isinstance(value, Duration):
        return value
    if _word(value) == NEVER:
        return Duration(math.inf)
    text = str(value) if isinstance(value, int | float) and not isinstance(value, bool) else _word(value)
    found = re.fullmatch(r"(\d{1,9}(?:\.\d+)?) ?([smhd]?)", text)
    seconds = float(found[1]) * _SECONDS[found[2] or "s"] if found else 0.0
    if not seconds:
        raise ValueError("not a duration")
    return Duration(seconds)


def _word(value: Any) -> str:
    return value.strip().lower() if isinstance(value, str) else ""
