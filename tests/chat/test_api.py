"""The API as the `openai` client and plain HTTP see it."""

from __future__ import annotations

import asyncio
import json

import httpx
import openai
import pytest

from chat.service import ChatService
from chat.templates import Entry
from chat.views import TurnOptions
from engine.protocol import Rejected, Sampling
from engine.state import EngineState
from tests.chat.fake_engine import END
from tests.chat.serving import serving
from tests.chat.test_cache_service import DYING


@pytest.fixture
async def url(service):
    async with serving(service) as base:
        yield base


@pytest.fixture
async def client(url):
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture
async def http(url):
    async with httpx.AsyncClient(base_url=url) as made:
        yield made


def user(text):
    return {"role": "user", "content": text}


async def ask(client, *messages, **options):
    return await client.chat.completions.create(model="default", messages=list(messages), **options)


async def stream(client, *messages, **options):
    chunks = await ask(client, *messages, stream=True, **options)
    return [chunk async for chunk in chunks]


async def eventually(look):
    async with asyncio.timeout(10):
        while not (found := look()):  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0.001)
    return found


async def test_a_completion(client, engine, template):
    answer = await ask(client, user("one"))
    choice = answer.choices[0]
    assert (choice.message.content, choice.message.role, choice.finish_reason) == ("Fine.", "assistant", "stop")
    prompt = len(engine.submits[0].token_ids)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (prompt, 3)
    assert answer.usage.total_tokens == prompt + 3
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    assert answer.model == "fake-smollm2"
    assert answer.keepwarm["tokens"] == {
        "device": 0, "host": 0, "disk": 0, "computed": prompt, "recomputed": 0, "drafted": 0, "accepted": 0,
        "output": 3,
    }  # fmt: skip
    assert answer.keepwarm["restore_s"] == 0.0
    assert answer.keepwarm["miss"] == {"position": 0, "message_index": 0, "cause": "new", "detail": ""}
    assert answer.keepwarm["matched_messages"] == 0
    assert answer.keepwarm["ttft_s"] > 0
    assert engine.submits[0].sampling == Sampling(temperature=1.0)


async def test_what_came_from_which_tier_and_why_the_rest_did_not(client, engine):
    asked = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "one"}]
    await client.chat.completions.create(model="default", messages=asked)
    engine.cold = (3, 4)
    more = [*asked, {"role": "assistant", "content": "Fine."}, {"role": "user", "content": "two"}]
    answer = await client.chat.completions.create(model="default", messages=more)
    tokens, cached = answer.keepwarm["tokens"], answer.usage.prompt_tokens_details.cached_tokens
    assert (tokens["host"], tokens["disk"], answer.keepwarm["restore_s"]) == (3, 4, 0.25)
    assert tokens["device"] + 7 == cached == answer.usage.prompt_tokens - tokens["computed"]
    assert answer.keepwarm["miss"] == {"position": cached, "message_index": 3, "cause": "new", "detail": ""}
    chunks = await stream(client, *more)  # which is all there but for its last token
    assert chunks[-1].keepwarm["miss"] is None


async def test_what_a_reply_would_cost(http, client, engine, store):
    asked = [{"role": "system", "content": "Be brief."}, user("one")]
    await client.chat.completions.create(model="default", messages=asked)
    before = engine.submits[0]
    more = {"model": "default", "messages": [*asked, {"role": "assistant", "content": "Fine."}, user("two")]}
    found = (await http.post("/v1/chat/completions/estimate", json=more)).json()
    assert len(engine.submits) == 1, "nothing was asked"
    answer = (await http.post("/v1/chat/completions", json=more)).json()
    tokens = answer["keepwarm"]["tokens"]
    assert found == {
        "prompt_tokens": len(engine.submits[1].token_ids),
        "tokens": {name: tokens[name] for name in ("device", "host", "disk", "computed")},
        "seconds": 0.125,
    }
    assert engine.estimates == [engine.submits[1].token_ids]
    assert tokens["device"] > len(before.token_ids), "it was matched with what is stored"


