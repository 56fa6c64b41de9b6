"""Chats that go any way a chat can go: the ledger always reads as the texts, and never forgets what was sampled."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from chat.errors import NothingToRetry
from chat.service import ChatService
from chat.views import TurnOptions
from storage.store import Store
from tests.chat.fake_engine import END, FakeEngine


@dataclass(frozen=True)
class Step:
    """One thing a person does, and how the model answers it."""

    retry: bool
    text: str
    sampled: list[int]
    dies_after: int | None
    stop: str
    max_tokens: int


TEXTS = st.text("ab \n👩é<|", min_size=1, max_size=8).filter(str.strip)
SAMPLED = st.lists(st.sampled_from([END]) | st.integers(20, 300) | st.integers(20, 49151), max_size=12)
STEPS = st.builds(
    Step,
    retry=st.booleans(),
    text=TEXTS,
    sampled=SAMPLED,
    dies_after=st.none() | st.none() | st.integers(0, 6),
    stop=st.sampled_from(["", "", "e", " t", "."]),
    max_tokens=st.integers(1, 12),
)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(system=st.sampled_from([None, "Be brief."]), steps=st.lists(STEPS, min_size=1, max_size=6))
def test_any_chat(template, embedded_model, empty_database, system, steps):
    asyncio.run(play(template, embedded_model, empty_database, system, steps))


async def play(template, model: Path, empty_database: Path, system: str | None, steps: list[Step]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(empty_database, folder, dirs_exist_ok=True)
        store = await Store.open(Path(folder))
        now: list[Step] = []
        engine = FakeEngine(model, lambda *_: now[0].sampled)
        service = ChatService(store, engine)  # type: ignore[arg-type]
        await service.start()
        chat = (await service.create_session(service.user.id, system)).id
        for step in steps:
            now[:] = [step]
            engine.tokens_until_death = step.dies_after
            options = TurnOptions(max_tokens=step.max_tokens, stop=(step.stop,) if step.stop else ())
            before = await store.path(chat)
            try:
                if step.retry:
                    turn = await service.retry(service.user.id, chat, options)
                else:
                    turn = await service.send(service.user.id, chat, step.text, options)
            except NothingToRetry:
                assert before == []
                continue
            done = await turn.finished()
            event(f"{done.status} {done.finish_reason}")
            check(template, await store.path(chat), engine.submits[-1].token_ids, done, step)
            kept = before[:-1] if step.retry and before[-1].role == "assistant" else before
            ids = [token for message in kept for token in message.token_ids]
            assert engine.submits[-1].token_ids[: len(ids)] == ids  # all that was in the ledger is sent again
        await service.close()
        await store.close()


def check(template, path, prompt, done, step) -> None:
    *asked, reply = path
    assert prompt == [token for message in asked for token in message.token_ids]
    for message in path:
        if message.role == "assistant":
            assert message.text == template.decode(message.token_ids)
    texts = [{"role": message.role, "content": message.text} for message in asked]
    assert template.tokenizer.decode(prompt, skip_special_tokens=False) == template._render(texts, generation=True)
    assert reply.text == done.text
    ours = list(reply.token_ids)
    if done.finish_reason != "stop":  # a token that a stop string cut is encoded anew
        assert ours == step.sampled[: len(ours)]
    assert not step.stop or step.stop not in reply.text
