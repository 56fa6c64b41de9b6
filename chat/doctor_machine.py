"""Checks of the machine: versions, cores, memory, the device that was chosen and the number format.

Knows nothing of models, settings files and databases.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass

import psutil

from chat.doctor import Finding, count, ok
from chat.machine import NVIDIA, core_quota, usable_cores
from chat.settings import VERSION, Settings
from engine.room import memory_limit
from engine.words import size
from storage import SQLITE

PACKAGES = ("torch", "transformers", "gguf", "safetensors", "gradio", "fastapi", "uvicorn", "sqlalchemy", "alembic")
SHOWN = ("torch", "transformers", "gradio")
LITTLE_MEMORY = 2**30  # bytes: below that even the embedded model runs short


@dataclass(frozen=True)
class Device:
    """Where the model would compute, and in what; `capacity` and `free` are bytes of the memory that it uses."""

    name: str
    dtype: str
    capacity: int
    free: int


def versions() -> Iterator[Finding]:
    """What is installed."""
    found: dict[str, str] = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            fix = "run `make run` once more, or `pip install -r requirements.lock`"
            yield Finding("problem", "versions", f"{package} is not installed", fix)
    shown = [f"keepwarm {VERSION}", f"Python {platform.python_version()}"]
    shown += [f"{package} {found[package]}" for package in SHOWN if package in found]
    yield ok("versions", ", ".join([*shown, f"SQLite {SQLITE}"]))


def machine() -> Iterator[Finding]:
    """The processor, its cores and how many of them the model would use."""
    from engine.model import hardware

    found, cores, quota = hardware.look(), usable_cores(), core_quota()
    threads = found.threads
    detail = (
        f"{platform.system()} {platform.release()}, {platform.machine()}, {count(cores, 'core')} "
        f"({found.instructions}), {count(threads, 'thread')} for the model"
    )
    if quota is not None and quota < threads:
        fix = f"give the container more, or start Keepwarm with OMP_NUM_THREADS={max(1, int(quota))}"
        detail += f"; the container gives it the time of {quota:g}, so that they wait for each other"
        yield Finding("warn", "machine", detail, fix)
    elif threads < cores:
        why = "OMP_NUM_THREADS" if "OMP_NUM_THREADS" in os.environ else "an environment variable"
        fix = f"take {why} out of the environment, unless other programs need the other cores"
        yield Finding("warn", "machine", f"{detail}: it would use a part of the machine", fix)
    else:
        yield ok("machine", detail)
    if found.compiler is None and found.gpu is None and not found.apple:
        detail = "there is no C compiler (cc, gcc or clang), so replies take longer than they need to"
        yield Finding("warn", "compiler", detail, "install one, such as gcc with libc6-dev, then start again")


def memory() -> Iterator[Finding]:
    """Main memory, within the container's limit if there is one."""
    capacity, free = main_memory()
    detail = f"{size(free)} of {size(capacity)} available"
    if capacity < psutil.virtual_memory().total:
        detail += ", which is what the container may have"
    if free < LITTLE_MEMORY:
        yield Finding("warn", "memory", detail, "close other programs before you start Keepwarm")
    else:
        yield ok("memory", detail)


def main_memory() -> tuple[int, int]:
    """Bytes of memory that there are for this process, and those that it can have now."""
    from engine.model import hardware

    total = psutil.virtual_memory().total
    return min(total, memory_limit() or total), hardware.look().free


def on_cpu(settings: Settings) -> bool:
    """Whether the model would compute on the CPU, so that device and host are the same memory."""
    from engine.model import hardware

    return settings.device == "cpu" or (settings.device == "auto" and hardware.look().gpu is None)


def device(settings: Settings, recorded: str | None) -> tuple[list[Finding], Device | None]:
    """Where the model would compute and in what number format, each with the reason; None where it cannot.

    `recorded` is the format that "auto" meant for this model at an earlier start.
    """
    from engine.errors import ModelLoadError
    from engine.model import loading

    try:
        target, kind = loading.choose(settings.device, recorded or settings.dtype)
    except ModelLoadError as error:
        return [Finding("problem", "device", str(error), "start with --device auto --dtype auto")], None
    dtype = str(kind).removeprefix("torch.")
    name, capacity, free = _measured(target.type)
    findings = [_device_finding(settings, target.type, name), _dtype_finding(settings, recorded, target.type, dtype)]
    return findings, Device(target.type, dtype, capacity, free)


def weights(settings: Settings, found: Device) -> Iterator[Finding]:
    """In how many bits the weights would be computed with, and why."""
    from engine.errors import ModelLoadError
    from engine.model import loading

    try:
        chosen = loading.choose_weights(settings.weights, *loading.choose(found.name, found.dtype))
    except ModelLoadError as error:
        yield Finding("problem", "bits of weights", str(error), "start with --weights auto")
        return
    if settings.weights != "auto":
        yield ok("bits of weights", f"{chosen}, as set with weights = {settings.weights}")
    elif chosen == "auto":
        yield ok("bits of weights", "auto takes as few as the model's own have, 4, 8 or 16, with a C compiler")
    else:
        yield ok("bits of weights", f"those of {found.dtype}; auto takes fewer only on a CPU in bfloat16 or float32")


def _measured(kind: str) -> tuple[str, int, int]:
    """The device's name, its memory and how much of that is free, in bytes."""
    from engine.model import hardware

    if kind == "cuda" and (gpu := hardware.look().gpu) is not None:
        return f"{gpu.name}, {size(gpu.free)} of {size(gpu.capacity)} free", gpu.capacity, gpu.free
    return (kind, *main_memory())


def _device_finding(settings: Settings, kind: str, name: str) -> Finding:
    from engine.model import hardware

    found = hardware.look()
    if settings.device != "auto":
        return ok("device", f"{name}, as set with device = {settings.device}")
    if kind == "cuda":
        return ok("device", f"{name}; auto takes a CUDA GPU where there is one")
    build = f"torch {found.torch}"
    if NVIDIA.exists():
        fix = "install torch with CUDA, as `pip install torch` does, or update the GPU's driver"
        return Finding("warn", "device", f"{name}, though there is an NVIDIA GPU: {build} cannot use it", fix)
    if found.apple:
        return ok("device", f"{name}; --device mps would take Apple's GPU, which is untested")
    return ok("device", f"{name}; auto takes a CUDA GPU where there is one, and {build} sees none")


def _dtype_finding(settings: Settings, recorded: str | None, kind: str, dtype: str) -> Finding:
    if settings.dtype != "auto":
        return ok("number format", f"{dtype}, as set with dtype = {settings.dtype}")
    if recorded is not None:
        return ok("number format", f"{dtype}; auto keeps what it meant for this model at its first start")
    if kind == "cpu":
        why = "this CPU multiplies it" if dtype == "bfloat16" else "this CPU has no AVX-512 BF16 and no AMX"
        return ok("number format", f"{dtype}; auto takes bfloat16 where the CPU multiplies it, and {why}")
    return ok("number format", f"{dtype}; auto takes bfloat16 where the GPU multiplies it, else float16")
