"""Open the tiers below the device: how much they may hold on this machine, and the files of earlier runs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

import torch

from engine.budgets import fill_in
from engine.cache.copies import copies_for
from engine.cache.disk import BlockFiles
from engine.cache.disk_tier import Files, Post
from engine.cache.holders import HolderFiles
from engine.cache.store import Stored
from engine.cache.tiers import ColdTiers
from engine.cache.write_budget import WriteBudget
from engine.config import CacheConfig, EngineConfig
from engine.errors import EngineError
from engine.words import size

log = logging.getLogger(__name__)


def open_tiers(
    config: EngineConfig, device: torch.device, clock: Callable[[], float], post: Post
) -> tuple[CacheConfig, ColdTiers]:
    """The limits with host's and disk's budgets filled in, and the tiers under them.

    A folder that cannot be used turns the disk tier off, and the log says why: chats go on without it.
    """
    limits = fill_in(config.cache, config.kv_dir, on_cpu=device.type == "cpu")
    files: Files | None = None
    old: Stored | None = None
    if config.kv_dir is not None:
        try:
            opened = _open_files(Path(config.kv_dir), limits)
            old = opened.blocks.set_aside()
            files = opened
        except EngineError as error:
            log.warning("blocks are not kept on disk: %s", error)
    tiers = ColdTiers(limits, files, clock=clock, wall=time.time, post=post, copies=copies_for(device))
    if old is not None:
        reason = f"{old.files} files of another format were set aside"
        log.warning("%s (%s)", reason, size(old.bytes))
        tiers.journal.note("set_aside", reason, size=old.bytes, source="disk", blocks=old.files)
    return limits, tiers


def _open_files(root: Path, limits: CacheConfig) -> Files:
    blocks = BlockFiles(root)
    return Files(blocks, HolderFiles(root), WriteBudget(root / "writes", limits.disk_writes))
