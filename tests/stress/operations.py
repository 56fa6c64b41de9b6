"""What people do to their chats, each with what must hold whatever else happens meanwhile."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import msgspec

from engine.client import EngineClient, new_request_id
from engine.config import CacheConfig
from engine.protocol import CacheEvent, Finished, Rejected, Sampling, Submit, Tokens, Usage
from tests.stress.chats import LONGEST_REPLY, Chat, Chats
from tests.stress.model import CONTEXT, Judge

SAMPLED, SEVERAL = 0.1, 0.1  # shares of the turns that are not greedy, and that want several replies
MOODS = (None, 0.5, 3.0, 30.0)  # seconds of a chat's own ttl
UNTOUCHED = ("quarantined", "skipped", "set_aside")  # what happens only where something outside is at fault
CHANCE = 2  # tokens after the preset that another chat of the same person may begin with too
TIER_TTLS = (None, None, 2.0, 10.0)  # seconds


class LawBrokenError(AssertionError):
    """A law that did not hold."""


@dataclass
class Counts:
    """What happened."""

    operations: Counter[str] = field(default_factory=Counter)
    tokens: Counter[str] = field(default_factory=Counter)  # of prompts, by source; and written ones
    misses: Counter[str] = field(default_factory=Counter)
    moved_blocks: Counter[str] = field(default_factory=Counter)
    failed: list[str] = field(default_factory=list)  # copies that did not come about, or not back
    judged: int = 0  # greedy replies
    ties: int = 0
    preemptions: int = 0

    def cache_events(self, events: list[CacheEvent]) -> None:
        """Note what the engine tells of its blocks."""
        for event in events:
            way = f" {event.source or ''}>{event.target or ''}" if event.source or event.target else ""
            self.moved_blocks[event.action + way] += event.blocks
            if event.action in UNTOUCHED:
                self.failed.append(f"{event.blocks} blocks {event.action}: {event.reason}")

    def usage(self, usage: Usage) -> None:
        """Note where a turn's tokens came from."""
        for name in ("device", "host", "disk", "computed", "recomputed", "output"):
            self.tokens[name] += getattr(usage, f"{name}_tokens")
        self.preemptions += usage.preemptions
        if usage.miss is not None:
            why = f" ({usage.miss.detail})" if usage.miss.cause == "unreadable" else ""
            self.misses[usage.miss.cause + why] += 1


@dataclass
class _Reply:
    """What came of a request: its replies by index, and how each ended."""

    replies: dict[int, list[int]] = field(default_factory=dict)
    ends: dict[int, Finished] = field(default_factory=dict)


