"""How much memory and disk this process can have now, also within a container. Knows not what for."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import psutil

CGROUP = Path("/sys/fs/cgroup")


def memory_limit(cgroup: Path = CGROUP) -> int | None:
    """How many bytes of memory a container gives the process; None: it does not say."""
    return _number(cgroup / "memory.max")


def free_memory(cgroup: Path = CGROUP) -> int:
    """Bytes of memory that this process can have now, as far as a container lets it.

    What the container's files keep there counts as free: it is given up when something else wants it.
    """
    free = int(psutil.virtual_memory().available)
    limit, used = memory_limit(cgroup), _number(cgroup / "memory.current")
    if limit is None or used is None:
        return free
    return min(free, max(0, limit - used + _files_in_memory(cgroup)))


def free_disk(folder: Path) -> int:
    """Bytes free on the disk of `folder`, which need not be there yet. Raises `OSError` where none can be asked."""
    return _disk(folder)[2]


def disk_size(folder: Path) -> int:
    """All bytes of the disk of `folder`; as `free_disk`."""
    return _disk(folder)[0]


def _disk(folder: Path) -> tuple[int, int, int]:
    return shutil.disk_usage(next(place for place in (folder, *folder.parents) if place.is_dir()))


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


def _files_in_memory(cgroup: Path) -> int:
    try:
        lines = (cgroup / "memory.stat").read_text("ascii").splitlines()
        return int(dict(line.split() for line in lines)["inactive_file"])
    except (OSError, KeyError, ValueError):
        return 0


def _number(path: Path) -> int | None:
    try:
        text = path.read_text("ascii").strip()
    except (OSError, ValueError):
        return None
    return int(text) if text.isdigit() else None  # "max": no limit
