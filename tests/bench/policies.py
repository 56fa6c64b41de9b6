"""`python -m tests.bench.policies`: what each cache policy would have kept, by replaying a trace of turns.

The trace is a running server's (`--url http://127.0.0.1:7860`), a file of what `GET /api/admin/trace` gave (`--trace`),
or made up: the chats of the replay workload, their lengths taken from its texts, with no model and no tokenizer. The
same trace gives the same figures every time. `hindsight` knows what comes: no policy can do what it does.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import httpx

from chat.doctor_text import table
from engine.cache.policy import Policy, policy_named, policy_names
from engine.config import EngineConfig
from engine.protocol import TurnTrace
from storage.cache_tables import MOST_TURNS
from tests.bench.policies_tier import KEY, Tier, hindsight, keys_of
from tests.bench.replay import load_sessions

HERE = Path(__file__).resolve().parent
BLOCK = EngineConfig(cache_dir="").block_size
CHARACTERS = 4  # of English text in a token, about
AROUND = 8  # tokens that a template puts around a message and its reply, about
TURN_S = 5.0  # from one turn to the next, whoever's
LEAST_LONGEST = 2  # chats of the longest that every budget has room for

Order = Literal["round", "habit"]


@dataclass(frozen=True)
class Outcome:
    """A policy at a budget (blocks): tokens that had been computed before and were again, the share of all prompts'
    tokens that was reused, and the share of returning turns that found all that they could have."""

    policy: str
    budget: int
    recomputed: int
    hit_rate: float
    in_full: float


def compare(turns: Sequence[TurnTrace], shares: Iterable[float], block_size: int = BLOCK) -> list[Outcome]:
    """Every policy at every share of the working set, which is all blocks that would ever be there at once."""
    everything = Tier(policy_named("lru"), None, block_size)
    best = [everything.turn(turn) for turn in turns]
    least = LEAST_LONGEST * max((len(keys_of(turn)) for turn in turns), default=0)
    outcomes = []
    for budget in dict.fromkeys(max(round(share * everything.most), least) for share in shares):
        policies: list[Policy] = [*(policy_named(name) for name in policy_names()), hindsight(turns)]
        for policy in policies:
            tier = Tier(policy, budget, block_size)
            found = [tier.turn(turn) for turn in turns]
            full = [one.reused == most.reused for one, most in zip(found, best, strict=True) if most.returning]
            outcomes.append(
                Outcome(
                    policy.name,
                    budget,
                    sum(most.reused - one.reused for one, most in zip(found, best, strict=True)),
                    sum(one.reused for one in found) / max(1, sum(one.prompt for one in found)),
                    sum(full) / max(1, len(full)),
                )
            )
    return outcomes


# --- traces -----------------------------------------------------------------------------------------------------------


def read(lines: Iterable[str]) -> list[TurnTrace]:
    """A trace as the server tells it. Raises `ValueError` for what is none."""
    found = [json.loads(line) for line in lines if line.strip()]
    try:
        return [TurnTrace(**turn | {"blocks": bytes.fromhex(turn["blocks"])}) for turn in found]
    except (TypeError, KeyError) as error:
        raise ValueError(f"this is no trace: {error}") from error


def made_up(
    sessions: int, turns: int, max_tokens: int, order: Order = "round", block_size: int = BLOCK
) -> list[TurnTrace]:
    """The replay workload's chats as a trace, every prompt found in full. All begin with its system prompt.

    "round": all first turns, then all second turns, and so on. "habit": some people come back soon and often, others
    late (the n-th of them 1 / n as often as the first), with as many turns in all.
    """
    texts = load_sessions(HERE / "mt_bench.jsonl", sessions, turns)
    system = len((HERE / "system_prompt.txt").read_text("utf-8").strip()) // CHARACTERS + AROUND
    lengths, next_turn = [system] * sessions, [0] * sessions
    trace: list[TurnTrace] = []
    for number, session in enumerate(_speakers(sessions, turns, order)):
        text = texts[session][next_turn[session] % turns]
        known, next_turn[session] = lengths[session], next_turn[session] + 1
        prompt = known + len(text) // CHARACTERS + AROUND
        lengths[session] = prompt + max_tokens
        trace.append(
            TurnTrace(
                at=number * TURN_S,
                session_id=f"session-{session}",
                model="made up",
                blocks=b"".join(_blocks(session, lengths[session] - 1, system, block_size)),
                device_tokens=0,
                host_tokens=0,
                disk_tokens=0,
                computed_tokens=prompt,
                output_tokens=max_tokens,
            )
        )
    return trace


def _speakers(sessions: int, turns: int, order: Order) -> Iterator[int]:
    """Whose turn it is, one after another."""
    if order == "round":
        for _ in range(turns):
            yield from range(sessions)
    else:
        often = [1 / (number + 1) for number in range(sessions)]
        yield from random.Random(0).choices(range(sessions), often, k=sessions * turns)


def _blocks(session: int, tokens: int, system: int, block_size: int) -> Iterator[bytes]:
    """The keys of so many tokens of a chat: equal where the system prompt is alone in a block, else the chat's own."""
    for start in range(0, tokens, block_size):
        end = min(start + block_size, tokens)
        name = f"{'all' if end <= system else session}/{start}/{end}"
        yield hashlib.blake2b(name.encode(), digest_size=KEY).digest()


# --- the command ------------------------------------------------------------------------------------------------------


def main() -> None:
    """Replay and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="a running server whose trace is replayed")
    parser.add_argument("--trace", type=Path, help="a file of its lines")
    parser.add_argument("--sessions", type=int, default=64, help="chats of a made up trace")
    parser.add_argument("--turns", type=int, default=4, help="turns of each")
    parser.add_argument("--max-tokens", type=int, default=32, help="tokens of a reply")
    parser.add_argument("--order", choices=get_args(Order), default="round", help="who speaks when")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.1, 0.25, 0.5], help="of the working set")
    args = parser.parse_args()
    if args.url:
        answer = httpx.get(f"{args.url}/api/admin/trace", params={"limit": MOST_TURNS}, trust_env=False, timeout=60)
        turns = read(answer.raise_for_status().text.splitlines())
    elif args.trace:
        turns = read(args.trace.read_text("utf-8").splitlines())
    else:
        turns = made_up(args.sessions, args.turns, args.max_tokens, args.order)
    outcomes = compare(turns, args.shares)
    print(f"{len(turns):,} turns of {len({turn.session_id for turn in turns}):,} chats, blocks of {BLOCK} tokens")
    rows = [
        [one.policy, f"{one.budget:,}", f"{one.recomputed:,}", f"{one.hit_rate:.1%}", f"{one.in_full:.1%}"]
        for one in outcomes
    ]
    print(table([["policy", "blocks", "recomputed tokens", "hit rate", "returned in full"], *rows]))


if __name__ == "__main__":
    main()
