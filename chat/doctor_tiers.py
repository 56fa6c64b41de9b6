"""What a server's figures say of its tiers: how full they are, which of them the tokens came from, what went and why.

Knows how to say it, and nothing of the other questions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from chat.doctor import count
from chat.figures import RecentReply, ServerFigures
from engine.config import Tier
from engine.protocol import Snapshot
from engine.words import size

MUCH_GONE = 0.1  # of the prompts, with blocks that are gone or unreadable
# The engine's words:
EXPIRED = "its time there was over"
SPENT, FAILING = "the disk may write no more today (disk_writes)", "the disk cannot be written to now"
DISK_CHECK = "check the disk of the data directory, or name another with --data-dir"


def below(snapshot: Snapshot) -> str:
    """How full host and disk are."""
    return ", ".join(
        f"{tier.tier} holds {size(tier.used_bytes)} of {size(tier.budget_bytes)}"
        if tier.budget_bytes
        else f"{tier.tier} is off"
        for tier in snapshot.tiers
        if tier.tier != "device"
    )


def came_from(replies: Sequence[RecentReply]) -> str:
    """Which tiers the prompts' tokens came from."""
    prompts = sum(reply.prompt_tokens for reply in replies)
    if not prompts:
        return ""
    host, disk = sum(reply.host_tokens for reply in replies), sum(reply.disk_tokens for reply in replies)
    device = sum(reply.reused_tokens for reply in replies) - host - disk
    return (
        f"of the last {count(len(replies), 'prompt')}, {device / prompts:.0%} came from the device, "
        f"{host / prompts:.0%} from host and {disk / prompts:.0%} from disk"
    )


def went(figures: ServerFigures) -> str:
    """What left a tier for none below it since the start, and why."""
    gone = sorted(figures.gone, key=lambda each: -each.blocks)
    return ", ".join(f"{count(each.blocks, 'block')} left {each.tier} ({each.reason})" for each in gone)


def missed(figures: ServerFigures, replies: Sequence[RecentReply]) -> tuple[str, str] | None:
    """Why prompts that had been read before were not found, and what to do about it; None: they mostly were."""
    lost = Counter(
        (reply.miss_cause, reply.miss_detail) for reply in replies if reply.miss_cause in ("evicted", "unreadable")
    )
    if lost.total() < max(1, MUCH_GONE * len(replies)):
        return None
    (cause, detail), _ = lost.most_common(1)[0]
    why = f"{lost.total():,} of the last {len(replies):,} prompts missed what had been there ({detail or cause})"
    return why, DISK_CHECK if cause == "unreadable" else _keep_longer(figures, detail)


def _keep_longer(figures: ServerFigures, detail: str) -> str:
    """What keeps blocks longer that went as `detail` says: a tier, a colon and a reason."""
    budgets: dict[str, int] = {}
    if figures.snapshot is not None:
        budgets = {tier.tier: tier.budget_bytes for tier in figures.snapshot.tiers}
    tier, _, reason = detail.partition(": ")
    if reason == EXPIRED:
        return f"raise --{tier}-ttl"
    if reason.endswith((SPENT, FAILING)):
        return "raise --disk-writes" if reason.endswith(SPENT) else DISK_CHECK
    if not budgets.get("disk"):
        ram: Tier = "host" if budgets.get("host") else "device"
        return f"give chats a place on disk with --disk-kv, or {raised(ram, budgets)}"
    return raised("host", budgets) if tier == "host" else raised("disk", budgets)


def raised(tier: Tier, budgets: dict[str, int]) -> str:
    """To raise a tier's budget, with an example."""
    now = budgets.get(tier)
    return f"raise --{tier}-kv" + (f", which is {size(now)} now, for instance to {2 * now // 2**20}MiB" if now else "")
