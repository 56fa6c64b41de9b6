"""Sabotages of guessed tokens: what is guessed, what is checked, and what is made of it."""

from __future__ import annotations

from tests.mutants.mutants import Mutant

LOOKUP = "engine/lookup.py"
SCHEDULER = "engine/scheduler.py"
SEQUENCE = "engine/sequence.py"
SPECULATION = "engine/speculation.py"
STEP = "engine/step.py"
RUNNER = "engine/model/runner.py"
BATCH = "engine/batch.py"

LOOKUPS = ("tests/engine/test_lookup.py",)
GUESSES = ("tests/engine/test_speculation.py",)

MUTANTS: tuple[Mutant, ...] = (
    Mutant("publish what was guessed wrong", SCHEDULER, "*part.draft[: len(ids) - 1]]", "*part.draft]", GUESSES),
    Mutant(
        "keep the room of a wrong guess", SCHEDULER, "            if part.draft:\n", "            if False:\n", GUESSES
    ),
    Mutant("one random number for a whole guess", SEQUENCE, ", position + len(guessed)", ", position", GUESSES),
    Mutant("penalties that see no guess", SEQUENCE, "reply, position = [*reply, *guessed], ", "position = ", GUESSES),
    Mutant("accept without comparing", STEP, " and self.draft[right] == sampled[right]", "", GUESSES),
    Mutant("deliver one token less than is sure", STEP, "sampled[: right + 1]", "sampled[: max(1, right)]", GUESSES),
    Mutant(
        "guess without room",
        SPECULATION,
        "if count and self._manager.extend(sequence.held, len(sequence.token_ids) + count):",
        "if count:",
        GUESSES,
    ),
    Mutant("evict for a guess", SPECULATION, "len(self._manager.free)", "self._manager.room", GUESSES),
    Mutant("guess beyond the end", SPECULATION, "sequence.tokens_left - 1", "self._most", GUESSES),
    Mutant("guess beyond the budget", SPECULATION, "min(self._most, step.budget, ", "min(self._most, ", GUESSES),
    Mutant(
        "guess for many",
        SPECULATION,
        "if not self._most or (self._measures and len(step.parts) > FEW):",
        "if not self._most:",
        GUESSES,
    ),
    Mutant(
        "guess whatever it costs",
        SPECULATION,
        "            if self._measures and not reads:\n",
        "            if False:\n",
        GUESSES,
    ),
    Mutant("guess what ends the reply", LOOKUP, "if token in stop_ids), most)", "if token in ()), most)", GUESSES),
    Mutant("find the last tokens in themselves", LOOKUP, "min(len(token_ids) - 1, ", "min(len(token_ids), ", LOOKUPS),
    Mutant(
        "sample a guess from its last logits alone",
        BATCH,
        "[1] * len(self.draws) if self.guessed else ",
        "",
        ("tests/engine/model/test_attention.py",),
    ),
)
