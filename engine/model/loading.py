"""Load a prepared model ready for paged attention: a *loaded* one is a torch module whose attention reads the pool.

This module knows nothing of where models come from, and nothing of blocks, requests or text.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from engine.errors import ModelLoadError
from engine.model.attention import IMPLEMENTATION
from engine.model.sources import PreparedModel, first_line

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

SHIFTING_ROPE = {"dynamic", "longrope"}


@dataclass(frozen=True)
class LoadedModel:
    """A model in memory, its attention implementation set to the paged one."""

    prepared: PreparedModel
    module: Any
    device: torch.device
    dtype: torch.dtype


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
        raise ModelLoadError(f"cannot load {prepared.name} from {prepared.path}: {first_line(error)}") from error
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
