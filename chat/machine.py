"""What this machine lets the process have, also within a container. Knows nothing of what it is wanted for."""

from __future__ import annotations

import os
from pathlib import Path

import psutil

CGROUP = Path("/sys/fs/cgroup")


def usable_cores() -> int:
    """How many cores this process may use; those that run two threads count once."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(allowed, psutil.cpu_count(logical=False) or allowed)


def core_quota(cgroup: Path = CGROUP) -> float | None:
    """How many cores' time a container gives the process, such as 1.5; None: it does not say."""
    quota, _, period = _text(cgroup / "cpu.max").partition(" ")
    if quota.isdigit() and period.strip().isdigit() and int(period):
        return int(quota) / int(period)
    return None


def memory_limit(cgroup: Path = CGROUP) -> int | None:
    """How many bytes of memory a container gives the process; None: it does not say."""
    limit = _text(cgroup / "memory.max")
    return int(limit) if limit.isdigit() else None


def _text(path: Path) -> str:
    try:
        return path.read_text("ascii").strip()
    except (OSError, ValueError):
        return ""
