"""Weights of 4 or 8 bits: how they are found for given numbers, and a linear layer that multiplies by them.

32 numbers along a row are a *group* with a scale and a zero of their own, as in GGUF's Q4_0, Q4_1 and Q8_0, whose very
codes are found again in the numbers that a file of those was converted into. torch multiplies by 4-bit weights; 8 bits
are two 4-bit weights side by side, the upper one times sixteen, so that they have the groups of a file too: torch's own
8-bit weights have one scale for a whole row, and lose six times as much.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import torch
from torch import nn

GROUP = 32  # numbers that share a scale and a zero
ROWS = 16  # a weight's rows come in multiples of so many
TILE = 64  # rows that torch packs together; what is packed by whole tiles can be put together
# Up to so many rows of input the packed weights are quicker than a bfloat16 copy, which the processor multiplies by in
# blocks of 16 rows. All layers of the embedded model, milliseconds on two cores with AMX, 4 bits | 8 | bfloat16:
# 1 row 5.6 | 11 | 20, 4 rows 10 | 20 | 25, 8 rows 21 | 41 | 26, 16 rows 41 | 82 | 26.
FEW_ROWS = {4: 8, 8: 4}
CHUNK = 2**18  # numbers that are looked at together
SAMPLE = 256  # groups of a weight that are looked at to tell its kind
NEAR = 2**-7  # relative; bfloat16 rounds by half of that at most
MEAN = torch.full((GROUP, 1), 1 / GROUP)  # groups times this are their means, several times as quick as `mean`

_pack = torch.ops.aten._convert_weight_to_int4pack_for_cpu.default
_multiply = torch.ops.aten._weight_int4pack_mm_for_cpu.default


Found: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # codes, scales, zeros


class Codes(NamedTuple):
    """A weight [out, in] as codes, uint8 of the same shape, and scales and zeros, bfloat16 [out, in / 32].

    A number is (code - half) * scale + zero, half being 8 of 4 bits and 128 of 8.
    """

    bits: int
    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor

    def numbers(self) -> torch.Tensor:
        """What the codes stand for, float32 [out, in]."""
        found = self.codes.view(-1, GROUP), self.scales.view(-1), self.zeros.view(-1)
        return _numbers(found, self.bits).view(self.codes.shape)


def can_hold(weight: torch.Tensor) -> bool:
    """Whether torch multiplies by 4-bit weights of this shape."""
    return weight.dim() == 2 and weight.shape[0] % ROWS == 0 and weight.shape[1] % GROUP == 0 and weight.numel() > 0


def own_bits(weight: torch.Tensor) -> int | None:
    """The bits that a weight [out, in] already has: 4 or 8 when its groups lie on grids of so many steps; else None.

    A sample is looked at. Of numbers that were never on a grid not one group in ten thousand looks as if it were.
    """
    groups = _sample(weight)
    if bool(_on_grid(groups, _four_of_any(groups)).all()):
        return 4
    error = (_numbers(_eight(groups), 8) - groups).abs()
    return 8 if bool((error <= NEAR * groups.abs()).all()) else None


def quantise(weight: torch.Tensor, bits: int, *, exact: bool) -> Codes:
    """The codes of a weight [out, in] that `can_hold` allows: the nearest, or, `exact`, those that it was made of."""
    sample = _sample(weight)
    if bits == 8:
        find = _eight
    elif not exact:
        find = _four
    else:
        find = _four_of_all if bool(_on_grid(sample, _four_of_all(sample)).all()) else _four_of_any
    chunks = torch.split(weight.detach(), max(1, CHUNK // weight.shape[1]))
    parts = [find(chunk.float().view(-1, GROUP)) for chunk in chunks]
    codes, scales, zeros = (torch.cat(part).view(len(weight), -1) for part in zip(*parts, strict=True))
    return Codes(bits, codes, scales, zeros)


def _sample(weight: torch.Tensor) -> torch.Tensor:
    groups = weight.detach().reshape(-1, GROUP)
    return groups[:: -(-len(groups) // SAMPLE)].float()


class QuantisedLinear(nn.Module):
    """What an `nn.Linear` computes with the weight that `codes` say.

    `many` computes with the same weight in bfloat16, for more rows than `FEW_ROWS`; None: those take the codes too.
    """

    def __init__(self, codes: Codes, bias: nn.Parameter | None, many: nn.Module | None) -> None:
        super().__init__()
        self.bits = codes.bits
        self.out_features, self.in_features = codes.codes.shape
        self.packed = nn.Parameter(_packed(codes), requires_grad=False)
        self.scales_and_zeros = nn.Parameter(_scales_and_zeros(codes), requires_grad=False)
        self.bias = bias
        self.many = many
        self._few = FEW_ROWS[codes.bits]

    @property
    def weight(self) -> torch.Tensor:
        """The weight as `nn.Linear` has it, [out, in]: for a model that looks at it, not for every step."""
        return self.by_codes(torch.eye(self.in_features, dtype=self.scales_and_zeros.dtype)).t().contiguous()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[…, in] → […, out]."""
        rows = x.numel() // self.in_features
        if self.many is not None and rows > self._few:
            result: torch.Tensor = self.many(x)
            return result
        result = self.by_codes(x.reshape(-1, self.in_features).contiguous())
        if self.bias is not None:
            result += self.bias
        return result.view(*x.shape[:-1], self.out_features)

    def by_codes(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, in] → [rows, out] by the codes, without the bias; the rows lie one after the other in memory."""
        if self.bits == 8:
            x = torch.cat([x, x], dim=1)
        result: torch.Tensor = _multiply(x, self.packed, GROUP, self.scales_and_zeros)
        return result


def _packed(codes: Codes) -> torch.Tensor:
    """`codes` as torch multiplies by them, 8-bit ones as two 4-bit ones side by side: uint8 [out, bytes of a row]."""
    rows = max(1, CHUNK // codes.codes.shape[1] // TILE) * TILE
    return torch.cat([_pack(_planes(part.int(), codes.bits), 1) for part in torch.split(codes.codes, rows)])


def _planes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """4-bit codes that make up `codes`, of which code - 128 = 16 * (upper - 8) + (lower - 8) + 8."""
    return codes if bits == 4 else torch.cat([codes >> 4, codes & 15], dim=1)


def _scales_and_zeros(codes: Codes) -> torch.Tensor:
    """Those of the 4-bit codes, as torch takes them: [groups of a row, out, 2]."""
    scales, zeros = codes.scales, codes.zeros
    if codes.bits == 8:
        zeros = torch.cat([zeros, 8 * scales], dim=1)
        scales = torch.cat([16 * scales, scales], dim=1)
    return torch.stack([scales, zeros], dim=-1).transpose(0, 1).contiguous()


def _four(groups: torch.Tensor) -> Found:
    """The nearest 4-bit codes of groups [n, 32], and their scales and zeros [n]; 15 steps from least to greatest."""
    _, scale, zero = _four_of_all(groups)
    codes = _whole(groups - zero[:, None], scale[:, None].float()).add_(8).clamp_(0, 15)
    return codes.byte(), scale, zero


def _four_of_all(groups: torch.Tensor) -> Found:
    """The 4-bit codes of groups [n, 32] that lie on grids of 15 steps, which is all of Q4_1's."""
    low = groups.amin(-1, keepdim=True)
    return _fitted(groups, low, (groups.amax(-1, keepdim=True) - low) / 15)


