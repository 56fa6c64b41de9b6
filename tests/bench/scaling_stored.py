"""What stored chats cost whoever asks: the engine that has their blocks, and the database that has their messages.

The engine's chats are real turns of a tiny random model, so that its own work shows and not the forward pass.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from sqlalchemy import insert
from sqlalchemy.orm import Session
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from chat.templates import Entry
from engine.config import CacheConfig, EngineConfig
from storage import Store
from storage.keys import path_keys
from storage.models import MessageRow, SessionRow, TokensRow
from storage.records import StoredPath, new_id
from storage.tokens import pack_ids
from tests.bench.profile_parts import ByHand
from tests.engine.model import tiny

PROMPT = 40  # tokens of each chat: a block and a tail
TOGETHER = 32  # chats that are had at once
DEVICE, HOST = 128, 40_000  # blocks
LIST = 50  # chats on a page of the list


def engine(folder: Path, counts: Sequence[int], steps: int) -> dict[str, list[float]]:
    """Median seconds of a step of one chat, and of a turn's submission, beside so many stored chats."""
    model = tiny.save(tiny.config_of("llama", max_position_embeddings=1024), folder / "tiny").path
    words = {f"w{number}": number for number in range(tiny.VOCABULARY)}
    Tokenizer(WordLevel(words, "w0")).save(str(model / "tokenizer.json"))  # nobody reads it, but models have one
    block = 3 * 2 * 32 * 2 * 8 * 4  # bytes: layers, K and V, tokens, heads, numbers of each, of 4 bytes
    cache = CacheConfig(device_kv=DEVICE * block, host_kv=HOST * block)
    hand = ByHand(
        EngineConfig(
            cache_dir=str(folder / "models"), model=str(model), dtype="float32", cache=cache, max_batch_tokens=2048
        )
    )
    found: dict[str, list[float]] = {"a step of the engine": [], "a submission to it": []}
    known = 0
    try:
        for count in counts:
            for start in range(known, count, TOGETHER):
                for number in range(start, min(count, start + TOGETHER)):
                    hand.submit(f"stored-{number}", _ids(number), 1)
                hand.finish()
            known = count
            hand.submit("writing", _ids(-1), steps + 50)
            hand.until_all_write()
            found["a step of the engine"].append(_median(hand.round, steps))
            hand.stop()
            found["a submission to it"].append(
                statistics.median(_submission(hand, count, i) for i in range(steps // 2))
            )
    finally:
        hand.close()
    return found


def _ids(number: int) -> list[int]:
    """A prompt of its own for each number."""
    digits = [3 + (number // 90**i) % 90 for i in range(4)]
    return [digits[i % 4] for i in range(PROMPT)]


def _submission(hand: ByHand, count: int, number: int) -> float:
    """From the arrival of a returning chat's message to its first token; the chat is one of those stored long ago."""
    began = time.perf_counter()
    hand.submit(f"stored-{number * 7 % count}", [*_ids(number * 7 % count), 5, 6], 1)
    hand.until_all_write()
    took = time.perf_counter() - began
    hand.finish()
    return took


def _median(work: Callable[[], Any], count: int) -> float:
    taken = []
    for _ in range(count):
        began = time.perf_counter()
        work()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


async def storage(folder: Path, counts: Sequence[int], times: int) -> dict[str, list[float]]:
    """Median seconds of a page of the list, and of finding a chat and storing its message, beside so many chats."""
    store = await Store.open(folder / "data")
    user = (await store.implicit_admin()).id
    found: dict[str, list[float]] = {"a page of the list": [], "finding and storing": []}
    known = 0
    try:
        for count in counts:
            rows = [_rows(user, number) for number in range(known, count)]
            await store._threads.write(lambda db, rows=rows: _insert(db, rows))
            known = count
            found["a page of the list"].append(await _median_of(lambda _: store.sessions(user, limit=LIST), times))
            turns = await _median_of(lambda at, among=count: _turn(store, user, 7 * at % among), times)
            found["finding and storing"].append(turns)
    finally:
        await store.close()
    return found


async def _median_of(work: Callable[[int], Awaitable[Any]], count: int) -> float:
    taken = []
    for number in range(count):
        began = time.perf_counter()
        await work(number)
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


async def _turn(store: Store, user: str, number: int) -> None:
    keys = path_keys((entry.role, entry.text) for entry in _said(number))

    def first(paths: Any) -> StoredPath | None:
        return next(paths, None)

    path = await store.choose_path(user, keys[::-1], first)
    assert path is not None
    last = path.messages[-1]
    await store.add_message(
        path.session.id, parent_id=last.id, role="user", text="and then?", token_ids=[1, 2, 3], tokenizer="tiny"
    )


def _said(number: int) -> list[Entry]:
    return [Entry("user", f"question {number}"), Entry("assistant", f"answer {number} " * 20)]


def _rows(user: str, number: int) -> tuple[dict[str, Any], list[dict[str, Any]], list[dict[str, Any]]]:
    """A chat of two messages, as rows of three tables."""
    session, at = new_id(), 1e9 + number
    said = _said(number)
    keys = path_keys((entry.role, entry.text) for entry in said)
    ids = [new_id() for _ in said]
    chat = {"id": session, "user_id": user, "origin": "chat", "created_at": at, "updated_at": at, "leaf_id": ids[-1]}
    messages = [
        {
            "id": ids[seq],
            "session_id": session,
            "parent_id": ids[seq - 1] if seq else None,
            "seq": seq + 1,
            "role": entry.role,
            "status": "complete",
            "created_at": at,
            "path_key": keys[seq],
            "text": entry.text,
        }
        for seq, entry in enumerate(said)
    ]
    tokens = [{"message_id": each, "tokenizer": "tiny", "ids": pack_ids(range(60))} for each in ids]
    return chat | {"title": f"chat {number}", "system_prompt": "", "pinned": False}, messages, tokens


def _insert(db: Session, rows: Sequence[tuple[dict[str, Any], list[dict[str, Any]], list[dict[str, Any]]]]) -> None:
    db.execute(insert(SessionRow), [{**chat, "leaf_id": None} for chat, _, _ in rows])
    db.execute(insert(MessageRow), [message for _, messages, _ in rows for message in messages])
    db.execute(insert(TokensRow), [each for _, _, tokens in rows for each in tokens])
