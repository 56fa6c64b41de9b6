"""An engine without a model: it plays replies from a script, and keeps books of what a prefix cache would reuse.

It has the interface of `EngineClient` and its promises; the same tests run on the real one where the model matters.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from engine.config import CacheConfig, EngineConfig, Tier
from engine.errors import EngineUnavailable, ModelLoadError
from engine.protocol import (
    CacheLog,
    Capabilities,
    Configured,
    Demoted,
    Dropped,
    Estimated,
    Finished,
    FinishReason,
    Miss,
    Pinned,
    Prefetched,
    Progress,
    Rejected,
    Submit,
    Tokens,
    Usage,
)
from engine.state import EngineState

END = 2
Script = Callable[[Submit, int], list[int]]


class FakeEngine:
    """Each token waits for `gate`, which closes after `tokens_until_pause`; `tokens_until_death` ends in a crash.

    `detail` is what it says of every reply that ends at its length. `cold` are the tokens that it claims to have taken
    from host and disk, where it reuses as many; `miss` is why it claims to have found no more. Each prefetch waits for
    `prefetch_gate`.
    """

    def __init__(self, model_path: Path, script: Script, context_length: int = 8192) -> None:
        self.script = script
        self.capabilities = Capabilities(
            model_name="fake-smollm2",
            model_path=str(model_path),
            fingerprint="f" * 16,
            device="cpu",
            dtype="float32",
            weights="float32",
            attention="none",
            context_length=context_length,
            vocab_size=49152,
            eos_ids=[END],
            block_size=32,
            total_blocks=64,
            kv_bytes_per_token=1,
            threads=1,
            commands=[],
        )
        self.state = EngineState("ready", capabilities=self.capabilities)
        self.started_at = 0.0
        self.config = EngineConfig(cache_dir="", model="smollm2")
        self.others: dict[str, Capabilities | str] = {}  # further models by source; a text is why one is refused
        self.loaded: list[tuple[str, str | None, str, str]] = []
        self.load_begun, self.load_gate = asyncio.Event(), asyncio.Event()  # each load waits for the gate
        self.load_gate.set()
        self.served = {self.capabilities.fingerprint}
        self.submits: list[Submit] = []
        self.cancelled: list[str] = []
        self._ended_samples: set[tuple[str, int]] = set()
        self.dropped: list[str] = []
        self.closed: list[str] = []  # streams left before their end
        self.gate = asyncio.Event()
        self.gate.set()
        self.tokens_until_death: int | None = None
        self.tokens_until_pause: int | None = None
        self.reject: Rejected | None = None
        self.detail = ""
        self.cold = (0, 0)
        self.miss: Miss | None = None
        self.pins: list[tuple[str, bool, float | None]] = []
        self.pin_refusal = ""
        self.prefetches: list[tuple[str, list[int]]] = []
        self.left: list[str] = []  # whose prefetch was cancelled
        self.prefetch_gate = asyncio.Event()
        self.prefetch_gate.set()
        self.estimates: list[list[int]] = []
        self.estimated_s: float | None = 0.125
        self.on_cache_log: Callable[[CacheLog], None] | None = None
        self._changed = asyncio.Event()
        self._known: list[tuple[str, str, list[int]]] = []  # model, session, ids
        self._wake: dict[str, asyncio.Event] = {}

    def set_state(self, state: EngineState) -> None:
        self.state = state
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def serves(self, fingerprint: str) -> bool:
        return fingerprint in self.served

    async def load(
        self, model: str, adapter: str | None = None, dtype: str = "auto", weights: str = "auto"
    ) -> Capabilities:
        self.loaded.append((model, adapter, dtype, weights))
        self.load_begun.set()
        await self.load_gate.wait()
        found = self.others.get(f"{model}+{adapter}" if adapter else model, f"no model {model!r}")
        if isinstance(found, str):
            raise ModelLoadError(found)
        self.served.add(found.fingerprint)
        return found

    async def watch(self) -> AsyncIterator[EngineState]:
        while True:
            changed = self._changed
            yield self.state
            await changed.wait()

    async def cancel(self, request_id: str, index: int | None = None) -> None:
        self.cancelled.append(request_id)
        if index is not None:
            self._ended_samples.add((request_id, index))
        elif request_id in self._wake:
            self._wake[request_id].set()

    def _require_ready(self) -> None:
        if self.state.phase != "ready":
            raise EngineUnavailable(f"the engine is {self.state.phase}")

    async def estimate(
        self, token_ids: list[int], salt: bytes = b"", shared_len: int = 0, model: str = "", session_id: str = ""
    ) -> Estimated:
        self._require_ready()
        self.estimates.append(token_ids)
        reused, total = self._reused(token_ids, model), len(token_ids)
        return Estimated(
            call_id="",
            prompt_tokens=total,
            device_tokens=reused,
            computed_tokens=total - reused,
            seconds=self.estimated_s,
            refused=self.reject,
        )

    async def prefetch(
        self, session_id: str, token_ids: list[int], salt: bytes = b"", shared_len: int = 0, model: str = ""
    ) -> Prefetched:
        self._require_ready()
        self.prefetches.append((session_id, token_ids))
        try:
            await self.prefetch_gate.wait()
        except asyncio.CancelledError:
            self.left.append(session_id)
            raise
        return Prefetched(call_id="", device_tokens=len(token_ids), host_tokens=0, disk_tokens=0)

    async def pin(self, session_id: str, pinned: bool, ttl: float | None = None, *, again: bool = False) -> Pinned:
        self._require_ready()
        if pinned and not again and self.pin_refusal:
            return Pinned(call_id="", pinned=False, message=self.pin_refusal)
        self.pins.append((session_id, pinned, ttl))
        return Pinned(call_id="", pinned=pinned)

    async def demote(self, session_id: str, to: Tier | None) -> Demoted:
        self._require_ready()
        return Demoted(call_id="", blocks=0, bytes=0)

    async def configure(self, cache: CacheConfig) -> Configured:
        self._require_ready()
        return Configured(call_id="", cache=cache)

    async def drop(self, session_id: str) -> Dropped:
        self._require_ready()
        self.dropped.append(session_id)
        return Dropped(call_id="", blocks=0, bytes=0)

    async def stream(self, submit: Submit) -> AsyncIterator[Progress | Tokens | Finished | Rejected]:
        try:
            async for event in self._play(submit):
                yield event
        except (GeneratorExit, asyncio.CancelledError):
            self.closed.append(submit.request_id)
            raise

    async def _play(self, submit: Submit) -> AsyncIterator[Progress | Tokens | Finished | Rejected]:
        request_id = submit.request_id
        self.submits.append(submit)
        if self.reject is not None:
            yield Rejected(request_id=request_id, code=self.reject.code, message=self.reject.message, retryable=False)
            return
        cancel = self._wake[request_id] = asyncio.Event()
        reused = self._reused(submit.token_ids, submit.model)
        total = len(submit.token_ids)
        yield Progress(request_id=request_id, state="reading", reused=reused, read=total - reused, total=total)
        for index in range(submit.n):
            written: list[int] = []
            reason: FinishReason = "length"
            for token in self.script(submit, index)[: submit.max_tokens]:
                await self._gate_or(cancel)
                if cancel.is_set() or (request_id, index) in self._ended_samples:
                    reason = "cancelled"
                    break
                if self.tokens_until_death is not None:
                    self.tokens_until_death -= 1
                    if self.tokens_until_death < 0:
                        message = "the engine stopped unexpectedly (SIGKILL)"
                        yield Rejected(request_id=request_id, code="engine_died", message=message, retryable=True)
                        return
                if self.tokens_until_pause is not None:
                    self.tokens_until_pause -= 1
                    if self.tokens_until_pause == 0:
                        self.gate.clear()
                written.append(token)
                yield Tokens(request_id=request_id, index=index, token_ids=[token])
                await asyncio.sleep(0)
                if token in submit.stop_ids:
                    reason = "stop"
                    break
            miss = self._why(submit, reused)
            host, disk = self.cold if reused >= sum(self.cold) else (0, 0)
            self._known.append((submit.model, submit.session_id, [*submit.token_ids, *written[:-1]]))
            usage = Usage(
                prompt_tokens=total,
                device_tokens=reused - host - disk,
                host_tokens=host,
                disk_tokens=disk,
                restore_s=0.25 if host or disk else 0.0,
                miss=miss,
                computed_tokens=total - reused,
                recomputed_tokens=0,
                output_tokens=len(written),
                preemptions=0,
                queue_s=0.0,
                first_token_s=0.0,
                total_s=0.0,
            )
            detail = self.detail if reason == "length" else ""
            yield Finished(request_id=request_id, index=index, reason=reason, usage=usage, detail=detail)
            reused = total - 1

    async def _gate_or(self, cancel: asyncio.Event) -> None:
        waits = [asyncio.ensure_future(self.gate.wait()), asyncio.ensure_future(cancel.wait())]
        _, left = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in left:
            wait.cancel()

    def _why(self, submit: Submit, reused: int) -> Miss | None:
        if self.miss is not None or reused == len(submit.token_ids) - 1:
            return self.miss
        own = [ids for model, session, ids in self._known if (model, session) == (submit.model, submit.session_id)]
        cause = "diverged" if own and len(own[-1]) > reused else "new"
        return Miss(position=reused, cause=cause)  # type: ignore[arg-type]

    def _reused(self, prompt: list[int], model: str) -> int:
        best = 0
        for known in (ids for computed_by, _, ids in self._known if computed_by == model):
            common = next((i for i, (a, b) in enumerate(zip(known, prompt, strict=False)) if a != b), None)
            best = max(best, min(len(known), len(prompt)) if common is None else common)
        return min(best, len(prompt) - 1)