@pytest.mark.parametrize(
    ("change", "status", "param"),
    [({"model": "other"}, 404, None), ({"messages": []}, 400, "messages"), ({"temperature": 9}, 400, "temperature")],
)
async def test_an_estimate_is_refused_as_a_reply_is(http, engine, change, status, param):
    body = {"model": "default", "messages": [user("one")], **change}
    answers = [await http.post(f"/v1/chat/completions{end}", json=body) for end in ("", "/estimate")]
    assert [answer.status_code for answer in answers] == [status, status]
    assert answers[0].json() == answers[1].json()
    assert answers[1].json()["error"]["param"] == param
    assert (engine.submits, engine.estimates) == ([], [])


async def test_an_estimate_of_what_the_pool_never_holds_is_the_reply_s_refusal(http, engine):
    engine.reject = Rejected(request_id="", code="never_fits", message="needs 14 blocks; the pool holds 11")
    body = {"model": "default", "messages": [user("one")]}
    answers = [await http.post(f"/v1/chat/completions{end}", json=body) for end in ("", "/estimate")]
    assert [answer.status_code for answer in answers] == [400, 400]
    assert answers[0].json() == answers[1].json()
    assert answers[1].json()["error"]["code"] == "never_fits"


async def test_an_estimate_while_the_engine_starts_again(http, engine):
    engine.set_state(DYING)
    answer = await http.post("/v1/chat/completions/estimate", json={"model": "default", "messages": [user("one")]})
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "not_ready")


async def test_an_estimate_that_fails_without_reason_is_told_in_openais_form(http, engine, monkeypatch):
    async def fail(*_, **__):
        raise ValueError("nobody expected this")

    monkeypatch.setattr(engine, "estimate", fail)
    answer = await http.post("/v1/chat/completions/estimate", json={"model": "default", "messages": [user("one")]})
    assert (answer.status_code, answer.json()["error"]["type"]) == (500, "server_error")
    assert "nobody expected this" not in answer.text


async def test_a_stream(client, replies, template):
    replies["one"] = [*template.encode_text("a b 👩‍👩‍👧 c"), END]
    chunks = await stream(client, user("one"))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "a b 👩‍👩‍👧 c"
    assert not any("\ufffd" in (chunk.choices[0].delta.content or "") for chunk in chunks)
    assert [chunk.choices[0].finish_reason for chunk in chunks[-2:]] == [None, "stop"]
    assert all(chunk.usage is None for chunk in chunks)
    assert chunks[-1].keepwarm["tokens"]["output"] == len(replies["one"])


async def test_a_stream_with_usage(client, engine):
    chunks = await stream(client, user("one"), stream_options={"include_usage": True})
    assert chunks[-1].choices == []
    assert chunks[-1].usage.prompt_tokens == len(engine.submits[0].token_ids)
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == 0
    assert chunks[-1].keepwarm["matched_messages"] == 0
    assert chunks[-2].choices[0].finish_reason == "stop"


