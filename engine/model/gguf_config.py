"""A configuration made from a GGUF file, completed: every fact in the file is applied, or the file is refused.

transformers reads the facts that it knows and drops the others, and with them scaled positions, windows or caps
that change every reply. This module knows what the facts mean, and nothing of weights and processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from engine.errors import ModelLoadError
from engine.model.gguf_header import Header

# A fact, and what configurations call it; the first name that a configuration has is the one.
NAMES = {
    "vocab_size": ("vocab_size",),
    "context_length": ("max_position_embeddings",),
    "block_count": ("num_hidden_layers",),
    "embedding_length": ("hidden_size",),
    "feed_forward_length": ("intermediate_size", "n_inner", "ffn_hidden_size"),
    "attention.head_count": ("num_attention_heads",),
    "attention.head_count_kv": ("num_key_value_heads", "num_kv_heads"),
    "attention.key_length": ("head_dim",),
    "attention.value_length": ("head_dim",),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps", "norm_eps"),
    "attention.layer_norm_epsilon": ("layer_norm_epsilon", "layer_norm_eps", "norm_epsilon", "norm_eps"),
    "attention.sliding_window": ("sliding_window",),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "expert_count": ("num_experts", "num_local_experts"),
    "expert_used_count": ("num_experts_per_tok",),
    "expert_feed_forward_length": ("moe_intermediate_size",),
    "expert_shared_feed_forward_length": ("shared_expert_intermediate_size",),
    "expert_weights_norm": ("norm_topk_prob",),
}
# Facts without bearing here, as long as they have one of these values (None: any).
WITHOUT_BEARING: dict[str, tuple[Any, ...] | None] = {
    "attention.causal": (True,),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "expert_gating_func": (0, 1),  # softmax
    "expert_weights_scale": (0.0, 1.0),
    "nextn_predict_layers": (0,),
    "rope.scale_linear": (1.0,),
    "rope.scaling.attn_factor": (0.0, 1.0),
    "rope.scaling.finetuned": None,
    "tensor_data_layout": None,
    "use_parallel_residual": None,  # transformers takes it from the tensors that are there
}
WINDOW_PATTERN = "attention.sliding_window_pattern"
HANDLED = {WINDOW_PATTERN, "rope.freq_base", "rope.freq_base_swa", "rope.dimension_count"} | {
    f"rope.scaling.{name}" for name in ("type", "factor", "original_context_length", "yarn_beta_fast", "yarn_beta_slow")
}
STRETCHED = ("none", "linear", "yarn")  # how positions may be
ROPE_FACTORS = "rope_freqs.weight"
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
LARGE_GEMMA_LAYERS = {"gemma2": 46, "gemma3": 62}  # the 27B models, whose scores are scaled in another way


def complete(config: Any, header: Header, rope_factors: Sequence[float] | None) -> Any:
    """`config` with every fact of the file. `rope_factors` [head_dim / 2] divide the speeds of the positions.

    Raises `ModelLoadError` for a fact that this architecture has no place for.
    """
    facts = dict(header.own_facts())
    changes = _changes(config, header.file, facts)
    made = _made(config, changes)
    for name, value in changes.items():
        if getattr(made, name) != value:
            raise _no_place(header.file, name, value)
    if header.architecture in LARGE_GEMMA_LAYERS:
        made = _made(made, {"query_pre_attn_scalar": _gemma_scalar(made, header.architecture)})
    if isinstance(getattr(made, "rope_parameters", None), dict):
        made = _made(made, {"rope_parameters": _rope(made.rope_parameters, header.file, facts)})
        _check_rotated(made, header.file, facts)
    if rope_factors is not None:
        made = _made(made, {"rope_parameters": _llama3(made, header.file, rope_factors)})
    return made


def _changes(config: Any, file: Path, facts: dict[str, Any]) -> dict[str, Any]:
    """What the facts say under the names that the configuration has for them."""
    changes: dict[str, Any] = {}
    for key, value in facts.items():
        if key in HANDLED or (key in WITHOUT_BEARING and value in (WITHOUT_BEARING[key] or (value,))):
            continue
        known = (name for name in NAMES.get(key, ()) if hasattr(config, name) or name == "head_dim")  # made if need be
        name = next(known, None)
        if name is None or changes.get(name, value) != value:
            raise _no_place(file, key, value)
        changes[name] = _single(file, key, value)
    if pattern := facts.get(WINDOW_PATTERN):
        if not hasattr(config, "layer_types"):
            raise _no_place(file, WINDOW_PATTERN, pattern)
        layers = range(config.num_hidden_layers)
        windowed = pattern if isinstance(pattern, list) else [(layer + 1) % pattern != 0 for layer in layers]
        changes["layer_types"] = ["sliding_attention" if yes else "full_attention" for yes in windowed]
    return changes


def _made(config: Any, changes: dict[str, Any]) -> Any:
    """A new configuration, so that transformers derives and checks everything again."""
    return type(config)(**{**config.to_dict(), **changes})


def _single(file: Path, key: str, value: Any) -> Any:
    """The one value of a fact that may be a list with an entry for each layer."""
    if not isinstance(value, list):
        return value
    if len(set(value)) != 1:
        raise _no_place(file, key, "a value for each layer")
    return value[0]


def _no_place(file: Path, key: str, value: Any) -> ModelLoadError:
    return ModelLoadError(
        f"{file} sets {key} to {value}, which cannot be applied to this kind of model: "
        "use the model's Hugging Face folder or hub id"
    )


def _gemma_scalar(config: Any, architecture: str) -> int:
    """What scores are scaled by: the file does not say it, llama.cpp tells it by the number of layers."""
    if config.num_hidden_layers == LARGE_GEMMA_LAYERS[architecture]:
        return int(config.hidden_size // config.num_attention_heads)
    return int(config.head_dim)


def _rope(parameters: dict[str, Any], file: Path, facts: dict[str, Any]) -> dict[str, Any]:
    """Positions: their speed, and how they are stretched. Layers with a window are not stretched."""
    own: dict[str, Any] = {}
    if "rope.freq_base" in facts:
        own["rope_theta"] = facts["rope.freq_base"]
    factor = facts.get("rope.scaling.factor") or 1.0
    kind = facts.get("rope.scaling.type") or ("linear" if factor != 1.0 else "none")
    if kind not in STRETCHED:
        raise _no_place(file, "rope.scaling.type", kind)
    if kind != "none":
        own |= {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        names = {"original_context_length": "original_max_position_embeddings"}
        names |= {f"yarn_{name}": name for name in ("beta_fast", "beta_slow")}
        own |= {name: facts[f"rope.scaling.{key}"] for key, name in names.items() if f"rope.scaling.{key}" in facts}
    if "full_attention" not in parameters:
        return {**parameters, **own}
    windowed = {"rope_theta": facts["rope.freq_base_swa"]} if "rope.freq_base_swa" in facts else {}
    return {
        **parameters,
        "full_attention": {**parameters["full_attention"], **own},
        "sliding_attention": {**parameters["sliding_attention"], **windowed},
    }


def _llama3(config: Any, file: Path, factors: Sequence[float]) -> dict[str, Any]:
    """The parameters of Llama 3 that give exactly these factors; the file has only the factors themselves."""
    wanted = torch.tensor(factors, dtype=torch.float32)
    plain = dict(config.rope_parameters)
    if bool((wanted == 1).all()):
        return plain
    tried = {**plain, "rope_type": "llama3", "factor": float(wanted.max()), **LLAMA3}
    speeds = [
        ROPE_INIT_FUNCTIONS[kind](_made(config, {"rope_parameters": parameters}), torch.device("cpu"))[0]
        for kind, parameters in (("linear", {**plain, "rope_type": "linear", "factor": 1.0}), ("llama3", tried))
    ]
    if speeds[0].shape != wanted.shape or not torch.allclose(speeds[0] / speeds[1], wanted, rtol=1e-4):
        raise _no_place(file, ROPE_FACTORS, "factors that are not Llama 3's")
    return tried


def _check_rotated(config: Any, file: Path, facts: dict[str, Any]) -> None:
    """Raises `ModelLoadError` when the file turns another share of each head by position than transformers does."""
    count = facts.get("rope.dimension_count")
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    share = config.rope_parameters.get("partial_rotary_factor", getattr(config, "partial_rotary_factor", None)) or 1.0
    if count is not None and int(width * share) != count:
        raise _no_place(file, "rope.dimension_count", count)
