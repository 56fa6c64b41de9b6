"""The chats: whose they are, what was said so far, and what somebody says next. Knows no engine."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field

from tests.stress.model import CONTEXT, FIRST, VOCABULARY

USERS, PRESETS = 20, (70, 48, 33)  # people, and tokens of the presets that they share
LONGEST_START, LONGEST_MESSAGE, LONGEST_REPLY = 380, 48, 40  # tokens
LATELY, SHARE_LATELY = 12, 0.35  # chats that were had last, and how often it is one of those again


@dataclass(eq=False)
class Chat:
    """One session. `history` begins with the preset; `lock` is held by its turn; `deletions` counts them.

    `alone` is false once another chat has had a part of the same history.
    """

    name: str
    salt: bytes
    preset: list[int]
    history: list[int]
    last_prompt: list[int] = field(default_factory=list)
    alone: bool = True
    deletions: int = 0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def cut(self, rng: random.Random) -> None:
        """Go back to some point after the preset."""
        self.history = self.history[: rng.randint(len(self.preset), max(len(self.preset), len(self.history) - 1))]

    def next_prompt(self, rng: random.Random, reply: int) -> list[int]:
        """What was said and something new; where the context would not hold a reply of so many tokens, it is cut."""
        message = tokens(rng, rng.randint(1, LONGEST_MESSAGE))
        while len(self.history) + len(message) + reply > CONTEXT:
            self.cut(rng)
        return [*self.history, *message]


class Chats:
    """All of them, and whose turn it is."""

    def __init__(self, count: int, rng: random.Random) -> None:
        salts = [rng.randbytes(16) for _ in range(USERS)]
        presets = [tokens(rng, length) for length in PRESETS]
        self.all = [
            Chat(
                f"chat-{number}", salts[number % USERS], preset, [*preset, *tokens(rng, rng.randint(0, LONGEST_START))]
            )
            for number, preset in enumerate(rng.choices(presets, k=count))
        ]
        self._lately: list[Chat] = []

    @property
    def tokens(self) -> int:
        """Of all histories."""
        return sum(len(chat.history) for chat in self.all)

    def choose(self, rng: random.Random) -> Chat:
        """Any chat; some of the time one that was had lately."""
        lately = self._lately and rng.random() < SHARE_LATELY
        chat = rng.choice(self._lately if lately else self.all)
        if chat not in self._lately:
            self._lately = [*self._lately, chat][-LATELY:]
        return chat

    def relative(self, chat: Chat, rng: random.Random) -> Chat | None:
        """Another chat of the same person under the same preset."""
        others = [other for other in self.all if other.salt == chat.salt and other.preset is chat.preset]
        return rng.choice([other for other in others if other is not chat] or [None])


def tokens(rng: random.Random, count: int) -> list[int]:
    """Something to say."""
    return [rng.randrange(FIRST, VOCABULARY) for _ in range(count)]
