"""All layers in one native call: the very numbers that the layers give one after the other, or no stack."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.batch import Batch, Row
from engine.cache.pool import KVPool
from engine.model import loading, selfcheck
from engine.model.loading import LoadedModel
from engine.model.runner import ModelRunner
from engine.model.stack import Stack
from tests.engine.model import tiny
from tests.engine.model.test_compact import WIDE

LIKE_ALL = ["llama", "llama-yarn", "qwen2", "qwen3", "mistral"]


def load(name: str, folder: Path, dtype: str = "float32", **changes: Any) -> LoadedModel:
    prepared = tiny.save(tiny.config_of(name, **{**WIDE, **changes}), folder / name)
    return loading.load(prepared, "cpu", dtype, None, "int8", kernels_dir=folder)


def stack_of(loaded: LoadedModel) -> Stack:
    (found,) = (each for each in loaded.module.modules() if isinstance(each, Stack))
    return found


def batch(*lengths: int) -> Batch:
    """A token after so many others of each of some texts, whose blocks lie anywhere."""
    blocks = torch.randperm(tiny.BLOCKS, generator=torch.Generator().manual_seed(3)).tolist()
    rows = [
        Row([5 + i], length, [blocks.pop() for _ in range(length // tiny.BLOCK + 1)], [tiny.draw()])
        for i, length in enumerate(lengths)
    ]
    return Batch(rows)


def filled(loaded: LoadedModel) -> KVPool:
    pool = tiny.make_pool(loaded)
    pool.data.normal_(generator=torch.Generator().manual_seed(4))
    return pool


@pytest.fixture(params=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> str:
    if request.param == "bfloat16" and loading._cpu_multiplies_bf16():
        pytest.skip("where the processor multiplies bfloat16, weights are not compact")
    return request.param


@pytest.mark.parametrize("name", LIKE_ALL)
def test_it_gives_what_the_layers_give_to_the_bit(name: str, dtype: str, tmp_path: Path) -> None:
    loaded = load(name, tmp_path, dtype)
    its, pool = stack_of(loaded), filled(loaded)
    runner, before = ModelRunner(loaded, pool), pool.data.clone()
    for lengths in ((0,), (9,), (40, 3, 127 - 96, 16)):
        together = runner.logits(batch(*lengths)).clone()
        written = pool.data.clone()
        pool.data.copy_(before)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(its, "_kernels", None)
            assert torch.equal(runner.logits(batch(*lengths)), together)
        assert torch.equal(pool.data, written)
        assert not torch.equal(written, before)
        pool.data.copy_(before)


@pytest.mark.parametrize("name", LIKE_ALL)
def test_it_passes_the_check_of_every_model(name: str, tmp_path: Path) -> None:
    loaded = load(name, tmp_path)
    selfcheck.check(loaded, tiny.make_pool(loaded))


def test_a_pool_that_has_moved_is_found(tmp_path: Path) -> None:
    loaded = load("llama", tmp_path)
    pool = filled(loaded)
    runner, its = ModelRunner(loaded, pool), batch(9, 30)
    expected = runner.logits(its).clone()
    keep = pool.data  # so that no new one comes to lie where it was
    pool.resize(tiny.BLOCKS + 8, {block: block for block in range(tiny.BLOCKS)})
    keep.fill_(torch.nan)
    assert torch.equal(runner.logits(its), expected)


def test_a_pool_of_another_size_in_the_same_place_is_found(tmp_path: Path) -> None:
    loaded = load("llama", tmp_path)
    its = Batch([Row([5], 9, [2, 0, 1], [tiny.draw()]), Row([6], 13, [5, 3, 4, 6], [tiny.draw()])])
    pool = filled(loaded)
    runner, larger = ModelRunner(loaded, pool), pool.data
    smaller = larger[:, :, :7].clone()
    pool._hold(smaller)
    expected = runner.logits(its).clone()
    pool._hold(larger)
    runner.logits(its)
    place = larger.flatten()
    place[smaller.numel() :] = torch.nan
    pool._hold(place[: smaller.numel()].view(smaller.shape).copy_(smaller))
    assert torch.equal(runner.logits(its), expected)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("qwen2-window", {}),
        ("smollm3", {}),
        ("gemma2", {}),
        ("llama", {"head_dim": 8}),
        ("llama", {"intermediate_size": 40}),
    ],
)
def test_layers_that_differ_or_that_kernels_do_not_take_stay_apart(
    name: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    loaded = load(name, tmp_path, **changes)
    assert not any(isinstance(each, Stack) for each in loaded.module.modules())
    selfcheck.check(loaded, tiny.make_pool(loaded))


def test_layers_with_other_windows_stay_apart_whatever_they_are_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.model.kinds.layer_kind", lambda *_: "attention")
    loaded = load("qwen2-window", tmp_path)
    assert not any(isinstance(each, Stack) for each in loaded.module.modules())


def test_layers_whose_attention_has_another_name_stay_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one stack transformers makes the first layer's mask alone."""
    monkeypatch.setattr("engine.model.kinds.layer_kind", lambda _, index: f"kind {index == 2}")
    loaded = load("llama", tmp_path)
    assert not any(isinstance(each, Stack) for each in loaded.module.modules())
