"""A fake model behind a real pool, index and scheduler, stepped by hand; every reply is checked when it ends."""

from __future__ import annotations

from collections import defaultdict
from itertools import count
from typing import Any

from engine.batch import Batch
from engine.cache.block import Scope
from engine.cache.manager import BlockManager
from engine.protocol import Event, Finished, Prefetched, Progress, Rejected, Sampling, Submit, Tokens
from engine.scheduler import Scheduler
from tests.engine.fake_model import VOCABULARY, FakeModel, StepError, expected_reply


class Rig:
    """Submit, step, look. Time goes by 1 s a step. Freed pages turn NaN, and the laws are checked at each step."""

    def __init__(
        self,
        blocks: int = 64,
        block_size: int = 4,
        max_batch_tokens: int = 64,
        context_length: int = 512,
        speculate: int | None = 0,
        *,
        repeats: bool = False,
    ) -> None:
        self.now = 0.0
        self.model = FakeModel(blocks, block_size, repeats=repeats)
        self.manager = BlockManager(
            blocks,
            block_size,
            fingerprint=b"fake",
            copy_tokens=self.model.copy_tokens,
            on_free=self.model.pool.poison,
        )
        self.scheduler = Scheduler(
            self.manager,
            context_length=context_length,
            vocab_size=VOCABULARY,
            max_batch_tokens=max_batch_tokens,
            clock=lambda: self.now,
            speculate=speculate,
        )
        self.submits: dict[str, Submit] = {}
        self.replies: dict[str, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
        self.finished: dict[str, dict[int, Finished]] = defaultdict(dict)
        self.rejected: dict[str, Rejected] = {}
        self.progress: dict[str, list[Progress]] = defaultdict(list)
        self.prefetched: dict[str, Prefetched] = {}
        self.events: list[Event] = []
        self._numbers = count()

    def submit(self, token_ids: list[int], max_tokens: int = 4, session: str = "s", **fields: Any) -> str:
        """A new request's id; its end may already be there."""
        request_id = fields.pop("request_id", None) or f"r{next(self._numbers)}"
        submit = Submit(request_id=request_id, session_id=session, token_ids=token_ids, max_tokens=max_tokens, **fields)
        if request_id not in self.submits:
            self.submits[request_id] = submit
        self.note(self.scheduler.submit(submit))
        return request_id

    def step(self) -> Batch | None:
        """One forward pass, or one that fails; None when there was nothing to run."""
        self.now += 1
        batch = self.scheduler.schedule()
        self.note(self.scheduler.take_events())
        if batch is not None:
            assert 0 < batch.tokens <= self.scheduler.max_batch_tokens
            try:
                sampled = self.model.run(batch)
            except StepError as error:
                self.note(self.scheduler.fail(str(error)))
            else:
                self.note(self.scheduler.commit(batch, sampled))
        self.check()
        return batch

    def run(self, limit: int = 10_000) -> int:
        """Step until nothing is left; how many passes that took."""
        steps = 0
        while not self.scheduler.idle:
            if self.step() is not None:
                steps += 1
            else:
                assert self.scheduler.idle, "requests wait, and nothing runs"
            assert steps < limit, "no end in sight"
        return steps

    def reply(self, token_ids: list[int], max_tokens: int = 4, session: str = "s", **fields: Any) -> list[int]:
        """One request to its end: its first sample."""
        request_id = self.submit(token_ids, max_tokens, session, **fields)
        self.run()
        return self.replies[request_id][0]

    def found(self, token_ids: list[int], salt: bytes = b"") -> int:
        """How many of these tokens a request would find in the pool now."""
        return self.manager.match(Scope("", salt), token_ids).reused

    def usage(self, request_id: str, index: int = 0) -> tuple[int, int, int, int]:
        """Found, computed, recomputed and sampled tokens of a finished sample."""
        usage = self.finished[request_id][index].usage
        return usage.device_tokens, usage.computed_tokens, usage.recomputed_tokens, usage.output_tokens

    def cancel(self, request_id: str, index: int | None = None) -> None:
        self.note(self.scheduler.cancel(request_id, index))
        self.check()

    def drop(self, session: str) -> int:
        blocks, events = self.scheduler.drop(session)
        self.note(events)
        self.check()
        return blocks

    def resize(self, blocks: int) -> None:
        """Another size of the pool, from one step to the next; nobody else holds room that would come back."""
        self.scheduler.allow(blocks)
        self.scheduler.resize(blocks, self.model.resize)
        self.note(self.scheduler.take_events())
        self.check()

    def check(self) -> None:
        """The conservation law."""
        assert self.scheduler.violations() == []

    def evicted_next(self) -> list[list[int]]:
        """The tokens of the idle blocks, in the order in which they would go."""
        return [block.token_ids for block in self.manager.idle.order()]

    def note(self, events: list[Event]) -> None:
        """Keep what was said; compare an ended reply with what the model says without a cache."""
        self.events += events
        for event in events:
            match event:
                case Tokens():
                    self.replies[event.request_id][event.index].extend(event.token_ids)
                case Progress():
                    self.progress[event.request_id].append(event)
                    assert event.reused + event.read <= event.total
                case Rejected():
                    self.rejected[event.request_id] = event
                case Finished():
                    assert event.index not in self.finished[event.request_id], "a sample ended twice"
                    self.finished[event.request_id][event.index] = event
                    self._compare(event)
                case Prefetched():
                    self.prefetched[event.call_id] = event
                case _:
                    raise AssertionError(f"the scheduler said {event}")

    def _compare(self, end: Finished) -> None:
        submit = self.submits[end.request_id]
        reply = self.replies[end.request_id][end.index]
        if submit.sampling.temperature == 0 or submit.sampling.seed is not None:
            whole = expected_reply(
                submit.token_ids,
                submit.max_tokens,
                stop_ids=submit.stop_ids,
                sampling=submit.sampling,
                index=end.index,
                repeats=self.model.repeats,
            )
            assert reply == whole[: len(reply)]
            if not end.detail and end.reason != "cancelled":
                assert reply == whole
        usage = end.usage
        found = usage.device_tokens + usage.host_tokens + usage.disk_tokens
        assert usage.prompt_tokens == found + usage.computed_tokens
        assert usage.output_tokens == len(reply)
        if end.reason != "cancelled":
            assert usage.prompt_tokens == len(submit.token_ids)


RANDOM = Sampling(temperature=1.0, seed=7)


def shape(batch: Batch) -> list[tuple[int, int]]:
    """Start and length of each row."""
    return [(row.start, len(row.token_ids)) for row in batch.rows]
