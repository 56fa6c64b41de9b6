"""What a prompt would cost before it is sent: the engine is asked, and nothing changes."""

from __future__ import annotations

from typing import Protocol, TypeAlias

from chat.errors import NotReady
from chat.generation import error_of
from chat.model import Composed, LoadedModel
from chat.views import EstimateView
from engine.errors import EngineUnavailable
from engine.protocol import Estimated
from storage.records import UserRecord


class Estimator(Protocol):
    """The part of `EngineClient` that an estimate needs."""

    async def estimate(
        self, token_ids: list[int], salt: bytes = b"", shared_len: int = 0, model: str = "", session_id: str = ""
    ) -> Estimated:
        """What a prompt would find in the cache now, and how long its first token would take."""


Place: TypeAlias = tuple[list[int], bytes, int, str]


def place(user: UserRecord, model: LoadedModel, composed: Composed) -> Place:
    """A prompt as the engine's calls take it: ids, salt, length of the shared prefix, fingerprint of the model."""
    return composed.prompt, user.salt, composed.shared_len, model.capabilities.fingerprint


async def estimated(
    engine: Estimator, user: UserRecord, model: LoadedModel, composed: Composed, session_id: str
) -> EstimateView:
    """What this prompt would cost in that session.

    Raises NotReady where the engine is not, and for a prompt that is too long what its turn would fail with.
    """
    try:
        found = await engine.estimate(*place(user, model, composed), session_id=session_id)
    except EngineUnavailable as error:
        raise NotReady(f"{error}.") from error
    if found.refused is not None:
        raise error_of(found.refused)
    return EstimateView(
        found.prompt_tokens,
        found.device_tokens,
        found.host_tokens,
        found.disk_tokens,
        found.computed_tokens,
        found.seconds,
    )
