"""What a request must satisfy before it may wait: it says no early, with the value, the limit and the fix."""

from __future__ import annotations

from dataclasses import dataclass

from engine.protocol import RejectCode, Submit

MAX_SAMPLES = 128
RAISE_IT, CLOSE_OTHERS = "raise device_kv", "close other programs"  # what helps where a pool is too small
# What keeps the scores of any model finite; beyond it a draw would be arbitrary.
SAMPLING = {
    "temperature": (0.0, 100.0),
    "top_k": (0, 2**31 - 1),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 100.0),
    "presence_penalty": (-100.0, 100.0),
    "frequency_penalty": (-100.0, 100.0),
}


@dataclass(frozen=True)
class Limits:
    """What the model and the pool can hold, in tokens and blocks.

    The pool has `total_blocks` now, and at most `most_blocks` when other models give way; `remedy` says how it may
    become larger.
    """

    context_length: int
    vocab_size: int
    block_size: int
    total_blocks: int
    most_blocks: int
    remedy: str = RAISE_IT

    def max_tokens(self, submit: Submit) -> int:
        """How long a reply may get: what was asked for, and no longer than the context."""
        return min(submit.max_tokens, self.context_length - len(submit.token_ids))

    @property
    def may_grow(self) -> bool:
        """Whether the pool would be larger if other models gave way."""
        return self.total_blocks < self.most_blocks

    @property
    def pool_full(self) -> str:
        """Why a reply that runs alone cannot go on."""
        return f"the pool of {self.total_blocks} blocks ({self.total_blocks * self.block_size} tokens) is full"

    @property
    def context_full(self) -> str:
        """Why a reply ends before it is as long as was asked for."""
        return f"the context of {self.context_length} tokens is full"

    def refusal(self, submit: Submit) -> tuple[RejectCode, str] | None:
        """Why this can never run; None when it can."""
        wrong = self._wrong_value(submit)
        if wrong is not None:
            return "invalid", wrong
        return self.too_much(len(submit.token_ids))

    def too_much(self, length: int) -> tuple[RejectCode, str] | None:
        """Why a prompt of so many tokens can never run, whatever else is asked; None when it can."""
        if length >= self.context_length:
            return "too_long", (
                f"the prompt has {length} tokens; the model's context holds {self.context_length}, one of them for the "
                "reply. Shorten the prompt or start a new chat"
            )
        blocks = -(-length // self.block_size)
        most = max(self.total_blocks, self.most_blocks)
        if blocks > most:
            return "never_fits", (
                f"the prompt has {length} tokens and needs {blocks} blocks; the pool holds {most} "
                f"({most * self.block_size} tokens). Shorten the prompt or {self.remedy}"
            )
        return None

    def _wrong_value(self, submit: Submit) -> str | None:
        if not submit.token_ids:
            return "the prompt is empty; send at least one token"
        if submit.max_tokens < 1:
            return f"max_tokens is {submit.max_tokens}; it must be at least 1"
        if not 1 <= submit.n <= MAX_SAMPLES:
            return f"n is {submit.n}; it must be 1 to {MAX_SAMPLES}"
        if not 0 <= submit.shared_len <= len(submit.token_ids):
            return f"shared_len is {submit.shared_len}; it must be 0 to the prompt's {len(submit.token_ids)} tokens"
        for name, (least, most) in SAMPLING.items():
            value = getattr(submit.sampling, name)
            if not least <= value <= most:
                return f"{name} is {value}; it must be {least:g} to {most:g}"
        outside = next((token for token in submit.token_ids if not 0 <= token < self.vocab_size), None)
        if outside is not None:
            return f"token id {outside} is outside the vocabulary of {self.vocab_size}"
        return None
