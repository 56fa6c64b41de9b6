"""The loaded model as chats see it: its tokenizer and template, its limits, and requests made for it.

Knows no session and no storage beyond a message's record. The engine process holds the model; here are only the files
that turn text into tokens, read again when the engine comes up with another model.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from chat.errors import ChatError, NotReady, PromptTooLong, UnusableModel
from chat.sampling import recommended
from chat.templates import ChatTemplate, Entry
from chat.thinking import Policy
from chat.views import ModelNotes, TurnOptions
from engine.client import EngineClient, new_request_id
from engine.protocol import Capabilities, Sampling, Submit
from storage.records import MessageRecord

DEFAULT_MAX_TOKENS = 1024  # of a reply whose length nobody chose
INLINE_CHARACTERS, INLINE_MESSAGES = 20_000, 64  # larger chats are rendered and encoded beside the event loop


@dataclass(frozen=True)
class Composed:
    """A chat ready to be sent: its messages, their segments (one each), and the prompt.

    The first `shared_len` tokens of the prompt were typed by no user.
    """

    entries: tuple[Entry, ...]
    segments: tuple[tuple[int, ...], ...]
    prompt: list[int]
    shared_len: int


@dataclass(frozen=True)
class LoadedModel:
    """What the engine serves now. `sampling` is what the model recommends."""

    capabilities: Capabilities
    template: ChatTemplate
    sampling: Sampling

    def entry(self, message: MessageRecord) -> Entry:
        """A stored message for the ledger; its ids count only if this model's tokenizer made them."""
        ids = message.token_ids if message.tokenizer == self.template.identity else None
        return Entry(message.role, message.text, ids, message.created_at)

    async def compose(self, entries: Sequence[Entry]) -> Composed:
        """Segments and prompt of these messages. Raises TemplateError, PromptTooLong, InvalidText."""

        limit = self.capabilities.context_length

        def work() -> Composed:
            segments = self.template.fill(entries, limit)
            prompt = self.template.prompt(entries, segments)
            return Composed(tuple(entries), tuple(segments), prompt, self.template.shared_length(entries, segments))

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
        return Submit(
            request_id=new_request_id(),
            session_id=session_id,
            token_ids=composed.prompt,
            max_tokens=min(options.max_tokens or DEFAULT_MAX_TOKENS, self.capabilities.context_length),
            sampling=options.sampling or usual,
            stop_ids=list(self.capabilities.eos_ids),
            n=n,
            salt=salt,
            shared_len=composed.shared_len,
        )


class Models:
    """Owns the loaded model's tokenizer and template; reads them once per model, beside the event loop."""

    def __init__(self, engine: EngineClient, thinking: Policy = "preserve") -> None:
        self._engine = engine
        self._thinking = thinking
        self._lock = asyncio.Lock()
        self._loaded: LoadedModel | None = None
        self._problem = ""

    @property
    def problem(self) -> str:
        """Why the model that the engine serves cannot chat, for people; "" when it can, or when there is none."""
        return self._problem if self._engine.state.phase == "ready" else ""

    @property
    def notes(self) -> ModelNotes:
        """What a person should know of the model that the engine serves."""
        loaded = self._loaded if self._engine.state.phase == "ready" else None
        return loaded.template.notes if loaded else ModelNotes()

    async def get(self) -> LoadedModel:
        """The loaded model. Raises NotReady while there is none, UnusableModel when it cannot chat."""
        state = self._engine.state
        if state.phase != "ready" or state.capabilities is None:
            raise NotReady(not_ready_sentence(state.phase, state.stage, state.message))
        capabilities = state.capabilities
        async with self._lock:
            if self._loaded is None or self._loaded.capabilities != capabilities:
                try:
                    self._loaded, self._problem = await asyncio.to_thread(_load, capabilities, self._thinking), ""
                except UnusableModel as error:
                    self._problem = error.message
                    raise
            return self._loaded

    async def follow(self) -> None:
        """Read each model's files as soon as the engine is ready, so that no first message waits for them."""
        async for state in self._engine.watch():
            if state.phase == "ready":
                try:
                    await self.get()
                except ChatError:
                    continue  # told by `problem`, and to whoever sends a message


def not_ready_sentence(phase: str, stage: str, message: str) -> str:
    """Why no reply can be written now, for people."""
    if phase == "loading":
        return f"The model is still loading{f' ({stage})' if stage else ''}; try again when it is ready."
    if phase == "restarting":
        return f"The engine is starting again{f' ({stage})' if stage else ''}; try again when it is ready."
    return message or f"The engine is {phase}."


def _load(capabilities: Capabilities, thinking: Policy) -> LoadedModel:
    template = ChatTemplate.load(capabilities.model_path, thinking)
    return LoadedModel(capabilities, template, recommended(capabilities.model_path, capabilities.model_name))
