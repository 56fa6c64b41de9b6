"""What an engine is started with. Plain values, checked where they are used: loading names a bad one and its fix."""

from __future__ import annotations

import msgspec


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of one engine process.

    `model` is "smollm2" (the embedded default), a Hugging Face directory or hub id, or a GGUF file, `adapter` a LoRA
    adapter for it (a PEFT directory or hub id). `device` is auto, cpu, cuda or mps; `dtype` auto, float32, bfloat16
    or float16. `context` is the most tokens of a prompt and its reply; None serves all that the model was made for.
    `device_kv` is the size in bytes of all models' pools; None takes two full contexts, at least 256 MiB, and no more
    than half of the memory that is free. `block_size` is in tokens. Converted weights are kept in `cache_dir`.
    `threads` is torch's thread count on the CPU; None takes one per core. `max_batch_tokens` bounds one forward pass.
    `log_level` is debug, info, warning or error.
    """

    cache_dir: str
    model: str = "smollm2"
    adapter: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    context: int | None = None
    device_kv: int | None = None
    block_size: int = 32
    threads: int | None = None
    max_batch_tokens: int = 512
    log_level: str = "warning"
