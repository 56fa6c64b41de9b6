"""Half a minute of `make stress`: nothing is wrong, and every tier has taken part."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.stress.__main__ import tell
from tests.stress.model import FIRST, Judge, make
from tests.stress.run import GROWTH, Settings, Stress


@pytest.mark.timeout(240)
async def test_half_a_minute_of_everything_at_once(tmp_path: Path) -> None:
    outcome = await Stress(Settings(seconds=30, seed=4), tmp_path).run()
    tell(outcome)
    counts = outcome.counts
    assert counts.judged > 100
    assert min(counts.tokens[source] for source in ("device", "host", "disk", "computed")) > 0
    assert outcome.restarted_from_disk > 0
    assert outcome.budget_bytes < 0.2 * outcome.working_bytes
    assert outcome.growth < GROWTH


def test_the_judge_tells_a_right_reply_from_a_wrong_one(tmp_path: Path) -> None:
    judge, prompt = Judge(make(tmp_path)), list(range(FIRST, FIRST + 40))
    reply: list[int] = []
    while len(reply) < 6:
        likeliest = next(token for token in range(97) if not judge.judge(prompt, [*reply, token]).wrong)
        reply.append(likeliest)
    assert judge.judge(prompt, reply).wrong == ""
    other = [*reply[:3], (reply[3] + 1) % 97, *reply[4:]]
    assert "token 3 of the reply, at position 43," in judge.judge(prompt, other).wrong
