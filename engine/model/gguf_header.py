"""What a GGUF file says of itself, read without its weights: its facts, and each tensor's shape, type and place.

Every count and length in the file is checked against the file's size before it is believed. This module knows the
format, and nothing of models.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from engine.errors import ModelLoadError
from engine.model.files import AGAIN, unreadable

MAGIC = b"GGUF"
VERSIONS = (2, 3)
SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
STRING, ARRAY = 8, 9
MOST_DIMENSIONS = 4
LONG = 4096  # arrays with more entries are vocabularies; only their lengths are kept


@dataclass(frozen=True)
class Tensor:
    """One tensor: `shape` in torch's order, `start` and `size` in bytes, the start counted from that of the file."""

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    start: int
    size: int

    @property
    def numbers(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class Header:
    """A whole header. `facts` has numbers, strings, booleans and short lists; for a long list its length."""

    file: Path
    facts: dict[str, Any]
    tensors: tuple[Tensor, ...]

    @property
    def architecture(self) -> str:
        return str(self.facts.get("general.architecture", ""))

    @property
    def numbers(self) -> int:
        """How many numbers all tensors hold together."""
        return sum(tensor.numbers for tensor in self.tensors)

    def own_facts(self) -> Iterator[tuple[str, Any]]:
        """The facts of this architecture, without its name before them: `attention.head_count`, 9."""
        start = f"{self.architecture}."
        return ((key.removeprefix(start), value) for key, value in self.facts.items() if key.startswith(start))


class _Short(Exception):  # noqa: N818 - a finding, told by `read_header`
    """The file ends before something that it announces."""


def read_header(file: Path) -> Header:
    """The header of a GGUF file. Raises `ModelLoadError` for a file that is damaged, cut short or something else."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            if stream.read(4) != MAGIC:
                raise unreadable(file, ValueError("it does not start with GGUF"), "GGUF")
            with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
                header = _Reader(data).header(file)
    except OSError as error:
        raise unreadable(file, error, "GGUF") from error
    except _Short as error:
        raise ModelLoadError(f"{file} is cut short or damaged, {error}: {AGAIN}") from error
    needed = max((tensor.start + tensor.size for tensor in header.tensors), default=0)
    if needed > size:
        raise ModelLoadError(f"{file} is cut short, it has {size} of {needed} bytes: {AGAIN}")
    return header


class _Reader:
    """Reads value after value from the start of a file."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = len(MAGIC)

    def header(self, file: Path) -> Header:
        version = self._number("<I")
        if version not in VERSIONS:
            swapped = version and not version & 0xFFFF
            of = "for machines of another byte order" if swapped else f"of GGUF version {version}"
            raise ModelLoadError(f"{file} is {of}: use one of version 2 or 3, in little-endian")
        tensors, facts = self._number("<Q"), self._number("<Q")
        found: dict[str, Any] = {}
        for _ in range(facts):
            key = self._string()
            found[key] = self._value(self._number("<I"))
        alignment = found.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
            raise _Short("its alignment is no power of two")
        table = [self._entry(file) for _ in range(tensors)]
        start = -(-self._at // alignment) * alignment
        placed = (Tensor(name, shape, kind, start + offset, size) for name, shape, kind, offset, size in table)
        return Header(file, found, tuple(placed))

    def _entry(self, file: Path) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int, int]:
        name = self._string()
        count = self._number("<I")
        if count > MOST_DIMENSIONS:
            raise _Short(f"{name} has {count} dimensions")
        shape = tuple(reversed([self._number("<Q") for _ in range(count)]))
        number, offset = self._number("<I"), self._number("<Q")
        try:
            kind = GGMLQuantizationType(number)
        except ValueError as error:
            raise ModelLoadError(
                f"{file} is quantised in a way that this version of gguf does not know (type {number} of {name}): "
                "take another quantisation, such as Q8_0"
            ) from error
        block, width = GGML_QUANT_SIZES[kind]
        if shape and shape[-1] % block:
            raise _Short(f"{name} has rows of {shape[-1]}, which {kind.name} cannot hold")
        return name, shape, kind, offset, prod(shape) // block * width

    def _value(self, kind: int) -> Any:
        if kind in SCALARS:
            return self._number(SCALARS[kind])
        if kind == STRING:
            return self._string()
        if kind != ARRAY:
            raise _Short(f"it has a value of the unknown type {kind}")
        of, count = self._number("<I"), self._number("<Q")
        if of in SCALARS and count > LONG:
            self._take(count * struct.calcsize(SCALARS[of]))
            return count
        if of != STRING and of not in SCALARS:
            raise _Short(f"it has a list of the unknown type {of}")
        if count > len(self._data):
            raise _Short(f"it announces a list of {count}")
        if count <= LONG:
            return [self._value(of) for _ in range(count)]
        for _ in range(count):
            self._take(self._number("<Q"))
        return count

    def _number(self, form: str) -> Any:
        width = struct.calcsize(form)
        return struct.unpack_from(form, self._data, self._take(width))[0]

    def _string(self) -> str:
        length = self._number("<Q")
        start = self._take(length)
        return self._data[start : start + length].decode("utf-8", "replace")

    def _take(self, width: int) -> int:
        """Step over `width` bytes and return where they start."""
        start = self._at
        if start + width > len(self._data):
            raise _Short(f"it ends after {len(self._data)} bytes, within its header")
        self._at = start + width
        return start
