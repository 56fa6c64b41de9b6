"""Weights of 4 and 8 bits in bfloat16: layers compute with a file's own codes, and nothing is confused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf.constants import GGMLQuantizationType as Kind
from gguf.quants import dequantize, quantize
from torch import nn
from transformers import AutoModelForCausalLM

from engine.model import codes as finding
from engine.model import loading, packing, quantised
from engine.model.packing import PackedLinear
from engine.model.quantised import QuantisedLinear
from engine.served import Measures
from tests.engine.model import tiny
from tests.engine.model.test_codes import error, weight

pytestmark = pytest.mark.skipif(not loading._cpu_multiplies_bf16(), reason="this processor does not multiply bfloat16")

PLENTY = 2**40


# --- layers -----------------------------------------------------------------------------------------------------------


def layer(bits: int, *, bias: bool = False, copy: bool = False) -> tuple[QuantisedLinear, torch.Tensor, Any]:
    """A layer, the numbers that it stands for, and its bias."""
    codes = finding.quantise(weight().bfloat16(), bits, exact=False)
    parameter = nn.Parameter(torch.randn(64).bfloat16(), requires_grad=False) if bias else None
    many = PackedLinear(codes.numbers().bfloat16(), parameter) if copy else None
    return QuantisedLinear(codes, parameter, many), codes.numbers(), parameter


@torch.inference_mode()
@pytest.mark.parametrize("copy", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("shape", [(1, 0, 96), (1, 1, 96), (1, 7, 96), (96,), (3, 96), (2, 3, 4, 96), (40, 96)])
def test_every_shape_of_input_gives_what_the_numbers_give(
    shape: tuple[int, ...], bits: int, bias: bool, copy: bool
) -> None:
    torch.manual_seed(0)
    module, numbers, its_bias = layer(bits, bias=bias, copy=copy)
    x = torch.randn(shape, dtype=torch.bfloat16)
    expected = nn.functional.linear(x.float(), numbers, None if its_bias is None else its_bias.float())
    result = module(x)
    assert (result.dtype, result.shape) == (torch.bfloat16, expected.shape)
    torch.testing.assert_close(result.float(), expected, rtol=0.02, atol=0.08)
    assert x.numel() == 0 or error(result, expected) < 0.004
    wide = torch.randn((3, 192), dtype=torch.bfloat16)[:, ::2]
    torch.testing.assert_close(module(wide), module(wide.contiguous()))
    assert torch.equal(module.weight, numbers.bfloat16())


@pytest.mark.parametrize("bits", [4, 8])
def test_many_rows_take_the_copy_and_few_the_codes(bits: int) -> None:
    module, _, _ = layer(bits, copy=True)
    other = PackedLinear(torch.zeros(64, 96, dtype=torch.bfloat16), None)
    module.many = other
    few = quantised.FEW_ROWS[bits]
    assert module(torch.ones(few, 96, dtype=torch.bfloat16)).any()
    assert not module(torch.ones(few + 1, 96, dtype=torch.bfloat16)).any()


@pytest.mark.parametrize("rows", [64, 80, 448])
@pytest.mark.parametrize("bits", [4, 8])
def test_a_large_weight_is_packed_in_parts(rows: int, bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    codes = finding.quantise(weight(rows, 32).bfloat16(), bits, exact=False)
    whole = QuantisedLinear(codes, None, None)
    monkeypatch.setattr(finding, "CHUNK", 32)
    monkeypatch.setattr(quantised, "CHUNK", 32)
    parts = QuantisedLinear(finding.quantise(weight(rows, 32).bfloat16(), bits, exact=False), None, None)
    assert torch.equal(parts.packed, whole.packed)
    assert torch.equal(parts.scales_and_zeros, whole.scales_and_zeros)


def test_a_zero_in_the_wrong_place_is_another_layer() -> None:
    """Nothing hides it: the result is off by a step of every number."""
    codes = finding.quantise(weight().bfloat16(), 4, exact=False)
    x = torch.randn(4, 96, generator=torch.Generator().manual_seed(1)).bfloat16()
    shifted = QuantisedLinear(codes._replace(zeros=codes.zeros + codes.scales), None, None)
    assert error(shifted(x), QuantisedLinear(codes, None, None)(x)) > 0.1


# --- models -----------------------------------------------------------------------------------------------------------

WIDE = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 96}


def plain(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, attn_implementation="eager").eval()


def on_grid(model: Any, kind: Kind, head: Kind | None = None) -> Any:
    """The model with its layers' weights as a file of this kind would have them."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            kinds = head if name == "lm_head" or isinstance(module, nn.Embedding) else kind
            if kinds is not None:
                data = module.weight.detach().float().numpy()
                module.weight.data.copy_(torch.from_numpy(dequantize(quantize(data, kinds), kinds).copy()))
    return model


