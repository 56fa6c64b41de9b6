"""Why a turn had to read what it read: the engine's reason, and what only the ledger knows of it.

The engine sees tokens. Here it is known which message they belong to, whether that message took the place of another,
whether it was written anew, and which model the last reply came from.
"""

from __future__ import annotations

import bisect
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from chat.model import Composed
from chat.views import MissView
from engine.protocol import Miss
from storage.errors import StorageError
from storage.records import MessageRecord
from storage.store import Store

log = logging.getLogger(__name__)

ANOTHER_REPLY = "it goes on from another reply"
OTHER_WEIGHTS = "or this one with other weights"
GONE = "read before, and in no tier any more"
LOST = "read before the engine was started, and not kept in any tier"


@dataclass(frozen=True)
class Misses:
    """Explains the misses of one request: `composed` for the model of this `fingerprint`.

    The first messages are those of `path`, stored in session `session_id` (None: nothing of them is stored). The engine
    was started at `engine_started_at` (Unix time), and knows nothing of what became of blocks before that.
    """

    store: Store
    session_id: str | None
    fingerprint: str
    composed: Composed
    path: Sequence[MessageRecord]
    engine_started_at: float = 0.0

    async def explain(self, miss: Miss) -> MissView:
        """The miss as people understand it. Reads the database only where more than the new text was missed."""
        index = self._message(miss.position)
        role = None if index is None else self.composed.entries[index].role
        cause, detail = miss.cause, miss.detail
        view = MissView(miss.position, index, role, cause, detail)
        new_text = index is not None and index >= len(self.path)
        if cause not in ("new", "diverged") or self.session_id is None or (new_text and cause == "new"):
            return view
        try:
            return await self._refined(view, self.session_id)
        except StorageError as error:
            log.warning("the reason of a miss could not be looked up: %s", error)
            return view

    # --- inside -----------------------------------------------------------------------------------------------------

    def _message(self, position: int) -> int | None:
        """The message that the token at `position` is of. The token sampled last was never read: the next one's."""
        starts, entries = self.composed.starts, self.composed.entries
        if starts is None:
            return None
        index = bisect.bisect_right(starts, position) - 1
        ends = index + 1 < len(starts) and position + 1 == starts[index + 1]
        return index + 1 if ends and entries[index].role == "assistant" else index

    async def _refined(self, view: MissView, session_id: str) -> MissView:
        last = max((number for number, message in enumerate(self.path) if message.role == "assistant"), default=-1)
        before = view.message_index is None or view.message_index <= last
        if last >= 0 and before:
            turn = (await self.store.turns(session_id)).get(self.path[last].id)
            if turn is not None and turn.fingerprint and turn.fingerprint != self.fingerprint:
                return view.because("other_model", OTHER_WEIGHTS)
        if view.message_index is None:
            return view.because("template") if view.cause == "diverged" else view
        if await self._replaced(view.message_index, session_id):
            return view.because("edited", ANOTHER_REPLY if view.role == "assistant" else "")
        if view.message_index >= len(self.path):
            return view.because("new")
        if view.message_index in self.composed.rewritten:
            return view.because("template")
        if view.cause != "new" or not before:
            return view
        lost = self.path[last].created_at < self.engine_started_at
        return view.because("lost", LOST) if lost else view.because("evicted", GONE)

    async def _replaced(self, index: int, session_id: str) -> bool:
        """Whether another message stands where this one does."""
        if index > len(self.path):
            return False
        above = self.path[index - 1].id if index else None
        entry = self.composed.entries[index]
        siblings = await self.store.children(above, session_id)
        return any(sibling.role == entry.role and sibling.text != entry.text for sibling in siblings)
