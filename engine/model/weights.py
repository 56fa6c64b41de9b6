"""A model's safetensors: which files they are, what their headers say, and whether a load took all of them.

This module reads headers only and never a weight; it knows nothing of devices and of where a model came from.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from engine.errors import ModelLoadError
from engine.model.files import AGAIN, PICKLES, can_run_code, entries, json_object, require_file, unreadable

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"

INTEGER_BYTES = {"BOOL": 1, "I8": 1, "U8": 1, "I16": 2, "U16": 2, "I32": 4, "U32": 4, "I64": 8, "U64": 8}


@dataclass(frozen=True)
class Stored:
    """One tensor as a header describes it; `kind` is safetensors' word for its type, such as BF16."""

    shape: tuple[int, ...]
    kind: str

    @property
    def numbers(self) -> int:
        return prod(self.shape)


def weight_files(folder: Path) -> list[Path]:
    """The files that hold a folder's weights. Raises `ModelLoadError` when there are none, or one is missing."""
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if (folder / INDEX).is_file():
        places = json_object(folder / INDEX).get("weight_map")
        if not isinstance(places, dict) or not places or not all(isinstance(name, str) for name in places.values()):
            raise ModelLoadError(f"{folder / INDEX} does not say which file holds which weights: {AGAIN}")
        files = [folder / name for name in sorted(set(places.values()))]
        for file in files:
            if not file.is_file():
                raise ModelLoadError(f"no {file.name} in {folder}, which {INDEX} names: {AGAIN}")
        return files
    require_file(folder / WEIGHTS)
    raise ModelLoadError(_without_weights(folder))


def _without_weights(folder: Path) -> str:
    """Why a folder without weights that can be read cannot be used, by what it holds instead."""
    names = entries(folder)
    if pickles := [name for name in names if name.endswith(PICKLES)]:
        return f"{folder / pickles[0]} is a pickle, which {can_run_code(folder / pickles[0])}"
    if ggufs := [name for name in names if name.lower().endswith(".gguf")]:
        return f"{folder} holds {ggufs[0]}: name that file, {folder / ggufs[0]}, as the model"
    if others := [name for name in names if name.endswith(".safetensors")]:
        return f"no {WEIGHTS} and no {INDEX} in {folder}: rename {others[0]} if it holds the whole model"
    if "config.json" not in names:
        return f"{folder} is not a model's folder: it holds no config.json and no {WEIGHTS}"
    return f"no {WEIGHTS} in {folder}: other weight formats are not read"


def stored_tensors(files: Iterable[Path]) -> dict[str, Stored]:
    """Every tensor of these files by name. Raises `ModelLoadError` for a file that is not whole safetensors."""
    found: dict[str, Stored] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as header:
                for name in header.keys():  # noqa: SIM118 - it is no mapping
                    part = header.get_slice(name)
                    found[name] = Stored(tuple(part.get_shape()), part.get_dtype())
        except Exception as error:  # safetensors has an error type of its own
            raise unreadable(file, error, "safetensors") from error
    return found


def indexed(folder: Path, tensors: Mapping[str, Stored]) -> None:
    """Raises `ModelLoadError` when the index names tensors that no file holds."""
    if (folder / WEIGHTS).is_file():
        return
    missing = sorted(set(json_object(folder / INDEX)["weight_map"]) - set(tensors))
    if missing:
        raise ModelLoadError(f"{folder} lacks {some(missing)}, which {INDEX} names: {AGAIN}")


def weight_bytes(folder: Path, dtype: torch.dtype) -> int:
    """Bytes that the weights in `folder` take in memory in `dtype`; integers stay as they are.

    Raises `ModelLoadError` as `weight_files` and `stored_tensors` do.
    """
    return sum(
        tensor.numbers * INTEGER_BYTES.get(tensor.kind, dtype.itemsize)
        for tensor in stored_tensors(weight_files(folder)).values()
    )


def check_complete(module: torch.nn.Module, info: Mapping[str, Any], name: str) -> None:
    """Raises `ModelLoadError` when a load left weights random, or dropped some that belong to what was loaded.

    `info` is transformers' loading info. Weights that it drops for whole parts that the module does not have, such as
    the eyes of a model that also sees, are none of its business.
    """
    if missing := sorted(info["missing_keys"]):
        raise ModelLoadError(f"{name} cannot be served: its files lack {some(missing)}; {AGAIN}")
    if odd := sorted(f"{key} {list(held)} instead of {list(due)}" for key, held, due in info["mismatched_keys"]):
        raise ModelLoadError(f"{name} cannot be served: its weights are not of the shapes that it says, {some(odd)}")
    if dropped := sorted(key for key in info["unexpected_keys"] if _belongs(module, key)):
        raise ModelLoadError(
            f"{name} cannot be served: its files hold {some(dropped)}, which its config.json has no place for; {AGAIN}"
        )


def _belongs(module: torch.nn.Module, key: str) -> bool:
    """Whether a dropped tensor lies in a layer, or in another part that does more than hold parts, of the module."""
    inner = module
    for part in key.split(".")[:-1]:
        child = dict(inner.named_children()).get(part)
        if child is None:
            break
        inner = child
    holders = (module, getattr(module, "base_model", module))
    return not isinstance(inner, torch.nn.ModuleList) and all(inner is not holder for holder in holders)


def some(names: list[str], most: int = 3) -> str:
    """A few names of many, for a sentence."""
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")
