"""What torch finds to compute with on this machine, as plain values. Knows no model and no setting."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.model import kernels
from engine.model.memory import available


@dataclass(frozen=True)
class Gpu:
    """A CUDA GPU: its name, and bytes of its memory."""

    name: str
    free: int
    capacity: int


@dataclass(frozen=True)
class Hardware:
    """`instructions` are the widest that torch uses on this CPU, such as "AVX2"; `threads` how many it would start.

    `compiler` is the C compiler for the kernels, `free` are bytes of main memory that this process can have now, and
    `apple` says whether there is an Apple GPU.
    """

    torch: str
    instructions: str
    threads: int
    compiler: str | None
    free: int
    gpu: Gpu | None
    apple: bool


def look() -> Hardware:
    """What is there now."""
    gpu = None
    if torch.cuda.is_available():
        gpu = Gpu(torch.cuda.get_device_name(), *torch.cuda.mem_get_info())
    return Hardware(
        torch=torch.__version__,
        instructions=torch.backends.cpu.get_cpu_capability(),
        threads=torch.get_num_threads(),
        compiler=kernels.compiler(),
        free=available(torch.device("cpu")),
        gpu=gpu,
        apple=torch.backends.mps.is_available(),
    )
