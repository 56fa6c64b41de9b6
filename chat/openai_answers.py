"""A turn in the form that OpenAI's clients expect: one body, or server-sent events.

Knows what a turn has, and nothing of how it is sent. A reply's reasoning is told apart from its `content`, as
`reasoning_content`, which is there only where there is some. Beside OpenAI's fields an answer carries one object,
`keepwarm`, in the last chunk when streamed:

    tokens              where the tokens came from: {"device": found in the pool, "host", "disk": brought back from main
                        memory and from disk, "computed": read by the model, "recomputed": read again because the pool
                        was full meanwhile, "output": written}
    restore_s           seconds that were spent bringing tokens back
    miss                why the tokens from some point on were not found, or null where none but the last was missed:
                        {"position": the first of them, "message_index": the request's message in which it is (null
                        where the template renders the chat anew), "cause": "new" (nobody had read it), "diverged" (the
                        chat went on otherwise before), "edited" (the message took the place of another), "template"
                        (it is written otherwise than it was), "other_model" (another model wrote the last reply),
                        "evicted" (it was there and is gone), "lost" (the engine was started anew and had it in no
                        tier), "unreadable" (its copy failed the check), "slower" (reading it was quicker than loading
                        it), "detail": more words, or ""}
    matched_messages    how many of the request's messages were found in storage, so that their exact ids were used
    ttft_s, tpot_s      seconds to the first text, and per output token after the first
    total_s             seconds of the whole turn
    finish_details      for each choice, a sentence about why it ended where its finish_reason does not tell enough (it
                        reached the end of the context, or memory was full), else null
    ignored_parameters  parameters of the request that this server does not know

With several choices (`n`), tokens of the prompt are those of the first, output tokens are summed.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from chat.api_turn import ApiTurn
from chat.generation import Piece
from chat.openai_types import ChatRequest, finish_reason
from chat.refusals import error_body
from chat.thinking import STORED, Splitter, Trimmer
from chat.views import EstimateView, MissView
from storage.reasoning import split_reply

NAMES = {"reasoning": "reasoning_content", "answer": "content"}


@dataclass
class Answer:
    """A turn in OpenAI's form."""

    turn: ApiTurn
    chat: ChatRequest

    def __post_init__(self) -> None:
        self._head = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": self.turn.model.name,
            "system_fingerprint": self.turn.model.capabilities.fingerprint,
        }

    def whole(self) -> dict[str, Any]:
        """The answer when it is not streamed."""
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", **_content(reply.content.text), "refusal": None},
                "logprobs": None,
                "finish_reason": finish_reason(reply.finish_reason),
            }
            for index, reply in enumerate(self.turn.replies)
        ]
        body = {"object": "chat.completion", **self._head, "choices": choices}
        return {**body, "usage": self._usage(), "keepwarm": self._extension()}

    async def chunks(self) -> AsyncIterator[bytes]:
        """The answer as server-sent events; an error in the middle is the last event."""
        count = len(self.turn.replies)
        for index in range(count):
            yield self._chunk(index, {"role": "assistant", "content": ""})
        ended = 0
        parts = [_Parts() for _ in range(count)]
        async for event in self.turn.events():
            told = parts[event.index].tell(event.text) if isinstance(event, Piece) else parts[event.index].end()
            for name, text in told:
                yield self._chunk(event.index, {name: text})
            if isinstance(event, Piece):
                continue
            ended += 1
            reason = finish_reason(self.turn.replies[event.index].finish_reason)
            last = ended == count and not self.chat.include_usage
            yield self._chunk(event.index, {}, reason, {"keepwarm": self._extension()} if last else {})
        if (cut := self.turn.cut_by()) is not None:
            for index, rest in enumerate(parts):
                for name, text in rest.end():
                    yield self._chunk(index, {name: text})
            yield sent_event(error_body(cut))
            return
        if self.chat.include_usage:
            tail = {"choices": [], "usage": self._usage(), "keepwarm": self._extension()}
            yield sent_event({"object": "chat.completion.chunk", **self._head, **tail})
        yield b"data: [DONE]\n\n"

    def _chunk(
        self, index: int, delta: dict[str, str], reason: str | None = None, extra: dict[str, Any] | None = None
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}
        body: dict[str, Any] = {"object": "chat.completion.chunk", **self._head, "choices": [choice]}
        if self.chat.include_usage:
            body["usage"] = None
        return sent_event({**body, **(extra or {})})

    def _usage(self) -> dict[str, Any]:
        first = self.turn.replies[0].figures(self.turn.started)
        prompt = self.turn.prompt_tokens
        output = sum(reply.content.sampled for reply in self.turn.replies)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "total_tokens": prompt + output,
            "prompt_tokens_details": {"cached_tokens": first.reused_tokens if first else 0},
        }

    def _extension(self) -> dict[str, Any]:
        first = self.turn.replies[0].figures(self.turn.started)
        usages = [reply.usage for reply in self.turn.replies if reply.usage is not None]
        return {
            "tokens": {
                "device": first.device_tokens if first else 0,
                "host": first.host_tokens if first else 0,
                "disk": first.disk_tokens if first else 0,
                "computed": first.computed_tokens if first else 0,
                "recomputed": first.recomputed_tokens if first else 0,
                "drafted": sum(usage.drafted_tokens for usage in usages),
                "accepted": sum(usage.accepted_tokens for usage in usages),
                "output": sum(reply.content.sampled for reply in self.turn.replies),
            },
            "restore_s": first.restore_s if first else 0.0,
            "miss": _miss(first.miss) if first and first.miss else None,
            "matched_messages": self.turn.matched_messages,
            "ttft_s": first.ttft_s if first else None,
            "tpot_s": first.tpot_s if first else None,
            "total_s": self.turn.total_s(),
            "finish_details": [reply.detail or None for reply in self.turn.replies],
            "ignored_parameters": self.chat.ignored,
        }


def sent_event(body: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


class _Parts:
    """The reasoning and the answer of one reply as they grow, under OpenAI's names."""

    def __init__(self) -> None:
        self._splitter = Splitter(STORED)
        self._trimmer = Trimmer()

    def tell(self, piece: str) -> list[tuple[str, str]]:
        """What `piece` adds."""
        return [(NAMES[part], text) for part, text in self._trimmer.trim(self._splitter.push(piece))]

    def end(self) -> list[tuple[str, str]]:
        """What was kept back until the reply is over."""
        return [(NAMES[part], text) for part, text in self._trimmer.trim(self._splitter.flush())]


def _miss(miss: MissView) -> dict[str, Any]:
    return {
        "position": miss.position,
        "message_index": miss.message_index,
        "cause": miss.cause,
        "detail": miss.detail,
    }


def _content(text: str) -> dict[str, str]:
    parts = split_reply(text)
    return {"content": parts.answer, **({"reasoning_content": parts.reasoning} if parts.reasoning else {})}


def estimate_body(found: EstimateView) -> dict[str, Any]:
    """An estimate, its tokens named as in `keepwarm`."""
    return {
        "prompt_tokens": found.prompt_tokens,
        "tokens": {
            "device": found.device_tokens,
            "host": found.host_tokens,
            "disk": found.disk_tokens,
            "computed": found.computed_tokens,
        },
        "seconds": found.seconds,
    }
