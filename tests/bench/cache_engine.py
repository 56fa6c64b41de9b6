"""A real engine process and turns through it, timed as its client sees them; and the ids of real text to have them of.

It knows nothing of what is compared with what.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from engine.client import EngineClient, new_request_id
from engine.config import EngineConfig
from engine.protocol import Capabilities, Estimated, Finished, Rejected, Submit, Tokens, Usage

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
MODELS = ROOT / ".cache" / "models"  # converted weights, kept between runs
MESSAGE = 40  # tokens
LOOK_S, STILL = 0.1, 3  # between two looks at what is being saved, and how many of them must show the same
PATIENCE_S = 120.0


@dataclass(frozen=True)
class Turn:
    """One turn: seconds from its submission to its first token, and what the engine says that it cost."""

    ttft_s: float
    usage: Usage

    @property
    def sources(self) -> dict[str, int]:
        """The prompt's tokens by where they came from, those that are none left out."""
        usage = self.usage
        counts = {
            "device": usage.device_tokens,
            "host": usage.host_tokens,
            "disk": usage.disk_tokens,
            "computed": usage.computed_tokens,
        }
        return {name: count for name, count in counts.items() if count}


class Driven:
    """An engine of its own process. `capabilities` are known once it has been started."""

    capabilities: Capabilities

    def __init__(self, config: EngineConfig) -> None:
        self.client = EngineClient(config)

    async def __aenter__(self) -> Driven:
        await self.client.start()
        self.capabilities = await self.client.wait_ready()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.client.close()

    async def restart(self) -> float:
        """End the process and start another one; seconds until it is ready."""
        await self.client.close()
        began = time.perf_counter()
        await self.__aenter__()
        return time.perf_counter() - began

    async def turn(self, session_id: str, ids: list[int], salt: bytes = b"", shared_len: int = 0) -> Turn:
        """Read `ids` and write one token. Raises `RuntimeError` when the engine refuses."""
        request = Submit(
            request_id=new_request_id(),
            session_id=session_id,
            token_ids=ids,
            max_tokens=1,
            salt=salt,
            shared_len=shared_len,
        )
        first: float | None = None
        usage: Usage | None = None
        began = time.perf_counter()
        async for event in self.client.stream(request):
            if isinstance(event, Tokens) and first is None:
                first = time.perf_counter() - began
            elif isinstance(event, Finished):
                usage = event.usage
            elif isinstance(event, Rejected):
                raise RuntimeError(f"the engine refused a turn: {event.message}")
        if first is None or usage is None:
            raise RuntimeError("a turn ended without a token")
        return Turn(first, usage)

    async def estimate(self, session_id: str, ids: list[int], salt: bytes, shared_len: int) -> Estimated:
        """What these tokens would find now."""
        return await self.client.estimate(ids, salt, shared_len, session_id=session_id)

    async def saved(self, session_id: str) -> None:
        """Wait until nothing is being written any more, so that the next turn has the machine to itself."""
        before, still, until = -1, 0, time.monotonic() + PATIENCE_S
        while still < STILL:
            if time.monotonic() > until:
                raise RuntimeError(f"blocks were still being saved after {PATIENCE_S:.0f} s")
            snapshot = await self.client.snapshot()
            residency = snapshot.sessions.get(session_id)
            now = residency.disk_bytes if residency is not None else 0
            still = still + 1 if now == before and snapshot.saving_blocks == 0 else 0
            before = now
            await asyncio.sleep(LOOK_S)


class Text:
    """Real text as token ids: the recorded chats one after another, as often as is needed."""

    def __init__(self, model_path: str) -> None:
        from transformers import AutoTokenizer  # heavy

        self.tokenizer = AutoTokenizer.from_pretrained(model_path, local_files_only=True)
        chats = [json.loads(line)["turns"] for line in (HERE / "mt_bench.jsonl").read_text("utf-8").splitlines()]
        self._ids: list[int] = self.encode("\n\n".join(text for turns in chats for text in turns))
        system = [{"role": "system", "content": (HERE / "system_prompt.txt").read_text("utf-8").strip()}]
        self.system: list[int] = self.encode(self.tokenizer.apply_chat_template(system, tokenize=False))

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without special ones around it."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids

    def part(self, start: int, length: int) -> list[int]:
        """So many ids from some place on."""
        return [self._ids[(start + i) % len(self._ids)] for i in range(length)]

    def messages(self, start: int) -> Iterator[list[int]]:
        """New messages without end, no two with the same first token while there are others: they share nothing."""
        seen: set[int] = set()
        position = start
        while True:
            for _ in range(len(self._ids)):
                if self._ids[position % len(self._ids)] not in seen:
                    break
                position += 1
            else:
                seen.clear()
            seen.add(self._ids[position % len(self._ids)])
            yield self.part(position, MESSAGE)
            position += MESSAGE
