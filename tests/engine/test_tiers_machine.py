"""Random lives of chats over device, host and disk: whatever happens, no wrong token, nobody else's, and no lost byte.

Blocks are saved, pushed out, fetched ahead, pinned and forgotten, files are damaged, limits change, time goes by, and
the engine is killed and started again over what it has left behind. Budgets hold a fraction of what is said. Workers
do their work when the life says so. What happened is counted, and printed at the end.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from engine.cache.holdings import COLD
from engine.config import Tier
from tests.engine.fake_model import VOCABULARY
from tests.engine.life import CANARIES, CHATS, PRESET, Life, user_of

STEPS = 130
EXAMPLES = 40

# What happens, and how often. Of many rules hypothesis leaves most out in half of the lives; so one chooses among all.
OFTEN = {"ask_new": 6, "ask_more": 8, "ask_otherwise": 6, "step": 4, "finish": 4, "save": 6, "push_out": 6}
SELDOM = ["prefetch", "prefetch", "cancel", "cancel", "drop", "drop", "fail_a_step", "fail_a_step"]
MISHAPS = ["wish", "let_time_pass", "change_limits", "damage", "stop_and_start"]
ACTS = [name for name, times in OFTEN.items() for _ in range(times)] + SELDOM + MISHAPS * 2

# Of what is counted, what has to have happened.
ASKED = {"new", "urgent", "continue", "again", "branch", "edit", "prefetch", "cancel", "drop", "rejected", "preempted"}
WENT_ON = {"step", "finish", "fail", "save", "save all", "flush", "demote", "pin", "time passes", "resize"}
WENT_WRONG = {"damage", "closed", "killed", "torn", "killed while blocks are written", "drop while it is written"}
WENT_WRONG |= {"limits", "limits while blocks move", "missed: new", "missed: diverged", "missed: evicted"}
SOURCES = {"device tokens", "host tokens", "disk tokens", "disk tokens of earlier runs", "missed: unreadable"}
MOVES = {"demoted device>host", "demoted device>disk", "demoted host>disk", "promoted host>device"}
MOVES |= {"promoted disk>device", "saved >disk", "quarantined disk>", "expired disk>", "evicted disk>"}

counts: Counter[str] = Counter()
below: list[Tier | None] = ["host", "disk", "disk", None]

chats = st.sampled_from(CHATS)
lengths, steps = st.integers(1, 9), st.sampled_from([0, 1, 3, 40])
ttls = st.sampled_from([None, 30.0, 200.0])


@seed(6)  # the same lives every time, so that a red run is red again
class Lives(RuleBasedStateMachine):
    """Small tiers, few distinct tokens, so that everything meets everything."""

    @initialize(
        blocks=st.sampled_from([8, 12, 40]),
        host=st.sampled_from([0, 0, 4, 30]),
        disk=st.sampled_from([8, 24, 500, 500]),
        block_size=st.sampled_from([2, 4]),
        budget=st.sampled_from([3, 16, 64]),
        staged=st.sampled_from([4, 24]),
        ttl=ttls,
        spared=st.sets(st.sampled_from(MISHAPS), max_size=2),
    )
    def start(self, blocks: int, block_size: int, spared: set[str], **drawn: Any) -> None:
        counts["examples"] += 1
        self.acts, self.spared, self.scale = 0, spared, 4 // block_size
        fields = {
            "blocks": blocks * self.scale,
            "host_blocks": drawn["host"] * self.scale,
            "disk_blocks": drawn["disk"] * self.scale,
            "block_size": block_size,
            "max_batch_tokens": drawn["budget"],
            "context_length": 60,
            "vocabulary": VOCABULARY + len(CANARIES),
            "staged": drawn["staged"],
            "late": counts["examples"] % 2 == 0,  # not drawn: then what is would be other lives
            **expiry(drawn["ttl"]),
        }
        self.life = Life(Path(tempfile.mkdtemp(prefix="lives-")), fields, counts)

    @rule(act=st.sampled_from(ACTS), data=st.data())
    def act(self, act: str, data: st.DataObject) -> None:
        if act not in self.spared:
            self.draw, self.rig = data.draw, self.life.rig
            getattr(self, act)()

    # --- asking -----------------------------------------------------------------------------------------------------

    def ask_new(self) -> None:
        chat, preset, secret, urgent = self.draw(st.tuples(chats, st.booleans(), st.booleans(), st.booleans()))
        words = [CANARIES[user_of(chat)]] * 2 * secret + [self.draw(st.integers(1, 3))] * self.draw(lengths)
        prompt = PRESET * preset + words
        self.ask("urgent" if urgent else "new", self.life.session(chat), prompt, priority=int(urgent))

    def ask_more(self) -> None:
        if (session := self.known()) is not None:
            self.ask("continue", session, self.life.history[session] + [6] * self.draw(lengths))

    def ask_otherwise(self) -> None:
        """The same again, another way from some point on in either chat of this person, or with one token changed."""
        if (session := self.known()) is None:
            return
        how, at, prompt = self.draw(st.sampled_from(["again", "branch", "edit"])), self.draw(st.integers(0, 50)), []
        if how == "again":
            prompt = self.life.prompts[session]
        elif how == "branch":
            prompt = [*self.life.history[session][:at], 7]
            session = self.life.session(f"{user_of(session)}/{at % 2}")
        else:
            prompt = list(self.life.history[session])
            prompt[at % len(prompt)] = 8
        self.ask(how, session, prompt)

    def ask(self, name: str, session: str, prompt: list[int], priority: int = 0) -> None:
        self.life.ask(name, session, prompt, self.draw(st.integers(1, 12)), priority)
        self.step()

    def known(self) -> str | None:
        """A session that has had a reply."""
        return self.draw(st.sampled_from(sorted(self.life.history))) if self.life.history else None

    def prefetch(self) -> None:
        if (session := self.known()) is not None:
            self.life.prefetch(session, self.life.history[session][: self.draw(st.integers(1, 60))])

    # --- going on ---------------------------------------------------------------------------------------------------

    def step(self) -> None:
        self.rig.pace, self.rig.which = self.draw(st.integers(0, 6)), self.draw(st.integers(0, 63))
        for _ in range(self.draw(steps)):
            if self.rig.scheduler.idle:
                return
            counts["step"] += self.rig.step() is not None
            self.life.remember()

    def finish(self) -> None:
        counts["finish"] += not self.rig.scheduler.idle
        self.rig.pace, self.rig.which = 2, self.draw(st.integers(0, 63))
        self.rig.run()
        self.life.remember()

    def fail_a_step(self) -> None:
        self.rig.model.fail_next = True
        counts["fail"] += self.rig.step() is not None
        self.rig.model.fail_next = False

    def cancel(self) -> None:
        if running := sorted({*self.life.asked, *self.life.fetching}):
            counts["cancel"] += 1
            request = self.draw(st.sampled_from(running))
            self.rig.cancel(request)
            assert request in self.rig.finished or request in self.rig.prefetched

    def drop(self) -> None:
        if self.draw(st.booleans()):  # amid saving
            self.rig.residency.saver.save()
        self.life.drop(self.draw(chats))

    # --- where blocks are -------------------------------------------------------------------------------------------

    def save(self) -> None:
        """Have some of what the last turns left behind written, or all of it."""
        self.rig.note_ends()
        more = self.rig.residency.saver.save()
        counts["save"] += self.rig.tiers.disk.saving > 0
        if self.draw(st.booleans()):
            self.rig.work(self.draw(st.sampled_from([0, 0, 2, 12])))
            return
        for _ in range(400):
            if not (more or self.rig.tiers.disk.saving or self.rig.residency.saver.unsaved):
                counts["save all"] += 1
                return
            if self.rig.tiers.disk.busy:
                self.rig.note_an_end()
            more = self.rig.residency.saver.save()
        raise AssertionError("saving does not end")

    def push_out(self) -> None:
        """Some blocks leave the device for lack of room, or a chat goes down because a person wishes it."""
        if blocks := self.draw(st.sampled_from([0, 2, 1000, 1000])):
            counts["flush"] += self.rig.manager.evict_idle(blocks) > 0
            return
        session, to = self.life.session(self.draw(chats)), self.draw(st.sampled_from(below))
        gone = self.rig.residency.demote(session, to)[0]
        counts["demote"] += gone + self.rig.tiers.demote(session, to)[0] > 0

    def wish(self) -> None:
        session, pinned, ttl = self.life.session(self.draw(chats)), self.draw(st.booleans()), self.draw(ttls)
        counts["pin" if pinned else "unpin"] += pinned != (session in self.life.pinned)
        (self.life.pinned.add if pinned else self.life.pinned.discard)(session)
        self.rig.tiers.sessions.wish(session, self.rig.now, pinned=pinned, ttl=ttl)
        self.rig.residency.reconsider()
        self.rig.tiers.settle()

    def let_time_pass(self) -> None:
        counts["time passes"] += 1
        kept = self.life.protected()
        self.rig.now += self.draw(st.sampled_from([1, 100, 1000, 10_000]))
        self.rig.residency.relieve(float("inf"), expired=True)
        for tier in COLD:
            self.rig.tiers.enforce(tier)
        left = {key for session in self.life.pinned for key in self.life.resident(session)}
        assert kept <= left, "a pinned block has gone"

    def change_limits(self) -> None:
        host, disk = self.draw(st.sampled_from([0, 4, 30])), self.draw(st.sampled_from([0, 8, 300, 300]))
        ttl, blocks = self.draw(ttls), self.draw(st.integers(2, 40)) * self.scale
        changes = {
            "host_kv": host * self.scale * self.rig.image_bytes,
            "disk_kv": disk * self.scale * 8192,
            "policy": self.draw(st.sampled_from(["lru", "cost"])),
            **expiry(ttl),
        }
        self.rig.tiers.configure(msgspec.structs.replace(self.rig.tiers.limits, **changes))
        self.life.fields |= changes
        counts["limits"] += 1
        counts["limits while blocks move"] += not self.rig.quiet
        if blocks >= self.rig.manager.leased_blocks:
            counts["resize"] += 1
            self.rig.resize(blocks)
            self.life.fields["blocks"] = blocks

    # --- bad luck ---------------------------------------------------------------------------------------------------

    def damage(self) -> None:
        if not (files := self.life.files()):
            return
        for file in self.draw(st.lists(st.sampled_from(files), min_size=1, max_size=5, unique=True)):
            how = self.draw(st.sampled_from(["flip", "flip the header", "cut", "lose", "swap"]))
            counts["damage"] += 1
            self.life.damaged.add(file.stem)
            content = bytearray(file.read_bytes())
            if how == "lose":
                file.unlink()
            elif how == "cut":
                file.write_bytes(content[: len(content) // 2])
            elif how == "swap":
                file.write_bytes(self.draw(st.sampled_from(self.life.files())).read_bytes())
            else:
                content[24 if how == "flip the header" else -4096] ^= 1
                file.write_bytes(content)

    def stop_and_start(self) -> None:
        """Killed, or closed: then what was begun is written, and nobody may be left to note it. A file may be torn."""
        how = self.draw(st.sampled_from(["closed", "killed", "torn", "unnoted"]))
        counts["closed" if how == "unnoted" else how] += 1
        self.rig.residency.saver.save()
        if how == "killed":
            self.rig.work(self.draw(st.integers(0, 6)))
            counts["killed while blocks are written"] += not self.rig.quiet
        elif how != "torn":
            (self.rig.close if how == "closed" else self.rig.tiers.close)()
        elif files := self.life.files():
            (files[0].parent / ".tmp-0123456789abcdef").write_bytes(b"half a bl")
        self.life.again()

    @invariant()
    def lawful(self) -> None:
        counts["acts"] += 1
        self.acts += 1
        self.life.check()

    def teardown(self) -> None:
        if not hasattr(self, "life"):
            return
        counts["lives of 100 acts"] += self.acts >= 100
        try:
            self.life.end()
        finally:
            shutil.rmtree(self.life.folder)


def expiry(ttl: float | None) -> dict[str, float | None]:
    """Each tier keeps what it holds for longer than the one above it."""
    return {"device_ttl": ttl, "host_ttl": ttl and ttl * 4, "disk_ttl": ttl and ttl * 16}


@pytest.mark.timeout(300)
def test_chats_live_in_all_tiers(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)  # nobody pulls the plug here
    counts.clear()
    run_state_machine_as_test(
        Lives,
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
        print("\nacts and what they met:", ", ".join(f"{name} {number}" for name, number in sorted(counts.items())))
    assert counts["lives of 100 acts"] >= EXAMPLES  # hypothesis cuts a few more short, and counts them extra
    happened = ASKED | WENT_ON | WENT_WRONG | SOURCES | MOVES
    assert not {name for name in happened if not counts[name]}, "an act or a case never happened"
