"""Weights as codes of 4 or 8 bits: how they are found for given numbers, and what they stand for. No layer's business.

32 numbers along a row are a *group* with a scale and a zero of their own, as in GGUF's Q4_0, Q4_1 and Q8_0, whose very
codes are found again in the numbers that a file of those was converted into.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch

GROUP = 32  # numbers that share a scale and a zero
CHUNK = 2**18  # numbers that are looked at together
SAMPLE = 256  # groups of a weight that are looked at to tell its kind
# How near codes are to numbers that were made of them, relative to the greatest: bfloat16 rounds by half of its figure
# at most, and scales and zeros in float16, which not every file has, by a quarter of float32's.
NEAR = {torch.bfloat16: 2**-7, torch.float32: 2**-10}
NONE = 1e-30  # a step that is less is none
MEAN = torch.full((GROUP, 1), 1 / GROUP)  # groups times this are their means, several times as quick as `mean`

Found: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # codes, scales, zeros


@dataclass(frozen=True)
class Grid:
    """How codes count: from the middle of what they can be, or from 0; and the dtype of scales and zeros."""

    centred: bool
    steps: torch.dtype

    def middle(self, bits: int) -> int:
        """The code that stands for its group's zero."""
        return 2 ** (bits - 1) if self.centred else 0


TORCHS = Grid(centred=True, steps=torch.bfloat16)  # what torch multiplies by
FILES = Grid(centred=False, steps=torch.float16)  # as Q4_1 has it


class Codes(NamedTuple):
    """A weight [out, in] as codes, uint8 of the same shape, and scales and zeros [out, in / 32], as the grid says.

    A number is (code - middle) * scale + zero.
    """

    bits: int
    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    grid: Grid = TORCHS

    def numbers(self) -> torch.Tensor:
        """What the codes stand for, float32 [out, in]."""
        found = self.codes.view(-1, GROUP), self.scales.view(-1), self.zeros.view(-1)
        return _numbers(found, self.grid.middle(self.bits)).view(self.codes.shape)


def own_bits(weight: torch.Tensor, grid: Grid = TORCHS) -> int | None:
    """The bits that a weight [out, in] already has: 4 or 8 when its groups lie on grids of so many steps; else None.

    A sample is looked at. Of numbers that were never on a grid not one group in ten thousand looks as if it were.
    """
    groups, near = _sample(weight), NEAR[weight.dtype]
    if bool(_on_grid(groups, _four_of_any(groups, grid, near), grid, near).all()):
        return 4
    error = (_numbers(_eight(groups, grid), grid.middle(8)) - groups).abs()
    return 8 if bool((error <= near * groups.abs()).all()) else None


