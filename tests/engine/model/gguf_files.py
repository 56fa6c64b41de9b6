"""Tiny GGUF files, written with llama.cpp's own library the way its converter writes them, and the models in them."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, GGMLQuantizationType, GGUFWriter
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, LlamaConfig

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
TEXT = "Pack my box with five dozen liquor jugs; über-quick foxes jump, 12345 times, over lazy dogs.\n" * 3
HEADS_PERMUTED = {"llama"}  # whose converter reorders the rows of each head
NORMS_PLUS_ONE = {"gemma2", "gemma3"}


def tokenizer() -> Tokenizer:
    """A byte-level tokenizer with a few merges, like those of qwen2 and smollm."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([TEXT], trainer)
    return made


VOCABULARY = tokenizer().get_vocab_size()
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
LLAMA = {"rope.freq_base": 5e5, "rope.dimension_count": 16}


def llama() -> Any:
    """A random llama, which `LLAMA` describes beside its sizes."""
    return random_model(LlamaConfig(**SIZES, rope_theta=5e5))


def random_model(config: Any) -> Any:
    """A model whose weights are so large that each of them, and each setting, moves the logits."""
    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.3 if parameter.dim() > 1 else 0.5))
    return module


def write(
    file: Path,
    module: Any,
    architecture: str,
    facts: dict[str, Any],
    *,
    kind: GGMLQuantizationType = GGMLQuantizationType.Q8_0,
    extra: dict[str, np.ndarray] | None = None,
    without: tuple[str, ...] = (),
) -> Any:
    """Write the module with its matrices as `kind`; returns it with the values that the file holds.

    `facts` are what the converter writes beside the sizes that every kind of model has; `extra` and `without` add
    tensors and leave some out.
    """
    writer = GGUFWriter(file, architecture)
    _write_facts(writer, module.config, architecture, facts)
    _write_tokenizer(writer)
    arch = next(key for key, name in MODEL_ARCH_NAMES.items() if name == architecture)
    state = _write_weights(writer, module, arch, kind, without)
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    held = copy.deepcopy(module)
    held.load_state_dict(state, strict=False)
    held.tie_weights()
    return held


def _write_facts(writer: GGUFWriter, config: Any, architecture: str, facts: dict[str, Any]) -> None:
    facts = {"general.name": f"tiny {architecture}", "block_count": config.num_hidden_layers, **facts}
    facts = {"feed_forward_length": config.intermediate_size, **facts}
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    if hasattr(config, "num_key_value_heads"):
        writer.add_head_count_kv(config.num_key_value_heads)
    if hasattr(config, "rms_norm_eps"):
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    for key, value in facts.items():
        if key == "general.architecture":  # in the place of the one that the library wrote
            writer.kv_data[0][key].value = value
            continue
        name = key if key.startswith(("general.", "split.")) else f"{architecture}.{key}"
        match value:
            case bool():
                writer.add_bool(name, value)
            case int():
                writer.add_uint32(name, value)
            case float():
                writer.add_float32(name, value)
            case str():
                writer.add_string(name, value)
            case _:
                writer.add_array(name, value)


def _write_tokenizer(writer: GGUFWriter) -> None:
    made = tokenizer()
    ids = sorted(made.get_vocab().items(), key=lambda item: item[1])
    merges = [" ".join(pair) for pair in _merges(made)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([token for token, _ in ids])
    writer.add_token_types([3 if token in SPECIAL else 1 for token, _ in ids])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_eot_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_chat_template(TEMPLATE)


def _merges(made: Tokenizer) -> list[list[str]]:
    return json.loads(made.to_str())["model"]["merges"]


def _write_weights(
    writer: GGUFWriter, module: Any, arch: MODEL_ARCH, kind: GGMLQuantizationType, without: tuple[str, ...]
) -> dict[str, torch.Tensor]:
    names = gguf.get_tensor_name_map(arch, module.config.num_hidden_layers)
    held: dict[str, torch.Tensor] = {}
    for key, value in module.state_dict().items():
        if key == "lm_head.weight" and module.config.tie_word_embeddings:
            continue
        parts = value.chunk(2, dim=1) if key.endswith("experts.gate_up_proj") else (value,)
        read = []
        for part, name in zip(parts, _names(names, key), strict=True):
            if name in without:
                continue
            values = _stored(part.numpy().astype(np.float32), key, MODEL_ARCH_NAMES[arch], module.config)
            use = kind if values.ndim > 1 else GGMLQuantizationType.F32
            data = gguf.quantize(values, use)
            writer.add_tensor(name, data, raw_dtype=use)
            numbers = gguf.dequantize(data, use).reshape(values.shape)
            read.append(_stored(numbers, key, MODEL_ARCH_NAMES[arch], module.config, back=True))
        if read:
            held[key] = torch.from_numpy(np.concatenate(read, axis=1 if len(read) > 1 else 0))
    return held


def _names(names: Any, key: str) -> list[str]:
    """What the file calls a weight; one of all experts together is two there."""
    if ".experts." not in key:
        return [names.get_name(key, try_suffixes=(".weight", ".bias"))]
    kinds = ["gate", "up"] if key.endswith("gate_up_proj") else ["down"]
    return [f"blk.{key.split('.')[2]}.ffn_{kind}_exps.weight" for kind in kinds]


def _stored(values: np.ndarray, key: str, architecture: str, config: Any, *, back: bool = False) -> np.ndarray:
    """A weight as the converter stores it, and `back`."""
    if architecture in NORMS_PLUS_ONE and key.endswith("norm.weight"):
        return values - 1 if back else values + 1
    if architecture in HEADS_PERMUTED and key.endswith(("q_proj.weight", "k_proj.weight")):
        heads = config.num_attention_heads if "q_proj" in key else config.num_key_value_heads
        half = values.shape[0] // heads // 2
        split = (heads, half, 2) if back else (heads, 2, half)
        return values.reshape(*split, -1).swapaxes(1, 2).reshape(values.shape)
    return values
