"""Chats on a GPU whose blocks were in host and on disk meanwhile: the replies are those of the processor."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from tests.engine.model.tiny import prompt
from tests.engine.tiered import KIB, engine, greedy, model, settings

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
PROMPT, MESSAGE = prompt(45), [5, 6, 7]


@pytest.mark.parametrize("cold_kv_dtype", ["auto", "int8"])
@pytest.mark.parametrize("tier", ["host", "disk"])
async def test_a_chat_goes_on_from_below(tmp_path: Path, tier: str, cold_kv_dtype: str) -> None:
    folder = model(tmp_path / "llama")
    expected = greedy(folder)
    async with engine(settings(folder, tmp_path, device="cuda", cold_kv_dtype=cold_kv_dtype)) as driven:
        first = await driven.turn(PROMPT)
        assert first.reply == expected(PROMPT)
        await driven.leave("s", tier)
        turn = await driven.turn([*first.known, *MESSAGE])
        assert turn.sources.computed == 4 and turn.sources.device == 0
        if cold_kv_dtype == "auto":
            assert turn.reply == expected([*first.known, *MESSAGE])


async def test_chats_push_each_other_out_while_all_write(tmp_path: Path) -> None:
    folder = model(tmp_path / "llama")
    expected = greedy(folder)
    talks = {name: [number, *PROMPT[:29]] for number, name in enumerate("abcdef", start=80)}
    async with engine(settings(folder, tmp_path, device="cuda", device_kv=48 * KIB)) as driven:  # two of them at a time
        for _ in range(3):
            turns = await asyncio.gather(*(driven.turn(ids, name) for name, ids in talks.items()))
            for name, turn in zip(list(talks), turns, strict=True):
                assert turn.reply == expected(talks[name])
                talks[name] = [*turn.known, *MESSAGE]
        host = await driven.tier("host")
        assert host.blocks > 0 and host.page_locked_bytes <= host.held_bytes
