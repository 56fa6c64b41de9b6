"""Chats with models whose layers see only the last few tokens: a turn reuses the turn before, and says the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.model import selfcheck
from tests.engine.harness import Harness
from tests.engine.model import tiny

NEW = 8


@torch.inference_mode()
def greedy(module, ids: list[int]) -> list[int]:
    """The model's own reply, every token from the whole text."""
    text = list(ids)
    for _ in range(NEW):
        text.append(int(tiny.eager(module, text)[-1].argmax()))
    return text[len(ids) :]


@pytest.mark.parametrize("name", ["mistral", "gemma3", "gpt-oss"])
def test_a_small_change_reads_only_what_is_new(name: str, tmp_path: Path) -> None:
    loaded = tiny.load(name, tmp_path)
    harness, module = Harness(loaded, selfcheck.probe(loaded), blocks=12), tiny.untouched(loaded)
    prompt = [(7 * i + 3) % tiny.VOCABULARY for i in range(40)]
    reply = harness.reply(prompt, NEW)
    assert reply == greedy(module, prompt)
    second = [*prompt, *reply, 5, 6]
    assert harness.reply(second, NEW) == greedy(module, second)
    usage = harness.finished["r1"][0].usage
    assert (usage.device_tokens, usage.computed_tokens) == (len(prompt) + NEW - 1, 3)
    edited = [*prompt[:35], 11, 12]
    assert harness.reply(edited, NEW) == greedy(module, edited)
    assert harness.finished["r2"][0].usage.device_tokens == 35
