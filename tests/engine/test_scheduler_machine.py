"""Random lives of chats over pool, index and scheduler: every reply right, every law kept, after every rule.

The model is a fake whose every pass verifies what attention would read; freed pages are filled with NaN. The pool is
so small that eviction and preemption are daily business. Rule counts are printed at the end.
"""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from engine.protocol import Sampling
from tests.engine.cache.books import session_tokens
from tests.engine.rig import Rig

STEPS = 130
EXAMPLES = 40
PRESET = [11, 12, 13, 14, 15, 16, 17, 18, 19]
USERS = {"anna": b"", "ben": b"ben's", "cleo": b"cleo's"}
SESSIONS = [f"{user}/{number}" for user in USERS for number in range(2)]

counts: Counter[str] = Counter()

lengths = st.integers(1, 9)
replies = st.integers(1, 14)
sessions = st.sampled_from(SESSIONS)


@seed(1)  # the same lives every time, so that a red run is red again
class Chats(RuleBasedStateMachine):
    """Few sessions, few distinct tokens and a tiny pool, so that everything meets everything."""

    @initialize(
        blocks=st.sampled_from([5, 8, 11, 15, 40]),
        block_size=st.sampled_from([1, 2, 4]),
        budget=st.sampled_from([1, 3, 16]),
        speculate=st.sampled_from([0, 2, 8, None]),
    )
    def start(self, blocks: int, block_size: int, budget: int, speculate: int | None) -> None:
        counts["examples"] += 1
        self.rules = 0
        sizes = (blocks * 4 // block_size, block_size, budget)
        self.rig = Rig(*sizes, context_length=60, speculate=speculate, repeats=speculate != 0)
        self.history: dict[str, list[int]] = {}  # the whole path of each session's last finished request
        self.asked: dict[str, tuple[str, list[int]]] = {}

    def submit(
        self, name: str, session: str, prompt: list[int], max_tokens: int, n: int = 1, priority: int = 0
    ) -> None:
        counts[name] += 1
        request = self.rig.submit(
            prompt,
            max_tokens,
            session,
            n=n,
            priority=priority,
            stop_ids=[5, 55],
            salt=USERS[session.split("/", maxsplit=1)[0]],
            shared_len=len(PRESET) if prompt[: len(PRESET)] == PRESET else 0,
            sampling=Sampling(temperature=float(n > 1), seed=3),
        )
        if request in self.rig.rejected:
            counts["rejected"] += 1
        else:
            self.asked[request] = (session, prompt)

    @rule(session=sessions, preset=st.booleans(), token=st.integers(1, 4), length=lengths, new=replies)
    def ask_new(self, session: str, preset: bool, token: int, length: int, new: int) -> None:
        self.submit("new", session, (PRESET if preset else []) + [token] * length, new)

    @rule(session=sessions, token=st.integers(1, 4), length=lengths, new=replies)
    def ask_samples(self, session: str, token: int, length: int, new: int) -> None:
        self.submit("samples", session, PRESET + [token] * length, new, n=3)

    @rule(session=sessions, token=st.integers(1, 4), new=replies)
    def ask_urgent(self, session: str, token: int, new: int) -> None:
        self.submit("urgent", session, [token] * 6, new, priority=1)

    @precondition(lambda self: self.history)
    @rule(data=st.data(), length=lengths, new=replies)
    def ask_more(self, data: st.DataObject, length: int, new: int) -> None:
        session = data.draw(st.sampled_from(sorted(self.history)))
        self.submit("continue", session, self.history[session] + [6] * length, new)

    @precondition(lambda self: self.history)
    @rule(data=st.data(), cut=st.integers(0, 40), new=replies)
    def ask_again_from(self, data: st.DataObject, cut: int, new: int) -> None:
        session = data.draw(st.sampled_from(sorted(self.history)))
        other = data.draw(sessions)
        self.submit("branch", other, [*self.history[session][:cut], 7], new)

    @precondition(lambda self: self.history)
    @rule(data=st.data(), at=st.integers(0, 60), new=replies)
    def ask_edited(self, data: st.DataObject, at: int, new: int) -> None:
        session = data.draw(st.sampled_from(sorted(self.history)))
        prompt = list(self.history[session])
        prompt[at % len(prompt)] = 8
        self.submit("edit", session, prompt, new)

    @rule(steps=st.integers(1, 6))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            counts["step"] += self.rig.step() is not None
        self.remember()

    @precondition(lambda self: not self.rig.scheduler.idle)
    @rule()
    def finish(self) -> None:
        counts["finish"] += 1
        self.rig.run()
        self.remember()

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        counts["cancel"] += 1
        request = data.draw(st.sampled_from(sorted(self.asked)))
        self.rig.cancel(request)
        del self.asked[request]
        assert len(self.rig.finished[request]) == self.rig.submits[request].n

    @rule(session=sessions)
    def drop(self, session: str) -> None:
        counts["drop"] += self.rig.drop(session) > 0
        assert session not in session_tokens(self.rig.manager)
        self.asked = {request: asked for request, asked in self.asked.items() if asked[0] != session}
        self.history.pop(session, None)

    @precondition(lambda self: not self.rig.scheduler.idle)
    @rule()
    def fail_a_step(self) -> None:
        self.rig.model.fail_next = True
        counts["fail"] += self.rig.step() is not None
        self.rig.model.fail_next = False
        self.remember()

    @rule(blocks=st.integers(1, 5))
    def evict(self, blocks: int) -> None:
        counts["evict"] += self.rig.manager.evict_idle(blocks) > 0

    @rule(blocks=st.integers(1, 40))
    def resize(self, blocks: int) -> None:
        if blocks >= self.rig.manager.leased_blocks:
            counts["shrink"] += blocks < self.rig.manager.total_blocks
            counts["grow"] += blocks > self.rig.manager.total_blocks
            counts["resized while running"] += self.rig.manager.leased_blocks > 0
            self.rig.resize(blocks)
            self.remember()

    @invariant()
    def lawful(self) -> None:
        counts["rules"] += 1
        self.rules += 1
        self.rig.check()
        for block in self.rig.manager.index:
            users = {session.split("/", maxsplit=1)[0] for session in block.holders}
            assert len(users) == 1 or set(block.token_ids) <= set(PRESET), "two users share more than a preset"

    def remember(self) -> None:
        for request, (session, prompt) in list(self.asked.items()):
            if len(self.rig.finished[request]) == self.rig.submits[request].n:
                self.history[session] = prompt + self.rig.replies[request][0]
            elif request not in self.rig.rejected:
                continue
            del self.asked[request]

    def teardown(self) -> None:
        if not hasattr(self, "rig"):
            return
        counts["lives of 100 rules"] += self.rules >= 100
        self.rig.run()
        self.remember()
        assert self.asked == {}
        forwarded = sum(
            end.usage.computed_tokens
            + end.usage.recomputed_tokens
            + max(0, end.usage.output_tokens - 1)
            + end.usage.drafted_tokens
            - end.usage.accepted_tokens
            for ends in self.rig.finished.values()
            for end in ends.values()
        )
        failed = any(rejected.code == "internal" for rejected in self.rig.rejected.values())
        assert forwarded == self.rig.model.forwarded_tokens or failed
        totals = self.rig.scheduler.snapshot_fields()
        usages = [end.usage for ends in self.rig.finished.values() for end in ends.values()]
        for name in ("drafted_tokens", "accepted_tokens"):
            assert totals[name] == sum(getattr(usage, name) for usage in usages) or failed
            counts[name] += totals[name]
        for session in SESSIONS:
            self.rig.drop(session)
        assert self.rig.manager.counts()["free_blocks"] == self.rig.manager.total_blocks
        counts["preempted"] += self.rig.scheduler.preemptions
        counts["copied tokens"] += self.rig.model.copied_tokens
        counts["reused tokens"] += self.rig.manager.reused_tokens
        counts["ran out of pool"] += sum(
            "pool" in end.detail for ends in self.rig.finished.values() for end in ends.values()
        )


@pytest.mark.timeout(240)
def test_chats_live_through_anything(capsys: pytest.CaptureFixture[str]) -> None:
    counts.clear()
    run_state_machine_as_test(
        Chats,
        _min_steps=100,  # hypothesis' own tests use it; without, a mutated example may be a few steps long
        settings=settings(
            max_examples=EXAMPLES,
            phases=[Phase.generate],  # a red run is shown as it was found: making it smaller takes minutes
            stateful_step_count=STEPS,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    with capsys.disabled():  # so that every run shows that it was about something
        print("\nrules and what they met:", ", ".join(f"{name} {number}" for name, number in sorted(counts.items())))
    happened = {"new", "samples", "urgent", "continue", "branch", "edit", "step", "finish", "cancel", "drop", "fail"}
    happened |= {"shrink", "grow", "resized while running"}
    happened |= {"evict", "rejected", "preempted", "copied tokens", "reused tokens", "ran out of pool"}
    happened |= {"drafted_tokens", "accepted_tokens"}
    assert counts["lives of 100 rules"] >= EXAMPLES  # hypothesis cuts a few more short, and counts them extra
    assert not {name for name in happened if not counts[name]}, "a rule or a case never happened"
