"""Checks of the model: is it there, can it be served, does it fit, and can it chat.

Reads configurations and headers, never a weight. Knows nothing of servers and databases.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from chat.doctor import Finding, ok
from chat.doctor_machine import Device
from chat.engine_config import budget as tier_budget
from chat.errors import UnusableModel
from chat.settings import Settings
from chat.templates import ChatTemplate
from engine.config import EngineConfig
from engine.errors import ModelLoadError
from engine.model import folders, gguf, hub, sizing, sources, weights
from engine.model.adapters import check_adapter
from engine.model.attention import KERNEL
from engine.model.choices import known_dtype
from engine.model.digests import remembered
from engine.model.loading import DTYPES, choose
from engine.model.packing import BITS, COMFORT
from engine.model.sizing import Sizing
from engine.shares import usual_bytes
from engine.words import size

ANOTHER = "name another with --model"
AT_FIRST_START = "converted at the first start, after which its tokenizer and template can be checked"
SAMPLE = "Grüße, 你好, नमस्ते\n\t 👩‍👩‍👧 1.000 <b>"


@dataclass(frozen=True)
class Located:
    """A model as it lies on this machine. `folder` holds its configuration and tokenizer; None: not yet."""

    detail: str
    folder: Path | None
    convert_numbers: int = 0  # how many numbers are still to be converted


def recorded(settings: Settings, cache_dir: Path) -> str | None:
    """The number format that "auto" meant when this model was first loaded; None where none is kept, or one is set."""
    if settings.dtype != "auto":
        return None
    try:
        target, _ = choose(settings.device, "auto")
    except ModelLoadError:
        return None
    return known_dtype(cache_dir, settings.model, target.type)


def locate(settings: Settings, cache_dir: Path, dtype: str) -> Located | Finding:
    """Where the model is, or the problem with it."""
    try:
        return _locate(settings.model, cache_dir, dtype)
    except ModelLoadError as error:
        return Finding("problem", "model", str(error), ANOTHER)


def _locate(model: str, cache_dir: Path, dtype: str) -> Located:
    source = sources.locate(model)
    if source.path is None:
        folder = hub.cached(model)
        if folder is None:
            return Located(f"{model}, a hub id that is not fetched yet: the first start does that", None)
        return Located(f"{model}, fetched from the hub into {folder}", _whole(folder))
    if source.kind == "folder":
        return Located(f"{model}, a folder", _whole(source.path))
    header = gguf.checked_header(source.path)
    what = "the embedded model" if source.kind == "embedded" else "a GGUF file"
    detail = f"{model}, {what} of {size(source.path.stat().st_size)}"
    content = remembered([source.path], cache_dir)
    folder = gguf.converted_folder(content, cache_dir, DTYPES[dtype]) if content else None
    if folder is None:
        return Located(f"{detail}; {AT_FIRST_START}", None, header.numbers)
    return Located(f"{detail}, converted", _whole(folder))


def _whole(folder: Path) -> Path:
    """`folder`, whose files are all there as far as their headers tell. Raises `ModelLoadError`."""
    folders.read_configuration(folder)
    weights.stored_tensors(weights.weight_files(folder))
    return folder


def adapter(settings: Settings) -> Iterator[Finding]:
    """Whether the adapter, if one is set, can be read."""
    if not settings.adapter:
        return
    path = Path(settings.adapter).expanduser()
    if not path.is_dir() and hub.is_id(settings.adapter):
        yield ok("adapter", f"{settings.adapter}, a hub id, fetched at the first start unless it is there")
        return
    try:
        check_adapter(path)
    except ModelLoadError as error:
        yield Finding("problem", "adapter", str(error), "name another with --adapter, or none")
    else:
        yield ok("adapter", f"{path}, merged into the model when it is loaded")


def architecture(model: str, located: Located) -> tuple[Sizing | None, Finding]:
    """What kind of model it is, and whether Keepwarm serves it."""
    try:
        sized = sizing.size(str(located.folder) if located.folder else model)
    except ModelLoadError as error:
        return None, Finding("problem", "architecture", str(error), ANOTHER)
    windows = sum(window is not None for window in sized.windows)
    sees = f", {windows} of {len(sized.windows)} layers see only the last tokens" if windows else ""
    return sized, ok(
        "architecture",
        f"{sized.kind}, {sized.parameters:,} parameters, a context of {sized.context_length:,} tokens{sees}; served by "
        f"{KERNEL}, which every start compares with the model's own attention",
    )


def fit(
    sized: Sizing, located: Located, settings: Settings, device: Device, *, running: bool, disk_free: int
) -> Iterator[Finding]:
    """Whether weights and cache fit into the device's memory, and what the cache holds."""
    dtype = DTYPES[device.dtype]
    weight, token = sized.weight_bytes(dtype), sized.kv_bytes(dtype)
    yield from _weights(weight, located, device, running=running, disk_free=disk_free)
    copied = settings.weights in BITS and device.dtype == "bfloat16"  # in float32 the few bits serve for all
    if copied and not running and (1 + COMFORT) * weight > device.free:
        detail = f"no room beside {settings.weights} for a copy in bfloat16: prompts are read several times slower"
        yield Finding("warn", "weights", detail, "close other programs, or start with --weights bf16")
    block_size = EngineConfig(cache_dir="").block_size
    context = settings.context or sized.context_length
    if context > sized.context_length:
        detail = f"{context:,} tokens, and the model was made for {sized.context_length:,}"
        yield Finding("problem", "context", detail, f"--context {sized.context_length} or less")
        return
    usual = usual_bytes(context, block_size, token * block_size, (device.capacity if running else device.free) - weight)
    budget = tier_budget(settings.device_kv, lambda: device.free) or usual
    tokens = budget // (token * block_size) * block_size
    one = -(-context // block_size) * block_size * token
    detail = (
        f"{size(budget)}{'' if settings.device_kv else ', the default,'} hold {tokens:,} tokens of {token:,} bytes, "
        f"{tokens / context:.1f} full contexts"
    )
    if budget < one:
        yield Finding("problem", "cache", detail, f"--device-kv {-(-one // 2**20)}MiB or more holds a full context")
    elif weight + budget > device.capacity:
        fix = f"a smaller --device-kv, {-(-one // 2**20)}MiB or more, or a smaller model"
        yield Finding("problem", "cache", f"{detail}: with the weights more than the memory has", fix)
    elif not running and weight + budget > device.free:
        fix = f"close other programs, or take a smaller --device-kv, {-(-one // 2**20)}MiB or more"
        yield Finding("warn", "cache", f"{detail}: with the weights more than the {size(device.free)} available", fix)
    else:
        yield ok("cache", detail)


def _weights(weight: int, located: Located, device: Device, *, running: bool, disk_free: int) -> Iterator[Finding]:
    detail = f"{size(weight)} in {device.dtype}"
    half = " or --dtype bfloat16" if device.dtype == "float32" else ""
    if weight > device.capacity:
        fix = f"choose a smaller model{half}"
        yield Finding("problem", "weights", f"{detail}, more than the memory of {size(device.capacity)}", fix)
    elif located.convert_numbers and weight > disk_free:
        fix = "make room, or choose another disk with --data-dir"
        yield Finding("problem", "weights", f"{detail}, to be kept on a disk with {size(disk_free)} free", fix)
    elif not running and weight > device.free:
        fix = f"close other programs, or choose a smaller model{half}"
        yield Finding("warn", "weights", f"{detail}, more than the {size(device.free)} available now", fix)
    else:
        yield ok("weights", detail)


def chatting(folder: Path, settings: Settings) -> Iterator[Finding]:
    """Whether the tokenizer keeps text as it is, and the chat template lets earlier messages be reused."""
    if not (folder / folders.TOKENIZER).is_file() and _older_tokenizer(folder):
        yield ok("tokenizer", f"in an older form; {AT_FIRST_START}")
        return
    try:
        template = ChatTemplate.load(folder, settings.thinking)
    except UnusableModel as error:
        yield Finding("problem", "chat template", error.message, ANOTHER)
        return
    tokens = f"{template.tokenizer.get_vocab_size():,} tokens"
    if template.decode(template.encode_text(SAMPLE)) == SAMPLE:
        yield ok("tokenizer", f"{tokens}, and text comes back as it was")
    else:
        fix = "nothing is lost, for Keepwarm keeps the text as well; another model may do better"
        yield Finding("warn", "tokenizer", f"{tokens}; some text does not come back as it was", fix)
    if not _ends(folder):
        fix = "add eos_token_id to its generation_config.json, or choose another model"
        yield Finding("warn", "end of reply", "the model does not say which token ends a reply", fix)
    thinking = f"; reasoning of earlier replies: {template.notes.thinking}" if template.notes.thinking else ""
    if template.notes.notice:
        fix = "choose a model that was made for chatting, or add its chat_template.jinja"
        yield Finding("warn", "chat template", f"{template.notes.notice}{thinking}", fix)
    elif template.stable:
        yield ok("chat template", f"leaves earlier messages as they were, so that they are reused{thinking}")
    else:
        fix = "the replies are right, but every turn reads more; another model may reuse more"
        yield Finding("warn", "chat template", f"writes earlier messages anew as the chat grows{thinking}", fix)


def _older_tokenizer(folder: Path) -> bool:
    return any(all((folder / name).is_file() for name in names) for names in folders.OLDER_TOKENIZERS)


def _ends(folder: Path) -> bool:
    """Whether the model says which token ends a reply."""
    for name in ("generation_config.json", "config.json"):
        try:
            value = json.loads((folder / name).read_text("utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(value, dict) and value.get("eos_token_id") is not None:
            return True
    return False
