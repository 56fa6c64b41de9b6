"""Linear layers with packed weights compute what plain ones do, and nothing else is packed."""

from __future__ import annotations

import weakref
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from engine.model import loading, packing
from engine.model.packing import PackedLinear
from engine.served import Measures
from tests.engine.model import tiny

pytestmark = pytest.mark.skipif(not loading._cpu_multiplies_bf16(), reason="this processor does not multiply bfloat16")


def packed(module: nn.Module) -> dict[str, PackedLinear]:
    return {name: each for name, each in module.named_modules() if isinstance(each, PackedLinear)}


def plain(path: Path) -> nn.Module:
    """transformers' own model of the same files, in bfloat16."""
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, attn_implementation="eager").eval()


@pytest.mark.parametrize("name", tiny.MODELS)
def test_a_packed_model_computes_what_the_plain_one_does(name: str, tmp_path: Path) -> None:
    loaded = tiny.load(name, tmp_path, dtype="bfloat16", fuse=False)
    reference = plain(loaded.prepared.path)
    ids = tiny.prompt(40)
    loaded.module.set_attn_implementation("eager")
    expected, result = tiny.eager(reference, ids).float(), tiny.eager(loaded.module, ids).float()
    assert (result - expected).norm() <= 0.03 * expected.norm()
    for path, module in packed(loaded.module).items():
        assert torch.equal(module.weight, reference.get_submodule(path).weight)


@torch.inference_mode()
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 0, 24), (1, 1, 24), (1, 7, 24), (24,), (2, 3, 4, 24)])
def test_every_shape_of_input_gives_what_it_gives_without(shape: tuple[int, ...], bias: bool) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(24, 40, bias=bias, dtype=torch.bfloat16)
    x = torch.randn(shape, dtype=torch.bfloat16)
    torch.testing.assert_close(PackedLinear(linear.weight, linear.bias)(x), linear(x), rtol=0.02, atol=0.02)
    wide = torch.randn((3, 48), dtype=torch.bfloat16)
    torch.testing.assert_close(
        PackedLinear(linear.weight, linear.bias)(wide[:, ::2]), linear(wide[:, ::2]), rtol=0.02, atol=0.02
    )


def test_all_linear_layers_are_packed_and_an_output_layer_that_is_the_embedding_where_there_is_room(
    tmp_path: Path,
) -> None:
    in_layers = 7 * 3
    tied = tiny.load("llama", tmp_path / "tied", dtype="bfloat16", tie_word_embeddings=True, fuse=False).module
    assert len(packed(tied)) == in_layers + 1
    assert torch.equal(packed(tied)["lm_head"].weight, tied.model.embed_tokens.weight)
    own = tiny.load("llama", tmp_path / "own", dtype="bfloat16", tie_word_embeddings=False, fuse=False).module
    assert len(packed(own)) == in_layers + 1
    assert "lm_head" in packed(own)
    tight = plain(tmp_path / "tied" / "llama")
    its = tight.lm_head.weight.nbytes
    assert packing.pack(tight, "bf16", int(1.5 * its) - 1) == its
    assert len(packed(tight)) == in_layers
    assert tight.lm_head.weight is tight.model.embed_tokens.weight


def test_weights_are_there_once(tmp_path: Path) -> None:
    linear = nn.Linear(8, 8, dtype=torch.bfloat16)
    model = nn.Sequential(linear)
    gone = weakref.ref(linear.weight)
    del linear
    packing.pack(model, "bf16", 0)
    assert gone() is None
    loaded = tiny.load("llama", tmp_path, dtype="bfloat16", fuse=False)
    numbers = sum(each.numel() for each in plain(loaded.prepared.path).parameters())
    assert Measures.of(loaded, 4).weight_bytes == 2 * numbers, "and counted as what they are"


def test_a_weight_goes_before_the_next_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(*(nn.Linear(8, 8, dtype=torch.bfloat16) for _ in range(2)))
    first, alive, reorder = weakref.ref(model[0].weight), [], packing._reorder

    def watched(*args: object) -> torch.Tensor:
        alive.append(first() is not None)
        return reorder(*args)

    monkeypatch.setattr(packing, "_reorder", watched)
    packing.pack(model, "bf16", 0)
    assert alive == [True, False]


def test_layers_that_share_a_weight_stay() -> None:
    model = nn.Sequential(*(nn.Linear(8, 8, dtype=torch.bfloat16) for _ in range(3)))
    model[1].weight = model[0].weight
    packing.pack(model, "bf16", 10**9)
    assert [type(each) for each in model] == [nn.Linear, nn.Linear, PackedLinear]


def test_what_is_no_plain_linear_layer_stays(tmp_path: Path) -> None:
    class Other(nn.Linear):
        """Computes something of its own."""

    heard: list[object] = []
    listened = nn.Linear(8, 8, dtype=torch.bfloat16)
    listened.register_forward_hook(lambda *args: heard.append(args))
    model = nn.Sequential(Other(8, 8, dtype=torch.bfloat16), listened, nn.Linear(8, 8, dtype=torch.bfloat16))
    packing.pack(model, "bf16", 0)
    assert [type(each) for each in model] == [Other, nn.Linear, PackedLinear]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_other_dtypes_are_left_alone(dtype: str, tmp_path: Path) -> None:
    assert packed(tiny.load("llama", tmp_path, dtype=dtype, fuse=False).module) == {}


def test_a_slower_processor_keeps_plain_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "_cpu_multiplies_bf16", lambda: False)
    assert packed(tiny.load("llama", tmp_path, dtype="bfloat16", fuse=False).module) == {}
