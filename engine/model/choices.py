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
    path, key = cache_dir / FILE_NAME, f"{target.type}:{model}"
    known = _read(path)
    if known.get(key) in loading.DTYPES:
        return known[key]
    chosen = str(kind).removeprefix("torch.")
    _write(path, {**known, key: chosen})
    return chosen


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
