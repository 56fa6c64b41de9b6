"""A linear layer of a bfloat16 model that multiplies few rows by torch's 4-bit weights.

8 bits are two 4-bit weights side by side, the upper one times sixteen, so that they have the groups of a file too:
torch's own 8-bit weights have one scale for a whole row, and lose six times as much.
"""

from __future__ import annotations

import torch
from torch import nn

from engine.model.codes import CHUNK, GROUP, Codes

ROWS = 16  # a weight's rows come in multiples of so many
TILE = 64  # rows that torch packs together; what is packed by whole tiles can be put together
# Up to so many rows of input the packed weights are quicker than a bfloat16 copy, which the processor multiplies by in
# blocks of 16 rows. All layers of the embedded model, milliseconds on two cores with AMX, 4 bits | 8 | bfloat16:
# 1 row 5.6 | 11 | 20, 4 rows 10 | 20 | 25, 8 rows 21 | 41 | 26, 16 rows 41 | 82 | 26.
FEW_ROWS = {4: 8, 8: 4}

_pack = torch.ops.aten._convert_weight_to_int4pack_for_cpu.default
_multiply = torch.ops.aten._weight_int4pack_mm_for_cpu.default


def can_hold(weight: torch.Tensor) -> bool:
    """Whether a weight of this shape can be multiplied by in fewer bits, by torch or by the compiled kernels."""
    return weight.dim() == 2 and weight.shape[0] % ROWS == 0 and weight.shape[1] % GROUP == 0 and weight.numel() > 0


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
