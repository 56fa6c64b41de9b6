"""A process that writes until it is done or killed, and prints each write once it was acknowledged."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from storage import Store


async def main(data_dir: Path, count: int) -> None:
    """Add `count` messages, one under the other; grow each to a longer text and its ids in a second write."""
    store = await Store.open(data_dir)
    user = await store.implicit_admin()
    session = await store.create_session(user.id)
    parent: str | None = None
    for n in range(count):
        message = await store.add_message(
            session.id, parent_id=parent, role="user", text=f"{n} ", token_ids=[], tokenizer="t", status="streaming"
        )
        print(f"added {n}", flush=True)
        await store.update_message(message.id, text=f"{n} " + "grown" * 500, token_ids=range(500), status="complete")
        print(f"grown {n}", flush=True)
        parent = message.id
    await store.close()
    print("done")


asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2])))
