"""Run a batch: pack its rows into one forward pass over the pool, and sample where a row asks for it.

Counts what it forwards, because that is where the work is done. Knows the model and the pool; nothing of requests.
"""

from __future__ import annotations

import torch

from engine.batch import Batch
from engine.cache.pool import KVPool
from engine.model.attention import PagedContext, attending
from engine.model.loading import LoadedModel
from engine.model.sampler import sample


class ModelRunner:
    """Owner of the forward pass; without its `module` (None) it cannot run.

    `steps` and `forwarded_tokens` count what went through the model since the start.
    """

    def __init__(self, loaded: LoadedModel, pool: KVPool) -> None:
        self.module = loaded.module
        self._device = loaded.device
        self._pool = pool
        self.steps = 0
        self.forwarded_tokens = 0

    @torch.inference_mode()
    def run(self, batch: Batch) -> list[list[int]]:
        """One forward pass. Returns the sampled ids per row, one per draw.

        When it returns, the K and V of every token of the batch are in the pool. Raises what torch raises, and
        `StepError` when the logits are not numbers; then nothing of this step may be used.
        """
        logits = self.logits(batch)
        draws = [draw for row in batch.rows for draw in row.draws]
        if not draws:
            return [[] for _ in batch.rows]
        counts = [len(row.draws) for row in batch.rows if row.draws]
        if max(counts) > 1:
            logits = logits.repeat_interleave(torch.tensor(counts, device=logits.device), dim=0)
        ids = iter(sample(logits, draws))
        return [[next(ids) for _ in row.draws] for row in batch.rows]

    @torch.inference_mode()
    def logits(self, batch: Batch) -> torch.Tensor:
        """Forward the batch; the logits after the last token of each row that draws, [such rows, vocabulary]."""
        ids = [token for row in batch.rows for token in row.token_ids]
        positions = [row.start + i for row in batch.rows for i in range(len(row.token_ids))]
        wanted, end = [], 0
        for row in batch.rows:
            end += len(row.token_ids)
            if row.draws:
                wanted.append(end - 1)
        paged = PagedContext.build(batch, self._pool.block_size, self._pool.layer, self._device)
        with attending(paged):
            output = self.module(
                input_ids=torch.tensor([ids], device=self._device),
                position_ids=torch.tensor([positions], device=self._device),
                use_cache=False,
                logits_to_keep=torch.tensor(wanted, dtype=torch.long, device=self._device),
            )
        self.steps += 1
        self.forwarded_tokens += len(ids)
        logits: torch.Tensor = output.logits[0]
        return logits

    def copy_tokens(self, source: int, target: int, count: int) -> None:
        """Copy the K and V of the first `count` tokens, all layers, from one block to another."""
        self._pool.copy_tokens(source, target, count)
