"""A turn of a person's chat: a task of the server that writes one reply, saves it, and is watched by any tabs.

Knows nothing of what a tab is. Closing every tab changes nothing for the turn; a second tab watches the same one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Protocol

from chat.generation import Ended, Generation, Piece
from chat.views import Figures, Status, TurnView
from engine.protocol import FinishReason, Progress
from storage.errors import StorageError, UnknownMessage
from storage.records import TurnRecord
from storage.store import Store

log = logging.getLogger(__name__)

SAVE_SECONDS = 1.0  # how much of a reply a killed server may lose


class Finisher(Protocol):
    """Called once, when a turn is over."""

    def __call__(self, turn: LiveTurn) -> None:
        """`turn` is done and saved."""


class LiveTurn:
    """One reply in the making. The turn's task is the only writer of `view` and of the stored message."""

    def __init__(
        self,
        store: Store,
        generation: Generation,
        *,
        session_id: str,
        message_id: str,
        on_done: Finisher,
        save_seconds: float = SAVE_SECONDS,
    ) -> None:
        self.session_id = session_id
        self.message_id = message_id
        self._store = store
        self._generation = generation
        self._on_done = on_done
        self._save_seconds = save_seconds
        self._view = TurnView(session_id, message_id, total=len(generation.submit.token_ids))
        self._stale = False  # whether `_view.text` lags behind the reply
        self._changed = asyncio.Event()
        self._unsaved = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def view(self) -> TurnView:
        """The reply as it is now."""
        if self._stale:
            self._view = replace(self._view, text=self._generation.replies[0].content.text)
            self._stale = False
        return self._view

    def start(self) -> None:
        """Begin; called once by the service that owns the turn."""
        self._task = asyncio.create_task(self._run(), name=f"turn {self.message_id}")

    async def watch(self, interval: float = 0.05) -> AsyncIterator[TurnView]:
        """The view now, then its changes, at most one per `interval` seconds; the first text and the end at once.

        Ends after a view whose state is "done". Any number may watch; none can slow the turn down.
        """
        seen = self.view
        yield seen
        due = time.monotonic() + interval
        while seen.state != "done":
            changed = self._changed
            now = self.view
            urgent = now.state == "done" or (now.text and not seen.text)
            wait = due - time.monotonic()
            if now is not seen and (urgent or wait <= 0):
                seen = now
                yield seen
                due = time.monotonic() + interval
                continue
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(changed.wait(), None if now is seen else wait)

    async def finished(self) -> TurnView:
        """The view once the turn is done."""
        if self._task is not None:
            await asyncio.wait([self._task])
        return self.view

    async def stop(self) -> TurnView:
        """End the reply where it is; what was written stays. Returns the view once the turn is done."""
        await self._generation.stop()
        return await self.finished()

    async def interrupt(self) -> None:
        """End the turn because the server ends: saved as "interrupted", to be retried later."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    # --- the task ---------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        saver = asyncio.create_task(self._save_growing())
        status: Status = "failed"
        error: str | None = None
        retryable = False
        try:
            async for event in self._generation.events():
                self._show(event)
            status, error, retryable = self._outcome()
        except asyncio.CancelledError:
            status, error, retryable = "interrupted", None, True
        except Exception:
            log.exception("a turn failed")
            error, retryable = "Something went wrong inside Keepwarm; the log has the details.", True
        finally:
            saver.cancel()
            await self._end(status, error, retryable)

    def _show(self, event: Progress | Piece | Ended) -> None:
        if isinstance(event, Progress):
            self._set(replace(self.view, state=event.state, reused=event.reused, read=event.read, total=event.total))
            return
        self._stale = True
        self._view = replace(self._view, state="writing")
        self._unsaved.set()
        self._notify()

    def _outcome(self) -> tuple[Status, str | None, bool]:
        failure, reply = self._generation.error, self._generation.replies[0]
        if failure is not None:
            return "failed", failure.message, failure.retryable
        if reply.finish_reason == "cancelled":
            return "stopped", reply.detail or None, True
        return "complete", reply.detail or None, False

    async def _end(self, status: Status, error: str | None, retryable: bool) -> None:
        reply = self._generation.replies[0]
        reply.content.finish()
        figures = reply.figures(self._generation.started)
        try:
            await self._save(status, reply.finish_reason, error)
            if figures is not None:
                await self._save_figures(figures, reply.finish_reason or "cancelled")
        except UnknownMessage:
            pass  # the chat was deleted meanwhile, and the reply with it
        except StorageError as failure:
            log.error("a reply could not be saved: %s", failure)
            error = f"The reply could not be saved: {failure}"
        finally:
            done = replace(
                self.view,
                state="done",
                text=reply.content.text,
                status=status,
                finish_reason=reply.finish_reason,
                error=error,
                retryable=retryable,
                figures=figures,
            )
            self._on_done(self)
            self._set(done)

    async def _save_growing(self) -> None:
        while True:
            await self._unsaved.wait()
            self._unsaved.clear()
            try:
                await self._save("streaming", None, None)
            except StorageError as failure:
                log.error("a growing reply could not be saved: %s", failure)
            await asyncio.sleep(self._save_seconds)

    async def _save(self, status: Status, finish_reason: FinishReason | None, error: str | None) -> None:
        content = self._generation.replies[0].content
        await self._store.update_message(
            self.message_id,
            text=content.text,
            token_ids=content.delivered_ids(),
            status=status,
            finish_reason=finish_reason,
            error=error,
        )

    async def _save_figures(self, figures: Figures, finish_reason: str) -> None:
        total_s = self._generation.total_s()
        model = self._generation.submit.model
        await self._store.add_turn(turn_record(self.message_id, figures, finish_reason, total_s, model))

    def _set(self, view: TurnView) -> None:
        self._view, self._stale = view, False
        self._notify()

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


def turn_record(message_id: str, figures: Figures, finish_reason: str, total_s: float, model: str) -> TurnRecord:
    """The figures of a reply as storage keeps them; `model` is the fingerprint of the one that wrote it."""
    miss = figures.miss
    return TurnRecord(
        message_id=message_id,
        prompt_tokens=figures.prompt_tokens,
        device_tokens=figures.device_tokens,
        host_tokens=figures.host_tokens,
        disk_tokens=figures.disk_tokens,
        computed_tokens=figures.computed_tokens,
        recomputed_tokens=figures.recomputed_tokens,
        output_tokens=figures.output_tokens,
        ttft_s=figures.ttft_s,
        tpot_s=figures.tpot_s,
        total_s=total_s,
        finish_reason=finish_reason,
        restore_s=figures.restore_s,
        fingerprint=model,
        miss_position=miss.position if miss else None,
        miss_message=miss.message_index if miss else None,
        miss_role=miss.role if miss else None,
        miss_cause=miss.cause if miss else None,
        miss_detail=miss.detail if miss else None,
    )