async def test_the_wire_format_of_a_stream(http):
    body = {"model": "default", "messages": [user("one")], "stream": True}
    response = await http.post("/v1/chat/completions", json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert "content-length" not in response.headers
    events = response.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    first = json.loads(events[0].removeprefix("data: "))
    assert (first["object"], first["choices"][0]["delta"]) == (
        "chat.completion.chunk",
        {"role": "assistant", "content": ""},
    )


async def test_a_client_that_sends_everything_again_reuses_the_sampled_ids(client, engine, replies, template):
    odd = [*template.encode_text("hel"), *template.encode_text("lo"), END]
    assert template.encode_text("hello") != odd[:-1]
    replies["one"] = odd
    history = [{"role": "system", "content": "Be brief."}, user("one")]
    cached, before = 0, 0
    for turn in range(4):
        answer = await ask(client, *history)
        if turn:
            assert answer.usage.prompt_tokens_details.cached_tokens == before - 1  # the last token has no KV yet
            assert answer.keepwarm["matched_messages"] == len(history) - 1
            cached += 1
        before = answer.usage.prompt_tokens + answer.usage.completion_tokens
        history += [{"role": "assistant", "content": f"\n{answer.choices[0].message.content} "}, user(f"turn {turn}")]
    assert cached == 3
    first = engine.submits[0].token_ids
    assert engine.submits[1].token_ids[: len(first) + len(odd)] == [*first, *odd]
    assert len({submit.session_id for submit in engine.submits}) == 1


async def test_an_edited_reply_is_encoded_from_its_text(client, engine):
    await ask(client, user("one"))
    answer = await ask(client, user("one"), {"role": "assistant", "content": "Awful."}, user("two"))
    assert answer.keepwarm["matched_messages"] == 0
    assert answer.usage.prompt_tokens_details.cached_tokens > 0  # the engine still finds what is equal


async def test_asking_the_same_again_writes_a_sibling(client, store, service, engine):
    await ask(client, user("one"))
    answer = await ask(client, user("one"))
    assert answer.keepwarm["matched_messages"] == 1
    assert engine.submits[0].session_id == engine.submits[1].session_id
    (record,) = await store.sessions(service.user.id, origin="api")
    path = await store.path(record.id)
    assert [m.status for m in await store.children(path[0].id, record.id)] == ["complete", "complete"]


async def test_choices_are_siblings_and_any_of_them_can_be_continued(client, replies, template, service, store):
    for index, text in enumerate(("first", "second", "third")):
        replies[f"one#{index}"] = [*template.encode_text(text), END]
    answer = await ask(client, user("one"), n=3)
    assert [(c.index, c.message.content) for c in answer.choices] == [(0, "first"), (1, "second"), (2, "third")]
    assert answer.usage.completion_tokens == 6
    (record,) = await store.sessions(service.user.id, origin="api")
    path = await store.path(record.id)
    assert [m.text for m in await store.children(path[0].id, record.id)] == ["first", "second", "third"]
    for text in ("first", "second", "third"):
        again = await ask(client, user("one"), {"role": "assistant", "content": text}, user("two"))
        assert again.keepwarm["matched_messages"] == 2
        assert again.usage.prompt_tokens_details.cached_tokens > answer.usage.prompt_tokens
    chunks = await stream(client, user("one"), n=3)
    texts = dict.fromkeys(range(3), "")
    for chunk in chunks:
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == {0: "first", 1: "second", 2: "third"}


async def test_api_chats_are_hidden_and_expire(client, store, service):
    await ask(client, user("one"))
    assert await service.sessions(service.user.id) == []
    (record,) = await store.sessions(service.user.id, origin="api")
    assert record.expires_at - record.created_at == pytest.approx(30 * 24 * 3600, abs=60)
    from chat.errors import SessionNotFound

    with pytest.raises(SessionNotFound):  # the page cannot write into it either
        await service.send(service.user.id, record.id, "hi")


async def test_a_chat_that_goes_on_is_found_without_asking_storage(client, store, monkeypatch):
    await ask(client, user("one"))
    monkeypatch.setattr(store, "choose_path", None)
    answer = await ask(client, user("one"), {"role": "assistant", "content": "Fine."}, user("two"))
    assert answer.keepwarm["matched_messages"] == 2
    monkeypatch.undo()
    (record,) = await store.sessions((await store.implicit_admin()).id, origin="api")
    assert [message.text for message in await store.path(record.id)] == ["one", "Fine.", "two", "Fine."]


async def test_the_engine_is_asked_before_anything_is_stored(client, store, engine, monkeypatch):
    await ask(client, user("one"))
    submitted, add, update = [], store.add_message, store.update_session

    async def adding(*given, **named):
        submitted.append(len(engine.submits))
        return await add(*given, **named)

    async def updating(*given, **named):
        submitted.append(len(engine.submits))
        return await update(*given, **named)

    monkeypatch.setattr(store, "add_message", adding)
    monkeypatch.setattr(store, "update_session", updating)
    await ask(client, user("one"), {"role": "assistant", "content": "Fine."}, user("two"))
    assert submitted == [2, 2, 2]


async def test_a_chat_that_has_expired_is_nowhere_to_be_found(store, engine, monkeypatch):
    monkeypatch.setattr("chat.service.EXPIRY_SECONDS", 0.01)
    now = 1e9
    service = ChatService(store, engine, clock=lambda: now)
    await service.start()
    first = await service.complete(service.user.id, [Entry("user", "one")])
    await first.finished()
    now += 31 * 24 * 3600
    async with asyncio.timeout(10):
        while await store.sessions(service.user.id, origin="api"):  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0.01)
    messages = [Entry("user", "one"), Entry("assistant", "Fine."), Entry("user", "two")]
    second = await service.complete(service.user.id, messages)
    await second.finished()
    assert (first.matched_messages, second.matched_messages) == (0, 0)
    assert len(await store.path(second.session_id)) == 4
    await service.close()


