"""A real model behind a real pool, index and scheduler, stepped by hand in the test's own thread."""

from __future__ import annotations

from collections import defaultdict
from itertools import count

from engine.cache.manager import BlockManager
from engine.model.loading import LoadedModel
from engine.model.runner import ModelRunner
from engine.protocol import Event, Finished, Rejected, Submit, Tokens
from engine.scheduler import Scheduler

BLOCK = 32


class Harness:
    """Submit, step, look. `replies[request_id][index]` grows as tokens come; `finished`, `rejected` keep the ends."""

    def __init__(
        self, loaded: LoadedModel, shape, blocks: int, max_batch_tokens: int = 512, speculate: int | None = 0
    ) -> None:
        self.pool = shape.pool(blocks, BLOCK, loaded.dtype, loaded.device)
        for block in range(blocks):
            self.pool.poison(block)
        self.runner = ModelRunner(loaded, self.pool)
        self.manager = BlockManager(
            total_blocks=blocks, block_size=BLOCK, fingerprint=b"test", copy_tokens=self.runner.copy_tokens
        )
        self.scheduler = Scheduler(
            self.manager,
            context_length=loaded.module.config.max_position_embeddings,
            vocab_size=loaded.module.config.vocab_size,
            max_batch_tokens=max_batch_tokens,
            speculate=speculate,
        )
        self.replies: dict[str, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
        self.finished: dict[str, list[Finished]] = defaultdict(list)
        self.rejected: dict[str, Rejected] = {}
        self._numbers = count()

    def submit(self, token_ids: list[int], max_tokens: int = 16, session: str = "s", **kwargs) -> str:
        request_id = f"r{next(self._numbers)}"
        submit = Submit(request_id=request_id, session_id=session, token_ids=token_ids, max_tokens=max_tokens, **kwargs)
        self._note(self.scheduler.submit(submit))
        return request_id

    def step(self) -> None:
        batch = self.scheduler.schedule()
        self._note(self.scheduler.take_events())
        if batch is not None:
            self._note(self.scheduler.commit(batch, self.runner.run(batch)))
        assert self.scheduler.violations() == []

    def run(self) -> None:
        while not self.scheduler.idle:
            self.step()

    def reply(self, token_ids: list[int], max_tokens: int = 16, session: str = "s", **kwargs) -> list[int]:
        """One request to its end."""
        request_id = self.submit(token_ids, max_tokens, session, **kwargs)
        self.run()
        return self.replies[request_id][0]

    def _note(self, events: list[Event]) -> None:
        for event in events:
            match event:
                case Tokens():
                    self.replies[event.request_id][event.index].extend(event.token_ids)
                case Finished():
                    self.finished[event.request_id].append(event)
                case Rejected():
                    self.rejected[event.request_id] = event
                case _:
                    pass
