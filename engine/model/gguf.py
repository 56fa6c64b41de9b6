"""GGUF files: refuse those that cannot be read, and keep the others as safetensors in the dtype that is wanted.

This module knows which files transformers can read; how they are converted is in `engine.model.convert`.
"""

from __future__ import annotations

import re
import shutil
from functools import cache
from pathlib import Path

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES

from engine.errors import ModelLoadError
from engine.model.conversion import Conversion, converted
from engine.model.digests import digest
from engine.model.files import Progress
from engine.model.gguf_header import Header, read_header

PART = re.compile(r"-\d{5}-of-(\d{5})\.gguf$", re.IGNORECASE)


def prepare_gguf(file: Path, cache_dir: Path, dtype: torch.dtype, progress: Progress) -> tuple[Path, str]:
    """The directory that `file` is converted into, once for its content and `dtype`, and the digest of its content.

    Raises `ModelLoadError` for a file that is damaged, of a kind that cannot be read, or too large for the disk or the
    memory.
    """
    header = checked_header(file)
    content = digest([file], cache_dir, progress)
    if (folder := converted_folder(content, cache_dir, dtype)) is not None:
        return folder, content
    job = Conversion(
        target=_target(content, cache_dir, dtype),
        arguments=("gguf", str(file), _name(dtype)),
        subject=file,
        size=header.numbers * dtype.itemsize,
        stage="converting weights",
    )
    folder = converted(job, progress)
    shutil.rmtree(cache_dir / "models" / content[:20], ignore_errors=True)  # an earlier version's, without all settings
    return folder, content


def converted_folder(content: str, cache_dir: Path, dtype: torch.dtype) -> Path | None:
    """What a file with this digest was converted into for `dtype`; None: nothing yet."""
    target = _target(content, cache_dir, dtype)
    return target if target.is_dir() else None


def checked_header(file: Path) -> Header:
    """The header of a file that can be converted, as far as a header tells. Raises `ModelLoadError` for any other."""
    parts = PART.search(file.name)
    header = read_header(file)
    count = header.facts.get("split.count", int(parts[1]) if parts else 1)
    if isinstance(count, int) and count > 1:
        raise ModelLoadError(
            f"{file} is one of {count} parts: join them with `llama-gguf-split --merge`, and name the whole file"
        )
    readable = {plain_name(name) for name in set(GGUF_SUPPORTED_ARCHITECTURES) - {"general", "tokenizer"}}
    if plain_name(header.architecture) not in readable:
        raise ModelLoadError(
            f"{file} holds a model of the kind {header.architecture!r}, which cannot be read from GGUF: "
            "use the model's Hugging Face folder or hub id, or another model"
        )
    if odd := next((tensor for tensor in header.tensors if not _readable(tensor.kind)), None):
        raise ModelLoadError(
            f"{file} is quantised as {odd.kind.name}, which cannot be converted ({odd.name}): "
            "take another quantisation, such as Q8_0"
        )
    layers = header.facts.get(f"{header.architecture}.block_count", 0)
    if not isinstance(layers, int) or layers > len(header.tensors):
        raise ModelLoadError(f"{file} announces {layers} layers and holds {len(header.tensors)} tensors: it is damaged")
    return header


def plain_name(architecture: str) -> str:
    """An architecture's name without its signs: qwen3moe in a file is qwen3_moe to transformers."""
    return architecture.replace("_", "").replace("-", "")


def _target(content: str, cache_dir: Path, dtype: torch.dtype) -> Path:
    return cache_dir / "models" / f"{content[:20]}-{_name(dtype)}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@cache
def _readable(kind: GGMLQuantizationType) -> bool:
    """Whether gguf can turn this type into numbers; one empty block tells."""
    _, width = GGML_QUANT_SIZES[kind]
    dtype = {GGMLQuantizationType.F32: np.float32, GGMLQuantizationType.F16: np.float16}.get(kind, np.uint8)
    try:
        dequantize(np.zeros((1, width // np.dtype(dtype).itemsize), dtype), kind)
    except NotImplementedError:
        return False
    return True
