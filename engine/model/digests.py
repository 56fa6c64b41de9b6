"""What a model's files contain, as a digest that is remembered, so that a restart reads no file again.

This module knows nothing of what the files mean.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from engine.model.files import Progress, unreadable

KNOWN = "digests.json"


def digest(files: Sequence[Path], cache_dir: Path, progress: Progress) -> str:
    """SHA-256, hex, over the contents of `files` in that order; remembered by path, size and mtime in `cache_dir`.

    Raises `ModelLoadError` for a file that cannot be read.
    """
    key, known = _key(files), _read(cache_dir / KNOWN)
    if key not in known:
        known[key] = _hash(files, progress)
        _write(cache_dir / KNOWN, known)
    return known[key]


def remembered(files: Sequence[Path], cache_dir: Path) -> str | None:
    """The same without reading them; None when they have changed, or were never read. Raises `ModelLoadError`."""
    return _read(cache_dir / KNOWN).get(_key(files))


def _key(files: Sequence[Path]) -> str:
    try:
        stats = [(file.resolve(), file.stat()) for file in files]
    except OSError as error:
        raise unreadable(Path(error.filename or files[0]), error, "a model file") from error
    return "|".join(f"{path}:{stat.st_size}:{stat.st_mtime_ns}" for path, stat in stats)


def _hash(files: Sequence[Path], progress: Progress) -> str:
    done, total, hashed = 0, sum(file.stat().st_size for file in files), hashlib.sha256()
    for path in files:
        try:
            with path.open("rb") as stream:
                while chunk := stream.read(1 << 24):
                    hashed.update(chunk)
                    done += len(chunk)
                    progress("checking weights", done, total)
        except OSError as error:
            raise unreadable(path, error, "a model file") from error
    return hashed.hexdigest()


def _read(path: Path) -> dict[str, str]:
    """What is remembered; nothing of it where the file is missing or damaged, since a digest can be made again."""
    try:
        known = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(known, dict):
        return {}
    return {key: value for key, value in known.items() if _is_digest(value)}


def _is_digest(value: object) -> bool:
    return isinstance(value, str) and len(value) == 64 and not set(value) - set("0123456789abcdef")


def _write(path: Path, known: dict[str, str]) -> None:
    """Replace the file in one go. One that cannot be written only costs another reading at the next start."""
    with contextlib.suppress(OSError):
        handle, partial = tempfile.mkstemp(prefix="digests.", suffix=".partial", dir=path.parent)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as stream:
                json.dump(known, stream)
            Path(partial).replace(path)
        except OSError:
            Path(partial).unlink()
            raise
