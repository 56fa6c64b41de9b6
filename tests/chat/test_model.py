"""The loaded model: where chats are composed, what is refused early, and models that cannot chat."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import httpx
import pytest

from chat.errors import PromptTooLong, UnusableModel
from chat.model import LoadedModel
from chat.models import Models
from chat.page import ChatPage
from chat.service import ChatService
from chat.templates import Entry
from engine.protocol import Sampling
from engine.state import EngineState
from tests.chat.fake_engine import FakeEngine
from tests.chat.serving import serving


@pytest.fixture
def model(template, engine) -> LoadedModel:
    return LoadedModel(engine.capabilities, template, Sampling(), "m", "fake")


@pytest.mark.parametrize(
    ("entries", "inline"),
    [
        ([Entry("user", "one")], True),
        ([Entry("user", "word " * 5000)], False),
        ([Entry(("user", "assistant")[number % 2], "x") for number in range(101)], False),
    ],
)
async def test_a_large_chat_is_composed_beside_the_event_loop(model, template, monkeypatch, entries, inline):
    threads = []
    fill = template.fill

    def spied(*args):
        threads.append(threading.get_ident())
        return fill(*args)

    monkeypatch.setattr(template, "fill", spied)
    await model.compose(entries)
    assert [thread == threading.get_ident() for thread in threads] == [inline]


async def test_a_full_history_is_refused_without_reading_the_message(model, template, monkeypatch):
    full = model.capabilities.context_length
    entries = [Entry("user", "one", (7,) * full), Entry("assistant", "two", (8,)), Entry("user", "three")]
    monkeypatch.setattr(template, "_render", None)  # nothing may be rendered
    with pytest.raises(PromptTooLong, match="before this message is at least 8,193 tokens") as raised:
        await model.compose(entries)
    assert (raised.value.prompt_tokens, raised.value.limit) == (full + 1, full)


@pytest.mark.parametrize(("tokens", "words"), [(8192, "by 1 token or"), (8193, "by 2 tokens or"), (10000, "by 1,809 ")])
def test_how_much_to_shorten(tokens, words):
    assert words in str(PromptTooLong(tokens, 8192))


@pytest.fixture(params=["no tokenizer", "broken template"])
def unusable(request, embedded_model: Path, tmp_path: Path) -> tuple[Path, str]:
    """A model directory, and a part of the sentence about it."""
    folder = tmp_path / "model"
    folder.mkdir()
    if request.param == "no tokenizer":
        return folder, "tokenizer of the model in"
    shutil.copy(embedded_model / "tokenizer.json", folder)
    (folder / "chat_template.jinja").write_text("{{ raise_exception('no chats, please') }}")
    return folder, "no chats, please"


async def test_a_model_that_cannot_chat_is_the_servers_fault_and_says_so(unusable, store):
    folder, sentence = unusable
    service = ChatService(store, FakeEngine(folder, lambda *_: []))  # type: ignore[arg-type]
    await service.start()
    async with serving(service) as url, httpx.AsyncClient(base_url=url) as http:
        body = {"model": "default", "messages": [{"role": "user", "content": "hi"}]}
        answer = await http.post("/v1/chat/completions", json=body)
        error = answer.json()["error"]
        assert (answer.status_code, error["type"], error["code"]) == (500, "server_error", "unusable_model")
        assert sentence in error["message"]
        ready = await http.get("/readyz")
        assert (ready.status_code, ready.json()["status"]) == (503, "failed")
        assert sentence in ready.json()["message"]
        engine = (await http.get("/page/state")).json()["engine"]
        assert engine["phase"] == "failed"
        assert sentence in engine["message"]
    page = ChatPage(service)
    notice = (await page._on_send("new-1", "", "hi", "", "Model's own", 1.0, 1.0, "", ""))[page._notice]
    assert sentence in notice["html"]
    assert await service.sessions(service.user.id) == []
    await service.close()


async def test_an_order_of_roles_that_the_template_refuses_is_the_clients_fault(with_template, tmp_path, store):
    twice = "{% if not loop.first and m.role == loop.previtem.role %}{{ raise_exception('take turns') }}{% endif %}"
    strict = "{% for m in messages %}" + twice + "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    with_template(strict)
    service = ChatService(store, FakeEngine(tmp_path, lambda *_: []))  # type: ignore[arg-type]
    await service.start()
    async with serving(service) as url, httpx.AsyncClient(base_url=url) as http:
        messages = [{"role": "user", "content": "s"}, {"role": "user", "content": "hi"}]
        answer = await http.post("/v1/chat/completions", json={"model": "default", "messages": messages})
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (400, "template_error")
        assert "take turns" in error["message"]
    assert service.status().phase == "ready"
    await service.close()


async def test_a_problem_ends_with_the_model_that_had_it(embedded_model, tmp_path, store):
    engine = FakeEngine(tmp_path, lambda *_: [])
    models = Models(engine, store)  # type: ignore[arg-type]
    with pytest.raises(UnusableModel):
        await models.get()
    assert models.problem
    engine.set_state(EngineState("restarting"))
    assert models.problem == ""
    good = FakeEngine(embedded_model, lambda *_: []).capabilities
    engine.set_state(EngineState("ready", capabilities=good))
    await models.get()
    assert models.problem == ""
