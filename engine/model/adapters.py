"""LoRA adapters in PEFT's form: refuse those that cannot be merged exactly, and merge the others into their base.

This module knows adapters; it knows nothing of devices, attention and requests.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from engine.errors import ModelLoadError
from engine.model.files import AGAIN, PICKLES, can_run_code, entries, json_object, one_line, require_file
from engine.model.folders import ADAPTER_CONFIG
from engine.model.weights import some, stored_tensors

WEIGHTS = "adapter_model.safetensors"

# What an adapter may set; of anything else, known to this peft or not, merging may miss a part.
MERGED = {
    "alpha_pattern", "bias", "exclude_modules", "fan_in_fan_out", "init_lora_weights", "layers_pattern",
    "layers_to_transform", "lora_alpha", "lora_bias", "modules_to_save", "r", "rank_pattern", "target_modules",
    "target_parameters", "use_dora", "use_rslora",
}  # fmt: skip
WITHOUT_BEARING = {
    "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config", "inference_mode",
    "loftq_config", "lora_dropout", "lora_ga_config", "megatron_core", "peft_type", "peft_version", "qalora_group_size",
    "revision", "runtime_config", "task_type",
}  # fmt: skip
PLAIN_BASES = (True, False, None, "gaussian", "orthogonal", "eva")  # ways to begin that leave the base as it was


def check_adapter(folder: Path) -> list[Path]:
    """The files of an adapter that can be merged. Raises `ModelLoadError` for any other."""
    if not (folder / ADAPTER_CONFIG).is_file():
        raise ModelLoadError(f"no {ADAPTER_CONFIG} in {folder}: an adapter's folder, in PEFT's form, holds it")
    config = json_object(folder / ADAPTER_CONFIG)
    if not (kind := config.get("peft_type")):
        raise ModelLoadError(f"{folder / ADAPTER_CONFIG} does not say the adapter's type (peft_type): {AGAIN}")
    if kind != "LORA":
        raise ModelLoadError(f"{folder} is an adapter of the type {kind}: only LoRA can be used")
    if odd := sorted(key for key, value in config.items() if value and key not in MERGED | WITHOUT_BEARING):
        raise ModelLoadError(f"{folder} is a kind of LoRA that cannot be merged: its {ADAPTER_CONFIG} sets {some(odd)}")
    if (begun := config.get("init_lora_weights")) not in PLAIN_BASES:
        raise ModelLoadError(
            f"{folder} was made for a base that {begun!r} had changed: convert it to plain LoRA with peft's "
            "save_pretrained(path_initial_model_for_weight_conversion=...)"
        )
    if not (folder / WEIGHTS).is_file():
        require_file(folder / WEIGHTS)
        raise ModelLoadError(_without_weights(folder))
    stored_tensors([folder / WEIGHTS])
    return [folder / ADAPTER_CONFIG, folder / WEIGHTS]


def _without_weights(folder: Path) -> str:
    pickles = [folder / name for name in entries(folder) if name.endswith(PICKLES)]
    if pickles:
        return f"{pickles[0]} is a pickle, which {can_run_code(pickles[0])}"
    return f"no {WEIGHTS} in {folder}: other weight formats are not read"


def merge_adapter(module: Any, folder: Path, name: str) -> Any:
    """`module` with the adapter's changes added to its weights; the module given is used up.

    The changes are computed in float32 and rounded once, to the dtype of the weights: what is served in bfloat16
    differs from the adapter applied beside its base by no more than that rounding. Raises `ModelLoadError` when the
    adapter was made for another base, is not whole, or changes embeddings that are tied.
    """
    from peft import LoraConfig, PeftModel, get_peft_model_state_dict  # takes seconds, and most models have no adapter

    stored = stored_tensors([folder / WEIGHTS])
    _check_tied(module, stored, name)
    try:
        with warnings.catch_warnings(action="ignore"):
            adapted = PeftModel.from_pretrained(
                module, folder, config=LoraConfig.from_pretrained(str(folder)), torch_device=str(module.device)
            )
            needed = set(get_peft_model_state_dict(adapted, save_embedding_layers=False))
            placed = needed | set(get_peft_model_state_dict(adapted, save_embedding_layers=True))
    except Exception as error:  # peft raises types of its own, and torch for other shapes
        raise ModelLoadError(f"{name} does not fit its base model: {one_line(error)}") from error
    if missing := sorted(needed - set(stored)):
        raise ModelLoadError(f"{folder / WEIGHTS} lacks {some(missing)}: {AGAIN}, or choose the base it was made for")
    if foreign := sorted(set(stored) - placed):
        raise ModelLoadError(f"{name} does not fit its base model, which has no place for {some(foreign)}")
    if any(not bool(torch.isfinite(weight).all()) for key, weight in adapted.named_parameters() if "lora_" in key):
        raise ModelLoadError(f"{folder / WEIGHTS} holds values that are not numbers: {AGAIN}")
    return adapted.merge_and_unload()


def _check_tied(module: Any, names: Iterable[str], name: str) -> None:
    """Raises `ModelLoadError` for changes to embeddings that are also the output: merged, they would change both."""
    if not getattr(module.config.get_text_config(), "tie_word_embeddings", False):
        return
    ends = (module.get_input_embeddings(), module.get_output_embeddings())
    parts = [key for key, part in module.named_modules() if any(part is end for end in ends)]
    if odd := sorted(key for key in names if any(f".{part}." in key for part in parts)):
        raise ModelLoadError(
            f"{name} changes {some(odd)}, which this model uses at both ends: merge it yourself with peft, and name "
            "the merged folder as the model"
        )
