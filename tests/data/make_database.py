"""Make the populated database of the newest revision: `python -m tests.data.make_database`.

It writes `<revision>.sqlite3` and, beside it, what a store says that it holds, `<revision>.json`. Both are committed
when a revision is released, and never made again after that: later programs are tested on the very files.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from alembic.script import ScriptDirectory

from storage import CacheEventRecord, Store, TraceRecord, TurnRecord, UserRecord
from storage.database import FILE_NAME
from storage.migrate import SCRIPTS

HERE = Path(__file__).parent
GRID = "  |  a\tb  |\r\n\n   indented\n"
FAMILY = "Zażółć 👩\u200d👩\u200d👧 e\u0301 \u202e"


def ids(text: str) -> tuple[int, ...]:
    """Ids that any tokenizer could have given: a character's code each, and the largest there is."""
    return (*map(ord, text), 2**32 - 1)


async def fill(store: Store) -> None:
    """Fixed contents, one chat for each thing that a migration could spoil."""
    user = await store.implicit_admin()
    await _a_chat_with_branches(store, user)
    await _a_chat_cut_short(store, user)
    await store.create_session(user.id, title="", system_prompt=GRID)
    api = await store.create_session(user.id, origin="api", expires_at=4_102_444_800.0)
    system = await _say(store, api.id, None, "system", "You are terse.")
    question = await _say(store, api.id, system, "user", "Ping\x00pong?")
    await _say(store, api.id, question, "assistant", "Pong.", finish_reason="stop")
    await _chats_with_models(store, user)
    await store.save_setting("device_kv", "256MiB")
    await store.save_setting("theme", "dark 🌙")
    await _what_the_cache_did(store, user)


async def _a_chat_with_branches(store: Store, user: UserRecord) -> None:
    chat = await store.create_session(user.id, title="里昂之行 🚄", system_prompt="请简短回答。")
    question = await _say(store, chat.id, None, "user", "去里昂怎么走？")
    first = await _say(store, chat.id, question, "assistant", "坐火车。", finish_reason="stop")
    again = await _say(store, chat.id, question, "assistant", "坐高铁，两小时。", finish_reason="length")
    edited = await _say(store, chat.id, None, "user", GRID)
    await _say(store, chat.id, edited, "assistant", FAMILY, finish_reason="stop")
    await _say(store, chat.id, first, "user", "谢谢")
    await store.update_session(user.id, chat.id, leaf_id=again, touch=False)
    for message_id, ttft in ((first, 0.5), (again, None)):
        turn = TurnRecord(
            message_id=message_id,
            prompt_tokens=50,
            device_tokens=32,
            computed_tokens=18,
            recomputed_tokens=2,
            output_tokens=9,
            ttft_s=ttft,
            tpot_s=0.125,
            total_s=1.5,
            finish_reason="stop",
        )
        await store.add_turn(turn)


async def _a_chat_cut_short(store: Store, user: UserRecord) -> None:
    chat = await store.create_session(user.id, title="SQL question")
    question = await _say(store, chat.id, None, "user", "What is a join?")
    stopped = await _say(store, chat.id, question, "assistant", "A join", status="stopped", finish_reason="cancelled")
    await _say(store, chat.id, question, "assistant", "", status="failed", error="the engine ended: killed")
    more = await _say(store, chat.id, stopped, "user", " \n\t ")
    await _say(store, chat.id, more, "assistant", "White space, I s", status="interrupted")


async def _chats_with_models(store: Store, user: UserRecord) -> None:
    """API chats, so that the page's list stays what it was in the revisions before."""
    for name, source, adapter in (("tiny", "/models/tiny", ""), ("tiny+巴黎", "/models/tiny", "/adapters/巴黎")):
        model = await store.catalog.save_model(name=name, source=source, adapter=adapter)
        chat = await store.create_session(user.id, origin="api", model_id=model.id)
        await _say(store, chat.id, None, "user", "Which are you?")
    await store.catalog.save_model(name="tiny", source="owner/tiny")