async def test_a_chat_of_the_page_lends_its_ids_and_stays_as_it_is(client, service, engine, replies, template):
    replies["one"] = [*template.encode_text("hel"), *template.encode_text("lo"), END]
    chat = (await service.create_session(service.user.id)).id
    await (await service.send(service.user.id, chat, "one", TurnOptions())).finished()
    before = await service.session(service.user.id, chat)
    answer = await ask(client, user("one"), {"role": "assistant", "content": "hello"}, user("two"))
    assert answer.keepwarm["matched_messages"] == 2
    prompt = engine.submits[0].token_ids
    assert engine.submits[1].token_ids[: len(prompt) + 3] == [*prompt, *replies["one"]]
    assert await service.session(service.user.id, chat) == before
    third = await ask(
        client,
        user("one"),
        {"role": "assistant", "content": "hello"},
        user("two"),
        {"role": "assistant", "content": "Fine."},
        user("three"),
    )
    assert third.keepwarm["matched_messages"] == 4


async def test_requests_at_once_share_a_history(client, engine):
    await ask(client, user("one"))
    history = [user("one"), {"role": "assistant", "content": "Fine."}]
    answers = await asyncio.gather(*(ask(client, *history, user(f"q{i}")) for i in range(8)))
    assert all(answer.choices[0].message.content == "Fine." for answer in answers)
    assert {answer.keepwarm["matched_messages"] for answer in answers} == {2}


async def test_a_session_hint_chooses_between_equal_chats_and_opens_none(client, engine, service):
    for name in ("mine", "other"):
        await ask(client, user("one"), {"role": "assistant", "content": name}, user("x"))
    for name in ("mine", "other", "mine"):
        header = {"X-Session-ID": name}
        await ask(client, user("same"), extra_headers=header)
    assert len({submit.session_id for submit in engine.submits[:2]}) == 2
    chat = (await service.create_session(service.user.id)).id
    await (await service.send(service.user.id, chat, "secret")).finished()
    await ask(client, user("tell me"), extra_headers={"X-Session-ID": chat})
    assert engine.submits[-1].session_id != chat
    assert (await service.session(service.user.id, chat)).messages[-1].text == "Fine."


async def test_parameters_reach_the_engine(client, engine):
    await ask(
        client,
        user("one"),
        temperature=0,
        top_p=0.5,
        presence_penalty=1.5,
        frequency_penalty=-1,
        seed=-3,
        max_tokens=5,
        stop=["x", "y"],
        user="me",
        extra_body={"top_k": 7, "min_p": 0.1, "repetition_penalty": 1.2},
    )
    (submit,) = engine.submits
    assert submit.sampling == Sampling(
        temperature=0.0,
        top_p=0.5,
        top_k=7,
        min_p=0.1,
        repetition_penalty=1.2,
        presence_penalty=1.5,
        frequency_penalty=-1.0,
        seed=2**63 - 3,
    )
    assert submit.max_tokens == 5
    await ask(client, user("one"), max_completion_tokens=6)
    assert engine.submits[1].max_tokens == 6


async def test_content_in_parts_and_the_developer_role(client, engine, template):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    await ask(client, {"role": "developer", "content": "Be kind."}, {"role": "user", "content": parts})
    text = template.tokenizer.decode(engine.submits[0].token_ids, skip_special_tokens=False)
    assert text.startswith("<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nab<|im_end|>")


async def test_a_stop_string_never_leaks(client, replies, template):
    replies["one"] = [*template.encode_text("Yes, and then it goes on."), END]
    chunks = await stream(client, user("one"), stop=" then it")
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Yes, and"
    assert chunks[-1].choices[0].finish_reason == "stop"