def _four_of_any(groups: torch.Tensor) -> Found:
    """The 4-bit codes of groups [n, 32] that lie on grids of which they need not use both ends.

    Q4_0's greatest number is 8 steps from nothing; what is left is tried with fewer and fewer steps, down to 8.
    """
    found = _four_of_all(groups)
    for steps in (None, 14, 13, 12, 11, 10, 9, 8):
        left = (~_on_grid(groups, found)).nonzero().squeeze(-1)
        if not len(left):
            break
        part = groups[left]
        low, high = part.amin(-1, keepdim=True), part.amax(-1, keepdim=True)
        step = (high - low) / steps if steps else torch.maximum(low.abs(), high.abs()) / 8
        other = _fitted(part, low, step)
        before = found[0][left], found[1][left], found[2][left]
        nearer = (_error(part, other) < _error(part, before)).nonzero().squeeze(-1)
        for each, new in zip(found, other, strict=True):
            each[left[nearer]] = new[nearer]
    return found


def _fitted(groups: torch.Tensor, low: torch.Tensor, step: torch.Tensor) -> Found:
    """4-bit codes on a grid from about `low` [n, 1] on in steps of about `step` [n, 1], and what fits them best."""
    above = groups - low
    codes = _whole(above, step).clamp_(0, 15)
    centre, mean = codes @ MEAN, above @ MEAN
    common = (codes * above) @ MEAN - centre * mean
    scale = (common / ((codes * codes) @ MEAN - centre.square()).clamp_min_(1e-9)).bfloat16()
    zero = (low + mean - scale * (centre - 8)).bfloat16()
    return codes.byte(), scale.squeeze(-1), zero.squeeze(-1)


def _on_grid(groups: torch.Tensor, found: Found) -> torch.Tensor:
    """Whether 4-bit codes say numbers [n, 32] as exactly as bfloat16 does, bool [n]."""
    return _error(groups, found) <= NEAR * groups.abs().amax(-1)


def _error(groups: torch.Tensor, found: Found) -> torch.Tensor:
    """How far the worst number of each group is from what 4-bit codes say, [n]."""
    return (_numbers(found, 4) - groups).abs().amax(-1)


def _eight(groups: torch.Tensor) -> Found:
    """8-bit codes of groups [n, 32], and their scales and zeros [n]: 127 is the greatest of a group."""
    scale = torch.maximum(groups.amax(-1, keepdim=True), -groups.amin(-1, keepdim=True)) / 127
    for _ in range(2):  # what is rounded to bfloat16 does not say exactly what the greatest was
        codes = _whole(groups, scale)
        scale = ((codes * groups) @ MEAN) / ((codes * codes) @ MEAN).clamp_min_(1e-9)
    scale = scale.bfloat16()
    codes = _whole(groups, scale.float()).clamp_(-128, 127).add_(128)
    return codes.byte(), scale.squeeze(-1), torch.zeros_like(scale.squeeze(-1))


def _whole(numbers: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    """How many whole steps each number is; some finite number where a step is 0."""
    return numbers.mul(1 / step.clamp_min(1e-30)).round_()


def _numbers(found: Found, bits: int) -> torch.Tensor:
    """What codes [n, 32] of so many bits stand for, float32 [n, 32]."""
    codes, scales, zeros = found
    centred = codes.float().sub_(2 ** (bits - 1))
    return centred.mul_(scales.float()[:, None]).add_(zeros.float()[:, None])