class Operations:
    """Every operation, by name, with how often it is done. `base` are the budgets from which `configure` departs."""

    def __init__(self, client: EngineClient, chats: Chats, judge: Judge, base: CacheConfig) -> None:
        self.client, self.chats, self.counts = client, chats, Counts()
        self._judge, self._base = judge, base
        client.on_cache_log = lambda log: self.counts.cache_events(log.events)
        self.every: dict[str, tuple[float, Callable[[Chat, random.Random], Awaitable[None]]]] = {
            "turn": (40, self.turn),
            "edit": (10, self.edit),
            "again": (6, self.again),
            "branch": (5, self.branch),
            "cancel": (10, self.cancel),
            "prefetch": (10, self.prefetch),
            "estimate": (6, self.estimate),
            "pin": (6, self.pin),
            "demote": (8, self.demote),
            "delete": (3, self.delete),
            "delete while it runs": (2, self.delete_running),
            "configure": (1, self.configure),
        }

    def choose(self, rng: random.Random) -> str:
        """The name of one of them."""
        return rng.choices(list(self.every), [weight for weight, _ in self.every.values()])[0]

    # --- turns --------------------------------------------------------------------------------------------------------

    async def turn(self, chat: Chat, rng: random.Random) -> None:
        """Say something, and read the reply."""
        async with chat.lock:
            reply = rng.randint(1, LONGEST_REPLY)
            await self._have(chat, rng, chat.next_prompt(rng, reply), reply)

    async def edit(self, chat: Chat, rng: random.Random) -> None:
        """Go back, and go on otherwise."""
        async with chat.lock:
            chat.cut(rng)
            reply = rng.randint(1, LONGEST_REPLY)
            await self._have(chat, rng, chat.next_prompt(rng, reply), reply)

    async def again(self, chat: Chat, rng: random.Random) -> None:
        """Have the last message answered once more."""
        async with chat.lock:
            if chat.last_prompt:
                reply = min(LONGEST_REPLY, CONTEXT - len(chat.last_prompt))
                await self._have(chat, rng, chat.last_prompt, reply)

    async def branch(self, chat: Chat, rng: random.Random) -> None:
        """Go on from where another chat of the same person was."""
        other = self.chats.relative(chat, rng)
        if other is None:
            return
        async with chat.lock:
            chat.alone = other.alone = False
            chat.history = other.history[: rng.randint(len(chat.preset), len(other.history))]
            reply = rng.randint(1, LONGEST_REPLY)
            await self._have(chat, rng, chat.next_prompt(rng, reply), reply)

    async def cancel(self, chat: Chat, rng: random.Random) -> None:
        """Stop a reply after a while, by asking for that or by going away."""
        async with chat.lock:
            prompt = chat.next_prompt(rng, LONGEST_REPLY)
            await self._have(chat, rng, prompt, LONGEST_REPLY, stop_after=rng.randint(1, 8), ask=rng.random() < 0.5)

    async def _have(
        self, chat: Chat, rng: random.Random, prompt: list[int], most: int, stop_after: int = 0, *, ask: bool = True
    ) -> None:
        greedy, deletions = rng.random() >= SAMPLED, chat.deletions
        request = Submit(
            request_id=new_request_id(),
            session_id=chat.name,
            token_ids=prompt,
            max_tokens=most,
            sampling=Sampling() if greedy else Sampling(temperature=1.0, seed=rng.randrange(1000)),
            n=rng.randint(2, 3) if rng.random() < SEVERAL else 1,
            salt=chat.salt,
            shared_len=len(chat.preset),
            priority=rng.choice((0, 0, 0, 1)),
        )
        reply = await self._follow(request, stop_after, ask=ask)
        for index, end in reply.ends.items():
            if index == 0:
                self.counts.usage(end.usage)
            stopped = stop_after or chat.deletions != deletions
            if not stopped and (end.reason != "length" or end.detail or len(reply.replies.get(index, [])) != most):
                raise LawBrokenError(
                    f"{chat.name}: a reply of {most} tokens ended as {end} with {reply.replies.get(index)}"
                )
            if end.reason == "length" and end.usage.prompt_tokens != len(prompt):
                raise LawBrokenError(
                    f"{chat.name}: {len(prompt)} tokens were sent, and {end.usage} accounts for others"
                )
        if greedy:
            for index, written in reply.replies.items():
                await self._hold_against_the_model(chat, request, index, written)
        if chat.deletions == deletions:
            chat.last_prompt, chat.history = prompt, [*prompt, *reply.replies.get(0, [])]

    async def _follow(self, request: Submit, stop_after: int, *, ask: bool) -> _Reply:
        reply, events = _Reply(), 0
        stream = self.client.stream(request)
        async for event in stream:
            events += 1
            if isinstance(event, Tokens):
                reply.replies.setdefault(event.index, []).extend(event.token_ids)
            elif isinstance(event, Finished):
                reply.ends[event.index] = event
            elif isinstance(event, Rejected):
                raise LawBrokenError(f"a request of {len(request.token_ids)} tokens was refused: {event}")
            if events == stop_after and len(reply.ends) < request.n:
                if ask:
                    await self.client.cancel(request.request_id)
                else:
                    await stream.aclose()  # type: ignore[attr-defined]  # an async generator, as it happens
                    break
        return reply

    async def _hold_against_the_model(self, chat: Chat, request: Submit, index: int, written: list[int]) -> None:
        verdict = await asyncio.to_thread(self._judge.judge, request.token_ids, written)
        self.counts.judged += 1
        self.counts.ties += verdict.ties
        if verdict.wrong:
            raise LawBrokenError(
                f"{chat.name}, sample {index} of a prompt of {len(request.token_ids)}: {verdict.wrong}"
            )

    # --- what is done to the cache ------------------------------------------------------------------------------------

    async def prefetch(self, chat: Chat, rng: random.Random) -> None:
        """Open a chat, and perhaps go away again at once."""
        ids = list(chat.history)
        if not ids:
            return
        impatience = rng.choice((None, None, rng.uniform(0, 0.02)))
        try:
            async with asyncio.timeout(impatience):
                there = await self.client.prefetch(chat.name, ids, chat.salt, len(chat.preset))
        except TimeoutError:
            self.counts.operations["prefetch given up"] += 1
            return
        if not there.host_tokens + there.disk_tokens <= there.device_tokens <= len(ids):
            raise LawBrokenError(f"{chat.name}: a prefetch of {len(ids)} tokens was answered by {there}")
        self.counts.tokens["prefetched from host"] += there.host_tokens
        self.counts.tokens["prefetched from disk"] += there.disk_tokens

    async def estimate(self, chat: Chat, rng: random.Random) -> None:
        """Ask what a turn would cost."""
        ids = chat.next_prompt(rng, LONGEST_REPLY)
        cost = await self.client.estimate(ids, chat.salt, len(chat.preset), session_id=chat.name)
        found = cost.device_tokens + cost.host_tokens + cost.disk_tokens
        if found + cost.computed_tokens != len(ids) or cost.computed_tokens < 1:
            raise LawBrokenError(f"{chat.name}: the estimate for {len(ids)} tokens was {cost}")

    async def pin(self, chat: Chat, rng: random.Random) -> None:
        """Pin a chat, unpin it, or give it a time of its own."""
        pinned = rng.random() < 0.3
        answer = await self.client.pin(chat.name, pinned, rng.choice(MOODS))
        if answer.pinned != (pinned and not answer.message):
            raise LawBrokenError(f"{chat.name}: pinning ({pinned}) was answered by {answer}")
        self.counts.operations["pin refused"] += bool(answer.message)

    async def demote(self, chat: Chat, rng: random.Random) -> None:
        """Move a chat down, or out."""
        await self.client.demote(chat.name, rng.choice(("device", "host", "host", "disk", "disk", None)))

    async def delete(self, chat: Chat, rng: random.Random) -> None:
        """Delete a chat: what only it had is in no tier any more."""
        async with chat.lock:
            ids = [*chat.history, *chat.preset[:1]]
            await self._forget(chat)
            if chat.alone:
                cost = await self.client.estimate(ids, chat.salt, len(chat.preset), session_id=chat.name)
                found = cost.device_tokens + cost.host_tokens + cost.disk_tokens
                if found > len(chat.preset) + CHANCE:
                    raise LawBrokenError(f"{chat.name} was deleted, and of its {len(ids)} tokens were found: {cost}")
            chat.alone = True

    async def delete_running(self, chat: Chat, rng: random.Random) -> None:
        """Delete a chat while a reply may be written in it."""
        await self._forget(chat)

    async def _forget(self, chat: Chat) -> None:
        chat.deletions += 1
        chat.history, chat.last_prompt = list(chat.preset), []
        await self.client.drop(chat.name)

    async def configure(self, chat: Chat, rng: random.Random) -> None:
        """Change budgets, times and the policy."""
        base = self._base
        sizes = {
            name: int(getattr(base, name) * rng.choice((0.3, 0.6, 1.0))) for name in ("device_kv", "host_kv", "disk_kv")
        }
        times = {name: rng.choice(TIER_TTLS) for name in ("device_ttl", "host_ttl", "disk_ttl")}
        wanted = msgspec.structs.replace(base, **sizes, **times, policy=rng.choice(("lru", "cost")))
        answer = await self.client.configure(wanted)
        self.counts.operations["configure refused"] += bool(answer.message)
