"""How much memory a device has left. Knows nothing of what it is wanted for."""

from __future__ import annotations

import torch

from engine.room import free_memory
from engine.words import size


def available(device: torch.device) -> int:
    """Bytes that can be taken on `device` now: of the GPU, or of this machine's memory as far as a container may."""
    if device.type == "cuda":
        free: int = torch.cuda.mem_get_info(device)[0]
        return free
    return free_memory()


def require(device: torch.device, needed: int) -> None:
    """Raise `MemoryError` where so many bytes cannot be taken on `device` now."""
    if (free := available(device)) < needed:
        raise MemoryError(f"{device} has no {size(needed)}, {size(free)} are free")
