"""Tell kinds of models apart by their configuration, and say by name which of them cannot be served.

This module reads configurations alone: it knows nothing of weights, attention or pools.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import AutoModelForCausalLM

from engine.errors import ModelLoadError
from engine.model.files import AGAIN

ADVICE = "choose a decoder-only model with full or sliding attention"
RUNNING_STATE = {"linear_attention", "conv", "mamba"}  # layers that keep nothing but one
MIXED = {"hybrid", "hybrid_sliding"}  # layers that attend beside keeping one
LAYERS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer")  # what configurations call how many there are
MOST_LAYERS = 10_000
SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")


def refusal(name: str, why: str) -> ModelLoadError:
    """The error for model `name`: one sentence that says why it cannot be served, and what to do."""
    return ModelLoadError(f"{name} cannot be served: {why}; {ADVICE}")


def require_servable(name: str, config: Any) -> None:
    """Raise `ModelLoadError` for a kind of model that is known from its configuration not to be servable."""
    kind = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise refusal(name, f"it is an encoder-decoder model ({kind}), which reads a text before it writes another")
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise refusal(name, f"transformers does not know its kind ({kind}) as a model that writes text")
    text = text_config(config)
    layers = set(getattr(text, "layer_types", None) or ())
    if layers & (RUNNING_STATE | MIXED) or _is_stateful(config):
        attends = bool(layers - RUNNING_STATE) if layers else hasattr(text, "num_attention_heads")
        which, whose = ("hybrid", "some of its layers keep") if attends else ("linear-attention", "its layers keep")
        raise refusal(name, f"it is a {which} model ({kind}): {whose} a running state instead of keys and values")
    if getattr(text, "attn_temperature_tuning", False):
        raise refusal(name, f"its attention ({kind}) is scaled by how many tokens are read at once")
    stated = text.to_dict()  # whose values do not depend on a layer, as an attribute's may
    _require_sizes(name, {key: stated.get(key) for key in SIZES})


def require_few_layers(name: str, raw: Mapping[str, Any]) -> None:
    """Raise `ModelLoadError` for a config.json with so many layers that even to make something of it would not end."""
    for part in (raw, *(part for part in raw.values() if isinstance(part, dict))):
        for key in LAYERS:
            if isinstance(layers := part.get(key), int | float) and layers > MOST_LAYERS:
                raise ModelLoadError(f"{name} says {key} {layers}, and no model has more than {MOST_LAYERS:,}: {AGAIN}")


def _require_sizes(name: str, sizes: Mapping[str, Any]) -> None:
    for key, size in sizes.items():
        if isinstance(size, int) and size < 1:
            raise ModelLoadError(f"{name} cannot be served: its configuration says {key} {size}, where 1 is the least")
    require_few_layers(name, sizes)


def text_config(config: Any) -> Any:
    """The part of a configuration that describes the model that writes: all of it, but for models that also see."""
    return config.get_text_config(decoder=True)


def attention(config: Any) -> str:
    """What to call a model's attention: "multi-latent attention (deepseek_v3)", or "attention (llama)"."""
    latent = getattr(text_config(config), "kv_lora_rank", None) is not None
    return f"{'multi-latent ' if latent else ''}attention ({config.model_type})"


def layer_kind(config: Any, index: int) -> str:
    """What the configuration calls the attention of layer `index`, such as "chunked attention"."""
    kinds = getattr(text_config(config), "layer_types", None) or ()
    return kinds[index].replace("_", " ") if index < len(kinds) else "attention"


def _is_stateful(config: Any) -> bool:
    return bool(getattr(AutoModelForCausalLM._model_mapping[type(config)], "_is_stateful", False))