async def test_a_reply_at_its_limit(client):
    answer = await ask(client, user("one"), max_tokens=1)
    assert (answer.choices[0].finish_reason, answer.choices[0].message.content) == ("length", "Fine")


async def test_what_cut_a_reply_is_told_for_each_choice(client, engine, replies, template):
    engine.detail = "the pool of 8 blocks (256 tokens) is full"
    sentence = "The reply ended early: the pool of 8 blocks (256 tokens) is full."
    replies["one#0"] = [*template.encode_text("Yes."), END]
    replies["one#1"] = template.encode_text("No, and")  # the engine ends it
    answer = await ask(client, user("one"), n=2)
    assert [choice.finish_reason for choice in answer.choices] == ["stop", "length"]
    assert answer.keepwarm["finish_details"] == [None, sentence]
    for options in ({}, {"stream_options": {"include_usage": True}}):
        chunks = await stream(client, user("one"), n=2, **options)
        assert chunks[-1].keepwarm["finish_details"] == [None, sentence]
    stopped = await ask(client, user("one"), n=2, stop=" and")
    assert stopped.choices[1].finish_reason == "stop"
    assert stopped.keepwarm["finish_details"] == [None, None]


BAD = [
    ({"temperature": float("nan")}, "temperature"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": float("inf")}, "frequency_penalty"),
    ({"seed": 1.5}, "seed"),
    ({"seed": 2**70}, "seed"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_completion_tokens": "many"}, "max_completion_tokens"),
    ({"n": 0}, "n"),
    ({"n": 64}, "n"),
    ({"n": 10**9}, "n"),
    ({"stop": 3}, "stop"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stream": "yes"}, "stream"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages[0].content"),
    ({"messages": [{"role": "assistant", "content": "x"}]}, "messages"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"logprobs": True}, "logprobs"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"model": 3}, "model"),
]


async def test_bad_values_are_named(http, engine):
    for change, param in BAD:
        body = {"model": "default", "messages": [user("one")], **change}
        response = await http.post("/v1/chat/completions", content=json.dumps(body))
        error = response.json()["error"]
        found = (response.status_code, error["param"], error["type"], error["code"])
        assert found == (400, param, "invalid_request_error", "invalid_value"), change
        assert error["message"]
    assert engine.submits == []


async def test_a_body_that_is_no_request(http):
    for body in (b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 100_000):
        response = await http.post("/v1/chat/completions", content=body)
        assert (response.status_code, response.json()["error"]["type"]) == (400, "invalid_request_error"), body[:9]


async def test_half_a_character_is_named(http):
    body = b'{"model":"default","messages":[{"role":"user","content":"x\\ud83d"}]}'
    response = await http.post("/v1/chat/completions", content=body)
    assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_text")
    assert "U+D83D" in response.json()["error"]["message"]


async def test_unknown_parameters_are_ignored_and_named(client):
    answer = await ask(client, user("one"), extra_body={"chat_id": "7", "tools": []})
    assert answer.keepwarm["ignored_parameters"] == ["chat_id", "tools"]


async def test_an_unknown_model_names_what_there_is(client):
    with pytest.raises(openai.NotFoundError, match=r"fake-smollm2.*default") as raised:
        await client.chat.completions.create(model="gpt-4", messages=[user("one")])
    assert raised.value.code == "model_not_found"
    answer = await client.chat.completions.create(model="fake-smollm2", messages=[user("one")])
    assert answer.choices[0].message.content == "Fine."


async def test_a_prompt_over_the_context(client):
    with pytest.raises(openai.BadRequestError, match=r"8,192") as raised:
        await ask(client, user("word " * 9000))
    assert raised.value.code == "context_length_exceeded"


async def test_an_engines_refusal_is_a_status_even_when_streamed(client, engine):
    engine.reject = Rejected(request_id="", code="never_fits", message="needs 90 blocks, there are 64")
    for call in (ask(client, user("one")), stream(client, user("one"))):
        with pytest.raises(openai.BadRequestError, match="needs 90 blocks") as raised:
            await call
        assert raised.value.code == "never_fits"


