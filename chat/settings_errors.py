"""What is wrong with a setting, in one line, and what would be right. Knows no place that settings come from."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any, Literal, get_args, get_origin

from pydantic_core import ErrorDetails

LIKENESS = 0.5  # of a value to a possible one, from 0 to 1, that makes it worth a hint
SHOWN = 200  # characters of a value in an error
TIERS = ("device", "host", "disk")
SIZES = "256MiB, 1.5GB"
SIZE = f"not a size; write it like {SIZES}"
FREE = "or 25% of what is free"
TOO_SMALL = f"too small; the device's share cannot be turned off: write it like {SIZES} {FREE}"
LEVEL = "not a share; write it like 90%: more than 0%, at most 100%"
REASONS = {  # what is wrong with a setting of a tier
    "kv": f"{SIZE} {FREE}",
    "ttl": "not a duration; write it like 90s, 30m, 12h, 30d or never",
    "high": LEVEL,
    "low": LEVEL,
    "writes": f"{SIZE} or unlimited",
}


class SettingsError(Exception):
    """A setting that Keepwarm does not know or cannot use. `str()` is one line: the name, its origin and the fix."""


def nearest(name: str, known: Iterable[str]) -> str:
    """The entry of `known` that looks most like `name`, whatever its case."""
    spelt = {entry.lower(): entry for entry in known}
    return spelt[difflib.get_close_matches(name.lower(), list(spelt), n=1, cutoff=0.0)[0]]


def reason(name: str, annotation: Any, value: object, details: ErrorDetails) -> str:
    """What is wrong with a value and what would be right, after the colon of an error line."""
    tier, _, rest = name.partition("_")
    if tier in TIERS and rest in REASONS:
        return TOO_SMALL if details["type"] == "nothing" else REASONS[rest]
    if name == "context":
        return "not a number of tokens; give a whole number from 1"
    if name == "port":
        return "not a port; give a whole number from 0 to 65535"
    if get_origin(annotation) is Literal:
        choices = get_args(annotation)
        alike = difflib.get_close_matches(str(value).lower(), choices, n=1, cutoff=LIKENESS)
        return f"not one of {', '.join(choices)}" + "".join(f"; the nearest is {choice!r}" for choice in alike)
    if name == "browser":
        return "not a yes or a no; write true or false"
    if name in ("data_dir", "config"):
        return "not a path"
    if name == "model":
        return "not a model; name smollm2, a Hugging Face folder or hub id, or a .gguf file"
    if name == "adapter":
        return "not an adapter; name a folder or a hub id"
    return details["msg"] if details["type"] == "loopback" else "not an address; use 127.0.0.1"


def shown(value: object) -> str:
    """A value in an error line, shortened where it is long."""
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
