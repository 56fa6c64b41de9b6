"""What this machine lets the process have, also within a container. Knows nothing of what it is wanted for."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import psutil

CGROUP = Path("/sys/fs/cgroup")
NVIDIA = Path("/proc/driver/nvidia/version")
ROOT = Path(__file__).resolve().parent.parent
ASK_GPU = "from engine.model.hardware import look; gpu = look().gpu; print(gpu.free if gpu else '')"
GPU_SECONDS = 60.0  # that torch may take to find it


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


def free_memory(cgroup: Path = CGROUP) -> int:
    """Bytes of memory that this process can have now, as far as a container lets it.

    What the container's files keep there counts as free: it is given up when something else wants it.
    """
    free = int(psutil.virtual_memory().available)
    limit, used = memory_limit(cgroup), _text(cgroup / "memory.current")
    if limit is None or not used.isdigit():
        return free
    kept = dict(line.split(" ", 1) for line in _text(cgroup / "memory.stat").splitlines() if " " in line)
    files = kept.get("inactive_file", "0")
    return min(free, max(0, limit - int(used) + (int(files) if files.isdigit() else 0)))


def gpu_memory() -> int | None:
    """Bytes free on the GPU that torch would take; None: it sees none.

    Torch is asked in a process of its own, which takes seconds: only it knows which GPU that is.
    """
    command = [sys.executable, "-c", ASK_GPU]
    try:
        asked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=GPU_SECONDS)
    except (OSError, subprocess.SubprocessError):
        return None
    return int(asked.stdout) if asked.stdout.strip().isdigit() else None


def free_disk(folder: Path) -> int:
    """Bytes free on the disk of `folder`, which need not be there yet."""
    return shutil.disk_usage(next(place for place in (folder, *folder.parents) if place.is_dir())).free


def used_disk(folder: Path) -> int:
    """Bytes of the files in `folder` and below; 0 where there is none."""
    total, folders = 0, [folder]
    while folders:
        try:
            with os.scandir(folders.pop()) as found:
                for entry in found:
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(Path(entry.path))
                    else:
                        total += entry.stat(follow_symlinks=False).st_size
        except OSError:  # gone, or never there
            continue
    return total


def _text(path: Path) -> str:
    try:
        return path.read_text("ascii").strip()
    except (OSError, ValueError):
        return ""
