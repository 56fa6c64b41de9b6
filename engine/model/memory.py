"""How much memory a device has left. Knows nothing of what it is wanted for."""

from __future__ import annotations

from pathlib import Path

import psutil
import torch

CGROUP = Path("/sys/fs/cgroup")


def available(device: torch.device) -> int:
    """Bytes that can be taken on `device` now: of the GPU, or of this machine's memory as far as a container may."""
    if device.type == "cuda":
        free: int = torch.cuda.mem_get_info(device)[0]
        return free
    limits = [int(psutil.virtual_memory().available)]
    most, used = (_number(CGROUP / name) for name in ("memory.max", "memory.current"))
    if most is not None and used is not None:
        limits.append(max(0, most - used + (_reclaimable() or 0)))
    return min(limits)


def _reclaimable() -> int | None:
    """Bytes of the container's memory that only cache files, and are given up when something else wants them."""
    try:
        lines = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
        return int(lines["inactive_file"])
    except (OSError, KeyError, ValueError):
        return None


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # "max": no limit
        return None
