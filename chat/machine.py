"""The cores that this process may use, also within a container, and what the GPU has free. Knows not what for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil

from engine.room import CGROUP

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


def _text(path: Path) -> str:
    try:
        return path.read_text("ascii").strip()
    except (OSError, ValueError):
        return ""
