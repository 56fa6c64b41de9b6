"""The messages of a chat as the ledger sees them. Knows no tokenizer and no template."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from chat.views import Role


@dataclass(frozen=True)
class Entry:
    """One message as the ledger sees it; `token_ids` None: it has no segment yet (for this tokenizer and template).

    `at`: when it was stored, in seconds since the epoch; None: it is new.
    """

    role: Role
    text: str
    token_ids: tuple[int, ...] | None = None
    at: float | None = None

    @property
    def ids(self) -> tuple[int, ...]:
        """The segment; empty where there is none."""
        return self.token_ids or ()


@dataclass(frozen=True)
class Layout:
    """A prompt; where each message begins in it (None: it is rendered anew); which are not sent as they are kept."""

    prompt: list[int]
    starts: tuple[int, ...] | None
    altered: frozenset[int]


def stretches(entries: Sequence[Entry]) -> Iterator[tuple[Sequence[Entry], Entry | None]]:
    """Each reply with the messages between the one before and it; last, with None, the messages after all replies."""
    start = 0
    for index, entry in enumerate(entries):
        if entry.role == "assistant":
            yield entries[start:index], entry
            start = index + 1
    yield entries[start:], None