async def test_while_the_engine_loads(client, http, engine):
    engine.set_state(EngineState("loading", stage="converting weights", done=1, total=3))
    with pytest.raises(openai.APIStatusError, match="converting weights") as raised:
        await ask(client, user("one"))
    assert raised.value.status_code == 503
    assert raised.value.response.headers["retry-after"]
    assert (await http.get("/healthz")).status_code == 200
    ready = await http.get("/readyz")
    assert ready.status_code == 503
    assert ready.json() == {"status": "loading", "stage": "converting weights", "done": 1, "total": 3, "message": ""}
    assert [model.id for model in (await client.models.list()).data] == ["fake-smollm2", "default"]
    engine.set_state(EngineState("ready", capabilities=engine.capabilities))
    assert (await http.get("/readyz")).json() == {"status": "ready"}


async def test_models(client, service):
    await eventually(lambda: service.status().phase == "ready")
    assert [model.id for model in (await client.models.list()).data] == ["fake-smollm2", "default"]
    assert (await client.models.retrieve("default")).id == "default"
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("other/model")


async def test_an_address_that_is_none_says_so(http):
    wrong = await http.post("/v1/embeddings", json={})
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (404, "unknown_url")


async def test_an_engine_that_dies_in_the_middle_is_the_last_event(client, http, engine):
    engine.tokens_until_death = 1
    body = {"model": "default", "messages": [user("one")], "stream": True}
    events = (await http.post("/v1/chat/completions", json=body)).text.strip().split("\n\n")
    error = json.loads(events[-1].removeprefix("data: "))["error"]
    assert (error["type"], error["code"]) == ("server_error", "engine_died")
    assert '"content":"Fine"' in events[-2]
    engine.tokens_until_death = 1
    with pytest.raises(openai.APIError, match="stopped unexpectedly"):
        await stream(client, user("one"))
    engine.tokens_until_death = 0
    with pytest.raises(openai.InternalServerError) as raised:
        await ask(client, user("one"))
    assert raised.value.status_code == 503
    engine.tokens_until_death = None
    assert (await ask(client, user("one"))).choices[0].message.content == "Fine."


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_dropped_connection_cancels_its_turn(url, engine, store, service, streamed):
    engine.tokens_until_pause = 1
    body = {"model": "default", "messages": [user("one")], "stream": streamed}
    async with httpx.AsyncClient(base_url=url) as http:
        if streamed:
            async with http.stream("POST", "/v1/chat/completions", json=body) as response:
                async for line in response.aiter_lines():
                    if '"content":"Fine"' in line:
                        break
        else:
            asking = asyncio.create_task(http.post("/v1/chat/completions", json=body))
            await eventually(lambda: not engine.gate.is_set())
            asking.cancel()
    await eventually(lambda: engine.submits and engine.cancelled == [engine.submits[0].request_id])
    (record,) = await store.sessions(service.user.id, origin="api")
    async with asyncio.timeout(10):
        while len(path := await store.path(record.id)) < 2:  # noqa: ASYNC110 - another's write
            await asyncio.sleep(0.001)
    assert (path[-1].status, path[-1].text) == ("stopped", "Fine")


async def test_closing_the_service_ends_a_stream_with_an_error(client, engine, service):
    engine.tokens_until_pause = 1
    chunks = await ask(client, user("one"), stream=True)
    seen = []
    with pytest.raises(openai.APIError, match="shutting down"):
        async for chunk in chunks:
            seen.append(chunk.choices[0].delta.content)
            if chunk.choices[0].delta.content == "Fine":
                await service.close()
    assert seen == ["", "Fine"]


async def test_a_question_asked_right_after_another_one_is_in_the_prompt_once(client, engine, replies, template):
    await ask(client, user("one"))
    await ask(client, user("one"), user("two"))
    await ask(client, user("one"), user("two"), {"role": "assistant", "content": "Fine."}, user("three"))
    prompt = template.decode(engine.submits[2].token_ids)
    assert [prompt.count(text) for text in ("one", "two", "three")] == [1, 1, 1]
