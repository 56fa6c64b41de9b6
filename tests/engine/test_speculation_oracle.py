"""The oracle with guessed tokens: in float32 the embedded model's replies are the same with and without them.

A text that repeats itself is asked for, so that guesses come true; what was guessed and accepted is asserted.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from engine.model import loading, selfcheck
from engine.model.loading import LoadedModel
from engine.model.sources import PreparedModel
from engine.protocol import Sampling
from tests.engine.harness import Harness

TEXT = "The red fox ran over the red hill, and the red fox ran over the green hill."
NEW = 40
SAMPLINGS = {
    "greedy": Sampling(),
    "sampled": Sampling(temperature=0.7, top_p=0.9, seed=5),
    "penalties": Sampling(
        temperature=0.5, repetition_penalty=1.05, presence_penalty=0.3, frequency_penalty=0.2, seed=6
    ),
    "greedy with penalties": Sampling(repetition_penalty=1.1, frequency_penalty=0.3),
}


@pytest.fixture(scope="module")
def loaded(embedded_model: Path) -> LoadedModel:
    prepared = PreparedModel(name="embedded", path=embedded_model, digest="0")
    return loading.load(prepared, "cpu", "float32")


@pytest.fixture(scope="module")
def make(loaded: LoadedModel) -> Callable[..., Harness]:
    shape = selfcheck.probe(loaded)
    return lambda blocks=64, **kwargs: Harness(loaded, shape, blocks, **kwargs)


@pytest.fixture(scope="module")
def prompt(embedded_model: Path) -> list[int]:
    tokenizer = AutoTokenizer.from_pretrained(embedded_model)
    messages = [{"role": "user", "content": f"Repeat this text exactly: {TEXT}"}]
    ids: list[int] = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    return ids


def accepted(engine: Harness) -> int:
    return int(engine.scheduler.snapshot_fields()["accepted_tokens"])


@pytest.mark.parametrize("kind", SAMPLINGS)
def test_the_reply_is_the_same_with_guesses_and_comes_in_fewer_steps(make, prompt, kind: str) -> None:
    plain, guessing = make(), make(speculate=8)
    said = plain.reply(prompt, NEW, sampling=SAMPLINGS[kind])
    assert guessing.reply(prompt, NEW, sampling=SAMPLINGS[kind]) == said
    assert accepted(guessing) > 0
    assert guessing.runner.steps == plain.runner.steps - accepted(guessing)
    drafted = guessing.scheduler.snapshot_fields()["drafted_tokens"]
    assert guessing.runner.forwarded_tokens == plain.runner.forwarded_tokens + drafted - accepted(guessing)


def test_what_guesses_left_behind_is_a_cache_like_any_other(make, prompt) -> None:
    plain, guessing = make(), make(speculate=8)
    path = list(prompt)
    for turn in ([2, 198], [2, 198, 1]):  # the second turn finds what the first one said, and so on
        said = plain.reply(path, NEW)
        request = guessing.submit(path, NEW)
        guessing.run()
        assert guessing.replies[request][0] == said
        path = [*path, *said, *turn]
    branch = path[: len(prompt) + 21]
    plain.scheduler.drop("s")
    assert guessing.reply(branch, NEW) == plain.reply(branch, NEW)
    assert guessing.manager.reused_tokens > len(prompt) + NEW
    assert accepted(guessing) > 0


def test_samples_and_sessions_side_by_side(make, prompt) -> None:
    replies = []
    for speculate in (0, 6):
        engine = make(speculate=speculate)
        sampling = Sampling(temperature=0.6, seed=3)
        requests = [engine.submit(prompt, 24, n=2, sampling=sampling), engine.submit(prompt[:-4], 24, session="t")]
        engine.run()
        replies.append([dict(engine.replies[request]) for request in requests])
        assert (accepted(engine) > 0) == (speculate > 0)
    assert replies[0] == replies[1]


def test_a_preempted_reply_goes_on_as_it_began(make, prompt) -> None:
    blocks = -(-len(prompt) // 32) * 2 + 1
    plain, guessing = make(), make(blocks=blocks, speculate=8)
    expected = [plain.reply(ids, NEW) for ids in (prompt, prompt[3:])]
    requests = [guessing.submit(ids, NEW, session=f"s{i}") for i, ids in enumerate((prompt, prompt[3:]))]
    guessing.run()
    assert [guessing.replies[request][0] for request in requests] == expected
    assert guessing.scheduler.preemptions > 0
    assert accepted(guessing) > 0
