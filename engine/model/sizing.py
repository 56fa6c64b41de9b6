"""Size a model by its configuration alone: what its weights and its K and V take, and whether it can be served.

The model is built on torch's meta device, where tensors have shapes and no memory, and each layer tells what it would
hand to attention. This module reads no weight, and knows nothing of this machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

from engine.errors import ModelLoadError
from engine.model import gguf, gguf_config, hub, kinds, loading, selfcheck, sources
from engine.model.files import one_line
from engine.model.folders import read_configuration
from engine.model.gguf_header import Header
from engine.model.loading import LoadedModel
from engine.model.selfcheck import KVShape
from engine.model.sources import PreparedModel

CONFIG = "config.json"
TEXT_ONLY = {"gemma3": "gemma3_text", "gemma4": "gemma4_text"}  # of which GGUF holds the part that writes


@dataclass(frozen=True)
class Sizing:
    """A model that can be served, in numbers. `windows`: how many last tokens each layer sees; None: all."""

    name: str
    kind: str
    parameters: int
    shape: KVShape
    windows: tuple[int | None, ...]
    context_length: int

    def weight_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of all weights; tied ones count once."""
        return self.parameters * dtype.itemsize

    def kv_bytes(self, dtype: torch.dtype, tokens: int = 1) -> int:
        """Bytes of the K and V of so many tokens: what Keepwarm keeps, which is all of them in every layer."""
        return self.shape.bytes_per_token(dtype) * tokens

    def seen_bytes(self, dtype: torch.dtype, tokens: int) -> int:
        """Bytes of those K and V among them that a further token could still see."""
        layer = KVShape(1, self.shape.kv_heads, self.shape.head_dim).bytes_per_token(dtype)
        return layer * sum(tokens if window is None else min(window, tokens) for window in self.windows)


def size(model: str) -> Sizing:
    """Size `model`: "smollm2", a folder or file with a configuration, a .gguf file, or a hub id (fetches config.json).

    Raises `ModelLoadError` when there is no such model, or it cannot be served.
    """
    name, config = _described(model)
    kinds.require_servable(name, config)
    module = _empty_module(name, config)
    context = loading.longest_context(name, kinds.text_config(config))
    prepared = PreparedModel(name=name, path=Path(), digest="")
    loaded = LoadedModel(prepared, module, torch.device("meta"), torch.bfloat16, min(context, 8))
    shape, windows = selfcheck.outline(loaded)
    return Sizing(
        name=name,
        kind=str(config.model_type),
        parameters=sum(parameter.numel() for parameter in module.parameters()),
        shape=shape,
        windows=windows,
        context_length=context,
    )


def _described(model: str) -> tuple[str, Any]:
    """A model's name for people, and its configuration."""
    path = sources.path_of(model, "model")
    if path.name == CONFIG and path.is_file():
        return path.resolve().parent.name, read_configuration(path.parent)
    source = sources.locate(model)
    if source.kind == "folder" and source.path is not None:
        return source.path.resolve().name, read_configuration(source.path)
    if source.path is not None:
        return source.path.stem, _gguf_configuration(gguf.checked_header(source.path))
    return model, read_configuration(hub.fetch(model, (CONFIG,), lambda *_: None))


def _gguf_configuration(header: Header) -> Any:
    """The configuration that transformers would make of the header, but for what has no bearing on sizes."""
    known = {gguf.plain_name(kind): kind for kind in GGUF_CONFIG_MAPPING}
    kind = known[gguf.plain_name(header.architecture)]
    facts = dict(header.own_facts())
    values = {name: facts[key] for key, name in GGUF_CONFIG_MAPPING[kind].items() if name and key in facts}
    tokens = header.facts.get("tokenizer.ggml.tokens", 0)
    values.setdefault("vocab_size", tokens if isinstance(tokens, int) else len(tokens))
    values["pad_token_id"] = header.facts.get("tokenizer.ggml.padding_token_id")
    values["tie_word_embeddings"] = all(tensor.name != "output.weight" for tensor in header.tensors)
    return gguf_config.complete(CONFIG_MAPPING[TEXT_ONLY.get(kind, kind)](**values), header, None)


def _empty_module(name: str, config: Any) -> Any:
    """The model without weights. Raises `ModelLoadError` when its configuration does not make one."""
    try:
        with torch.device("meta"):
            module = AutoModelForCausalLM.from_config(
                config, dtype=torch.bfloat16, attn_implementation="eager", trust_remote_code=False
            ).eval()
    except Exception as error:  # whatever a model raises that was given numbers that do not fit
        raise ModelLoadError(f"{name} has a configuration that makes no model: {one_line(error)}") from error
    for part in module.modules():  # positions that follow the longest one would need numbers; sizes do not depend on it
        kind = getattr(part, "rope_type", None)
        if kind is not None:
            part.rope_type = dict.fromkeys(kind, "default") if isinstance(kind, dict) else "default"
    return module
