"""The rig with tiers below its pool: real images, a real slab, real files; workers' ends are noted between steps."""

from __future__ import annotations

import queue
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from engine.batch import Batch
from engine.cache.block import root_hash
from engine.cache.cold import ColdBlock, Space
from engine.cache.cold_laws import cold_violations
from engine.cache.copies import DONE, DirectCopies
from engine.cache.disk import BlockFiles
from engine.cache.disk_tier import Files
from engine.cache.holders import HolderFiles
from engine.cache.holdings import Leaving
from engine.cache.image import ImageCodec
from engine.cache.manager import BlockManager
from engine.cache.residency import Residency
from engine.cache.tiers import ColdTiers
from engine.cache.write_budget import WriteBudget
from engine.config import CacheConfig, Force
from engine.scheduler import Scheduler
from tests.engine.fake_model import LAYERS, VOCABULARY, FakeModel
from tests.engine.late_copies import LateCodec, LateCopies
from tests.engine.rig import Rig

FINGERPRINT = b"f" * 32


class ColdRig(Rig):
    """`host_blocks` have room in RAM, `disk_blocks` in files under `folder`. Loads what it finds, by default.

    Its clock begins at `now`, and 0 on it is `epoch` in Unix time. Token ids below `vocabulary` may be sent. With
    `late`, copies to and from the device are made as late as the fences allow.
    """

    late = False

    def __init__(
        self,
        folder: Path | None = None,
        *,
        blocks: int = 64,
        host_blocks: int = 0,
        disk_blocks: int = 10_000,
        block_size: int = 4,
        max_batch_tokens: int = 64,
        context_length: int = 512,
        force: Force | None = "load",
        fingerprint: bytes = FINGERPRINT,
        now: float = 0.0,
        epoch: float = 1e9,
        vocabulary: int = VOCABULARY,
        late: bool | None = None,
        **limits: Any,
    ) -> None:
        super().__init__(blocks, block_size, max_batch_tokens, context_length)
        self.now = now
        self.posted: queue.Queue[Callable[[], None]] = queue.Queue()
        self.waited = False  # the last step had nothing to run until a copy ended
        shape = (LAYERS, block_size, 1, 2, torch.float64, "auto")
        codec, copies, on_free = ImageCodec(*shape), DirectCopies(), self.model.pool.poison
        if self.late if late is None else late:
            copies = LateCopies(self.model.pool)
            codec = LateCodec(copies.cuda, *shape)
            on_free = partial(copies.freed, codec)
        self.model.copies = copies
        self.image_bytes = codec.size
        self.config = CacheConfig(
            **{
                "host_kv": host_blocks * codec.size,
                "disk_kv": disk_blocks * 8192 if folder else 0,
                "host_low": 1.0,
                "device_low": 1.0,
                **limits,
            }
        )
        files = None
        if folder is not None:
            files = Files(BlockFiles(folder), HolderFiles(folder), WriteBudget(folder / "writes", None))
        self.tiers = ColdTiers(
            self.config,
            files,
            clock=lambda: self.now,
            wall=lambda: epoch + self.now,
            post=self.posted.put,
            copies=copies,
        )
        space = Space(fingerprint, root_hash(fingerprint), codec, block_size, codec.size, lambda *_: None)
        self.residency = Residency(space, self.tiers, lambda: self.model.pool.data, lambda: self.now, force)
        self.manager = BlockManager(
            blocks,
            block_size,
            fingerprint=fingerprint,
            copy_tokens=self.model.copy_tokens,
            on_free=on_free,
            clock=lambda: self.now,
            below=self.residency,
        )
        self.residency.manager = self.manager
        self.scheduler = Scheduler(
            self.manager,
            context_length=context_length,
            vocab_size=vocabulary,
            max_batch_tokens=max_batch_tokens,
            clock=lambda: self.now,
            residency=self.residency,
        )
        self.tiers.take_stock(space)

    def step(self) -> Batch | None:
        """As ever; when nothing can run, the next end of a copy is waited for."""
        self.note_ends()
        batch = super().step()
        on_the_way = self.tiers.disk.loading or self.tiers.disk.saving
        self.waited = batch is None and not self.scheduler.idle and on_the_way > 0
        if self.waited:
            self.now -= 1  # the fake clock stands still while a real worker works
            self.wait_for_end()
        return batch

    def run(self, limit: int = 10_000) -> int:
        """Step until nothing is left; how many passes that took."""
        steps = 0
        while not self.scheduler.idle:
            if self.step() is not None:
                steps += 1
            else:
                assert self.scheduler.idle or self.waited, "requests wait, and nothing runs"
            assert steps < limit, "no end in sight"
        return steps

    def note_ends(self) -> None:
        """Note every copy that has ended."""
        while not self.posted.empty():
            self.posted.get()()

    def wait_for_end(self) -> None:
        """Note the next copy that ends; deletions may end before it."""
        disk = self.tiers.disk
        before = disk.loading + disk.saving
        while disk.loading + disk.saving == before:
            self.note_an_end()

    def note_an_end(self) -> None:
        """Note the next copy or deletion that ends."""
        self.posted.get(timeout=10)()

    def save(self) -> None:
        """Write all that the last turns left behind, or what can be where writes fail."""
        saver, disk = self.residency.saver, self.tiers.disk
        while saver.save() or disk.saving or (saver.unsaved and disk.busy):
            if disk.busy:
                self.note_an_end()
        self.check()

    def settle(self) -> None:
        """Wait for whatever is on its way to or from the disk, deletions too."""
        disk = self.tiers.disk
        while disk.saving or disk.loading or disk.deleting:
            self.note_an_end()
        self.note_ends()

    def forget(self, session: str) -> Leaving:
        """Drop a session everywhere; its files go later."""
        self.drop(session)
        self.residency.forget(session)
        return self.tiers.holdings.drop(session)

    def delete(self, session: str) -> int:
        """Drop a session everywhere, files too; how many of its blocks left host and disk."""
        leaving = self.forget(session)
        while not self.tiers.holdings.has_gone(leaving):
            self.note_an_end()
        self.check()
        return leaving.blocks

    def close(self) -> None:
        """End the workers; what they did is noted."""
        self.tiers.close()
        self.note_ends()

    def flush(self) -> None:
        """Take every idle block off the device."""
        self.manager.evict_idle(len(self.manager.idle))
        self.check()

    def check(self) -> None:
        """The conservation law, of every tier."""
        super().check()
        broken = cold_violations(self.tiers)
        assert not broken, broken

    def cold(self) -> list[ColdBlock]:
        """What host and disk hold."""
        return list(self.tiers.index)

    def has_come(self, cold: ColdBlock) -> bool:
        """Whether its copy in host can be looked at without making it come."""
        copied = cold.host.copied if cold.host is not None else None
        return copied is DONE or (copied is not None and copied.seconds is not None)

    def ids_in_host(self, cold: ColdBlock) -> list[float]:
        """The token ids that a block's K in host says."""
        assert cold.host is not None
        return _ids(self.tiers.host.view(cold.host))

    def ids_on_disk(self, cold: ColdBlock) -> list[float]:
        """The token ids that the K in a block's file says. Raises `BlockUnreadable`."""
        files = self.tiers.disk.files
        assert files is not None
        image = torch.empty(self.image_bytes, dtype=torch.uint8)
        files.blocks.read(cold.space.fingerprint, cold.key, image.numpy().data)
        return _ids(image)

    def sources(self, request_id: str) -> tuple[int, int, int, int]:
        """Tokens of a finished request's prompt from device, host, disk and the model."""
        usage = self.finished[request_id][0].usage
        return usage.device_tokens, usage.host_tokens, usage.disk_tokens, usage.computed_tokens


def _ids(image: torch.Tensor) -> list[float]:
    ids: list[float] = image.view(torch.float64).view(LAYERS, 2, -1, 2)[0, 0, :, 0].tolist()
    return ids


def other_model() -> FakeModel:
    """A model with nothing in its pool."""
    return FakeModel(8, 4)
