"""The oracle over all tiers: greedy float32 replies are those of transformers' eager model, from wherever K and V come.

Loading is forced, and every turn says by its tokens that they came from where the test has put them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.client import new_request_id
from engine.model.runner import ModelRunner
from engine.protocol import Submit, Tokens
from tests.engine.model.tiny import prompt
from tests.engine.tiered import BLOCK, CONTEXT, KIB, NEW, Driven, Sources, Turn, engine, greedy, model, settings, until

PROMPT = prompt(45)  # five blocks of eight, and five tokens
MESSAGE = [5, 6, 7]
REPLIED = len(PROMPT) + NEW - 1  # the token sampled last has no K and V yet
ALICE, BOB = b"a" * 16, b"b" * 16
Greedy = Callable[..., list[int]]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="module")
def expected(llama: Path) -> Greedy:
    return greedy(llama)


@pytest.fixture
async def driven(llama: Path, tmp_path: Path) -> AsyncIterator[Driven]:
    async with engine(settings(llama, tmp_path)) as driven:
        yield driven


async def first_turn(driven: Driven, expected: Greedy, session: str = "s", **fields: Any) -> Turn:
    """A turn that finds nothing: the cache is as good as off."""
    turn = await driven.turn(PROMPT, session, **fields)
    assert turn.sources == Sources(0, 0, 0, len(PROMPT))
    assert turn.reply == expected(PROMPT)
    return turn


FOUND = {
    "none": Sources(0, 0, 0, REPLIED + 4),
    "device": Sources(REPLIED, 0, 0, 4),
    "host": Sources(0, REPLIED, 0, 4),
    "disk": Sources(0, 0, REPLIED, 4),
}


@pytest.mark.parametrize("tier", FOUND)
async def test_a_reply_is_the_same_from_every_tier(driven: Driven, expected: Greedy, tier: str) -> None:
    known = (await first_turn(driven, expected)).known
    await driven.leave("s", tier)
    before = await driven.client.snapshot()
    turn = await driven.turn([*known, *MESSAGE])
    assert turn.sources == FOUND[tier]
    after = await driven.client.snapshot()
    spent, drafted, accepted = (
        getattr(after, name) - getattr(before, name)
        for name in ("forwarded_tokens", "drafted_tokens", "accepted_tokens")
    )
    assert spent == turn.sources.computed + NEW - 1 + drafted - accepted
    assert turn.reply == expected([*known, *MESSAGE])


@pytest.mark.parametrize("name", ["mistral", "gpt-oss", "gemma2"])
async def test_a_reply_is_the_same_with_windows_sinks_and_caps(name: str, tmp_path: Path) -> None:
    folder = model(tmp_path / name, name, tie_word_embeddings=False)  # tied ones only repeat the last token
    expected = greedy(folder)
    async with engine(settings(folder, tmp_path)) as driven:
        known = (await first_turn(driven, expected)).known
        assert len(set(known[len(PROMPT) :])) > 3, "a reply that would look different if it were another"
        for tier in ("host", "disk"):
            await driven.leave("s", tier)
            turn = await driven.turn([*known, *MESSAGE])
            found = len(known) - 1
            assert turn.sources == {"host": (0, found, 0, 4), "disk": (0, 0, found, 4)}[tier]
            assert turn.reply == expected([*known, *MESSAGE])
            known = turn.known


async def test_a_chat_goes_on_after_a_restart(llama: Path, expected: Greedy, tmp_path: Path) -> None:
    async with engine(settings(llama, tmp_path)) as driven:
        known = (await first_turn(driven, expected)).known
        await driven.saved()
    async with engine(settings(llama, tmp_path)) as driven:
        turn = await driven.turn([*known, *MESSAGE])
        assert turn.sources == Sources(0, 0, REPLIED, 4)
        assert turn.reply == expected([*known, *MESSAGE])


async def test_a_chat_goes_on_after_kill_9_amid_another_reply(llama: Path, expected: Greedy, tmp_path: Path) -> None:
    async with engine(settings(llama, tmp_path), in_thread=False) as driven:
        known = (await first_turn(driven, expected)).known
        await driven.saved()
        request = Submit(request_id=new_request_id(), session_id="cut", token_ids=PROMPT[:30], max_tokens=CONTEXT)
        async for event in driven.client.stream(request):
            if isinstance(event, Tokens):
                assert driven.client.pid is not None
                with contextlib.suppress(ProcessLookupError):
                    os.kill(driven.client.pid, signal.SIGKILL)
        await until(lambda: driven.client.state.phase != "ready")
        await driven.client.wait_ready()
        turn = await driven.turn([*known, *MESSAGE])
        assert turn.sources == Sources(0, 0, REPLIED, 4)
        assert turn.reply == expected([*known, *MESSAGE])
        cut = await driven.turn(PROMPT[:30], "cut")
        assert cut.reply == expected(PROMPT[:30])


@pytest.mark.parametrize("host_kv", [2 * KIB * KIB, 0])
async def test_who_stepped_back_goes_on_as_it_began(
    llama: Path, expected: Greedy, tmp_path: Path, host_kv: int
) -> None:
    # Ten blocks: both prompts take eight. The first ends in nine, so the second has to leave all of its own.
    config = settings(llama, tmp_path, device_kv=30 * KIB, host_kv=host_kv)
    async with engine(config) as driven:
        other = [90, *PROMPT[:29]]
        first, second = await asyncio.gather(
            driven.turn(PROMPT[:30], "first", new=40), driven.turn(other, "second", new=24)
        )
        assert (first.usage.preemptions, second.usage.preemptions) == (0, 1)
        assert second.usage.recomputed_tokens == 0, "its blocks came back from below"
        assert first.reply == expected(PROMPT[:30], 40)
        assert second.reply == expected(other, 24)


@pytest.mark.parametrize("tier", ["host", "disk"])
async def test_a_branch_and_an_edit_find_what_they_share(driven: Driven, expected: Greedy, tier: str) -> None:
    await first_turn(driven, expected)
    branch = [*PROMPT, 9, 8, 7, 6, 5]  # another reply
    edited = [*PROMPT[:21], 90, *PROMPT[22:]]  # a token inside the third block
    for ids, shared in ((branch, len(PROMPT)), (edited, 21), (PROMPT[:16], 15)):
        await driven.leave("s", tier)
        turn = await driven.turn(ids)
        assert turn.sources == Sources(0, *((shared, 0) if tier == "host" else (0, shared)), len(ids) - shared)
        assert turn.reply == expected(ids)


@pytest.mark.parametrize("tier", ["host", "disk"])
async def test_two_users_share_a_preset_and_nothing_else(driven: Driven, expected: Greedy, tier: str) -> None:
    shared = 20  # two blocks, and a part of a third
    alice = await first_turn(driven, expected, "alice", salt=ALICE, shared_len=shared)
    await driven.leave("alice", tier)
    bob = await driven.turn(PROMPT, "bob", salt=BOB, shared_len=shared)
    preset = shared // BLOCK * BLOCK
    assert bob.sources == Sources(0, *((preset, 0) if tier == "host" else (0, preset)), len(PROMPT) - preset)
    assert bob.reply == alice.reply
    again = await driven.turn([*alice.known, *MESSAGE], "alice", salt=ALICE, shared_len=shared)
    own = REPLIED - shared  # on the device, the part of the third block is found as well
    assert again.sources == Sources(shared, *((own, 0) if tier == "host" else (0, own)), 4)
    assert again.reply == expected([*alice.known, *MESSAGE])


async def test_several_models_under_one_budget_find_their_own(llama: Path, expected: Greedy, tmp_path: Path) -> None:
    wide = model(tmp_path / "wide", num_key_value_heads=4)
    other_expected = greedy(wide)
    # At the end the chats take 33 and 66 KiB: whoever writes pushes the other's blocks out, and not all fit host.
    async with engine(settings(llama, tmp_path, device_kv=80 * KIB, host_kv=30 * KIB)) as driven:
        other = await driven.client.load(str(wide), dtype="float32")
        known = {"": PROMPT, other.fingerprint: PROMPT}
        below = dict.fromkeys(known, 0)
        for number in range(3):
            for name, reply in (("", expected), (other.fingerprint, other_expected)):
                ids = [*known[name], *MESSAGE]
                turn = await driven.turn(ids, model=name)
                assert turn.reply == reply(ids)
                computed = len(ids) if number == 0 else 4
                assert turn.sources.computed == computed, "nothing is lost"
                below[name] += turn.sources.host + turn.sources.disk
                known[name] = turn.known
                await driven.saved()
        assert all(count > 0 for count in below.values())
        snapshot = await driven.client.snapshot()
        assert all(tier.used_bytes <= tier.budget_bytes for tier in snapshot.tiers)


# --- other dtypes -----------------------------------------------------------------------------------------------------


@pytest.fixture
def logits(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The logits of every forward pass of an engine in a thread, [rows, vocabulary]."""
    seen: list[torch.Tensor] = []
    forward = ModelRunner.logits

    def listen(runner: ModelRunner, batch: object) -> torch.Tensor:
        seen.append(forward(runner, batch))  # type: ignore[arg-type]
        return seen[-1]

    monkeypatch.setattr(ModelRunner, "logits", listen)
    return seen


