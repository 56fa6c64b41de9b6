"""Paged attention against transformers' own eager attention: packed, chunked, scattered, next to NaN-filled blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from engine.batch import Batch, Row
from engine.errors import ModelLoadError
from engine.model import attention, loading, selfcheck
from engine.model.loading import LoadedModel
from engine.model.runner import ModelRunner
from tests.engine.model import tiny
from tests.engine.model.tiny import Part, draw

SCATTERED = [60, 2, 59, 4, 33, 35, 20, 21, 22, 10, 11, 12, 19, 18, 17, 16]
PARTS = [
    Part(tiny.prompt(41), list(range(40, 51)), [19, 40, 41]),  # consecutive blocks
    Part(tiny.prompt(6, 1), [7, 3], [5, 6]),
    Part(tiny.prompt(63, 2), SCATTERED, [1, 50, 62, 63]),
]


def assert_exact(loaded: LoadedModel) -> None:
    """Three prompts in one batch, each in chunks of its own, give transformers' logits."""
    runner = ModelRunner(loaded, tiny.make_pool(loaded))
    own = tiny.untouched(loaded)
    for part, logits in zip(PARTS, tiny.paged(runner, PARTS), strict=True):
        tiny.assert_equal(logits, tiny.eager(own, part.ids))
        assert [position for position, _ in logits] == [end - 1 for end in part.ends]
    assert runner.forwarded_tokens == 41 + 6 + 63
    assert runner.steps == 4


@pytest.mark.parametrize("name", tiny.MODELS)
def test_paged_equals_eager(name: str, tmp_path: Path) -> None:
    assert_exact(tiny.load(name, tmp_path))


@pytest.mark.parametrize("name", ["llama", "mistral", "olmo2", "gemma2", "gpt-oss", "gpt2"])
def test_long_parts_equal_eager_too(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "GROUPED_QUERIES", 3)  # the parts here are as long as the real ones then
    assert_exact(tiny.load(name, tmp_path))


def test_a_model_that_also_sees_is_served_as_one_that_writes(tmp_path: Path) -> None:
    eyes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Gemma3Config(
        text_config=tiny.config_of("gemma3"),
        vision_config={**eyes, "image_size": 16, "patch_size": 8},
        mm_tokens_per_image=4,
        image_token_index=96,
    )
    assert_exact(loading.load(tiny.save(config, tmp_path / "gemma3"), "cpu", "float32"))


@pytest.mark.parametrize(
    ("name", "kwarg"),
    [("granite", "scaling"), ("mistral", "sliding_window"), ("gemma2", "softcap"), ("gpt-oss", "s_aux")],
)
def test_each_kwarg_matters_and_the_self_check_sees_it(
    name: str, kwarg: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = tiny.load(name, tmp_path, fuse=False)
    selfcheck.check(loaded, tiny.make_pool(loaded))

    def deaf(*args: Any, **kwargs: Any) -> Any:
        return attention.paged_attention(*args, **{**kwargs, kwarg: None})

    monkeypatch.setitem(transformers.AttentionInterface._global_mapping, attention.IMPLEMENTATION, deaf)
    with pytest.raises(ModelLoadError, match=f"^{name} cannot be served: .* differs from the model's own"):
        selfcheck.check(loaded, tiny.make_pool(loaded))
    logits = tiny.paged(ModelRunner(loaded, tiny.make_pool(loaded)), PARTS[:1])[0]
    with pytest.raises(AssertionError):
        tiny.assert_equal(logits, tiny.eager(tiny.untouched(loaded), PARTS[0].ids))


@pytest.fixture
def llama(tmp_path: Path) -> LoadedModel:
    return tiny.load("llama", tmp_path)


def test_a_step_reads_no_more_keys_than_its_window(tmp_path: Path) -> None:
    loaded = tiny.load("mistral", tmp_path)
    pool = tiny.make_pool(loaded)
    runner = ModelRunner(loaded, pool)
    own = tiny.eager(tiny.untouched(loaded), tiny.prompt(41))
    for blocks in (list(range(11)), list(range(40, 51))[::-1]):
        runner.run(Batch(rows=[Row(token_ids=tiny.prompt(40), start=0, block_ids=blocks, draws=[])]))
        for block in blocks[: (40 - 7) // tiny.BLOCK]:
            pool.poison(block)  # what no window reaches any more
        last = Row(token_ids=tiny.prompt(41)[40:], start=40, block_ids=blocks, draws=[draw()])
        tiny.assert_equal([(40, runner.logits(Batch(rows=[last]))[0])], own)


def test_copied_tokens_are_the_same_tokens(llama: LoadedModel) -> None:
    runner = ModelRunner(llama, tiny.make_pool(llama))
    ids = [9, 8, 7, 6, 5, 4]
    runner.run(Batch(rows=[Row(token_ids=ids, start=0, block_ids=[10, 11], draws=[])]))
    runner.copy_tokens(11, 30, 1)
    other = [*ids[:5], 50]
    row = Row(token_ids=other[5:], start=5, block_ids=[10, 30], draws=[draw()])
    tiny.assert_equal([(5, runner.logits(Batch(rows=[row]))[0])], tiny.eager(tiny.untouched(llama), other))


def test_several_draws_come_from_one_row(llama: LoadedModel) -> None:
    own = tiny.untouched(llama)
    runner = ModelRunner(llama, tiny.make_pool(llama))
    rows = [
        Row(token_ids=[1, 2, 3], start=0, block_ids=[0], draws=[draw(), draw(), draw()]),
        Row(token_ids=[4, 5], start=0, block_ids=[1], draws=[]),
        Row(token_ids=[6], start=0, block_ids=[2], draws=[draw()]),
    ]
    first, second, third = runner.run(Batch(rows=rows))
    assert first == [int(tiny.eager(own, [1, 2, 3])[-1].argmax())] * 3
    assert second == []
    assert third == [int(tiny.eager(own, [6])[-1].argmax())]


def test_a_guess_is_sampled_after_each_of_its_tokens(llama: LoadedModel) -> None:
    own = tiny.untouched(llama)
    runner = ModelRunner(llama, tiny.make_pool(llama))
    runner.run(Batch(rows=[Row(token_ids=[1, 2, 3], start=0, block_ids=[0, 4], draws=[])]))
    rows = [
        Row(token_ids=[4, 5, 6], start=3, block_ids=[0, 4], draws=[draw(), draw(), draw()], guessed=2),
        Row(token_ids=[6], start=0, block_ids=[2], draws=[draw()]),
    ]
    first, second = runner.run(Batch(rows=rows))
    assert first == tiny.eager(own, [1, 2, 3, 4, 5, 6])[3:].argmax(dim=-1).tolist()
    assert len(set(first)) > 1
    assert second == [int(tiny.eager(own, [6])[-1].argmax())]


def test_attention_without_a_pool_is_an_error_and_not_a_guess(llama: LoadedModel) -> None:
    with pytest.raises(LookupError):
        llama.module(input_ids=torch.tensor([[1, 2]]))
