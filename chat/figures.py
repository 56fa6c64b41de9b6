"""The figures of a running server: what its last replies cost, its cache, its engine; and the route that tells them.

For whoever wants to know how the server does, such as `doctor --url`. Holds no text and no id of any chat.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec
import psutil
from fastapi import APIRouter
from starlette.responses import Response

from chat.machine import usable_cores
from chat.settings import VERSION
from chat.views import Figures
from engine.protocol import Capabilities, Phase, Snapshot, Usage

if TYPE_CHECKING:
    from chat.service import ChatService

PATH = "/api/admin/figures"
REMEMBERED = 200  # replies


class RecentReply(msgspec.Struct, frozen=True, kw_only=True):
    """What one reply cost: tokens as in `chat.views.Figures`, seconds.

    Of the `ttft_s` from the request to its first text, `queue_s` passed until the engine let it in and `read_s` more
    until the first token; the rest was outside the engine. It took `total_s` and ended at `ended_at`, on the clock of
    `ServerFigures.now`. `first`: no other reply to the same prompt has read it before.
    `miss_cause` and `miss_detail` are those of `chat.views.MissView`, "" where nothing was missed.
    """

    ended_at: float
    total_s: float
    prompt_tokens: int
    reused_tokens: int
    computed_tokens: int
    recomputed_tokens: int
    output_tokens: int
    ttft_s: float | None
    tpot_s: float | None
    queue_s: float
    read_s: float | None
    first: bool
    host_tokens: int = 0
    disk_tokens: int = 0
    restore_s: float = 0.0
    miss_cause: str = ""
    miss_detail: str = ""


class GoneBlocks(msgspec.Struct, frozen=True, kw_only=True):
    """How many blocks have left `tier` for none below it since the server's start, for one reason."""

    tier: str
    reason: str
    blocks: int


class ServerFigures(msgspec.Struct, frozen=True, kw_only=True):
    """A server now. `replies` are the last ones since its start, the newest last; `snapshot` None: no engine runs.

    `cores` are those that the server may use, `load` is how many threads of the whole machine wanted one, on average
    over the last minute.
    """

    version: str
    pid: int
    now: float
    uptime_s: float
    phase: Phase
    stage: str
    message: str
    cores: int
    load: float
    capabilities: Capabilities | None
    snapshot: Snapshot | None
    replies: list[RecentReply]
    gone: list[GoneBlocks] = []


class RecentReplies:
    """The last `REMEMBERED` replies that came to an end, with when they did."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.started_at = clock()
        self._replies: deque[RecentReply] = deque(maxlen=REMEMBERED)

    def note(self, figures: Figures, usage: Usage, total_s: float, *, first: bool) -> None:
        """Remember a reply that ended just now: as people had it, and as the engine counted it."""
        self._replies.append(
            RecentReply(
                ended_at=self.clock(),
                total_s=total_s,
                prompt_tokens=figures.prompt_tokens,
                reused_tokens=figures.reused_tokens,
                computed_tokens=figures.computed_tokens,
                recomputed_tokens=figures.recomputed_tokens,
                output_tokens=figures.output_tokens,
                ttft_s=figures.ttft_s,
                tpot_s=figures.tpot_s,
                queue_s=usage.queue_s,
                read_s=None if usage.first_token_s is None else usage.first_token_s - usage.queue_s,
                first=first,
                host_tokens=figures.host_tokens,
                disk_tokens=figures.disk_tokens,
                restore_s=figures.restore_s,
                miss_cause=figures.miss.cause if figures.miss else "",
                miss_detail=figures.miss.detail if figures.miss else "",
            )
        )

    def all(self) -> list[RecentReply]:
        """The replies, the newest last."""
        return list(self._replies)


def figures_router(service: ChatService) -> APIRouter:
    """GET /api/admin/figures: `ServerFigures` as JSON, whatever the engine's state."""
    router = APIRouter(include_in_schema=False)

    @router.get(PATH)
    async def figures() -> Response:
        """Answered from memory, and by the engine between two of its steps."""
        snapshot, state, recent = await service.snapshot(), service.status(), service.recent
        answer = ServerFigures(
            version=VERSION,
            pid=os.getpid(),
            now=recent.clock(),
            uptime_s=recent.clock() - recent.started_at,
            phase=state.phase,
            stage=state.stage,
            message=state.message,
            cores=usable_cores(),
            load=psutil.getloadavg()[0],
            capabilities=state.capabilities,
            snapshot=None if snapshot is None else msgspec.structs.replace(snapshot, sessions={}),
            replies=recent.all(),
            gone=[
                GoneBlocks(tier=tier, reason=reason, blocks=blocks)
                for (tier, reason), blocks in service.cache.gone.items()
            ],
        )
        return Response(msgspec.json.encode(answer), media_type="application/json")

    return router
