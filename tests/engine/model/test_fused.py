"""Fused layers stand for the layers that they equal, and for no others; they compute the same over the pool."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from engine.errors import ModelLoadError
from engine.model import fused, selfcheck
from engine.model.fused import FusedLayer
from engine.model.kernels import Kernels
from engine.model.runner import ModelRunner
from tests.engine.model import tiny
from tests.engine.model.tiny import Part

PARTS = [
    Part(tiny.prompt(41), list(range(40, 51)), [19, 40, 41]),
    Part(tiny.prompt(6, 1), [7, 3], [5, 6]),
    Part(tiny.prompt(63, 2), [60, 2, 59, 4, 33, 35, 20, 21, 22, 10, 11, 12, 19, 18, 17, 16], [1, 50, 54, 57, 58, 63]),
]
ALL = ["llama", "llama-linear", "llama-yarn", "llama-llama3", "qwen2", "qwen2-window", "qwen3", "mistral"]
NONE = ["gemma2", "gemma3", "phi3", "olmo2", "gpt-neox", "granite", "cohere2", "gpt-oss", "stablelm", "gpt2", "mixtral"]


def fused_layers(module: nn.Module) -> list[int]:
    return [layer.layer_idx for layer in module.modules() if isinstance(layer, FusedLayer)]


@pytest.mark.parametrize("name", ALL)
def test_llamas_like_are_fused(name: str, tmp_path: Path) -> None:
    assert fused_layers(tiny.load(name, tmp_path).module) == [0, 1, 2]
    assert fused_layers(tiny.load(name, tmp_path, fuse=False).module) == []


@pytest.mark.parametrize("name", NONE)
def test_others_stay_as_they_are(name: str, tmp_path: Path) -> None:
    assert fused_layers(tiny.load(name, tmp_path).module) == []


def test_a_layer_that_turns_nothing_stays_as_it_is(tmp_path: Path) -> None:
    assert fused_layers(tiny.load("smollm3", tmp_path).module) == [0, 2]


@pytest.mark.parametrize("head_dim", [8, 16, 48, 64, 128])
@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral", "qwen2"])
def test_with_native_kernels_it_equals_eager(name: str, head_dim: int, tmp_path: Path, native_kernels: Kernels) -> None:
    loaded = tiny.load(name, tmp_path, head_dim=head_dim)
    runner = ModelRunner(loaded, tiny.make_pool(loaded), kernels=native_kernels)
    own = tiny.untouched(loaded)
    for part, logits in zip(PARTS, tiny.paged(runner, PARTS), strict=True):
        tiny.assert_equal(logits, tiny.eager(own, part.ids))


@pytest.mark.parametrize("name", ["gemma2", "gpt-oss", "phi3", "cohere2", "granite"])
def test_layers_that_are_not_fused_attend_with_native_kernels(
    name: str, tmp_path: Path, native_kernels: Kernels
) -> None:
    loaded = tiny.load(name, tmp_path, head_dim=16)
    runner = ModelRunner(loaded, tiny.make_pool(loaded), kernels=native_kernels)
    own = tiny.untouched(loaded)
    for part, logits in zip(PARTS, tiny.paged(runner, PARTS), strict=True):
        tiny.assert_equal(logits, tiny.eager(own, part.ids))


@pytest.mark.parametrize("option", ["scaling", "sliding_window"])
def test_an_option_that_is_lost_is_noticed(option: str, tmp_path: Path) -> None:
    loaded = tiny.load("mistral", tmp_path)
    selfcheck.check(loaded, tiny.make_pool(loaded))
    for layer in loaded.module.modules():
        if isinstance(layer, FusedLayer):
            layer.options[option] = {"scaling": 0.5, "sliding_window": None}[option]
    attend_apart = FusedLayer._attend_apart
    with pytest.MonkeyPatch.context() as patch:

        def as_it_was(layer: FusedLayer, *args: Any) -> torch.Tensor:
            with pytest.MonkeyPatch.context() as inner:
                inner.setattr(layer, "options", {"scaling": layer.head_dim**-0.5, "sliding_window": 7})
                return attend_apart(layer, *args)

        patch.setattr(FusedLayer, "_attend_apart", as_it_was)
        with pytest.raises(ModelLoadError, match="differs from the model's own"):
            selfcheck.check(loaded, tiny.make_pool(loaded))


@pytest.mark.parametrize("part", ["qkv_proj", "gate_up_proj", "input_norm", "post_norm"])
def test_a_replacement_that_computes_something_else_is_not_taken(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = FusedLayer.__init__

    def wrong(layer: FusedLayer, *args: Any) -> None:
        make(layer, *args)
        weight = getattr(layer, part).weight
        getattr(layer, part).weight = nn.Parameter(weight.roll(1, dims=0), requires_grad=False)

    monkeypatch.setattr(FusedLayer, "__init__", wrong)
    assert fused_layers(tiny.load("llama", tmp_path).module) == []


def test_a_replacement_that_is_called_with_an_option_it_does_not_know_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused, "KNOWN_OPTIONS", {"scaling"})
    assert fused_layers(tiny.load("mistral", tmp_path).module) == []


def test_what_goes_in_stays_as_it_was(tmp_path: Path) -> None:
    loaded = tiny.load("llama", tmp_path)
    layer = next(layer for layer in loaded.module.modules() if isinstance(layer, FusedLayer))
    x, ones = torch.randn(1, 3, 32), torch.ones(1, 3, 8)
    before = x.clone()
    loaded.module.set_attn_implementation("eager")
    layer(x, position_embeddings=(ones, ones * 0))
    assert torch.equal(x, before)