async def _what_the_cache_did(store: Store, user: UserRecord) -> None:
    """In an API chat too: pinned, with a reply that came from every tier, its events, and a deletion still owed."""
    chat = await store.create_session(user.id, origin="api")
    await store.update_session(user.id, chat.id, pinned=True, ttl_s=5400.5, touch=False)
    question = await _say(store, chat.id, None, "user", "Still warm?")
    reply = await _say(store, chat.id, question, "assistant", "Mostly.", finish_reason="stop")
    turn = TurnRecord(
        message_id=reply,
        prompt_tokens=200,
        device_tokens=64,
        host_tokens=32,
        disk_tokens=33,
        computed_tokens=71,
        recomputed_tokens=0,
        output_tokens=3,
        ttft_s=0.25,
        tpot_s=0.125,
        total_s=0.5,
        restore_s=0.0625,
        finish_reason="stop",
        fingerprint="f" * 32,
        miss_position=129,
        miss_message=2,
        miss_role="user",
        miss_cause="evicted",
        miss_detail="disk: 30 days unused",
    )
    await store.add_turn(turn)
    for session_id, source, target in ((chat.id, "device", "host"), (None, "host", None), (chat.id, "host", "disk")):
        event = CacheEventRecord(
            at=1_750_000_000.5, action="demoted", session_id=session_id, source=source, target=target,
            blocks=3, bytes=2**33, age_s=0.25, reason="over the 95% mark – 温",
        )  # fmt: skip
        await store.cache.add_events([event])
    for blocks in (b"", bytes(range(256)) * 2):
        traced = TraceRecord(
            at=1_750_000_001.5, session_id=chat.id, model="f" * 32, blocks=blocks, device_tokens=64, host_tokens=32,
            disk_tokens=33, computed_tokens=71, output_tokens=3,
        )  # fmt: skip
        await store.cache.add_turns([traced])
    gone = await store.create_session(user.id, origin="api")
    await store.delete_session(user.id, gone.id)


async def _say(store: Store, session_id: str, parent_id: str | None, role: Any, text: str, **more: Any) -> str:
    message = await store.add_message(
        session_id, parent_id=parent_id, role=role, text=text, token_ids=ids(text), tokenizer="smollm2", **more
    )
    return message.id


async def describe(store: Store) -> dict[str, Any]:
    """All that a store holds, through its public methods, as JSON can say it."""
    user = await store.implicit_admin()
    chats = []
    for origin in ("chat", "api"):
        for listed in await store.sessions(user.id, origin=origin):  # type: ignore[arg-type]
            session = await store.session(user.id, listed.id)
            assert session is not None
            messages: list[Any] = []
            above: list[str | None] = [None]
            for parent_id in above:
                for child in await store.children(parent_id, listed.id):
                    above.append(child.id)
                    messages.append(dataclasses.asdict((await store.path(listed.id, child.id))[-1]))
            turns = await store.turns(listed.id)
            told = {key: dataclasses.asdict(turn) for key, turn in sorted(turns.items())}
            chats.append({"session": dataclasses.asdict(session), "messages": messages, "turns": told})
    whole = {
        "user": dataclasses.asdict(user) | {"salt": user.salt.hex()},
        "chats": chats,
        "models": [dataclasses.asdict(model) for model in await store.catalog.models()],
        "settings": await store.saved_settings(),
        "events": [dataclasses.asdict(event) for event in await store.cache.events(100)],
        "trace": [dataclasses.asdict(turn) | {"blocks": turn.blocks.hex()} for turn in await store.cache.trace(100)],
        "kept": [dataclasses.asdict(session) for session in await store.cache.kept_sessions()],
        "pending_drops": await store.cache.pending_drops(),
    }
    return json.loads(json.dumps(whole))  # type: ignore[no-any-return]


async def make() -> None:
    """Write both files for the newest revision."""
    target = HERE / f"{ScriptDirectory(str(SCRIPTS)).get_current_head()}.sqlite3"
    if target.exists():
        raise SystemExit(f"{target} exists; remove it first, if its revision was not released yet")
    ticks = itertools.count(1_750_000_000)
    with tempfile.TemporaryDirectory() as folder:
        store = await Store.open(Path(folder), clock=lambda: float(next(ticks)))
        await fill(store)
        whole = await describe(store)
        await store.close()
        shutil.copyfile(Path(folder) / FILE_NAME, target)
    text = json.dumps(whole, ensure_ascii=False, indent=1, sort_keys=True)
    target.with_suffix(".json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    asyncio.run(make())