def quantise(weight: torch.Tensor, bits: int, *, exact: bool, grid: Grid = TORCHS) -> Codes:
    """The codes of a weight [out, in], in being a multiple of 32: the nearest, or, `exact`, those it was made of."""
    sample, near = _sample(weight), NEAR[weight.dtype]

    def find(groups: torch.Tensor) -> Found:
        if bits == 8:
            return _eight(groups, grid)
        if not exact:
            return _four(groups, grid)
        return _four_of_all(groups, grid) if all_alike else _four_of_any(groups, grid, near)

    all_alike = bits == 4 and bool(_on_grid(sample, _four_of_all(sample, grid), grid, near).all())
    chunks = torch.split(weight.detach(), max(1, CHUNK // weight.shape[1]))
    parts = [find(chunk.float().view(-1, GROUP)) for chunk in chunks]
    codes, scales, zeros = (torch.cat(part).view(len(weight), -1) for part in zip(*parts, strict=True))
    return Codes(bits, codes, scales, zeros, grid)


def _sample(weight: torch.Tensor) -> torch.Tensor:
    """Some groups of a weight, float32 [SAMPLE, 32]: from anywhere in it, and the same ones each time."""
    groups = weight.detach().reshape(-1, GROUP)
    return groups[torch.randint(len(groups), (SAMPLE,), generator=torch.Generator().manual_seed(0))].float()


def _four(groups: torch.Tensor, grid: Grid) -> Found:
    """The nearest 4-bit codes of groups [n, 32], and their scales and zeros [n]; 15 steps from least to greatest."""
    _, scale, zero = _four_of_all(groups, grid)
    codes = _whole(groups - zero[:, None], scale[:, None].float()).add_(grid.middle(4)).clamp_(0, 15)
    return codes.byte(), scale, zero


def _four_of_all(groups: torch.Tensor, grid: Grid) -> Found:
    """The 4-bit codes of groups [n, 32] that lie on grids of 15 steps, which is all of Q4_1's."""
    low = groups.amin(-1, keepdim=True)
    return _fitted(groups, low, (groups.amax(-1, keepdim=True) - low) / 15, grid)


def _four_of_any(groups: torch.Tensor, grid: Grid, near: float) -> Found:
    """The 4-bit codes of groups [n, 32] that lie on grids of which they need not use both ends.

    Q4_0's greatest number is 8 steps from nothing; what is left is tried with fewer and fewer steps, down to 8.
    """
    found = _four_of_all(groups, grid)
    if not grid.centred:  # Q4_0 as it is: code 0 is the greatest number, on whichever side, and scales have a sign
        most = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
        _take_nearer(found, torch.arange(len(groups)), groups, _fitted(groups, most, -most / 8, grid), grid)
    for steps in (None, 14, 13, 12, 11, 10, 9, 8):
        left = (~_on_grid(groups, found, grid, near)).nonzero().squeeze(-1)
        if not len(left):
            break
        part = groups[left]
        low, high = part.amin(-1, keepdim=True), part.amax(-1, keepdim=True)
        step = (high - low) / steps if steps else torch.maximum(low.abs(), high.abs()) / 8
        _take_nearer(found, left, part, _fitted(part, low, step, grid), grid)
    return found


def _take_nearer(found: Found, index: torch.Tensor, part: torch.Tensor, other: Found, grid: Grid) -> None:
    """Have what is found be the other codes where those of groups `index`, whose numbers are `part`, are nearer."""
    before = found[0][index], found[1][index], found[2][index]
    nearer = (_error(part, other, grid) < _error(part, before, grid)).nonzero().squeeze(-1)
    for each, new in zip(found, other, strict=True):
        each[index[nearer]] = new[nearer]


def _fitted(groups: torch.Tensor, low: torch.Tensor, step: torch.Tensor, grid: Grid) -> Found:
    """4-bit codes on a grid from about `low` [n, 1] on in steps of about `step` [n, 1], and what fits them best."""
    above = groups - low
    codes = _whole(above, step).clamp_(0, 15)
    centre, mean = codes @ MEAN, above @ MEAN
    common = (codes * above) @ MEAN - centre * mean
    scale = (common / ((codes * codes) @ MEAN - centre.square()).clamp_min_(1e-9)).to(grid.steps)
    zero = (low + mean - scale * (centre - grid.middle(4))).to(grid.steps)
    return codes.byte(), scale.squeeze(-1), zero.squeeze(-1)


def _on_grid(groups: torch.Tensor, found: Found, grid: Grid, near: float) -> torch.Tensor:
    """Whether 4-bit codes say numbers [n, 32] as exactly as could be, bool [n]."""
    return _error(groups, found, grid) <= near * groups.abs().amax(-1)


def _error(groups: torch.Tensor, found: Found, grid: Grid) -> torch.Tensor:
    """How far the worst number of each group is from what 4-bit codes say, [n]."""
    return (_numbers(found, grid.middle(4)) - groups).abs().amax(-1)


def _eight(groups: torch.Tensor, grid: Grid) -> Found:
    """8-bit codes of groups [n, 32], and their scales and zeros [n]: 127 steps from nothing is the greatest."""
    scale = torch.maximum(groups.amax(-1, keepdim=True), -groups.amin(-1, keepdim=True)) / 127
    for _ in range(2):  # what is rounded does not say exactly what the greatest was
        codes = _whole(groups, scale)
        scale = ((codes * groups) @ MEAN) / ((codes * codes) @ MEAN).clamp_min_(1e-9)
    scale = scale.to(grid.steps)
    codes = _whole(groups, scale.float()).clamp_(-128, 127).add_(128)
    scale = scale.squeeze(-1)
    return codes.byte(), scale, (grid.middle(8) - 128) * scale


def _whole(numbers: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    """How many whole steps each number is; some finite number where a step is 0."""
    return numbers.mul(1 / torch.where(step.abs() < NONE, NONE, step)).round_()


def _numbers(found: Found, middle: int) -> torch.Tensor:
    """What codes [n, 32] stand for, float32 [n, 32]."""
    codes, scales, zeros = found
    return codes.float().sub_(middle).mul_(scales.float()[:, None]).add_(zeros.float()[:, None])
