"""What a restored turn cannot be faster than, measured on this machine: the forward pass, and moving the bytes.

It runs in the bench's own process, with the model, pool and runner of the engine and nothing of its bookkeeping.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from engine.batch import Batch, Draw, Row
from engine.cache.image import ImageCodec
from engine.cache.restores import COPY_UNHURRIED
from engine.model import loading, selfcheck, sources
from engine.model.runner import ModelRunner
from engine.protocol import Sampling

REPEATS = 5  # the median of so many, after one that does not count


class Floors:
    """A model over a pool in which `longest` tokens and a message are resident, and buffers as large as their K and V.

    `folder` is where the disk tier's files are, so that a plain file is read from the same disk.
    """

    def __init__(self, model: str, models: Path, dtype: str, block_size: int, longest: int, folder: Path) -> None:
        device, kind = loading.choose("auto", dtype)
        prepared = sources.prepare(model, models, lambda *_: None, dtype=kind)
        loaded = loading.load(prepared, "auto", dtype)
        shape = selfcheck.probe(loaded)
        blocks = -(-longest // block_size)
        pool = shape.pool(blocks, block_size, kind, device)
        pool.data.normal_()
        self.bytes_per_token = shape.bytes_per_token(kind)
        self._runner, self._blocks, self._pool = ModelRunner(loaded, pool), range(blocks), pool
        self._codec = ImageCodec(shape.layers, block_size, shape.kv_heads, shape.head_dim, kind, "auto")
        self._source = torch.ones(blocks * self._codec.size, dtype=torch.uint8)
        self._target = torch.zeros_like(self._source)
        self._file = folder / "plain-file"
        with self._file.open("wb") as file:
            file.write(self._source.numpy().data)
            os.fsync(file.fileno())

    def forward_s(self, history: int, message: list[int]) -> float:
        """Seconds to forward a message over `history` resident tokens and sample its first token."""
        draw = Draw(Sampling(), seed=0, position=history + len(message), prompt_ids=message, reply_ids=[])
        batch = Batch([Row(message, history, self._blocks, [draw])])
        return _median(lambda: self._runner.run(batch))

    def memcpy_s(self, tokens: int) -> float:
        """Seconds to copy the bytes of so many tokens from one buffer to another, both in use before."""
        size = tokens * self.bytes_per_token
        return _median(lambda: self._target[:size].copy_(self._source[:size]))

    def copies_s(self, tokens: int) -> float:
        """Seconds to copy the blocks of so many tokens from their images to the pool, as the engine does it."""
        blocks = range(-(-tokens // self._pool.block_size))
        images = [self._source[i * self._codec.size :][: self._codec.size] for i in blocks]

        def copy() -> None:
            for first in blocks[::COPY_UNHURRIED]:
                some = blocks[first : first + COPY_UNHURRIED]
                self._codec.load_many(images[some.start : some.stop], self._pool.data, some)

        return _median(copy)

    def read_s(self, tokens: int) -> float:
        """Seconds to read the bytes of so many tokens from one file that the system has in its cache."""
        into = memoryview(self._target.numpy().data)[: tokens * self.bytes_per_token]

        def read() -> None:
            with self._file.open("rb", buffering=0) as file:
                done = 0
                while done < len(into):
                    done += file.readinto(into[done:])

        return _median(read)


def _median(work: Callable[[], object]) -> float:
    work()
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return statistics.median(times)
