"""A folder in Hugging Face's form: refuse what cannot be read or must not be run, and see to its tokenizer.

This module knows which files make a model; it knows nothing of hubs, GGUF and adapters.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import transformers
from transformers import CONFIG_MAPPING, AutoConfig

from engine.errors import ModelLoadError
from engine.model.conversion import Conversion, converted
from engine.model.digests import digest
from engine.model.files import AGAIN, Progress, json_object, one_line, require_file
from engine.model.kinds import require_few_layers
from engine.model.weights import indexed, stored_tensors, weight_files

ADAPTER_CONFIG = "adapter_config.json"
TOKENIZER = "tokenizer.json"
OLDER_TOKENIZERS = (("tokenizer.model",), ("vocab.json", "merges.txt"), ("spiece.model",))
TOKENIZER_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja")
TOKENIZER_BYTES = 64 * 2**20  # that the largest one takes


def prepare_folder(folder: Path, cache_dir: Path, progress: Progress) -> tuple[Path, str]:
    """The directory to load `folder` from, itself where nothing needs to be converted, and the digest of its weights.

    Raises `ModelLoadError`, naming the file, for whatever keeps the folder from being loaded.
    """
    if (folder / ADAPTER_CONFIG).is_file():
        raise ModelLoadError(
            f"{folder} holds an adapter ({ADAPTER_CONFIG}): name it with --adapter, and its base model with --model"
        )
    files = weight_files(folder)
    config = read_configuration(folder)
    tensors = stored_tensors(files)
    indexed(folder, tensors)
    layers = getattr(config.get_text_config(), "num_hidden_layers", 0)
    if isinstance(layers, int) and layers > len(tensors):
        raise ModelLoadError(f"{folder} announces {layers} layers and holds {len(tensors)} tensors: {AGAIN}")
    content = digest(files, cache_dir, progress)
    return _with_tokenizer(folder, cache_dir, content, progress), content


def read_configuration(folder: Path) -> Any:
    """The folder's configuration; code that comes with a model is never run. Raises `ModelLoadError`."""
    raw = json_object(folder / "config.json")
    require_few_layers(str(folder / "config.json"), raw)
    kind = raw.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        if "auto_map" in raw:
            raise ModelLoadError(
                f"{folder} needs program code of its own (auto_map in config.json), which is never run: "
                "choose a model that transformers itself knows"
            )
        raise ModelLoadError(
            f"{folder / 'config.json'} has the model_type {kind!r}, which transformers {transformers.__version__} does "
            "not know: update transformers, or choose another model"
        )
    if "transformers_weights" in raw:
        raise ModelLoadError(
            f"{folder / 'config.json'} names its weights itself (transformers_weights), which is not read: "
            "take that out, and call them model.safetensors"
        )
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # libraries raise types of their own for a damaged or foreign file
        raise ModelLoadError(f"cannot read {folder / 'config.json'}: {one_line(error)}") from error


def _with_tokenizer(folder: Path, cache_dir: Path, content: str, progress: Progress) -> Path:
    """`folder` if it has a tokenizer.json; else a directory with one, made of an older form, and links to the rest."""
    if (folder / TOKENIZER).is_file():
        json_object(folder / TOKENIZER)
        return folder
    require_file(folder / TOKENIZER)
    older = next((names for names in OLDER_TOKENIZERS if all((folder / name).is_file() for name in names)), None)
    if older is None:
        raise ModelLoadError(f"no {TOKENIZER} in {folder}: a model's folder holds it beside the weights")
    parts = [folder / name for name in (*older, *TOKENIZER_SETTINGS) if (folder / name).is_file()]
    made_of = digest(parts, cache_dir, progress)
    key = hashlib.sha256(f"{folder.resolve()}|{made_of}|{content}".encode()).hexdigest()[:20]
    target = cache_dir / "models" / f"{key}-tokenizer"
    job = Conversion(target, ("tokenizer", str(folder)), folder, TOKENIZER_BYTES, "converting the tokenizer")
    converted(job, progress)
    for entry in folder.iterdir():
        if entry.is_file() and not (target / entry.name).exists():
            _link(entry.resolve(), target / entry.name)
    return target


def _link(source: Path, place: Path) -> None:
    try:
        place.unlink(missing_ok=True)  # it led to a file that is gone
        place.symlink_to(source)
    except OSError:  # Windows allows it to few
        try:
            os.link(source, place)
        except OSError as error:
            raise ModelLoadError(
                f"no {TOKENIZER} in {source.parent}: make one with transformers' save_pretrained"
            ) from error
