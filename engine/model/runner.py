"""Run a batch: pack its rows into one forward pass over the pool, and sample where a row asks for it.

Counts what it forwards, because that is where the work is done. Knows the model and the pool; nothing of requests.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from engine.batch import Batch
from engine.cache.copies import Copies, DirectCopies
from engine.cache.pool import KVPool
from engine.model.attention import PagedContext, attending
from engine.model.kernels import Kernels
from engine.model.loading import LoadedModel
from engine.model.sampler import sample


class ModelRunner:
    """Owner of the forward pass, and the one who writes to the pool; without its `module` (None) it cannot run.

    `steps` and `forwarded_tokens` count what went through the model since the start. `copies` may be under way, and
    have a say before the pool changes.
    """

    def __init__(
        self, loaded: LoadedModel, pool: KVPool, copies: Copies | None = None, kernels: Kernels | None = None
    ) -> None:
        self.module = loaded.module
        self.kernels = kernels or loaded.kernels
        self._device = loaded.device
        self._pool, self._copies = pool, copies or DirectCopies()
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
            if logits.is_cuda:  # which else goes on when this returns, and nobody knows how long it took
                torch.cuda.current_stream(self._device).synchronize()
            return [[] for _ in batch.rows]
        counts = [count for row in batch.rows for count in row.draws_each]
        if max(counts) > 1:
            logits = logits.repeat_interleave(torch.tensor(counts, device=logits.device), dim=0)
        ids = iter(sample(logits, draws))
        return [[next(ids) for _ in row.draws] for row in batch.rows]

    @torch.inference_mode()
    def logits(self, batch: Batch) -> torch.Tensor:
        """Forward the batch; the logits after each token that a row draws at, [such tokens, vocabulary]."""
        ids = [token for row in batch.rows for token in row.token_ids]
        positions = [row.start + i for row in batch.rows for i in range(len(row.token_ids))]
        wanted: list[int] = []
        end = 0
        for row in batch.rows:
            end += len(row.token_ids)
            wanted += range(end - len(row.draws_each), end)
        paged = PagedContext.build(batch, self._pool.block_size, self._pool.layer, self._device, self.kernels)
        self._copies.before_writes()
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
        self._copies.before_writes()
        self._pool.copy_tokens(source, target, count)

    def resize(self, blocks: int, moved: Mapping[int, int]) -> None:
        """`KVPool.resize`: have `blocks` blocks from now on, each old one of `moved` at its new place."""
        self._copies.before_moving()
        self._pool.resize(blocks, moved)
