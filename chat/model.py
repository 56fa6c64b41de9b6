"""A loaded model as chats see it: its tokenizer and template, its limits, and requests made for it.

Knows no session and no storage beyond a message's record. The engine process holds the model; here is only what turns
text into tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from chat.errors import PromptTooLong
from chat.templates import ChatTemplate, Entry
from chat.views import TurnOptions
from engine.client import new_request_id
from engine.protocol import Capabilities, Sampling, Submit
from storage.records import MessageRecord

DEFAULT_MAX_TOKENS = 1024  # of a reply whose length nobody chose
REASONING_MAX_TOKENS = 8192  # the same where the reply may begin with reasoning
INLINE_CHARACTERS, INLINE_MESSAGES = 20_000, 64  # larger chats are rendered and encoded beside the event loop


@dataclass(frozen=True)
class Composed:
    """A chat ready to be sent: its messages, their segments (one each), and the prompt.

    The first `shared_len` tokens of the prompt were typed by no user. `starts` says where each message begins in it
    (None: the whole is rendered anew), `rewritten` which messages are not as they were sent before.
    """

    entries: tuple[Entry, ...]
    segments: tuple[tuple[int, ...], ...]
    prompt: list[int]
    shared_len: int
    starts: tuple[int, ...] | None = None
    rewritten: frozenset[int] = frozenset()


@dataclass(frozen=True)
class LoadedModel:
    """A model that the engine serves. `sampling` is what it recommends; `id` and `name` are the catalog's."""

    capabilities: Capabilities
    template: ChatTemplate
    sampling: Sampling
    id: str
    name: str

    def entry(self, message: MessageRecord) -> Entry:
        """A stored message for the ledger; its ids count only if this model's template made them, or its vocabulary
        was sampled from.
        """
        made = message.tokenizer == self.template.rendering
        sampled = message.role == "assistant" and message.tokenizer == self.template.identity
        return Entry(message.role, message.text, message.token_ids if made or sampled else None, message.created_at)

    def names(self, entry: Entry) -> str:
        """What the ids of a message are stored as belonging to: a sampled reply's to the vocabulary alone."""
        sampled = entry.role == "assistant" and entry.token_ids is not None
        return self.template.identity if sampled else self.template.rendering

    async def compose(self, entries: Sequence[Entry]) -> Composed:
        """Segments and prompt of these messages. Raises TemplateError, PromptTooLong, InvalidText."""

        limit = self.capabilities.context_length

        def work() -> Composed:
            segments = self.template.fill(entries, limit)
            layout = self.template.lay_out(entries, segments)
            shared_len = self.template.shared_length(entries, segments)
            anew = (at for at, entry in enumerate(entries) if entry.at is not None and entry.token_ids != segments[at])
            rewritten = frozenset(anew) | layout.altered
            return Composed(tuple(entries), tuple(segments), layout.prompt, shared_len, layout.starts, rewritten)

        large = len(entries) > INLINE_MESSAGES or sum(len(entry.text) for entry in entries) > INLINE_CHARACTERS
        composed = await asyncio.to_thread(work) if large else work()
        if len(composed.prompt) >= limit:
            raise PromptTooLong(len(composed.prompt), limit)
        return composed

    def submit(
        self, session_id: str, composed: Composed, options: TurnOptions, *, usual: Sampling, salt: bytes, n: int = 1
    ) -> Submit:
        """The request for a chat, with the `usual` sampling where none was chosen.

        The reply may be as long as asked for; where the context leaves less, the engine ends it and says so.
        """
        usual_length = REASONING_MAX_TOKENS if self.template.notes.thinking else DEFAULT_MAX_TOKENS
        return Submit(
            request_id=new_request_id(),
            session_id=session_id,
            model=self.capabilities.fingerprint,
            token_ids=composed.prompt,
            max_tokens=min(options.max_tokens or usual_length, self.capabilities.context_length),
            sampling=options.sampling or usual,
            stop_ids=sorted({*self.capabilities.eos_ids, *self.template.end_ids}),
            n=n,
            salt=salt,
            shared_len=composed.shared_len,
        )
