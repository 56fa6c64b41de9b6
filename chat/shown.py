"""Stored records as the views that faces show. Knows both, and neither the database nor the engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import cast

from chat.turns import LiveTurn
from chat.views import Figures, MessageView, MissCause, MissView, Role
from storage.records import MessageRecord, TurnRecord


def message_view(message: MessageRecord, turn: TurnRecord | None, live: LiveTurn | None) -> MessageView:
    """A message with the figures of its turn; the one being written as `live` has it now."""
    view = MessageView(
        id=message.id,
        role=message.role,
        text=message.text,
        status=message.status,
        finish_reason=message.finish_reason,  # type: ignore[arg-type]
        error=message.error,
        figures=None if turn is None else _figures(turn),
        created_at=message.created_at,
    )
    if message.status != "streaming":
        return view
    if live is None or live.message_id != message.id:  # its end could not be saved
        return replace(view, status="interrupted")
    now = live.view
    return replace(
        view,
        text=now.text,
        status=now.status or "streaming",
        finish_reason=now.finish_reason,
        error=now.error,
        figures=now.figures,
    )


def context_tokens(path: Sequence[MessageRecord], turns: Mapping[str, TurnRecord]) -> int:
    """What a chat fills of the context: the last prompt as it was sent, and what follows it.

    Segments alone do not tell, because a prompt may leave the reasoning of earlier replies out.
    """
    last = next((index for index in reversed(range(len(path))) if path[index].id in turns), None)
    sent = 0 if last is None else turns[path[last].id].prompt_tokens
    return sent + sum(len(message.token_ids) for message in path[last or 0 :])


def _figures(turn: TurnRecord) -> Figures:
    return Figures(
        prompt_tokens=turn.prompt_tokens,
        reused_tokens=turn.device_tokens + turn.host_tokens + turn.disk_tokens,
        host_tokens=turn.host_tokens,
        disk_tokens=turn.disk_tokens,
        restore_s=turn.restore_s,
        miss=_miss(turn),
        computed_tokens=turn.computed_tokens,
        recomputed_tokens=turn.recomputed_tokens,
        output_tokens=turn.output_tokens,
        ttft_s=turn.ttft_s,
        tpot_s=turn.tpot_s,
    )


def _miss(turn: TurnRecord) -> MissView | None:
    if turn.miss_position is None:
        return None
    role, cause = cast(Role | None, turn.miss_role), cast(MissCause, turn.miss_cause)
    return MissView(turn.miss_position, turn.miss_message, role, cause, turn.miss_detail or "")
