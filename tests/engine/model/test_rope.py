"""Rotary positions that follow the longest prompt at hand are frozen at load, to what the served context asks for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.errors import ModelLoadError
from engine.model import loading, selfcheck
from engine.model.runner import ModelRunner
from tests.engine.model import tiny
from tests.engine.model.tiny import Part

ORIGINAL = 48
LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.1, 1.3, 1.6],
    "long_factor": [1.2, 2.0, 4.0, 7.0],
    "original_max_position_embeddings": ORIGINAL,
}
PLAIN = {"rope_type": "default", "rope_theta": 1e3}
MODELS: dict[str, dict[str, Any]] = {
    "phi3": {"rope_parameters": LONGROPE, "original_max_position_embeddings": ORIGINAL, "sliding_window": 100},
    "llama": {"rope_parameters": LONGROPE},
    "gemma3": {"rope_parameters": {"full_attention": LONGROPE, "sliding_attention": PLAIN}},
}
LONG, SHORT = tiny.prompt(100), tiny.prompt(ORIGINAL - 1, 1)
PARTS = [
    Part(LONG, list(range(30, 56)), [40, 99, 100]),
    Part(SHORT, [3, 1, 4, 15, 9, 2, 6, 5, 8, 7, 10, 11], [9, 46, 47]),
]


@pytest.mark.parametrize("name", MODELS)
def test_long_factors_serve_a_context_beyond_the_original(name: str, tmp_path: Path) -> None:
    loaded = tiny.load(name, tmp_path, **MODELS[name])
    selfcheck.check(loaded, tiny.make_pool(loaded))
    long, short = tiny.paged(ModelRunner(loaded, tiny.make_pool(loaded)), PARTS)
    tiny.assert_equal(long, tiny.eager(tiny.untouched(loaded), LONG))
    continued = tiny.eager(tiny.untouched(loaded), SHORT + LONG)  # its beginning is read with long factors
    tiny.assert_equal(short, continued[: len(SHORT)])
    with pytest.raises(AssertionError):  # two sets of factors, and not one
        tiny.assert_equal(short, tiny.eager(tiny.untouched(loaded), SHORT))


@pytest.mark.parametrize("name", MODELS)
def test_short_factors_serve_a_context_up_to_the_original(name: str, tmp_path: Path) -> None:
    loaded = tiny.load(name, tmp_path, context=ORIGINAL, **MODELS[name])
    assert loaded.context == ORIGINAL
    selfcheck.check(loaded, tiny.make_pool(loaded))
    parts = [Part(LONG[:ORIGINAL], PARTS[0].blocks, [40, ORIGINAL]), PARTS[1]]
    runner, own = ModelRunner(loaded, tiny.make_pool(loaded)), tiny.untouched(loaded)
    for part, logits in zip(parts, tiny.paged(runner, parts), strict=True):
        tiny.assert_equal(logits, tiny.eager(own, part.ids))


def test_dynamic_positions_are_plain_up_to_the_models_context_and_stay_so(tmp_path: Path) -> None:
    loaded = tiny.load("llama-dynamic", tmp_path)
    own = tiny.untouched(loaded)
    full = [Part(tiny.prompt(tiny.CONTEXT), list(range(20, 52)), [100, 127, 128]), PARTS[1]]
    expected = [tiny.eager(own, part.ids) for part in full]
    with torch.inference_mode():
        loaded.module.set_attn_implementation("eager")
        loaded.module(input_ids=torch.tensor([tiny.prompt(200)]))  # would scale all that comes after
        loaded.module.set_attn_implementation(loading.IMPLEMENTATION)
    for _ in range(2):
        parts = tiny.paged(ModelRunner(loaded, tiny.make_pool(loaded)), full)
        for logits, rows in zip(parts, expected, strict=True):
            tiny.assert_equal(logits, rows)


def test_positions_that_cannot_be_frozen_are_refused(tmp_path: Path) -> None:
    mscale = {"short_mscale": 1.1, "long_mscale": 1.3}
    config = tiny.config_of("phimoe", sliding_window=None, rope_parameters={**LONGROPE, **mscale})
    loaded = loading.load(tiny.save(config, tmp_path / "phimoe"), "cpu", "float32")
    with pytest.raises(
        ModelLoadError, match=r"^phimoe cannot be served: its positions \(phimoe\) depend on what else is read"
    ):
        selfcheck.probe(loaded)


def test_the_fingerprint_tells_frozen_variants_apart(tmp_path: Path) -> None:
    prepared = tiny.save(tiny.config_of("phi3", **MODELS["phi3"]), tmp_path / "phi3")

    def of(context: int | None) -> str:
        return loading.fingerprint(loading.load(prepared, "cpu", "float32", context), 32)

    assert of(ORIGINAL) != of(None)
    assert of(ORIGINAL) == of(ORIGINAL - 8)  # the same factors, so the same K and V
    assert of(ORIGINAL + 1) == of(None)


@pytest.mark.parametrize("context", [0, tiny.CONTEXT + 1])
def test_a_context_that_the_model_was_not_made_for_is_refused(context: int, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=f"a context of {context} tokens: choose 1 to {tiny.CONTEXT}"):
        tiny.load("llama", tmp_path, context=context)
