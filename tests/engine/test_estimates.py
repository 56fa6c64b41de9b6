"""What an estimate promises, and what the request is then answered."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.client import new_request_id
from engine.protocol import Rejected, Submit
from tests.engine.tiered import BLOCK, CONTEXT, KIB, engine, model, settings


@pytest.mark.parametrize(("length", "code"), [(0, None), (1, "never_fits"), (CONTEXT, "too_long")])
async def test_a_prompt_that_can_never_run_is_estimated_as_it_is_refused(
    tmp_path: Path, length: int, code: str | None
) -> None:
    """`length` is that of the prompt, or by how much it is more than the pool."""
    async with engine(settings(model(tmp_path / "m"), tmp_path, device_kv=64 * KIB, host_kv=0, disk_kv=0)) as driven:
        capabilities = await driven.client.wait_ready()
        pool = capabilities.total_blocks * BLOCK
        assert 0 < pool < CONTEXT - 1
        prompt = [7] * (length if length == CONTEXT else pool + length)
        refused = (await driven.client.estimate(prompt, session_id="s")).refused
        ends = [
            event
            async for event in driven.client.stream(
                Submit(request_id=new_request_id(), session_id="s", token_ids=prompt, max_tokens=2)
            )
        ]
        rejected = [event for event in ends if isinstance(event, Rejected)]
        assert (refused.code if refused else None) == code
        assert [(each.code, each.message) for each in rejected] == ([(code, refused.message)] if refused else [])


async def test_an_engine_that_has_just_started_knows_how_long_reading_takes(tmp_path: Path) -> None:
    async with engine(settings(model(tmp_path / "m"), tmp_path)) as driven:
        short, long = [await driven.client.estimate([7] * count, session_id="s") for count in (8, 64)]
        assert short.seconds is not None and long.seconds is not None
        assert 0 < short.seconds <= long.seconds < 60
        snapshot = await driven.client.snapshot()
        assert (snapshot.steps, snapshot.forwarded_tokens) == (0, 0), "nobody has asked for anything yet"
