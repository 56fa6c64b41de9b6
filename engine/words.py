"""Numbers in words for people. Knows nothing of what they count."""

from __future__ import annotations


def size(number: float) -> str:
    """A number of bytes: 180 MiB, 1.4 GiB."""
    for unit, factor in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if number >= factor:
            value = number / factor
            return f"{value:,.1f} {unit}" if value < 10 and value != int(value) else f"{value:,.0f} {unit}"
    return f"{number:,.0f} bytes"
