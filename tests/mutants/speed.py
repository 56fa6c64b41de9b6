"""Sabotages of what computes quickly: fused layers, compiled kernels, attention in parts, threads."""

from __future__ import annotations

from tests.mutants.mutants import ATTENTION, Mutant

FUSED = "engine/model/fused.py"
KERNELS = "engine/model/kernels.py"
SOURCE = "engine/model/native/layer.c"
MATRIX = "engine/model/native/matrix.c"
DECODER = "engine/model/native/decoder.c"
CODES = "engine/model/codes.py"
TILES = "engine/model/tiles.py"
COMPACTING = "engine/model/packing.py"
STACK = "engine/model/stack.py"
LOADING = "engine/model/loading.py"
THREADS = "engine/threads.py"

LAYERS = ("tests/engine/model/test_fused.py",)
NATIVE = ("tests/engine/model/test_kernels.py",)
EXACT = ("tests/engine/model/test_attention.py",)
COMPACT = ("tests/engine/model/test_compact.py",)
FOUND = ("tests/engine/model/test_codes.py",)
STACKED = ("tests/engine/model/test_stack.py",)
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
    Mutant("read the upper half of a code first", MATRIX, "from_nibbles(codes, 0)", "from_nibbles(codes, 4)", COMPACT),
    Mutant("forget the rows beyond a band", MATRIX, "bands = (rows + BAND - 1) / BAND", "bands = 1", COMPACT),
    Mutant(
        "leave out what a panel cannot hold",
        MATRIX,
        "from < width; from += PANEL",
        "from < PANEL; from += PANEL",
        COMPACT,
    ),
    Mutant(
        "multiply three rows as two",
        MATRIX,
        "if (rows == 3) return multiply_few(weight, bits, x, width, sums, 3)",
        "if (rows == 3) return multiply_few(weight, bits, x, width, sums, 2)",
        COMPACT,
    ),
    Mutant("forget the bias in a stack", DECODER, "if (!matrix->bias) return;", "return;", STACKED),
    Mutant("norm no heads in a stack", DECODER, "if (!its->weight) return;", "return;", STACKED),
    Mutant("lose what the last layer adds", DECODER, "store(load(x[i]) + load(added[i]))", "x[i]", STACKED),
    Mutant(
        "stack layers that see different windows", STACK, "(*shape, layer.options, kinds", "(*shape, kinds", STACKED
    ),
    Mutant(
        "stack layers that attend in different ways",
        STACK,
        ", kinds.layer_kind(layer.config, layer.layer_idx))",
        ")",
        STACKED,
    ),
    Mutant("stack what kernels do not take", STACK, "if not kernels.attends(queries, keys):", "if False:", STACKED),
    Mutant(
        "keep to a pool that has moved",
        STACK,
        "if self._pool != (keys.data_ptr(), keys.shape):",
        "if not self._pool:",
        STACKED,
    ),
    Mutant(
        "take a pool of another size in the same place for the same",
        STACK,
        "if self._pool != (keys.data_ptr(), keys.shape):",
        "if not self._pool or self._pool[0] != keys.data_ptr():",
        STACKED,
    ),
    Mutant(
        "take float32 for bfloat16",
        COMPACTING,
        "if torch.equal(weight.bfloat16().to(weight.dtype), weight) else None",
        "",
        COMPACT,
    ),
    Mutant(
        "lose the signs of a file's scales",
        CODES,
        "groups, most, -most / 8",
        "groups, most.abs(), most.abs() / 8",
        FOUND,
    ),
    Mutant("take what is farther", CODES, "(_error(part, other, grid) < ", "(_error(part, other, grid) > ", FOUND),
    Mutant(
        "let fewer bits be without a compiler",
        LOADING,
        '    elif weights != "auto" and (weights',
        "    elif False and (weights",
        COMPACT,
    ),
    Mutant("see all from a single token", ATTENTION, "else max(0, end - window)", "else 0", EXACT + LAYERS),
    Mutant("take one's own work for others'", THREADS, "- (own - self._seen[1])", "", CORES),
    Mutant("take more threads than were set", THREADS, "min(self._most, free)", "free", CORES),
)
