"""Sabotages of what computes quickly: fused layers, compiled kernels, attention in parts, threads."""

from __future__ import annotations

from tests.mutants.mutants import ATTENTION, Mutant

FUSED = "engine/model/fused.py"
KERNELS = "engine/model/kernels.py"
SOURCE = "engine/model/kernels.c"
THREADS = "engine/threads.py"

LAYERS = ("tests/engine/model/test_fused.py",)
NATIVE = ("tests/engine/model/test_kernels.py",)
EXACT = ("tests/engine/model/test_attention.py",)
CORES = ("tests/engine/test_threads.py",)

MUTANTS = (
    Mutant(
        "take a replacement untried",
        FUSED,
        "return replacement if same and _knows(called[0]) else None",
        "return replacement",
        LAYERS,
    ),
    Mutant("take a replacement that misses an option", FUSED, "if same and _knows(called[0])", "if same", LAYERS),
    Mutant("lose the window of a fused layer", FUSED, 'options.get("sliding_window"))', "None)", LAYERS),
    Mutant(
        "change what goes into a layer", FUSED, "kernels, after, x)", "kernels, after.copy_(x.add_(after)))", LAYERS
    ),
    Mutant("norm the keys' heads by the queries'", FUSED, "first += heads", "first += 0", LAYERS),
    Mutant("let wrong kernels serve", KERNELS, "if not agree(", "if False and agree(", NATIVE),
    Mutant("compile at every start", KERNELS, "if not library.exists():", "if True:", NATIVE),
    Mutant("attend with what does not fit", KERNELS, "and heads % keys.shape[2] == 0", "", NATIVE),
    Mutant(
        "read blocks as if they were in order",
        SOURCE,
        "(pool) + (blocks[j / shape.block_size]",
        "(pool) + ((blocks[0] + j / shape.block_size)",
        NATIVE,
    ),
    Mutant("miss the last key", SOURCE, "PART, seen[t].length)", "PART, seen[t].length - 1)", NATIVE),
    Mutant("weigh all parts alike", SOURCE, "exponential(its[heads * dim + head] - most)", "1", NATIVE),
    Mutant(
        "turn keys the other way", SOURCE, "rounded(b * load_wide(sin + i))", "-rounded(b * load_wide(sin + i))", NATIVE
    ),
    Mutant(
        "weigh the past as the present",
        ATTENTION,
        "torch.sigmoid(old_sum.reshape(new_sum.shape) - new_sum)",
        "torch.sigmoid(new_sum - old_sum.reshape(new_sum.shape))",
        EXACT,
    ),
    Mutant("see all from a single token", ATTENTION, "else max(0, end - window)", "else 0", EXACT + LAYERS),
    Mutant("take one's own work for others'", THREADS, "- (own - self._seen[1])", "", CORES),
    Mutant("take more threads than were set", THREADS, "min(self._most, free)", "free", CORES),
)
