"""Several models: a chat remembers its own, another can be chosen at any time, and what is not served is loaded."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from pathlib import Path

import httpx
import msgspec
import pytest

from chat.completion import Request
from chat.errors import (
    InvalidRequest,
    InvalidText,
    ModelNotFound,
    ModelNotLoadable,
    ModelUnavailable,
    NotReady,
    TurnStopped,
    UnusableModel,
)
from chat.service import ChatService
from chat.templates import Entry
from chat.views import ModelView, TurnOptions
from engine.protocol import Capabilities
from engine.state import EngineState
from storage.store import Store
from tests.chat.fake_engine import FakeEngine
from tests.chat.serving import serving
from tests.chat.whole import whole


@pytest.fixture
def other(engine: FakeEngine, embedded_model: Path, tmp_path: Path) -> Capabilities:
    """Another model that the engine can load, of another vocabulary as far as anybody can tell."""
    folder = tmp_path / "other"
    folder.mkdir()
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        if (embedded_model / name).exists():
            shutil.copy(embedded_model / name, folder)
    (folder / "tokenizer.json").write_text((embedded_model / "tokenizer.json").read_text() + "\n")
    capabilities = msgspec.structs.replace(
        engine.capabilities, model_name="other", model_path=str(folder), fingerprint="e" * 16, context_length=512
    )
    engine.others = {"/models/other": capabilities, "/models/damaged": "no config.json in /models/damaged"}
    return capabilities


async def say(service: ChatService, chat: str, text: str) -> None:
    await (await service.send(service.user.id, chat, text)).finished()


async def test_a_chat_remembers_the_model_it_began_with(service, engine, store, other):
    chat = await service.create_session(service.user.id)
    await say(service, chat.id, "one")
    (default,) = await service.models()
    assert (default.name, default.default, default.served) == ("fake-smollm2", True, True)
    assert (await service.session(service.user.id, chat.id)).model_id == default.id
    added = await service.add_model("/models/other")
    assert [(model.name, model.default) for model in await service.models()] == [
        ("fake-smollm2", True),
        ("other", False),
    ]
    await say(service, chat.id, "two")
    assert [submit.model for submit in engine.submits] == [engine.capabilities.fingerprint] * 2
    new = await service.create_session(service.user.id, model_id=added.id)
    await say(service, new.id, "one")
    assert engine.submits[-1].model == other.fingerprint
    assert (await service.session(service.user.id, new.id)).context_length == 512


async def test_after_a_restart_the_model_of_a_chat_is_loaded_when_it_goes_on(service, engine, store, other):
    added = await service.add_model("/models/other", "")
    chat = await service.create_session(service.user.id, model_id=added.id)
    await say(service, chat.id, "one")
    await service.close()
    engine.served = {engine.capabilities.fingerprint}
    again = ChatService(store, engine)
    await again.start()
    served = {model.name: model.served for model in await again.models()}  # in either order: the default is being noted
    assert served["other"] is False
    await say(again, chat.id, "two")
    assert engine.loaded == [("/models/other", None, "auto", "auto")] * 2
    assert engine.submits[-1].model == other.fingerprint
    assert [(model.name, model.served) for model in await again.models()] == [("fake-smollm2", True), ("other", True)]
    await again.close()


async def test_switching_there_and_back_finds_the_first_models_tokens_as_they_were(service, engine, other):
    chat = await service.create_session(service.user.id)
    await say(service, chat.id, "one")
    added = await service.add_model("/models/other")
    await service.choose_model(service.user.id, chat.id, added.id)
    await say(service, chat.id, "two")
    (default, _) = await service.models()
    await service.choose_model(service.user.id, chat.id, default.id)
    await say(service, chat.id, "three")
    first, second, third = engine.submits
    assert [submit.model for submit in engine.submits] == ["f" * 16, "e" * 16, "f" * 16]
    reply = engine.script(first, 0)
    assert third.token_ids[: len(first.token_ids) + len(reply)] == [*first.token_ids, *reply]
    figures = (await service.session(service.user.id, chat.id)).messages[-1].figures
    assert figures is not None
    assert figures.reused_tokens >= len(first.token_ids) + len(reply) - 1
    assert second.token_ids[: len(first.token_ids)] == first.token_ids, "the same text under the other vocabulary"


async def test_a_model_that_is_loaded_again_is_read_again(service, engine, other):
    await service.add_model("/models/other")
    template = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}[assistant] "
    (Path(other.model_path) / "chat_template.jinja").write_text(template)
    added = await service.add_model("/models/other")
    chat = await service.create_session(service.user.id, model_id=added.id)
    with contextlib.suppress(IndexError):  # the script of the engine looks for the other template's words
        await say(service, chat.id, "one")
    loaded = service._models.known(added.id)
    assert loaded is not None
    assert loaded.template.decode(engine.submits[-1].token_ids) == "[user] one\n[assistant] "


async def test_a_chosen_model_must_exist(service, other):
    chat = await service.create_session(service.user.id)
    with pytest.raises(ModelNotFound, match="'nothing'"):
        await service.choose_model(service.user.id, chat.id, "nothing")
    with pytest.raises(ModelNotFound):
        await service.create_session(service.user.id, model_id="nothing")


@pytest.mark.parametrize(
    ("source", "error", "words"),
    [
        ("", InvalidRequest, "Name a model"),
        (" \n", InvalidRequest, "Name a model"),
        ("a\0b", InvalidRequest, "Name a model"),
        ("half \ud800", InvalidText, "U\\+D800"),
        ("/models/damaged", ModelNotLoadable, "no config.json in /models/damaged"),
        ("/models/none", ModelNotLoadable, "no model '/models/none'"),
    ],
)
async def test_what_cannot_be_loaded_is_not_remembered(service, other, source, error, words):
    await service._models.get()
    with pytest.raises(error, match=words):
        await service.add_model(source)
    assert [model.name for model in await service.models()] == ["fake-smollm2"]


async def test_a_model_that_went_away_is_named_and_another_can_be_chosen(service, engine, other):
    added = await service.add_model("/models/other")
    chat = await service.create_session(service.user.id, model_id=added.id)
    await say(service, chat.id, "one")
    engine.served.discard(other.fingerprint)
    engine.others["/models/other"] = "no folder /models/other"
    with pytest.raises(ModelUnavailable, match=r"'other' cannot be loaded: no folder /models/other. Choose another"):
        await service.send(service.user.id, chat.id, "two")
    default = next(model for model in await service.models() if model.default)
    await service.choose_model(service.user.id, chat.id, default.id)
    await say(service, chat.id, "two")
    assert [m.text for m in (await service.session(service.user.id, chat.id)).messages] == ["one", "Fine."] * 1 + [
        "two",
        "Fine.",
    ]


async def test_only_a_model_that_no_chat_is_held_with_can_be_forgotten(service, engine, other):
    added = await service.add_model("/models/other")
    chat = await service.create_session(service.user.id, model_id=added.id)
    await say(service, chat.id, "one")
    with pytest.raises(InvalidRequest, match="1 chat is held with this model"):
        await service.forget_model(added.id)
    await service.delete_session(service.user.id, chat.id)
    await service.forget_model(added.id)
    with pytest.raises(ModelNotFound):
        await service.forget_model(added.id)
    (default,) = await service.models()
    with pytest.raises(InvalidRequest, match="stays in the list"):
        await service.forget_model(default.id)


async def test_one_folder_is_one_model_however_it_is_spelt(service, engine, other, tmp_path, monkeypatch):
    folder = tmp_path / "a model"
    folder.mkdir()
    engine.others[str(folder)] = other
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    spellings = (str(folder), f"{folder}/", "a model", "./a model", "~/a model", f" {folder}/../a model\n")
    assert len({(await service.add_model(spelling)).id for spelling in spellings}) == 1


async def test_a_model_that_cannot_chat_says_so_and_the_default_goes_on(service, engine, other, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(Path(other.model_path), broken)
    (broken / "chat_template.jinja").write_text("{{ raise_exception('no chats, please') }}")
    engine.others["/models/broken"] = msgspec.structs.replace(
        other, model_name="broken", model_path=str(broken), fingerprint="d" * 16
    )
    with pytest.raises(UnusableModel, match="no chats, please"):
        await service.add_model("/models/broken")
    assert service.status().phase == "ready"
    assert "broken" not in [model.name for model in await service.models()]
    chat = await service.create_session(service.user.id)
    await say(service, chat.id, "one")


async def test_no_model_is_loaded_while_there_is_no_engine(service, engine, other):
    engine.set_state(EngineState("restarting", message="The engine stopped unexpectedly; it is being restarted"))
    with pytest.raises(NotReady, match="starting again"):
        await service.add_model("/models/other")


async def test_clients_name_the_model_they_want(service, engine, store: Store, other):
    await service.add_model("/models/other")
    async with serving(service) as url, httpx.AsyncClient(base_url=url) as http:
        listed = (await http.get("/v1/models")).json()["data"]
        assert [model["id"] for model in listed] == ["fake-smollm2", "other", "default"]
        assert [model["keepwarm"]["model"] for model in listed] == ["fake-smollm2", "other", "fake-smollm2"]
        for name, fingerprint, said in (("other", "e", "other"), ("default", "f", "fake-smollm2")):
            body = {"model": name, "messages": [{"role": "user", "content": f"to {name}"}]}
            answer = (await http.post("/v1/chat/completions", json=body)).json()
            assert (answer["model"], answer["system_fingerprint"]) == (said, fingerprint * 16)
            assert engine.submits[-1].model == fingerprint * 16
        body = {"model": "gpt-4", "messages": [{"role": "user", "content": "hi"}]}
        answer = await http.post("/v1/chat/completions", json=body)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (404, "model_not_found")
        assert "'fake-smollm2', 'other', and 'default'" in error["message"]
        engine.served.discard(other.fingerprint)
        engine.others["/models/other"] = "no folder /models/other"
        answer = await http.post("/v1/chat/completions", json=body | {"model": "other"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "model_unavailable")
    names = {model.id: model.name for model in await store.catalog.models()}
    remembered = []
    for listed_session in await store.sessions(service.user.id, origin="api"):
        record = await store.session(service.user.id, listed_session.id)
        assert record is not None
        remembered.append(names[record.model_id or ""])
    assert sorted(remembered) == ["fake-smollm2", "other"]


# --- what happens while a message waits for its model -----------------------------------------------------------------


@pytest.fixture
async def waiting(service: ChatService, engine: FakeEngine, other: Capabilities) -> str:
    """A new chat of a model that is known, not served, and will be loaded as soon as the gate opens."""
    added = await service.add_model("/models/other")
    engine.served.discard(other.fingerprint)
    engine.load_begun.clear()
    engine.load_gate.clear()
    return (await service.create_session(service.user.id, model_id=added.id)).id


async def sending(service: ChatService, engine: FakeEngine, chat: str) -> asyncio.Task[None]:
    """A message that waits for its model now."""
    task = asyncio.create_task(say(service, chat, "one"))
    await engine.load_begun.wait()
    return task


async def test_stop_ends_the_wait_for_a_model_at_once_and_nothing_is_stored(service, engine, store, waiting):
    task = await sending(service, engine, waiting)
    assert (await service.session(service.user.id, waiting)).running
    await service.stop(service.user.id, waiting)
    with pytest.raises(TurnStopped, match="You stopped this message while its model was loading"):
        await task
    detail = await service.session(service.user.id, waiting)
    assert (detail.running, detail.messages, detail.title) == (False, (), "")
    engine.load_gate.set()
    await say(service, waiting, "two")
    assert [message.text for message in (await service.session(service.user.id, waiting)).messages] == ["two", "Fine."]


async def test_a_chat_can_be_deleted_while_its_model_loads(service, engine, waiting):
    task = await sending(service, engine, waiting)
    await service.delete_session(service.user.id, waiting)
    with pytest.raises(TurnStopped):
        await task
    assert await service.sessions(service.user.id) == []


async def test_the_service_closes_while_a_model_loads(service, engine, waiting):
    task = await sending(service, engine, waiting)
    await service.close()
    with pytest.raises(TurnStopped):
        await task


async def test_a_title_and_a_model_chosen_meanwhile_stay(service, engine, waiting):
    default = next(model for model in await service.models() if model.default)
    task = await sending(service, engine, waiting)
    await service.rename(service.user.id, waiting, "mine")
    await service.choose_model(service.user.id, waiting, default.id)
    engine.load_gate.set()
    await task
    detail = await service.session(service.user.id, waiting)
    assert (detail.title, detail.model_id) == ("mine", default.id)
    assert [message.text for message in detail.messages] == ["one", "Fine."]


async def test_nothing_of_a_message_is_stored_whose_model_is_forgotten_meanwhile(service, engine, store, waiting):
    default = next(model for model in await service.models() if model.default)
    task = await sending(service, engine, waiting)
    forgotten = (await service.session(service.user.id, waiting)).model_id
    await service.choose_model(service.user.id, waiting, default.id)
    await service.forget_model(forgotten)
    engine.load_gate.set()
    with pytest.raises(ModelNotFound, match="'other'"):
        await task
    assert (await service.session(service.user.id, waiting)).messages == ()
    assert [model.name for model in await service.models()] == ["fake-smollm2"]
    with pytest.raises(ModelNotFound):
        await service._models.get(forgotten)
    await say(service, waiting, "two")


async def test_a_client_whose_model_is_forgotten_meanwhile_is_told(service, engine, store, other):
    added = await service.add_model("/models/other")
    model = await service._models.get(added.id)
    await store.catalog.delete_model(added.id)
    request = Request((Entry("user", "hi"),), TurnOptions(), 0.0)
    with pytest.raises(ModelNotFound, match="'other'"):
        await service._completions.begin(service.user, model, request)
    assert await store.sessions(service.user.id, origin="api") == []


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_while_a_model_loads_is_noticed(service, engine, store, waiting, stream):
    left = asyncio.Event()

    async def load(*_: object) -> Capabilities:
        engine.load_begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            left.set()
        raise AssertionError("nobody opens this gate")

    engine.load = load
    body = {"model": "other", "messages": [{"role": "user", "content": "hi"}], "stream": stream}
    async with serving(service) as url, httpx.AsyncClient(base_url=url) as http:
        asking = asyncio.create_task(http.post("/v1/chat/completions", json=body))
        await engine.load_begun.wait()
        asking.cancel()
        await left.wait()
    assert engine.submits == []
    assert await store.sessions(service.user.id, origin="api") == []


async def test_a_wrong_name_is_the_mistake_of_whoever_gave_it(service, other):
    async with whole(service) as url, httpx.AsyncClient(base_url=url) as http:
        answer = await http.post("/page/models", json={"source": "/models/none"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "model_not_loadable")


async def test_a_model_forgotten_a_moment_ago_is_said_to_be_none(service, store, other, monkeypatch):
    added = await service.add_model("/models/other")
    chat = await service.create_session(service.user.id)
    known = await service.models()
    await store.catalog.delete_model(added.id)

    async def before() -> list[ModelView]:
        return known

    monkeypatch.setattr(service._models, "views", before)
    with pytest.raises(ModelNotFound):
        await service.choose_model(service.user.id, chat.id, added.id)
    with pytest.raises(ModelNotFound):
        await service.create_session(service.user.id, model_id=added.id)
