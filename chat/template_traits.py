"""What a chat template does with the beginning of a chat, found by trying. Knows text alone, no tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from chat.errors import TemplateError
from chat.rendering import Message, Renderer

PROBED_AT = 1e9  # seconds since the epoch: any moment, but the same for all
REPLIES = chr(0x10FFFC), chr(0x10FFFD)  # texts that no template writes of itself


@dataclass(frozen=True)
class Traits:
    """How a template treats a chat that grows.

    Whether what it wrote up to the end of a user's message stays as it was (`stable`; with a system prompt,
    `stable_with_system`), what it writes between that and a reply when it asks for one (`generation`) and when it has
    it (`history`), what comes before both in the probed chat (`before`), and what it writes after a reply (`closing`).
    """

    stable: bool
    stable_with_system: bool
    before: str
    generation: str
    history: str
    closing: str


def probe(renderer: Renderer) -> Traits:
    """Render a few small chats. Raises TemplateError when the template refuses even those."""
    before, generation, history = _opening(renderer)
    messages = [_user("one"), _reply(REPLIES[0]), _user("two")]
    _, written, after = renderer.render(messages, generation=True, at=PROBED_AT).rpartition(REPLIES[0])
    try:
        with_system = _opening(renderer, {"role": "system", "content": "be brief"})[2]
    except TemplateError:  # no such chat will come so far
        with_system = ""
    return Traits(
        history is not None, with_system is not None, before, generation, history or "", after if written else ""
    )


def _opening(renderer: Renderer, *first: Message) -> tuple[str, str, str | None]:
    """`before`, `generation` and `history` of a chat that begins with `first`; the last is None if it is not stable."""
    chat = [*first, _user("one"), _reply(REPLIES[0]), _user("two"), _reply(REPLIES[1]), _user("three")]
    counts = list(accumulate([len(first) + 1, 2, 2]))
    asking = [renderer.render(chat[:count], generation=True, at=PROBED_AT) for count in counts]
    heads = [_head(renderer, chat[:count], asked) for count, asked in zip(counts, asking, strict=True)]
    histories = [
        asked.removeprefix(head).partition(reply)[0] if asked.startswith(head) and reply in asked else None
        for head, asked, reply in zip(heads, asking[1:], REPLIES, strict=False)
    ]
    history = histories[0] if histories[0] == histories[1] else None
    return heads[0], asking[0].removeprefix(heads[0]), history


def _head(renderer: Renderer, messages: Sequence[Message], asked: str) -> str:
    """The part of a rendering that comes before the request for a reply; all of it where that cannot be told."""
    try:
        bare = renderer.render(messages, generation=False, at=PROBED_AT)
    except TemplateError:
        return asked
    return bare if asked.startswith(bare) else asked


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _reply(text: str) -> Message:
    return {"role": "assistant", "content": text}
