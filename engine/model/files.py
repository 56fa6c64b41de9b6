"""What every reader of a model's files shares: sentences for files that are missing, damaged or dangerous.

This module knows how files fail, and nothing of what a model's files mean.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.errors import ModelLoadError

Progress = Callable[[str, int, int], None]  # stage, done, total (0: unknown)

PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")
AGAIN = "copy or download it again"


def json_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises `ModelLoadError` when it is missing, damaged or something else."""
    require_file(path)
    try:
        value = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise unreadable(path, error, "JSON") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} holds a {type(value).__name__} where an object is needed: {AGAIN}")
    return value


def require_file(path: Path) -> None:
    """Raises `ModelLoadError` where something lies at `path` that is no file; to read a pipe would never end."""
    if path.exists() and not path.is_file():
        what = "a folder" if path.is_dir() else "a pipe or a device"
        raise ModelLoadError(f"{path} is {what}, where a file is needed: {AGAIN}")


def entries(folder: Path) -> list[str]:
    """The sorted names of what a folder holds. Raises `ModelLoadError` when it is not there or cannot be read."""
    try:
        return sorted(entry.name for entry in folder.iterdir())
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ModelLoadError(f"the folder {folder} is not there: it was moved or deleted") from error
    except OSError as error:
        raise ModelLoadError(f"{folder} cannot be read: {error.strerror}") from error


def unreadable(path: Path, error: BaseException, kind: str) -> ModelLoadError:
    """Why `path` cannot be read as `kind`, for people: missing, forbidden, a stand-in, a pickle, or damaged."""
    if isinstance(error, FileNotFoundError):
        return ModelLoadError(f"no {path.name} in {path.parent}: {AGAIN}, or name another model")
    if isinstance(error, OSError) and error.strerror:
        return ModelLoadError(f"{path} cannot be read: {error.strerror}")
    try:
        with path.open("rb") as stream:
            start = stream.read(64)
    except OSError as failure:
        return ModelLoadError(f"{path} cannot be read: {failure.strerror}")
    if not start:
        return ModelLoadError(f"{path} is empty: {AGAIN}")
    if start.startswith(b"version https://git-lfs"):
        return ModelLoadError(f"{path} only stands for a file that Git LFS keeps elsewhere: run `git lfs pull` there")
    if start.startswith((b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")):
        return ModelLoadError(f"{path} is not {kind}, it looks like a pickle, which {can_run_code(path)}")
    return ModelLoadError(f"{path} is damaged, or not {kind} ({one_line(error)}): {AGAIN}")


def can_run_code(path: Path) -> str:
    """The end of a sentence that refuses a pickle."""
    return (
        f"can run code when it is opened, so {path.name} stays closed: take the model in .safetensors, or convert it "
        "with transformers' save_pretrained where you trust it"
    )


def one_line(error: BaseException, limit: int = 300) -> str:
    """All that an error says, in one line of at most `limit` characters."""
    words = " ".join(str(error).split()) or type(error).__name__
    return words if len(words) <= limit else f"{words[:limit]}…"
