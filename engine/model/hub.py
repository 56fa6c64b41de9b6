"""Fetch a model or an adapter by its id into Hugging Face's own cache, or say why that is not possible.

This module knows the hub and its errors, and nothing of what is in the files.
"""

from __future__ import annotations

import re
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)
from huggingface_hub.utils import tqdm as hub_bar  # type: ignore[attr-defined]

from engine import words
from engine.errors import ModelLoadError
from engine.model.files import Progress, one_line

constants.HF_HUB_DISABLE_TELEMETRY = True  # it would tell the hub what runs on this machine

ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
MODEL_FILES = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model")
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
UNWANTED = ("*/*", "consolidated*", "adapter_model*")  # other forms of the same weights


def is_id(name: str) -> bool:
    """Whether a name can be a hub id: owner/name, in letters, digits and `-._`."""
    return ID.fullmatch(name) is not None and ".." not in name and "--" not in name


def fetch(name: str, wanted: Sequence[str], progress: Progress) -> Path:
    """The folder with the `wanted` files of a hub id, fetched unless they are here. Raises `ModelLoadError`."""
    progress(f"fetching {name}", 0, 0)
    choice = _choice(wanted)
    try:
        size = _size(name, choice)
        return Path(snapshot_download(name, **choice, tqdm_class=_bar(name, size, progress)))
    except Exception as error:
        raise ModelLoadError(_why(name, error)) from error


def cached(name: str) -> Path | None:
    """The folder of a hub id that has been fetched; None where it has not, or not whole."""
    try:
        return Path(snapshot_download(name, **_choice(MODEL_FILES), local_files_only=True))
    except (OSError, ValueError):
        return None


def _choice(wanted: Sequence[str]) -> dict[str, Any]:
    unwanted = UNWANTED if wanted is MODEL_FILES else ("*/*",)
    return {"allow_patterns": list(wanted), "ignore_patterns": list(unwanted)}


def _size(name: str, choice: dict[str, Any]) -> int:
    """Bytes still to be fetched; 0 if the hub cannot be asked. Raises `ModelLoadError` when they do not fit."""
    try:
        files = snapshot_download(name, **choice, dry_run=True)
    except OSError:  # the fetching itself tells why, unless everything is here already
        return 0
    size = sum(file.file_size or 0 for file in files if file.will_download)
    folder = Path(constants.HF_HUB_CACHE)
    folder.mkdir(parents=True, exist_ok=True)
    if (free := shutil.disk_usage(folder).free) < size:
        raise ModelLoadError(
            f"no room to fetch {name!r}: it takes {words.size(size)} in {folder}, where {words.size(free)} are free"
        )
    return size


def _bar(name: str, size: int, progress: Progress) -> type:
    """A progress bar that draws nothing and reports the bytes of all files; files come in on several threads."""
    lock = threading.Lock()
    furthest = 0

    class Bar(hub_bar):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._counts_bytes = kwargs.get("unit") == "B"  # two do, of what has arrived and of what is on the disk
            super().__init__(*args, **{**kwargs, "disable": True})  # type: ignore[no-untyped-call]

        def update(self, n: float | None = 1) -> None:
            nonlocal furthest
            with lock:
                self.n += n or 0
                if self._counts_bytes and self.n > furthest:
                    furthest = int(self.n)
                    progress(f"fetching {name}", furthest, size)

    return Bar


def _why(name: str, error: Exception) -> str:
    """What to tell of a fetch that failed, by what the hub or the network said."""
    if isinstance(error, ModelLoadError):
        return str(error)
    if isinstance(error, GatedRepoError):
        return (
            f"{name!r} is given only to those who asked for it: ask at {constants.ENDPOINT}/{name}, "
            "then log in with `hf auth login`"
        )
    status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
    if isinstance(error, RepositoryNotFoundError) or status in (401, 403):
        return f"the hub shows no {name!r}: check the name, or log in with `hf auth login` if it is private"
    if constants.HF_HUB_OFFLINE or isinstance(error.__cause__, OfflineModeIsEnabled):
        return f"{name!r} is not on this machine, and HF_HUB_OFFLINE keeps it off the hub: unset that, or name a folder"
    if isinstance(error, LocalEntryNotFoundError | ConnectionError):
        return f"{name!r} is not on this machine, and the hub cannot be reached: check the connection, or name a folder"
    return f"cannot fetch {name!r} from the hub: {one_line(error)}"
