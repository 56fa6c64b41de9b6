"""What an engine is started with. Plain values, checked where they are used: loading names a bad one and its fix."""

from __future__ import annotations

from typing import Literal

import msgspec

Tier = Literal["device", "host", "disk"]
ColdDtype = Literal["auto", "int8"]
Force = Literal["load", "recompute"]


class CacheConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How much each tier may hold and for how long; all of it can be changed while the engine runs.

    `device_kv`, `host_kv` and `disk_kv` are bytes of all models together; 0 turns host or disk off. None leaves it to
    the engine: two full contexts of the largest model on the device (at least 256 MiB, at most half of what is free), a
    part of what the machine has in RAM and on disk. A `ttl` is the seconds after their last use for which blocks stay
    in a tier, None for ever. Above the share `high` of its budget, a tier is brought below the share `low`. `policy`
    names who goes first. No more than `disk_writes` bytes a day are written; None is no limit.
    """

    device_kv: int | None = None
    host_kv: int | None = None
    disk_kv: int | None = None
    device_ttl: float | None = None
    host_ttl: float | None = None
    disk_ttl: float | None = None
    device_high: float = 1.0
    device_low: float = 0.95
    host_high: float = 1.0
    host_low: float = 0.9
    disk_high: float = 1.0
    disk_low: float = 0.9
    policy: str = "lru"
    disk_writes: int | None = None


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of one engine process.

    `model` is "smollm2" (the embedded default), a Hugging Face directory or hub id, or a GGUF file, `adapter` a LoRA
    adapter for it (a PEFT directory or hub id). `device` is auto, cpu, cuda or mps; `dtype` auto, float32, bfloat16
    or float16; `weights` auto, bf16, int8 or int4: what linear layers multiply by in bfloat16 on the CPU. `context` is
    the most tokens of a prompt and its reply; None serves all that the model was made for. `cache` says what the tiers
    may hold. `block_size` is in tokens. Converted weights are kept in `cache_dir`, the disk tier's files in `kv_dir`;
    None turns that tier off whatever its budget. `cold_kv_dtype` int8 keeps K and V in host and disk at about half
    their size and not exactly; auto keeps them as they are. `force` is for tests: load whatever a tier holds, or
    compute it again; None takes what is quicker. `threads` is torch's thread count on the CPU; None takes one per core.
    `max_batch_tokens` bounds one forward pass; `speculate` is the most tokens of a reply that are guessed at a time,
    None as many as pay, 0 none. `log_level` is debug, info, warning or error.
    """

    cache_dir: str
    model: str = "smollm2"
    adapter: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    weights: str = "auto"
    context: int | None = None
    cache: CacheConfig = CacheConfig()
    kv_dir: str | None = None
    cold_kv_dtype: ColdDtype = "auto"
    force: Force | None = None
    block_size: int = 32
    threads: int | None = None
    max_batch_tokens: int = 512
    speculate: int | None = None
    log_level: str = "warning"
