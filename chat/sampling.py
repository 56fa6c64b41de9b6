"""What a model itself recommends for drawing tokens. Knows the model's directory and nothing of requests."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

from engine.protocol import Sampling

log = logging.getLogger(__name__)

USUAL = Sampling(temperature=0.7, top_p=0.95)  # where a model recommends nothing
KNOWN = {"smollm2": Sampling(temperature=0.2, top_p=0.9)}  # its model card; the model's files do not say it


def recommended(model_path: str | Path, model_name: str) -> Sampling:
    """The sampling of the model's `generation_config.json`, else of its model card where known, else `USUAL`."""
    path = Path(model_path) / "generation_config.json"
    try:
        config = _object(json.loads(path.read_text("utf-8")))
    except FileNotFoundError:
        config = {}
    except (OSError, ValueError, TypeError) as error:
        log.warning("%s cannot be read (%s); the usual sampling is used", path, error)
        config = {}
    values = {name: config[name] for name in Sampling.__struct_fields__ if _is_number(config.get(name))}
    if "temperature" in values or "top_p" in values:
        if config.get("do_sample") is False:
            return Sampling()
        return Sampling(**{"temperature": 1.0, **values, "seed": None})
    return next((known for name, known in KNOWN.items() if name in model_name.lower()), USUAL)


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"{type(value).__name__} instead of an object")
    return value


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
