"""What host and disk may hold where nothing is set: a part of what this machine has. Knows no tier and no torch."""

from __future__ import annotations

from pathlib import Path

import msgspec

from engine.config import CacheConfig
from engine.room import disk_size, free_disk, free_memory, used_disk

HOST_BESIDE_GPU = 0.25  # of the machine's free memory, where that is not the device's too
HOST_ON_CPU = 0.05
DISK_SHARE, DISK_MOST = 0.1, 20 * 2**30  # of what the disk could hold
RESERVE_SHARE, RESERVE_MOST = 0.05, 256 * 2**20  # of a disk, what the tier there leaves free for all else
RESERVE_LEAST = 64 * 2**20  # a database writes tens of megabytes at times, on a small disk too


def fill_in(cache: CacheConfig, kv_dir: str | None, *, on_cpu: bool) -> CacheConfig:
    """The limits with the budgets of host and disk that this machine suggests where none are set.

    `on_cpu`: the device's memory is the machine's own. Without a `kv_dir` there is no disk tier, whatever was set.
    """
    host, disk = cache.host_kv, cache.disk_kv
    if host is None:
        host = int(free_memory() * (HOST_ON_CPU if on_cpu else HOST_BESIDE_GPU))
    if kv_dir is None:
        disk = 0
    elif disk is None:
        disk = min(DISK_MOST, int(disk_room(Path(kv_dir)) * DISK_SHARE))
    return msgspec.structs.replace(cache, host_kv=host, disk_kv=disk)


def disk_room(kv_dir: Path) -> int:
    """Bytes that the disk tier could have: what is free, and what it holds already, so that a share of it stays put."""
    try:
        return free_disk(kv_dir) + used_disk(kv_dir)
    except OSError:
        return 0


def disk_most(kv_dir: Path) -> int:
    """Bytes that the disk tier may take now, whatever its budget: it leaves some of the disk free for all else."""
    try:
        return max(0, disk_room(kv_dir) - disk_reserve(disk_size(kv_dir)))
    except OSError:
        return 0


def disk_reserve(total: int) -> int:
    """Bytes of a disk of so many that stay free for all else; never more than half of it."""
    return min(total // 2, max(RESERVE_LEAST, min(RESERVE_MOST, int(total * RESERVE_SHARE))))
