"""Change a model's folder the way that damage, or another model's maker, would."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file


def change(file: Path, **settings: Any) -> None:
    """Set keys of a JSON object; None takes one out."""
    config = json.loads(file.read_text()) | settings
    file.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def rewrite(model: Path, alter: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Change the weights and save them again."""
    tensors = load_file(model / "model.safetensors")
    alter(tensors)
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
