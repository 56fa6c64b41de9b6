"""Codes of 4 and 8 bits: a file's own are found again in the numbers it stands for, and others take the nearest."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType as Kind
from gguf.quants import dequantize, quantize

from engine.model.codes import FILES, TORCHS, Grid, own_bits, quantise

OWN = [(Kind.Q4_0, 4), (Kind.Q4_1, 4), (Kind.Q8_0, 8)]
GRIDS = pytest.mark.parametrize(
    ("grid", "dtype"),
    [(TORCHS, torch.bfloat16), (FILES, torch.bfloat16), (FILES, torch.float32)],
    ids=["torch's", "bfloat16", "float32"],
)


def weight(rows: int = 64, columns: int = 96, seed: int = 0) -> torch.Tensor:
    """Numbers as a model has them, float32, rows of unlike sizes."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator) * torch.rand(rows, 1, generator=generator).add(0.1)


def from_file(kind: Kind, rows: int = 64, columns: int = 96) -> torch.Tensor:
    """What a GGUF file of this kind says, float32."""
    return torch.from_numpy(dequantize(quantize(weight(rows, columns).numpy(), kind), kind).copy())


def error(result: torch.Tensor, expected: torch.Tensor) -> float:
    return float((result.float() - expected.float()).norm() / expected.float().norm())


@GRIDS
@pytest.mark.parametrize(("kind", "bits"), OWN)
def test_the_codes_of_a_file_are_found_again(kind: Kind, bits: int, grid: Grid, dtype: torch.dtype) -> None:
    """As near to the file's numbers as the dtype is: a step in the wrong place would be a hundred times that."""
    exact = from_file(kind)
    rounded = exact.to(dtype)
    assert own_bits(rounded, grid) == bits
    found = quantise(rounded, bits, exact=True, grid=grid)
    if dtype == torch.bfloat16:
        assert error(found.numbers(), exact) < 0.0025
        assert error(rounded, exact) == pytest.approx(0.00167, rel=0.1)
    else:
        assert error(found.numbers(), exact) < 1e-7


@GRIDS
@pytest.mark.parametrize(("kind", "bits"), OWN)
def test_the_codes_are_those_of_the_file(kind: Kind, bits: int, grid: Grid, dtype: torch.dtype) -> None:
    """The steps from one number to the next, which no zero in another place changes."""
    exact = from_file(kind)
    packed = quantize(exact.numpy(), kind).reshape(64, 3, -1)  # of what is on the grid already
    if kind == Kind.Q8_0:
        theirs = torch.from_numpy(packed[..., 2:].view(np.int8).astype(np.int32))
    else:
        nibbles = packed[..., 2 if kind == Kind.Q4_0 else 4 :]
        theirs = torch.from_numpy(np.concatenate([nibbles & 15, nibbles >> 4], axis=-1).astype(np.int32))
    found = quantise(exact.to(dtype), bits, exact=True, grid=grid)
    ours = found.codes.int().view(64, 3, 32)
    scale = torch.from_numpy(packed[..., :2].copy().view(np.float16).astype(np.float32)).squeeze(-1)
    same_way = torch.where(scale * found.scales.float() < 0, -1, 1)[..., None]  # Q4_0's steps may go down
    differences = (ours.diff(dim=-1) != same_way * theirs.diff(dim=-1)).float().mean()
    lost = 0.02 if bits == 8 and dtype == torch.bfloat16 else 0
    assert differences <= lost, "of 127 steps bfloat16 does not tell the last ones apart"


@GRIDS
@pytest.mark.parametrize("bits", [4, 8])
def test_other_numbers_have_no_bits_of_their_own_and_take_the_nearest(
    bits: int, grid: Grid, dtype: torch.dtype
) -> None:
    numbers = weight().to(dtype)
    assert own_bits(numbers, grid) is None
    assert own_bits(from_file(Kind.Q5_0).to(dtype), grid) is None
    found = quantise(numbers, bits, exact=False, grid=grid)
    steps = {4: 15, 8: 254}[bits]
    groups = numbers.float().view(64, 3, 32)
    span = groups.amax(-1) - groups.amin(-1) if bits == 4 else 2 * groups.abs().amax(-1)
    worst = (found.numbers().view(64, 3, 32) - groups).abs().amax(-1)
    assert bool((worst <= 0.9 * span / steps).all()), "half a step, and what the fit gives up at the ends"
    assert error(found.numbers(), numbers) == pytest.approx({4: 0.075, 8: 0.0053}[bits], rel=0.1)


@GRIDS
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("number", [0.0, -3.0])
def test_groups_of_one_number(number: float, bits: int, grid: Grid, dtype: torch.dtype) -> None:
    found = quantise(torch.full((16, 32), number, dtype=dtype), bits, exact=True, grid=grid)
    assert torch.allclose(found.numbers(), torch.full((16, 32), number), rtol=0.004, atol=0)


def test_a_grid_in_the_first_columns_alone_is_no_grid() -> None:
    numbers = weight(512, 96)
    numbers[:, :32] = 0
    assert own_bits(numbers, FILES) is None
