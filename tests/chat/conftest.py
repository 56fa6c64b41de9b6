"""Real tokenizer and template for the chat tests."""

from __future__ import annotations

import functools
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from chat.service import ChatService
from chat.templates import ChatTemplate
from chat.thinking import Policy
from engine.protocol import Submit
from storage.store import Store
from tests.chat.fake_engine import END, FakeEngine


@pytest.fixture(scope="session")
def template(embedded_model: Path) -> ChatTemplate:
    """The embedded model's tokenizer and chat template."""
    return ChatTemplate.load(embedded_model)


@pytest.fixture(scope="package", autouse=True)
def read_once(model_cache: Path) -> Iterator[None]:
    """The embedded model's tokenizer and template are read once for all services, which takes longer than most tests:
    its files never change, and what was read is immutable. Other models are read anew each time.
    """
    load = ChatTemplate.load
    keep = functools.cache(load)

    def read(directory: str | Path, thinking: Policy = "preserve") -> ChatTemplate:
        return (keep if Path(directory).is_relative_to(model_cache) else load)(str(directory), thinking)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ChatTemplate, "load", read)
        yield


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
