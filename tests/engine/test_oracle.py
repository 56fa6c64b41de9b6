"""The oracle: greedy replies of the embedded model in float32 are `model.generate`'s, wherever the K and V came from.

Every case forces its way through one path and asserts, by counts taken at the forward call, that it was that path.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.cache.block import Scope
from engine.model import loading, selfcheck
from engine.model.loading import LoadedModel
from engine.model.sources import PreparedModel
from tests.engine.harness import Harness

NEW = 8  # tokens of a reply
TOPICS = ["bread", "the moon", "a heron", "tides", "chess", "rust", "glass", "maps"]
FOLLOW_UPS = ["Say it in one sentence.", "Now as a question."]


@pytest.fixture(scope="module")
def loaded(embedded_model: Path) -> LoadedModel:
    prepared = PreparedModel(name="embedded", path=embedded_model, digest="0")
    return loading.load(prepared, "cpu", "float32")


@pytest.fixture(scope="module")
def make(loaded: LoadedModel) -> Callable[..., Harness]:
    shape = selfcheck.probe(loaded)
    return lambda blocks=128, **kwargs: Harness(loaded, shape, blocks, **kwargs)


@pytest.fixture(scope="module")
def tokenizer(embedded_model: Path):
    return AutoTokenizer.from_pretrained(embedded_model)


@pytest.fixture(scope="module")
def generate(embedded_model: Path) -> Callable[[list[int]], list[int]]:
    """transformers' own greedy reply, by a second copy of the model that our attention never touches."""
    module = AutoModelForCausalLM.from_pretrained(embedded_model, dtype=torch.float32, attn_implementation="eager")

    def reply(ids: list[int]) -> list[int]:
        with torch.inference_mode():
            output = module.generate(torch.tensor([ids]), max_new_tokens=NEW, do_sample=False, pad_token_id=2)
        return output[0, len(ids) :].tolist()

    return reply


def opening(tokenizer, topic: str) -> list[int]:
    messages = [{"role": "user", "content": f"Tell me something about {topic}."}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


def follow_up(tokenizer, text: str, reply: list[int]) -> list[int]:
    end = [] if reply[-1] == 2 else [2]
    turn = f"\n<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    return [*end, *tokenizer.encode(turn, add_special_tokens=False)]


@pytest.fixture(scope="module")
def chats(tokenizer, generate) -> list[list[tuple[list[int], list[int]]]]:
    """For each topic, three turns as (prompt ids, the reply that `generate` gives)."""
    out = []
    for topic in TOPICS:
        prompt, turns = opening(tokenizer, topic), []
        for text in [*FOLLOW_UPS, None]:
            reply = generate(prompt)
            turns.append((prompt, reply))
            if text is not None:
                prompt = [*prompt, *reply, *follow_up(tokenizer, text, reply)]
        out.append(turns)
    return out


def test_warm_turns_forward_only_what_is_new(make, chats) -> None:
    engine = make()
    known: list[int] = []
    for prompt, expected in chats[0]:
        before = engine.runner.forwarded_tokens
        request = engine.submit(prompt, NEW, stop_ids=[2])
        engine.run()
        assert engine.replies[request][0] == expected
        usage = engine.finished[request][0].usage
        reused = max(0, len(known) - 1)  # the token sampled last has no K and V yet
        assert (usage.device_tokens, usage.computed_tokens) == (reused, len(prompt) - reused)
        assert engine.runner.forwarded_tokens - before == usage.computed_tokens + len(expected) - 1
        known = [*prompt, *expected]


def test_cache_off_and_cache_evicted_give_the_same_reply(make, chats) -> None:
    engine = make()
    for prompt, expected in chats[1]:
        fresh = make()
        assert fresh.reply(prompt, NEW, stop_ids=[2]) == expected  # nothing to reuse: a pool of its own
        assert fresh.runner.forwarded_tokens == len(prompt) + len(expected) - 1
        assert engine.reply(prompt, NEW, stop_ids=[2]) == expected
        assert engine.runner.forwarded_tokens == len(prompt) + len(expected) - 1
        engine.scheduler.drop("s")
        assert engine.manager.match(Scope("s"), prompt).reused == 0
        engine.runner.forwarded_tokens = 0


def test_eight_sessions_at_once_over_three_turns(make, chats) -> None:
    engine = make()
    for turn in range(3):
        requests = [engine.submit(chat[turn][0], NEW, session=f"s{i}", stop_ids=[2]) for i, chat in enumerate(chats)]
        engine.run()
        for request, chat in zip(requests, chats, strict=True):
            assert engine.replies[request][0] == chat[turn][1]
        if turn:
            assert all(
                engine.finished[r][0].usage.device_tokens == len(chat[turn - 1][0]) + len(chat[turn - 1][1]) - 1
                for r, chat in zip(requests, chats, strict=True)
            )


def test_eight_chats_of_32_tokens_take_at_most_40_forward_passes(tiny_model: Path, chats) -> None:
    tiny = loading.load(PreparedModel(name="tiny", path=tiny_model, digest="0"), "cpu", "float32")
    engine = Harness(tiny, selfcheck.probe(tiny), 128)
    requests = [engine.submit(chat[0][0], 32, session=f"s{i}") for i, chat in enumerate(chats)]
    engine.run()
    assert [len(engine.replies[request][0]) for request in requests] == [32] * 8
    assert engine.runner.steps <= 40


def test_preempted_sequences_continue_as_they_began(make, chats, generate) -> None:
    # Two prompts of almost two blocks each, and one block more: the first takes it when it grows, the second steps back
    # when it would grow, and the first's next block is one of the second's, which is to be computed again.
    engine = make(blocks=5)
    prompts, lengths = [chat[2][0][:63] for chat in chats[:2]], (36, 8)
    requests = [engine.submit(prompts[i], length, session=f"s{i}") for i, length in enumerate(lengths)]
    engine.run()
    for request, prompt, length in zip(requests, prompts, lengths, strict=True):
        expected = generate(prompt)
        assert engine.replies[request][0][: len(expected)] == expected
        assert engine.replies[request][0] == make().reply(prompt, length)
    usages = [engine.finished[request][0].usage for request in requests]
    assert [usage.preemptions for usage in usages] == [0, 1]
    assert usages[1].recomputed_tokens > 0
    spent = sum(usage.computed_tokens + usage.recomputed_tokens + usage.output_tokens - 1 for usage in usages)
    assert engine.runner.forwarded_tokens == spent


def test_chunked_reading_gives_the_same_reply(make, chats) -> None:
    engine = make(max_batch_tokens=23)
    prompt, expected = chats[2][2]
    assert engine.reply(prompt, NEW, stop_ids=[2]) == expected
    assert engine.runner.steps >= len(prompt) // 23


def test_branches_share_their_beginning(make, chats, generate, tokenizer) -> None:
    engine = make()
    prompt, reply = chats[3][0]
    assert engine.reply(prompt, NEW, stop_ids=[2]) == reply
    branch = [*prompt, *reply, *follow_up(tokenizer, "Why?", reply)]
    assert engine.reply(branch, NEW, stop_ids=[2]) == generate(branch)
    assert engine.reply(chats[3][1][0], NEW, stop_ids=[2]) == chats[3][1][1]


def test_samples_share_their_prompt(make, chats) -> None:
    engine = make()
    prompt, expected = chats[4][0]
    request = engine.submit(prompt, NEW, n=3, stop_ids=[2])
    engine.run()
    assert [engine.replies[request][i] for i in range(3)] == [expected] * 3
    assert engine.runner.forwarded_tokens == len(prompt) + 3 * (len(expected) - 1)