def divergence(exact: torch.Tensor, other: torch.Tensor) -> float:
    """Kullback-Leibler divergence of next-token distributions, in nats."""
    p, q = exact.double().log_softmax(-1), other.double().log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).clamp_min(0).max())


@pytest.mark.parametrize("cold_kv_dtype", ["auto", "int8"])
@pytest.mark.parametrize("tier", ["host", "disk"])
async def test_bfloat16_comes_back_bit_by_bit_and_int8_nearly(
    llama: Path, tmp_path: Path, logits: list[torch.Tensor], tier: str, cold_kv_dtype: str
) -> None:
    # Read in the same parts, 32 tokens and then 8: what is computed in parts of other sizes is rounded otherwise.
    first, whole = PROMPT[:32], PROMPT[:40]
    changes = {"dtype": "bfloat16", "max_batch_tokens": 32, "cold_kv_dtype": cold_kv_dtype}
    async with engine(settings(llama, tmp_path, **changes)) as driven:
        fresh = await driven.turn(whole, "fresh", new=1, salt=ALICE)
        assert fresh.sources == Sources(0, 0, 0, 40)
        exact = logits[-1]
        await driven.turn(first, new=1, salt=BOB)
        await driven.leave("s", tier)
        turn = await driven.turn(whole, new=1, salt=BOB)
        assert turn.sources == Sources(0, *((32, 0) if tier == "host" else (0, 32)), 8)
        loss = divergence(exact, logits[-1])
    if cold_kv_dtype == "auto":
        assert torch.equal(exact, logits[-1])
        assert loss == 0
    else:
        print(f"KL divergence of the next token after int8 from {tier}: {loss:.2e} nats")
        assert 0 < loss < 0.05
