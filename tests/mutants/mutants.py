"""One-line sabotages of the code, each with the tests that must turn red. To add one, append to `MUTANTS`."""

from __future__ import annotations

from typing import NamedTuple


class Mutant(NamedTuple):
    """In `file`, `old` (exactly once there) becomes `new`; then one of `tests` (pytest arguments) must fail."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


POOL = "engine/cache/pool.py"
BLOCK = "engine/cache/block.py"
IDLE = "engine/cache/idle.py"
INDEX = "engine/cache/index.py"
MANAGER = "engine/cache/manager.py"
SEQUENCE = "engine/sequence.py"
SCHEDULER = "engine/scheduler.py"
ADMISSION = "engine/admission.py"
LINES = "engine/lines.py"
ATTENTION = "engine/model/attention.py"
PACKING = "engine/model/packing.py"
LOADING = "engine/model/loading.py"
SELFCHECK = "engine/model/selfcheck.py"
KINDS = "engine/model/kinds.py"
ROPE = "engine/model/rope.py"
SAMPLER = "engine/model/sampler.py"
RUNNER = "engine/model/runner.py"
SHARES = "engine/shares.py"
RESIDENTS = "engine/residents.py"
MODEL_OF_CHATS = "chat/model.py"
MODELS = "chat/models.py"
CONVERSATION = "chat/conversation.py"
STREAMING = "chat/streaming.py"
TEMPLATES = "chat/templates.py"
ENCODING = "chat/encoding.py"
RENDERING = "chat/rendering.py"
THINKING = "chat/thinking.py"
BYTES = "chat/token_bytes.py"
KEYS = "storage/keys.py"
GUARD = "chat/guard.py"
BOOKS = ("tests/engine/cache",)
STEPS = tuple(f"tests/engine/test_scheduler_{part}.py" for part in ("reuse", "room", "ends", "events"))
MODEL = ("tests/engine/model",)
EXACT = tuple(f"tests/engine/model/test_{part}.py" for part in ("selfcheck", "rope", "refused", "attention"))
PACKED = ("tests/engine/model/test_packing.py",)
TEXT = ("tests/chat/test_streaming.py",)
LEDGER = ("tests/chat/test_templates.py",)
LIVES = ("tests/engine/test_scheduler_machine.py",)
PRESSURE = ("tests/engine/test_models_under_pressure.py",)
SEVERAL = ("tests/engine/test_several_models.py",)
CHOICE = ("tests/chat/test_models.py",)
SWITCHES = ("tests/chat/test_switching.py",)
THOUGHTS = ("tests/chat/test_template_kinds.py", "tests/chat/test_thinking.py")
DATES = ("tests/chat/test_rendering.py",)
TOKENS = ("tests/chat/test_encoding.py",)
GUARDS = ("tests/chat/test_guard.py",)

MUTANTS: tuple[Mutant, ...] = (
    # --- naming and finding
    Mutant("hash without the parent", BLOCK, "parent, len(salt), salt)", "bytes(len(parent)), len(salt), salt)", BOOKS),
    Mutant("hash without the salt", BLOCK, "parent, len(salt), salt)", "parent, len(salt), bytes(len(salt)))", BOOKS),
    Mutant(
        "no salt where a preset ends",
        BLOCK,
        "self.public_at(index, block_size) == block_size",
        "self.public_at(index, block_size) > 0",
        STEPS,
    ),
    Mutant("ignore the salt of a tail", INDEX, " if block.salt == salt else min(public, block.public)", "", BOOKS),
    Mutant("share more than the other's preset", INDEX, "min(public, block.public)", "public", STEPS),
    Mutant("share more than one's own preset", INDEX, "min(public, block.public)", "block.public", STEPS),
    Mutant("continue a block of another salt", MANAGER, "block.salt == salt and self._can", "self._can", BOOKS),
    Mutant(
        "take what a chat adds for its preset",
        MANAGER,
        "min(match.tail.public, scope.public_at(match.tail.depth, self.block_size))",
        "match.tail.public",
        BOOKS,
    ),
    Mutant("forget that a copied part was rounded", MANAGER, "target.lossy = source.lossy", "pass", BOOKS),
    Mutant("skip the token comparison", INDEX, " and block.token_ids == list(token_ids)", "", STEPS),
    Mutant("skip the parent comparison", INDEX, "block.parent_hash == parent_hash and ", "", BOOKS),
    Mutant("reuse the last prompt token", MANAGER, "max(0, len(token_ids) - 1)", "len(token_ids)", STEPS),
    Mutant("continue a tail that is leased", MANAGER, "whole and block.leases == 0 and", "whole and", BOOKS),
    Mutant("continue another session's tail", MANAGER, " and block.holders <= {scope.session_id}", "", BOOKS),
    Mutant(
        "copy one token too few", MANAGER, "(source.id, target.id, count)", "(source.id, target.id, count - 1)", STEPS
    ),
    Mutant(
        "copy the first layer alone",
        POOL,
        "self.data[:, :, target, :count].copy_",
        "self.data[:1, :, target, :count].copy_",
        BOOKS,
    ),
    # --- publishing
    Mutant(
        "publish what a failed step computed",
        SCHEDULER,
        "step = [part.sequence for part in self._step.parts] if",
        "step = [self._manager.commit(p.sequence.held, p.token_ids) or p.sequence for p in self._step.parts] if",
        STEPS,
    ),
    Mutant(
        "count the token sampled last as cached",
        SCHEDULER,
        "self._manager.commit(sequence.held, forwarded)",
        "self._manager.extend(sequence.held, part.start + 99) and "
        "self._manager.commit(sequence.held, [*forwarded, *ids])",
        STEPS,
    ),
    Mutant(
        "publish behind a collision",
        MANAGER,
        "        if parent_hash is None:\n            return",
        "        if parent_hash is None:\n            parent_hash = self.index.root",
        BOOKS,
    ),
    Mutant(
        "keep two of one block",
        MANAGER,
        "            if first is not block:\n",
        "            if first is not block and False:\n",
        BOOKS,
    ),
    # --- leasing and forgetting
    Mutant("evict a chain's beginning first", IDLE, "in reversed(list(chain)):", "in list(chain):", BOOKS),
    Mutant("free a leased block", MANAGER, "        if block.leases:\n", "        if False:\n", BOOKS),
    Mutant(
        "leave leased blocks evictable",
        MANAGER,
        "        self.idle.pop(block.id, None)\n        block.leases += 1",
        "        block.leases += 1",
        STEPS,
    ),
    Mutant(
        "count found blocks as room",
        MANAGER,
        "self.room - sum(block.leases == 0 for block in found)",
        "self.room",
        BOOKS,
    ),
    Mutant(
        "forget who holds a block",
        MANAGER,
        "            block.holders.add(scope.session_id)",
        "            pass",
        BOOKS,
    ),
    Mutant(
        "drop what others hold too",
        MANAGER,
        "if block.holders == {session_id}",
        "if session_id in block.holders",
        BOOKS,
    ),
    Mutant("forget the spare block", MANAGER, "if fresh + spare > ", "if fresh > ", STEPS),
    Mutant("keep the lease of what ends", LINES, "            self._manager.release(sequence.lease)\n", "", STEPS),
    # --- scheduling
    Mutant("read twice what is being read", ADMISSION, "if self._is_being_read(sequence):", "if False:", STEPS),
    Mutant(
        "preempt the oldest", SCHEDULER, "newest = self._lines.running[-1]", "newest = self._lines.running[0]", STEPS
    ),
    Mutant(
        "overtake who waits for room",
        ADMISSION,
        "            if lease is None and (self._lines.running or limits.may_grow):\n                return",
        "            if lease is None and (self._lines.running or limits.may_grow):\n                continue",
        STEPS,
    ),
    Mutant(
        "forget the context's end",
        SCHEDULER,
        "self._clock(), self._limits.max_tokens(submit))",
        "self._clock(), submit.max_tokens)",
        STEPS,
    ),
    Mutant("one seed for all samples", SEQUENCE, 'f"{seed}/{index}"', 'f"{seed}"', STEPS),
    Mutant("count what is recomputed as computed", SEQUENCE, "max(0, min(end, self.seen) - start)", "0", STEPS),
    # --- several models, and pools that change their size
    Mutant("forget new ids in the index", MANAGER, "        self.index.renumber()\n", "", BOOKS),
    Mutant("lose the order of the idle", MANAGER, "for block in order:", "for block in reversed(order):", BOOKS),
    Mutant(
        "move blocks to the wrong place",
        POOL,
        "data[layer][:, new] = self",
        "data[layer][:, sorted(new)[::-1]] = self",
        BOOKS,
    ),
    Mutant(
        "let requests wait that no longer fit",
        SCHEDULER,
        "if (refusal := self._limits.refusal(sequence.request.submit)) is not None:",
        "if (refusal := self._limits.refusal(sequence.request.submit)) is not None and False:",
        LIVES,
    ),
    Mutant("leave the newcomer nothing", SHARES, "min(budget // 2, budget - needed)", "budget", SEVERAL),
    Mutant("take from who is running", SHARES, "max(holding.leased_bytes, min", "max(0, min", SEVERAL),
    Mutant(
        "give every model the whole budget",
        RESIDENTS,
        "return self.budget - sum(other.pool_bytes for other, _ in shares)",
        "return self.budget",
        SEVERAL,
    ),
    Mutant(
        "take the weights of the first for all",
        RESIDENTS,
        "            if known == (found.prepared, kind, found.wanted.weights, contents(found.prepared)):",
        "            if known:",
        SEVERAL,
    ),
    Mutant(
        "put changed weights under the old cache",
        RESIDENTS,
        "if not of_the_hub and self.find",
        "if of_the_hub and self.find",
        PRESSURE,
    ),
    Mutant(
        "leave a refused load's room to nobody",
        RESIDENTS,
        "                self.settle(last)",
        "                pass",
        PRESSURE,
    ),
    Mutant(
        "cut a reply that could wait",
        SCHEDULER,
        "len(self._lines.running) == 1 and not self._limits.may_grow",
        "len(self._lines.running) == 1",
        STEPS,
    ),
    Mutant("compute without weights", RESIDENTS, "if not served.has_weights:", "if False:", SEVERAL),
    Mutant(
        "send every chat to the default",
        CONVERSATION,
        "self._models.get(session.model_id)",
        "self._models.get()",
        CHOICE,
    ),
    Mutant(
        "believe that a restarted engine serves all",
        MODELS,
        "return loaded if loaded and self._engine.serves(",
        "return loaded if loaded or self._engine.serves(",
        CHOICE,
    ),
    Mutant(
        "keep what another template wrote",
        MODEL_OF_CHATS,
        "made = message.tokenizer == self.template.rendering",
        'made = message.tokenizer.partition("/")[0] == self.template.identity',
        SWITCHES,
    ),
    Mutant(
        "encode a reply again under another template",
        MODEL_OF_CHATS,
        'sampled = message.role == "assistant" and message.tokenizer',
        "sampled = False and message.tokenizer",
        SWITCHES,
    ),
    # --- the model
    Mutant("see past the window", ATTENTION, " & (keys > queries - window)", "", EXACT),
    Mutant("see the future", ATTENTION, "causal = keys <= queries", "causal = keys <= queries + 1", EXACT),
    Mutant("read one key too few", ATTENTION, "self.count + 1 - window)", "self.count + 2 - window)", EXACT),
    Mutant(
        "read scattered keys from the first on",
        ATTENTION,
        "[rest : rest + self.length - first]",
        "[: self.length - first]",
        EXACT,
    ),
    Mutant(
        "write to the slots of the first row",
        ATTENTION,
        "_slots(table[row.start // block_size :],",
        "_slots(table,",
        EXACT,
    ),
    Mutant(
        "compare the mask rule with itself",
        SELFCHECK,
        "theirs = call.mask.shows(query, keys)",
        "theirs = attention.visible(keys.new_tensor(query), keys, window)",
        EXACT,
    ),
    Mutant(
        "compare the mask rule as far as the numbers go",
        SELFCHECK,
        "_boundaries(kinds.text_config(config), loaded.context)",
        "range(CHECK_TOKENS)",
        EXACT,
    ),
    Mutant(
        "compare the mask rule of the first layer alone", SELFCHECK, "in enumerate(calls)", "in [(0, calls[0])]", EXACT
    ),
    Mutant("believe any mask", SELFCHECK, "not isinstance(call.mask, witness.Rule)", "call.mask is None", EXACT),
    Mutant("forget the bias of a packed layer", PACKING, "self.packed, self.bias,", "self.packed, None,", PACKED),
    Mutant("keep a shared weight twice", PACKING, "if owners[id(module.weight)] == 1 or", "if True or", PACKED),
    Mutant("pack what is listened to", PACKING, " or _is_listened_to(module)", "", PACKED),
    Mutant(
        "pack what only looks linear",
        PACKING,
        "type(module) is not nn.Linear",
        "not isinstance(module, nn.Linear)",
        PACKED,
    ),
    Mutant(
        "hold all weights while they are packed",
        PACKING,
        "layer = layers.pop(name)\n        if found",
        "layer = layers[name]\n        if found",
        PACKED,
    ),
    Mutant("mask grouped heads out of order", ATTENTION, ".repeat(group, 1)", ".repeat_interleave(group, 0)", EXACT),
    Mutant("ignore arguments of attention", SELFCHECK, "and name not in HONOURED", "and name in HONOURED", EXACT),
    Mutant("let positions depend on the batch", SELFCHECK, "    _require_still_positions(loaded, calls)\n", "", EXACT),
    Mutant(
        "let NaN pass the check",
        SELFCHECK,
        "if not error <= TOLERANCE[loaded.dtype]:",
        "if error > TOLERANCE[loaded.dtype]:",
        EXACT,
    ),
    Mutant("serve two calls a layer", SELFCHECK, "layers != list(range(len(layers)))", "False", EXACT),
    Mutant("serve V of another shape", SELFCHECK, "len(keys) > 1 or keys != values", "len(keys) > 1", EXACT),
    Mutant("take a running state for attention", KINDS, " or _is_stateful(config):", ":", EXACT),
    Mutant("leave positions to shift", LOADING, "    rope.freeze(module, served)\n", "", EXACT),
    Mutant(
        "freeze positions for the longest context",
        LOADING,
        "rope.freeze(module, served)",
        "rope.freeze(module, longest_context(prepared.name, kinds.text_config(module.config)))",
        EXACT,
    ),
    Mutant("choose positions again at every step", ROPE, "part.rope_type = FROZEN", "pass", EXACT),
    Mutant("choose positions of a layer again", ROPE, "types[layer_type] = FROZEN", "pass", EXACT),
    Mutant(
        "one fingerprint for long and short positions",
        LOADING,
        '"rope": rope.variant(config, loaded.context),',
        '"rope": None,',
        EXACT,
    ),
    Mutant("draw the same number everywhere", SAMPLER, "counter=position", "counter=0", MODEL),
    Mutant(
        "count a row as one token",
        RUNNER,
        "self.forwarded_tokens += len(ids)",
        "self.forwarded_tokens += len(batch.rows)",
        MODEL,
    ),
    # --- the ledger and the text
    Mutant("give out half a character", STREAMING, "if text.endswith(_BROKEN) and not", "if not text and not", TEXT),
    Mutant(
        "leak the beginning of a stop string",
        STREAMING,
        "keep = max((overlap(text, stop) for stop in self._stops), default=0)",
        "keep = 0",
        TEXT,
    ),
    Mutant(
        "keep ids that were not given out",
        STREAMING,
        "return end is not None and end <= length",
        "return end is not None",
        TEXT,
    ),
    Mutant("close a reply twice", TEMPLATES, "if not closed or not text.startswith(closed):", "if True:", LEDGER),
    Mutant("strip no reasoning", TEMPLATES, 'self._marks if thinking == "strip" else None', "None", THOUGHTS),
    Mutant(
        "leave the opening of stripped reasoning",
        TEMPLATES,
        "if asked and (self._openings.reasons or sent[index] != segments[index]):",
        "if False:",
        THOUGHTS,
    ),
    Mutant("cut reasoning one token short", THINKING, "return count, text[end", "return count - 1, text[end", THOUGHTS),
    Mutant("give out half a mark", THINKING, "keep = overlap(thought, self._marks.closing)", "keep = 0", THOUGHTS),
    Mutant("match reasoning that no client sends", KEYS, 'if role == "assistant":', "if False:", THOUGHTS),
    Mutant(
        "let a template write today's date anew", RENDERING, "now() if at is None else", "now() if True else", DATES
    ),
    Mutant("drop a refused system prompt", RENDERING, "waiting += [message", "waiting[:] = [] and [message", DATES),
    Mutant("believe a rewriting tokenizer", ENCODING, "if made and made != ", "if False and made != ", TOKENS),
    Mutant("promise tokens that a normaliser takes", BYTES, "COMPOSED = 4 ", "COMPOSED = 1 ", TOKENS),
    Mutant("give up a run for one bad byte", ENCODING, "if self._bytes and BROKEN in text:", "if False:", TOKENS),
    Mutant("let users write control tokens", ENCODING, "found[0][:1] + cut + self", "found[0][:1] + self", LEDGER),
    Mutant(
        "believe any Origin",
        GUARD,
        "_origin_address(origin) != host for",
        "_origin_address(origin) is None for",
        GUARDS,
    ),
)
