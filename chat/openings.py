"""What a template writes right before a reply, in token ids. Knows no chat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from chat.encoding import TextEncoder
from chat.template_traits import Traits
from chat.thinking import Marks


@dataclass(frozen=True)
class Openings:
    """The `generation` prompt, after which a reply is sampled, and what `history` has in its place.

    Both are empty where a template writes nothing of its own there. `reasons`: the generation prompt ends inside the
    reasoning, so that a reply begins there.
    """

    generation: tuple[int, ...]
    history: tuple[int, ...]
    reasons: bool

    @classmethod
    def of(cls, encoder: TextEncoder, traits: Traits, marks: Marks | None) -> Openings:
        """Those of a template with these traits."""
        bare = encoder.encode_bare(traits.before)

        def after(text: str) -> tuple[int, ...]:
            whole = encoder.encode_bare(traits.before + text)
            return tuple(whole[len(bare) :]) if whole[: len(bare)] == bare else ()

        opening, rest = "", ""
        if marks is not None:
            _, opening, rest = traits.generation.rpartition(marks.opening)
        reasons = marks is not None and bool(opening) and marks.closing not in rest
        return cls(after(traits.generation), after(traits.history), reasons)

    def end(self, segment: Sequence[int]) -> bool:
        """Whether a segment ends in the generation prompt, so that a reply can follow it."""
        start = len(segment) - len(self.generation)
        return bool(segment) and start >= 0 and tuple(segment[start:]) == self.generation

    def asked(self, segments: Sequence[tuple[int, ...]], index: int) -> bool:
        """Whether the reply at `index` was sampled after a generation prompt, and not put into the chat as a text."""
        return index > 0 and self.end(segments[index - 1])

    def in_history(self, segment: tuple[int, ...]) -> tuple[int, ...]:
        """A segment that ends in the generation prompt, as it is once the reply is there."""
        return (*segment[: len(segment) - len(self.generation)], *self.history)
