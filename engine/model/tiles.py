"""How a weight of 4, 8 or 16 bits lies in memory for the compiled kernels, and what its numbers are. Computes nothing.

A *tile* is 16 rows of a weight, a *group* 32 numbers along each of them. A group of 4 or 8 bits begins with its scales
and zeros, float16, one of each a row; then come the codes: of the first number of each row, of the second, and so on.
Two codes of 4 bits share a byte, the first of them the lower half. 16 bits are bfloat16, without scales and zeros.
"""

from __future__ import annotations

import torch

from engine.model.codes import GROUP, Codes

TILE = 16  # rows that lie together
BF16 = 16  # bits


def pack_codes(codes: Codes) -> torch.Tensor:
    """Codes [out, in] of which a number is code * scale + zero, as uint8 [tiles, groups, bytes of a group]."""
    if codes.grid.centred:
        raise ValueError("kernels multiply by codes that count from 0")
    its = _tiled(codes.codes, GROUP)
    if codes.bits == 4:
        its = its[:, :, 0::2] | (its[:, :, 1::2] << 4)
    steps = (_tiled(part.half(), 1).view(torch.uint8).flatten(2) for part in (codes.scales, codes.zeros))
    return torch.cat([*steps, its.flatten(2)], dim=-1).contiguous()


def pack_bf16(weight: torch.Tensor) -> torch.Tensor:
    """A weight [out, in] in bfloat16, as uint8 [tiles, groups, bytes of a group]."""
    return _tiled(weight.detach().bfloat16(), GROUP).view(torch.uint8).flatten(2)


def unpack(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """The numbers of a packed weight, float32 [out, in]."""
    tiles, groups, _ = packed.shape
    if bits == BF16:
        return _rows(packed.view(torch.bfloat16).view(tiles, groups, GROUP, TILE).float())
    steps, codes = packed[..., : 4 * TILE].contiguous(), packed[..., 4 * TILE :]
    scales, zeros = steps.view(torch.float16).view(tiles, groups, 2, 1, TILE).float().unbind(2)
    if bits == 4:
        halves = codes.reshape(tiles, groups, GROUP // 2, 1, TILE)
        codes = torch.cat([halves & 15, halves >> 4], dim=3)
    return _rows(codes.reshape(tiles, groups, GROUP, TILE).float() * scales + zeros)


def _tiled(numbers: torch.Tensor, count: int) -> torch.Tensor:
    """[out, in] as [tiles, groups of `count`, count, TILE]."""
    return numbers.view(-1, TILE, numbers.shape[1] // count, count).permute(0, 2, 3, 1).contiguous()


def _rows(tiles: torch.Tensor) -> torch.Tensor:
    """[tiles, groups, GROUP, TILE] as [out, in]."""
    return tiles.permute(0, 3, 1, 2).reshape(tiles.shape[0] * TILE, -1)
