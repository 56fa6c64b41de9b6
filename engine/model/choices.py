"""Remember the dtype that "auto" came to mean for a model, so that the same model is the same at the next start.

Another dtype would be another fingerprint, and everything kept under the old one would be lost. Knows only the file.
"""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

from engine.model import loading

FILE_NAME = "dtypes.json"

log = logging.getLogger(__name__)


def recorded_dtype(cache_dir: Path, model: str, device: str, dtype: str) -> str:
    """`dtype` itself; for "auto" what it meant the first time for this model and kind of device, recorded now if new.

    Raises `ModelLoadError` for a device or dtype that cannot be served.
    """
    target, kind = loading.choose(device, dtype)
    if dtype != "auto":
        return dtype
    if known := known_dtype(cache_dir, model, target.type):
        return known
    path, chosen = cache_dir / FILE_NAME, str(kind).removeprefix("torch.")
    _write(path, {**_read(path), _key(model, target.type): chosen})
    return chosen


def known_dtype(cache_dir: Path, model: str, kind: str) -> str | None:
    """What "auto" came to mean for a model on this kind of device ("cpu", "cuda", …); None: nothing yet."""
    known = _read(cache_dir / FILE_NAME).get(_key(model, kind))
    return known if known in loading.DTYPES else None


def _key(model: str, kind: str) -> str:
    return f"{kind}:{model}"


def _read(path: Path) -> dict[str, str]:
    try:
        known = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def _write(path: Path, known: dict[str, str]) -> None:
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        partial.write_text(json.dumps(known, indent=1), "utf-8")
        partial.replace(path)
    except OSError as error:
        log.warning("the dtype could not be recorded in %s: %s", path, error)