@pytest.fixture
def llama(tmp_path: Path) -> Any:
    return plain(tiny.save(tiny.config_of("llama", tie_word_embeddings=True, **WIDE), tmp_path / "llama").path)


def test_auto_gives_each_layer_the_bits_that_it_has(llama: Any) -> None:
    packing.pack(on_grid(llama, Kind.Q4_1, Kind.Q8_0), "auto", PLENTY)
    bits = packing.layouts(llama)
    assert set(bits.values()) == {4, 8}
    assert [name for name in bits if bits[name] == 8] == ["lm_head"]
    assert len(bits) == 7 * 3 + 1
    assert packing.called(llama) == "int4"


def test_auto_leaves_other_numbers_as_they_are(llama: Any) -> None:
    packing.pack(llama, "auto", PLENTY)
    assert (packing.layouts(llama), packing.called(llama)) == ({}, "bf16")


@pytest.mark.parametrize(("weights", "bits"), [("int4", 4), ("int8", 8)])
def test_all_layers_take_the_bits_that_are_asked_for_and_the_output_layer_eight(
    llama: Any, weights: Any, bits: int
) -> None:
    packing.pack(llama, weights, PLENTY)
    found = packing.layouts(llama)
    assert found.pop("lm_head") == 8
    assert (len(found), set(found.values())) == (7 * 3, {bits})
    assert packing.called(llama) == weights


def test_eight_bits_are_not_given_to_a_layer_that_has_four(llama: Any) -> None:
    packing.pack(on_grid(llama, Kind.Q4_0), "int8", PLENTY)
    bits = packing.layouts(llama)
    assert bits.pop("lm_head") == 8
    assert set(bits.values()) == {4}


def test_a_shape_that_torch_cannot_multiply_by_stays(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(48, 32), nn.Linear(32, 40), nn.Linear(32, 48)).bfloat16()
    packing.pack(model, "int4", PLENTY)
    assert [type(each) for each in model] == [PackedLinear, PackedLinear, QuantisedLinear]


def test_without_room_there_is_no_copy_and_little_is_left(llama: Any) -> None:
    layers = sum(each.weight.nbytes for each in llama.modules() if isinstance(each, nn.Linear))
    rest = sum(p.nbytes for p in llama.parameters()) - layers  # norms; the embedding stays in its place
    embedding = llama.model.embed_tokens.weight.nbytes
    assert packing.pack(llama, "int4", int(1.5 * layers) - 1) == layers
    kept = sum(p.nbytes for p in llama.parameters())
    assert kept == rest + embedding + (layers - embedding) * 5 // 16 + embedding * 10 // 16
    ids = torch.tensor([tiny.prompt(40)])
    assert llama(ids).logits.isfinite().all()


def test_with_just_enough_room_there_are_copies(llama: Any) -> None:
    layers = sum(each.weight.nbytes for each in llama.modules() if isinstance(each, nn.Linear))
    assert packing.pack(llama, "int4", int(1.5 * layers)) == 0
    assert all(each.many is not None for each in llama.modules() if isinstance(each, QuantisedLinear))


def test_what_codes_say_and_the_copy_are_the_same_weight(llama: Any) -> None:
    packing.pack(llama, "int4", PLENTY)
    for each in llama.modules():
        if isinstance(each, QuantisedLinear):
            assert torch.equal(each.weight, each.many.weight)


def test_the_copy_of_a_layer_that_has_four_bits_is_the_layer(llama: Any) -> None:
    on_grid(llama, Kind.Q4_0)
    before = {name: each.weight.detach().clone() for name, each in llama.named_modules() if type(each) is nn.Linear}
    packing.pack(llama, "auto", PLENTY)
    for name in packing.layouts(llama):
        assert torch.equal(llama.get_submodule(name).many.weight, before[name])


def test_other_bits_are_another_fingerprint_and_counted_as_what_they_are(tmp_path: Path) -> None:
    prepared = tiny.save(tiny.config_of("llama", **WIDE), tmp_path / "llama")
    found = {}
    for weights in ("auto", "bf16", "int8", "int4"):
        loaded = loading.load(prepared, "cpu", "bfloat16", None, weights)
        measures = Measures.of(loaded, 4)
        found[weights] = measures.fingerprint
        assert measures.weights == ("bf16" if weights == "auto" else weights)
        assert measures.weight_bytes == sum(parameter.nbytes for parameter in loaded.module.parameters())
    assert found["auto"] == found["bf16"]
    assert len(set(found.values())) == 3
