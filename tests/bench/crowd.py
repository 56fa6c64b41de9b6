"""More chats than the device holds: the replay on a server of ours with a tenth of what they need, the rest in host."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from transformers import AutoConfig, AutoTokenizer

from tests.bench.comparison import CROWD_P50, CROWD_P95
from tests.bench.launching import free_port, running
from tests.bench.peers import Files, Start, keepwarm
from tests.bench.replay import load_sessions
from tests.bench.workloads import HERE, Client, Sizes, replay_summary

SHARE = 0.1
MIB = 2**20
MARGIN = 256 * MIB  # of host, beyond all that the chats need


@dataclass(frozen=True)
class Need:
    """Bytes that the chats' K and V take when all have ended, what they share counted once, and two of the longest."""

    all: int
    least: int

    @property
    def device(self) -> int:
        """A tenth of it, in whole MiB, and no less than two chats."""
        return -(-max(int(self.all * SHARE), self.least) // MIB) * MIB

    @property
    def share(self) -> float:
        """What part of it `device` is."""
        return self.device / self.all


def need(folder: Path, sizes: Sizes) -> Need:
    """What the replay's chats come to where every reply has all of its tokens."""
    tokenizer, config = AutoTokenizer.from_pretrained(folder), AutoConfig.from_pretrained(folder)
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * head * 2
    system = {"role": "system", "content": (HERE / "system_prompt.txt").read_text("utf-8").strip()}

    def count(messages: list[dict[str, str]]) -> int:
        return len(tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"])

    shared = count([system])
    chats = []
    for turns in load_sessions(HERE / "mt_bench.jsonl", sizes.sessions, sizes.turns):
        said = [{"role": role, "content": text} for text in turns for role, text in (("user", text), ("assistant", ""))]
        chats.append(count([system, *said]) + sizes.turns * sizes.max_tokens)
    total = shared + sum(chat - shared for chat in chats)
    return Need(total * per_token, 2 * max(chats) * per_token)


def crowd(files: Files, folder: Path, nonce: str, sizes: Sizes) -> tuple[dict[str, float], list[str]]:
    """Figures of one replay on a server of its own, and what was odd. Raises `PeerError` and `RuntimeError`."""
    needed = need(files.folder, sizes)
    port = free_port()
    launch = keepwarm(
        Start(files, port, folder), "--model", str(files.folder), "--dtype", "bfloat16",
        "--device-kv", f"{needed.device // MIB}MiB", "--host-kv", f"{-(-needed.all // MIB) + MARGIN // MIB}MiB",
        "--disk-kv", "0",
    )  # fmt: skip
    with running(launch, port, folder / "log") as server:
        client = Client(server.url, server.model, nonce)
        replay_summary(Client(server.url, server.model, f"{nonce} warm-up"), Sizes(sessions=2, turns=2))
        summary = replay_summary(client, sizes)
    figures = {
        CROWD_P50: summary["ttft_return_p50"],
        CROWD_P95: summary["ttft_return_p95"],
        f"{sizes.sessions} chats at 10%: reused": summary["reuse_return"],
        f"{sizes.sessions} chats at 10%: share on the device": needed.share,
    }
    return figures, client.odd
