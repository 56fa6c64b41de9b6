"""Load a prepared model ready for paged attention: a *loaded* one is a torch module whose attention reads the pool.

This module knows nothing of where models come from, and nothing of blocks, requests or text.
"""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast, get_args

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from engine.errors import ModelLoadError
from engine.model import fused, kernels, kinds, packing, rope
from engine.model.adapters import merge_adapter
from engine.model.attention import IMPLEMENTATION
from engine.model.files import one_line
from engine.model.kernels import Kernels, NativeKernels, TorchKernels
from engine.model.memory import available
from engine.model.packing import Weights
from engine.model.sources import PreparedModel
from engine.model.stack import stack
from engine.model.weights import check_complete
from engine.words import size

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
ORIGIN = {"_name_or_path", "transformers_version"}  # what a configuration says of itself, not of the model

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadedModel:
    """A model in memory, its attention implementation set to the paged one.

    `context` is how many positions it serves; its rotary positions are those of a text of that length. `weights` is
    what was asked for; what came of it, `weights_of` tells.
    """

    prepared: PreparedModel
    module: Any
    device: torch.device
    dtype: torch.dtype
    context: int
    weights: Weights = "auto"
    kernels: Kernels = field(default_factory=TorchKernels)


def choose(device: str, dtype: str) -> tuple[torch.device, torch.dtype]:
    """What "auto" means here. Raises `ModelLoadError` for names that mean nothing or that this torch cannot serve."""
    target = _choose_device(device)
    return target, _choose_dtype(dtype, target)


def choose_weights(weights: str, device: torch.device, dtype: torch.dtype) -> Weights:
    """What weights to compute with: "bf16" where "auto" cannot be less. Raises `ModelLoadError` for what cannot be."""
    if weights not in get_args(Weights):
        raise ModelLoadError(f"unknown weights {weights!r}: use {', '.join(get_args(Weights))}")
    fewer = device.type == "cpu" and dtype in (torch.bfloat16, torch.float32)
    if weights == "auto":
        return "auto" if fewer else "bf16"
    if not fewer and (weights != "bf16" or dtype != torch.bfloat16):
        raise ModelLoadError(
            f"weights {weights!r} cannot be had in {_name(dtype)} on {device.type}: use --weights auto, or "
            f"--device cpu and --dtype auto"
        )
    return cast(Weights, weights)


def load(
    prepared: PreparedModel,
    device: str,
    dtype: str,
    context: int | None = None,
    weights: str = "auto",
    *,
    kernels_dir: Path | None = None,
    fuse: bool = True,
) -> LoadedModel:
    """Read the weights onto the device, to serve `context` positions (None: as many as the model was made for).

    `weights` is auto, bf16, int8 or int4. In `kernels_dir` are compiled kernels, or will be; None: torch's compute.
    `fuse` puts layers that compute the same in fewer operations in the place of
    transformers' own, where there are such. Raises `ModelLoadError` with the reason when that is not possible.
    """
    target, kind = choose(device, dtype)
    chosen = choose_weights(weights, target, kind)
    its = TorchKernels() if kernels_dir is None else kernels.choose(target, kind, kernels_dir)
    here: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    try:
        config = AutoConfig.from_pretrained(prepared.path, **here)
        kinds.require_servable(prepared.name, config)
        module, info = AutoModelForCausalLM.from_pretrained(
            prepared.path,
            dtype=kind,
            attn_implementation="eager",
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are told by name
            **here,
        )
        check_complete(module, info, prepared.name)
        if prepared.adapter is not None:
            module = merge_adapter(module, prepared.adapter, prepared.name)
        module = module.to(target).eval()
        if fuse:
            fused.fuse(module)
        if target.type == "cpu" and kind in (torch.bfloat16, torch.float32):
            _lay_out(module, chosen, its, prepared.name)
        module.set_attn_implementation(IMPLEMENTATION)
    except ModelLoadError:
        raise
    except Exception as error:  # libraries raise types of their own for a damaged or foreign file
        raise ModelLoadError(f"cannot load {prepared.name} from {prepared.path}: {one_line(error)}") from error
    served = _served(prepared.name, kinds.text_config(module.config), context)
    rope.freeze(module, served)
    return LoadedModel(
        prepared=prepared,
        module=module,
        device=target,
        dtype=kind,
        context=served,
        weights=cast(Weights, weights),
        kernels=its,
    )


def _lay_out(module: Any, weights: Weights, its: Kernels, name: str) -> None:
    """Have a model in RAM compute with weights in the layout that this processor is quickest with."""
    if module.dtype == torch.bfloat16 and _cpu_multiplies_bf16():
        fewer = weights != "auto" or torch.backends.cpu.get_cpu_capability() == "AVX512"
        _pack(module, weights if fewer else "bf16", name)
    elif isinstance(its, NativeKernels):
        packing.compact(module, weights, its)
        stack(module, its)
    elif weights != "auto" and (weights != "bf16" or module.dtype != torch.bfloat16):
        raise ModelLoadError(
            f"weights {weights!r} need a C compiler here (cc, gcc or clang): install one, or use --weights auto"
        )


def _pack(module: Any, weights: Weights, name: str) -> None:
    lacking = packing.pack(module, weights, available(torch.device("cpu")))
    if lacking and packing.layouts(module):
        log.warning(
            "%s reads prompts several times slower than it could: there is no room for a copy of its weights in "
            "bfloat16, %s; close other programs, or start with --weights bf16",
            name,
            size(lacking),
        )


def weights_of(loaded: LoadedModel) -> str:
    """What most of its weights are: "int4", "int8", "bf16", or as the dtype says."""
    return packing.called(loaded.module, "bf16" if loaded.dtype == torch.bfloat16 else _name(loaded.dtype))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def fingerprint(loaded: LoadedModel, block_size: int, format_version: int = 1) -> str:
    """SHA-256, hex, over everything that decides the K and V a token gets: weights, configuration, dtype, layout."""
    config = kinds.text_config(loaded.module.config)
    facts = {
        "weights": loaded.prepared.digest,
        "config": {key: value for key, value in config.to_dict().items() if key not in ORIGIN},
        "rope": rope.variant(config, loaded.context),
        "dtype": str(loaded.dtype),
        "block_size": block_size,
        "format": format_version,
    }
    if bits := packing.layouts(loaded.module):
        facts["bits"] = bits
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()


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


def longest_context(name: str, config: Any) -> int:
    """How many positions a model was made for. Raises `ModelLoadError` when its configuration does not say."""
    for key in ("max_position_embeddings", "n_positions", "max_seq_len"):
        if isinstance(size := getattr(config, key, None), int) and size > 0:
            return size
    raise ModelLoadError(f"{name} does not say its context length (max_position_embeddings)")


def _served(name: str, config: Any, wanted: int | None) -> int:
    """The context to serve. Raises `ModelLoadError` when the model was not made for as much as is wanted."""
    longest = longest_context(name, config)
    if wanted is not None and not 1 <= wanted <= longest:
        raise ModelLoadError(f"{name} cannot serve a context of {wanted} tokens: choose 1 to {longest}")
    return longest if wanted is None else wanted


def eos_ids(loaded: LoadedModel) -> list[int]:
    """The ids by which the model itself ends a reply: its generation configuration's, else its configuration's."""
    for config in (getattr(loaded.module, "generation_config", None), loaded.module.config.get_text_config()):
        value = getattr(config, "eos_token_id", None)
        if value is not None:
            return [value] if isinstance(value, int) else list(value)
    return []
