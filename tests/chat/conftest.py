"""Real tokenizer and template for the chat tests."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from chat.service import ChatService
from chat.templates import ChatTemplate
from engine.protocol import Submit
from storage.store import Store
from tests.chat.fake_engine import END, FakeEngine


@pytest.fixture(scope="session")
def template(embedded_model: Path) -> ChatTemplate:
    """The embedded model's tokenizer and chat template."""
    return ChatTemplate.load(embedded_model)


@pytest.fixture
def with_template(embedded_model: Path, tmp_path: Path) -> Callable[[str], ChatTemplate]:
    """The embedded model's tokenizer under another chat template."""

    def load(text: str) -> ChatTemplate:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (tmp_path / name).write_bytes((embedded_model / name).read_bytes())
        (tmp_path / "chat_template.jinja").write_text(text)
        return ChatTemplate.load(tmp_path)

    return load


@pytest.fixture
def replies(template: ChatTemplate) -> dict[str, list[int]]:
    """What the fake engine answers, by the words of the last user message; "Fine." to everything else."""
    return {"": [*template.encode_text("Fine."), END]}


@pytest.fixture
def engine(embedded_model: Path, template: ChatTemplate, replies: dict[str, list[int]]) -> FakeEngine:
    def script(submit: Submit, index: int) -> list[int]:
        asked = template.tokenizer.decode(submit.token_ids, skip_special_tokens=False).rsplit("<|im_start|>user\n", 1)[
            1
        ]
        words = asked.split("<|im_end|>")[0]
        return replies.get(f"{words}#{index}") or replies.get(words) or replies[""]

    return FakeEngine(embedded_model, script)


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A migrated database, because migrating takes longer than most tests."""
    folder = tmp_path_factory.mktemp("empty")

    async def make() -> None:
        await (await Store.open(folder)).close()

    asyncio.run(make())
    return folder


@pytest.fixture
async def store(tmp_path: Path, empty_database: Path) -> AsyncIterator[Store]:
    shutil.copytree(empty_database, tmp_path / "data")
    opened = await Store.open(tmp_path / "data")
    yield opened
    await opened.close()


@pytest.fixture
async def service(store: Store, engine: FakeEngine) -> AsyncIterator[ChatService]:
    made = ChatService(store, engine)  # type: ignore[arg-type]
    await made.start()
    yield made
    await made.close()
