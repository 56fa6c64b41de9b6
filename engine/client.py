"""The web side's hand on the engine: what may be asked of it, as methods. Knows the protocol and nothing of chats."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator

import msgspec

from engine.config import CacheConfig, Tier
from engine.connection import EngineConnection, StreamEvent
from engine.protocol import (
    Cancel,
    Capabilities,
    Check,
    Checked,
    Configure,
    Configured,
    Demote,
    Demoted,
    Drop,
    Dropped,
    Estimate,
    Estimated,
    Finished,
    GetSnapshot,
    Load,
    Loaded,
    Pin,
    Pinned,
    Prefetch,
    Prefetched,
    Rejected,
    Snapshot,
    Submit,
)


class EngineClient(EngineConnection):
    """One engine, as seen from the web side. Made for one asyncio loop; no method may be called from another thread."""

    async def stream(self, submit: Submit) -> AsyncIterator[StreamEvent]:
        """Submit, then yield what comes of it until the last `Finished`, or one `Rejected`.

        Closing the iterator early cancels the request. An engine that is not ready, or dies, is a `Rejected` with
        `retryable` set. Consumers may be slow: events wait for them here, the engine does not.
        """
        if self._state.phase != "ready":
            yield self._not_ready(submit.request_id)
            return
        if submit.request_id in self._streams:
            raise ValueError(f"request id {submit.request_id!r} is in use")
        events: asyncio.Queue[StreamEvent] = asyncio.Queue()
        self._streams[submit.request_id] = events
        left = submit.n
        try:
            self._send(submit)
            while left > 0:
                event = await events.get()
                if isinstance(event, Finished):
                    left -= 1
                elif isinstance(event, Rejected):
                    left = 0
                yield event
        finally:
            del self._streams[submit.request_id]
            if left > 0:
                self._send(Cancel(request_id=submit.request_id))

    async def cancel(self, request_id: str, index: int | None = None) -> None:
        """Stop a request, or one sample of it, within one step; it ends with `Finished(reason="cancelled")`."""
        self._send(Cancel(request_id=request_id, index=index))

    async def load(
        self, model: str, adapter: str | None = None, dtype: str = "auto", weights: str = "auto"
    ) -> Capabilities:
        """Have another model served, or find out that it is. Takes from milliseconds to minutes; `state.loads` tells.

        Raises `ModelLoadError` when it cannot be, `EngineUnavailable` when the engine is not ready or dies meanwhile.
        """
        call = Load(call_id=self._call_id(), model=model, adapter=adapter, dtype=dtype, weights=weights)
        try:
            return (await self._call(call, Loaded)).capabilities
        finally:
            self._note_load(call.call_id, None)

    async def drop(self, session_id: str) -> Dropped:
        """Forget every block that only this session holds."""
        return await self._call(Drop(call_id=self._call_id(), session_id=session_id), Dropped)

    async def estimate(
        self, token_ids: list[int], salt: bytes = b"", shared_len: int = 0, model: str = "", session_id: str = ""
    ) -> Estimated:
        """What a prompt would find in the cache now, and how long its first token would take."""
        call = Estimate(
            call_id=self._call_id(),
            model=model,
            session_id=session_id,
            token_ids=token_ids,
            salt=salt,
            shared_len=shared_len,
        )
        return await self._call(call, Estimated)

    async def prefetch(
        self, session_id: str, token_ids: list[int], salt: bytes = b"", shared_len: int = 0, model: str = ""
    ) -> Prefetched:
        """Bring what the tiers below hold of a prompt to the device. Cancelling this ends it early."""
        call_id = self._call_id()
        call = Prefetch(
            call_id=call_id,
            model=model,
            session_id=session_id,
            token_ids=token_ids,
            salt=salt,
            shared_len=shared_len,
        )
        try:
            return await self._call(call, Prefetched)
        except asyncio.CancelledError:
            self._send(Cancel(request_id=call_id))
            raise

    async def pin(self, session_id: str, pinned: bool, ttl: float | None = None, *, again: bool = False) -> Pinned:
        """Have a session's blocks stay where they are, or no longer; `Pinned.message` says why not.

        `again`: an earlier engine has taken this pin, so this one does not refuse it.
        """
        pin = Pin(call_id=self._call_id(), session_id=session_id, pinned=pinned, again=again, ttl=ttl)
        return await self._call(pin, Pinned)

    async def demote(self, session_id: str, to: Tier | None) -> Demoted:
        """Take a session's idle blocks off the tiers above `to`; None: out of all."""
        return await self._call(Demote(call_id=self._call_id(), session_id=session_id, to=to), Demoted)

    async def configure(self, cache: CacheConfig) -> Configured:
        """Change what the tiers may hold; `Configured.message` says why not. A restarted engine keeps the change."""
        answer = await self._call(Configure(call_id=self._call_id(), cache=cache), Configured)
        if not answer.message:
            self._config = msgspec.structs.replace(self._config, cache=cache)
        return answer

    async def snapshot(self) -> Snapshot:
        """Gauges and counters."""
        return await self._call(GetSnapshot(call_id=self._call_id()), Snapshot)

    async def check(self) -> Checked:
        """Run the conservation law on the live engine."""
        return await self._call(Check(call_id=self._call_id()), Checked)


def new_request_id() -> str:
    """A fresh request id."""
    return uuid.uuid4().hex
