"""Weights that stay in 4, 8 or 16 bits for any number of rows: the same numbers, the same results, less memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf.constants import GGMLQuantizationType as Kind
from gguf.quants import dequantize, quantize
from torch import nn

from engine.errors import ModelLoadError
from engine.model import loading, packing, sources, tiles
from engine.model.codes import FILES, TORCHS, quantise
from engine.model.compact import CompactLinear
from engine.model.kernels import Kernels, TorchKernels, choose
from engine.served import Measures
from tests.engine.model import tiny
from tests.engine.model.test_codes import error, weight

BITS = [4, 8, 16]
WIDE = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 128, "head_dim": 16}
CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=str)
def native(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Kernels, torch.dtype]:
    chosen = choose(CPU, request.param, tmp_path_factory.mktemp("kernels"))
    assert chosen.name == "native"
    return chosen, request.param


def packed(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    if bits == 16:
        return tiles.pack_bf16(numbers)
    return tiles.pack_codes(quantise(numbers, bits, exact=False, grid=FILES))


# --- tiles and products -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [4, 8])
def test_what_is_packed_is_what_the_codes_say(bits: int) -> None:
    codes = quantise(weight(48, 96), bits, exact=False, grid=FILES)
    assert torch.equal(tiles.unpack(tiles.pack_codes(codes), bits), codes.numbers())
    assert tiles.pack_codes(codes).nbytes == 48 * 96 * bits // 8 + 2 * 2 * 48 * 3


def test_bfloat16_is_packed_as_it_is() -> None:
    numbers = weight(48, 96).bfloat16()
    assert torch.equal(tiles.unpack(tiles.pack_bf16(numbers), 16), numbers.float())


def test_codes_that_count_from_the_middle_are_not_packed() -> None:
    with pytest.raises(ValueError, match="count from 0"):
        tiles.pack_codes(quantise(weight(), 4, exact=False, grid=TORCHS))


@pytest.mark.parametrize(("height", "width"), [(48, 96), (16, 32), (960, 576), (64, 1120)])
@pytest.mark.parametrize("bits", BITS)
def test_native_products_are_those_of_the_numbers(
    bits: int, height: int, width: int, native: tuple[Kernels, torch.dtype]
) -> None:
    kernels, dtype = native
    its = packed(weight(height, width), bits)
    for rows in (0, 1, 2, 3, 4, 5, 11, 12, 13, 200, 385):
        x = torch.randn(rows, width, generator=torch.Generator().manual_seed(rows)).to(dtype)
        result, expected = kernels.multiply(x, its, bits), x.double() @ tiles.unpack(its, bits).double().t()
        assert (result.dtype, result.shape) == (dtype, (rows, height))
        assert rows == 0 or error(result, expected) < (2e-6 if dtype == torch.float32 else 3e-3)
        assert rows == 0 or error(TorchKernels().multiply(x, its, bits), expected) < 3e-3


@pytest.mark.parametrize("bits", BITS)
def test_a_row_gives_the_same_alone_and_among_others_with_any_number_of_threads(
    bits: int, native: tuple[Kernels, torch.dtype]
) -> None:
    kernels, dtype = native
    its, x = packed(weight(320, 1120), bits), torch.randn(203, 1120).to(dtype)
    together, threads = kernels.multiply(x, its, bits), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        for first, count in ((0, 1), (7, 1), (8, 2), (20, 3), (40, 4), (100, 7), (192, 11), (0, 203)):
            assert torch.equal(kernels.multiply(x[first : first + count], its, bits), together[first : first + count])
    finally:
        torch.set_num_threads(threads)


def test_halves_of_every_size_are_read(native: tuple[Kernels, torch.dtype]) -> None:
    """From the least to the greatest, and less than the least normal one."""
    kernels, dtype = native
    scales = torch.logspace(-7, 4, 16 * 3).view(16, 3).half()
    codes = quantise(torch.ones(16, 96), 8, exact=False, grid=FILES)._replace(scales=scales, zeros=-scales.flip(0))
    its = tiles.pack_codes(codes)
    result = kernels.multiply(torch.eye(96, dtype=dtype), its, 8)
    torch.testing.assert_close(
        result.t().float(), codes.numbers(), rtol=1e-6 if dtype == torch.float32 else 8e-3, atol=0
    )


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("shape", [(1, 0, 96), (1, 7, 96), (96,), (2, 3, 4, 96)])
def test_every_shape_of_input(shape: tuple[int, ...], bits: int, bias: bool, native_kernels: Kernels) -> None:
    its = nn.Parameter(torch.randn(64), requires_grad=False) if bias else None
    layer = CompactLinear.of(weight(), bits, its, native_kernels, exact=False)
    x = torch.randn(shape)
    expected = nn.functional.linear(x, layer.weight, its)
    torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=1e-5)
    every_other = torch.randn(3, 192)[:, ::2]
    assert torch.equal(layer(every_other), layer(every_other.contiguous()))


def test_numbers_of_another_dtype_are_not_misread(native_kernels: Kernels) -> None:
    layer = CompactLinear.of(weight(), 4, None, native_kernels, exact=False)
    assert layer.weight.dtype == torch.float32
    with pytest.raises(TypeError, match=r"^a layer in torch.float32 was given torch.bfloat16$"):
        layer(torch.zeros(1, 96, dtype=torch.bfloat16))


# --- models -----------------------------------------------------------------------------------------------------------


def model(kind: Kind | None = None, head: Kind | None = None) -> nn.Module:
    """A tiny model in float32, whose layers' and output's numbers are as files of these kinds would have them."""
    made = tiny.of(tiny.config_of("llama", tie_word_embeddings=True, **WIDE))
    for name, module in made.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            kinds = head if name == "lm_head" or isinstance(module, nn.Embedding) else kind
            if kinds is not None:
                data = module.weight.detach().numpy()
                module.weight.data.copy_(torch.from_numpy(dequantize(quantize(data, kinds), kinds).copy()))
    return made


def test_auto_gives_each_layer_the_bits_that_it_has(native_kernels: Kernels) -> None:
    its, ids = model(Kind.Q4_1, Kind.Q8_0), torch.tensor([tiny.prompt(40)])
    expected = its(ids).logits
    packing.compact(its, "auto", native_kernels)
    bits = packing.layouts(its)
    assert (len(bits), set(bits.values()), bits["lm_head"]) == (7 * 3 + 1, {4, 8}, 8)
    assert packing.called(its, "float32") == "int4"
    assert error(its(ids).logits, expected) < 1e-5


def test_bfloat16_in_float32_is_kept_in_sixteen_bits(native_kernels: Kernels) -> None:
    its, ids = model(), torch.tensor([tiny.prompt(40)])
    its.bfloat16().float()
    expected = its(ids).logits
    packing.compact(its, "auto", native_kernels)
    assert set(packing.layouts(its).values()) == {16}
    assert packing.called(its, "float32") == "bf16"
    assert error(its(ids).logits, expected) < 1e-5


def test_auto_leaves_other_numbers_as_they_are(native_kernels: Kernels) -> None:
    its = model()
    packing.compact(its, "auto", native_kernels)
    assert (packing.layouts(its), packing.called(its, "float32")) == ({}, "float32")


@pytest.mark.parametrize(("weights", "bits"), [("int4", 4), ("int8", 8)])
def test_all_layers_take_the_bits_that_are_asked_for_and_the_output_layer_eight(
    weights: Any, bits: int, native_kernels: Kernels
) -> None:
    its = model()
    packing.compact(its, weights, native_kernels)
    found = packing.layouts(its)
    assert found.pop("lm_head") == 8
    assert (len(found), set(found.values()), packing.called(its, "float32")) == (7 * 3, {bits}, weights)


def test_other_bits_are_another_fingerprint_and_counted_as_what_they_are(tmp_path: Path) -> None:
    prepared = tiny.save(tiny.config_of("llama", **WIDE), tmp_path / "llama")
    found = {}
    for weights in ("auto", "bf16", "int8", "int4"):
        loaded = loading.load(prepared, "cpu", "float32", None, weights, kernels_dir=tmp_path)
        measures = Measures.of(loaded, 4)
        found[weights] = measures.fingerprint
        assert measures.weights == ("float32" if weights == "auto" else weights)
        assert measures.weight_bytes == sum(parameter.nbytes for parameter in loaded.module.parameters())
    assert len(set(found.values())) == 4


def test_without_a_compiler_weights_stay_as_they_are_unless_fewer_bits_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    prepared = tiny.save(tiny.config_of("llama", **WIDE), tmp_path / "llama")
    loaded = loading.load(prepared, "cpu", "float32", kernels_dir=tmp_path / "kernels")
    assert loading.weights_of(loaded) == "float32"
    for weights in ("int4", "bf16"):
        with pytest.raises(ModelLoadError, match=rf"^weights '{weights}' need a C compiler here .*: install one, or"):
            loading.load(prepared, "cpu", "float32", None, weights, kernels_dir=tmp_path / "kernels")


def test_the_embedded_model_computes_what_it_does_in_float32_in_two_fifths_of_the_memory(
    model_cache: Path, tmp_path: Path
) -> None:
    prepared = sources.prepare("smollm2", model_cache, lambda *_: None, dtype=torch.float32)
    whole = loading.load(prepared, "cpu", "float32")
    compact = loading.load(prepared, "cpu", "float32", kernels_dir=tmp_path)
    assert loading.weights_of(compact) == "int4"
    sizes = [sum(p.nbytes for p in each.module.parameters()) for each in (whole, compact)]
    assert sizes[1] < 0.4 * sizes[0]
    ids = torch.randint(3, 40_000, (1, 48), generator=torch.Generator().manual_seed(1))
    for each in (whole, compact):
        each.module.set_attn_implementation("eager")
    with torch.inference_mode():
        expected, found = (each.module(ids, use_cache=False).logits.log_softmax(-1) for each in (whole, compact))
    divergence = (expected.exp() * (expected - found)).sum(-1)
    assert float(divergence.abs().max()) < 1e-6
    assert torch.equal(expected.argmax(-1), found.argmax(-1))


# --- what can be chosen -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("weights", "device", "dtype"),
    [("int8", "cuda", torch.bfloat16), ("bf16", "cpu", torch.float16), ("bf16", "cuda", torch.float32)],
)
def test_what_cannot_be_is_refused(weights: str, device: str, dtype: torch.dtype) -> None:
    with pytest.raises(ModelLoadError) as refusal:
        loading.choose_weights(weights, torch.device(device), dtype)
    name = str(dtype).removeprefix("torch.")
    sentence = f"cannot be had in {name} on {device}: use --weights auto, or --device cpu and --dtype auto"
    assert str(refusal.value) == f"weights {weights!r} {sentence}"


def test_unknown_weights_are_refused() -> None:
    with pytest.raises(ModelLoadError, match=r"^unknown weights 'int3': use auto, bf16, int8, int4$"):
        loading.choose_weights("int3", CPU, torch.bfloat16)


def test_auto_is_bf16_where_fewer_bits_cannot_be() -> None:
    assert loading.choose_weights("auto", torch.device("cuda"), torch.bfloat16) == "bf16"
    assert loading.choose_weights("auto", CPU, torch.float16) == "bf16"
    assert loading.choose_weights("auto", CPU, torch.float32) == "auto"
    assert loading.choose_weights("bf16", torch.device("cuda"), torch.bfloat16) == "bf16"
