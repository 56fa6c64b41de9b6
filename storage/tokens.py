"""Token ids as the database holds them: little-endian uint32, four bytes each. Knows no tokenizer."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from storage.errors import InvalidValue


def pack_ids(ids: Sequence[int]) -> bytes:
    """`ids` (0 ≤ id < 2**32) as bytes; InvalidValue for an id outside."""
    try:
        return struct.pack(f"<{len(ids)}I", *ids)
    except struct.error:
        wrong = next(i for i in ids if not isinstance(i, int) or not 0 <= i < 2**32)
        raise InvalidValue(f"token id {wrong!r} is not an integer from 0 to 4294967295") from None


def unpack_ids(data: bytes) -> tuple[int, ...]:
    """The ids that `pack_ids` wrote."""
    return struct.unpack(f"<{len(data) // 4}I", data)
