"""Linear layers whose weights stay in 4, 8 or 16 bits for any number of rows: the compiled kernels multiply by them.

For processors that do not multiply bfloat16, which is most people's. A float32 model in as few bits as its numbers have
anyway reads a third to an eighth of the memory for each token, and computes the same, to rounding.
"""

from __future__ import annotations

import torch
from torch import nn

from engine.model import tiles
from engine.model.codes import FILES, GROUP, quantise
from engine.model.kernels import Kernels
from engine.model.tiles import BF16


class CompactLinear(nn.Module):
    """What an `nn.Linear` of this dtype computes whose weight [out, in] is `packed` in tiles of so many bits."""

    def __init__(
        self, packed: torch.Tensor, bits: int, bias: nn.Parameter | None, kernels: Kernels, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.bits, self.dtype = bits, dtype
        self.out_features, self.in_features = packed.shape[0] * tiles.TILE, packed.shape[1] * GROUP
        self.packed = nn.Parameter(packed, requires_grad=False)
        self.bias = bias
        self._kernels = kernels

    @classmethod
    def of(
        cls, weight: torch.Tensor, bits: int, bias: nn.Parameter | None, kernels: Kernels, *, exact: bool
    ) -> CompactLinear:
        """With a weight that `quantised.can_hold`; `exact`: its numbers have so many bits: codes say what it has."""
        if bits == BF16:
            return cls(tiles.pack_bf16(weight), bits, bias, kernels, weight.dtype)
        codes = quantise(weight, bits, exact=exact, grid=FILES)
        return cls(tiles.pack_codes(codes), bits, bias, kernels, weight.dtype)

    @property
    def weight(self) -> torch.Tensor:
        """The weight as `nn.Linear` has it, [out, in]: for a model that looks at it, not for every step."""
        return tiles.unpack(self.packed, self.bits).to(self.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[…, in] → […, out]. Raises `TypeError` for numbers of another dtype, which the kernels would misread."""
        if x.dtype != self.dtype:
            raise TypeError(f"a layer in {self.dtype} was given {x.dtype}")
        rows = x.reshape(-1, self.in_features).contiguous()
        result = self._kernels.multiply(rows, self.packed, self.bits)
        if self.bias is not None:
            result += self.bias
        return result.view(*x.shape[:-1], self.out_features)
