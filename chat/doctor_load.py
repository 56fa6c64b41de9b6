"""Load the model as a start would, in a process of its own, and measure how fast it reads and writes.

Knows the engine's protocol, and nothing of chats.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator

from chat.doctor import Finding, count, ok
from chat.doctor_questions import LESS_WORK, PER_TOKEN_HIGH_S, seconds
from engine.client import EngineClient, new_request_id
from engine.config import EngineConfig
from engine.errors import EngineUnavailable
from engine.protocol import Capabilities, Finished, Rejected, Submit, Usage

READ, WRITTEN = 512, 64  # tokens


async def loaded(config: EngineConfig) -> AsyncIterator[Finding]:
    """How loading goes, with the check of attention that belongs to it, and how fast the model is afterwards."""
    engine, started = EngineClient(config), time.monotonic()
    await engine.start()
    try:
        capabilities = await engine.wait_ready()
        took = seconds(time.monotonic() - started)
        attention = f"{capabilities.attention} agrees with the model's own attention"
        threads = count(capabilities.threads, "thread")
        yield ok("load", f"ready after {took}; {attention}, weights in {capabilities.weights}, {threads}")
        yield _speed(await _measure(engine, capabilities))
    except EngineUnavailable as error:
        yield Finding("problem", "load", str(error), "the findings above may say why; otherwise --log-level debug does")
    finally:
        await engine.close()


async def _measure(engine: EngineClient, capabilities: Capabilities) -> Usage:
    """One request that reads `READ` tokens and writes `WRITTEN`, or what the context allows of that."""
    written = min(WRITTEN, capabilities.context_length // 4)
    length = max(1, min(READ, capabilities.context_length - written - 1))
    ids = [(7919 * number + 1) % capabilities.vocab_size for number in range(length)]
    submit = Submit(request_id=new_request_id(), session_id="doctor", token_ids=ids, max_tokens=max(2, written))
    async for event in engine.stream(submit):
        if isinstance(event, Finished):
            return event.usage
        if isinstance(event, Rejected):
            raise EngineUnavailable(event.message)
    raise EngineUnavailable("the engine ended without an answer")


def _speed(usage: Usage) -> Finding:
    reading = (usage.first_token_s or 0.0) - usage.queue_s
    each = (usage.total_s - (usage.first_token_s or 0.0)) / max(1, usage.output_tokens - 1)
    read = f"reads {usage.computed_tokens / reading:,.0f} tokens/s" if reading > 0 else "reads at once"
    detail = f"{read}, writes {1 / each:,.1f} tokens/s ({seconds(each)} a token)" if each > 0 else read
    return Finding("warn", "speed", detail, LESS_WORK) if each > PER_TOKEN_HIGH_S else ok("speed", detail)
