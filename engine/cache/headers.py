"""A block below the device as the header of its file, and back. Touches no file."""

from __future__ import annotations

from array import array

from engine.cache.block_file import ALIGNMENT, BlockHeader
from engine.cache.cold import ColdBlock, Space
from engine.cache.earlier import EarlierBlock


def file_bytes(image: int) -> int:
    """Bytes that an image of so many takes on disk, as far as is known before it is written."""
    return ALIGNMENT + -(-image // ALIGNMENT) * ALIGNMENT


def header_of(cold: ColdBlock) -> BlockHeader:
    """What its file says of a block."""
    return BlockHeader(
        fingerprint=cold.space.fingerprint,
        key=cold.key,
        parent=cold.parent,
        token_ids=list(cold.token_ids),
        depth=cold.depth,
        salted=not cold.preset,
        full=cold.full,
        lossy=cold.lossy,
        holders=sorted(cold.holders),
        image_bytes=cold.space.codec.size,
    )


def cold_of(block: EarlierBlock, space: Space, last_used: float) -> ColdBlock:
    """The entry for a file of an earlier run; `last_used` is on the engine's clock."""
    header = block.stored.header
    return ColdBlock(
        key=header.key,
        parent=header.parent,
        token_ids=array("q", header.token_ids),
        depth=header.depth,
        space=space,
        holders=block.holders,
        last_used=last_used,
        preset=not header.salted,
        lossy=header.lossy,
        disk=block.stored.bytes,
    )
