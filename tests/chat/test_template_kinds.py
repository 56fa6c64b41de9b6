"""Chat templates of the shapes in use: what each prompt begins with, and that it reads as the template has it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from chat.rendering import PLAIN_STOPS
from chat.streaming import ReplyText
from chat.templates import ChatTemplate, Entry
from chat.thinking import Policy
from storage.reasoning import split_reply
from tests.chat import model_files as files

THINK = ["<think>", "</think>"]
KINDS: dict[str, tuple[str | None, list[str], list[str]]] = {  # template, special tokens, further tokens
    "stripping": (files.STRIPPING, ["<|im_start|>", "<|im_end|>"], THINK),
    "opened": (files.OPENED, ["<s>", "</s>", "<|user|>", "<|assistant|>"], THINK),
    "opened by words": (files.OPENED, ["<s>", "</s>", "<|user|>", "<|assistant|>"], []),
    "dated": (files.DATED, ["<|im_start|>", "<|im_end|>"], []),
    "wandering": (files.WANDERING, ["<s>", "</s>", "[INST]", "[/INST]"], []),
    "alternating": (files.ALTERNATING, ["<s>", "<start_of_turn>", "<end_of_turn>"], []),
    "channels": (files.CHANNELS, files.MARKS_OF_CHANNELS, []),
    "special marks": (files.WANDERING, ["<s>", "</s>", "[INST]", "[/INST]", "[THINK]", "[/THINK]"], []),
    "plain": (None, [], []),
}
REASONING = {  # what the models sample
    "stripping": "<think>\nhm, hm\n</think>\n\nYes {}.<|im_end|>",
    "opened": "hm, hm\n</think>\n\nYes {}.</s>",
    "opened by words": "hm, hm\n</think>\n\nYes {}.</s>",
    "channels": "<|channel|>analysis<|message|>hm, hm<|end|><|start|>assistant"
    "<|channel|>final<|message|>Yes {}.<|return|>",
    "special marks": "[THINK]hm, hm[/THINK]Yes {}.</s>",
}
PLAIN_REPLIES = {
    "dated": "Yes {}.<|im_end|>",
    "wandering": " Yes {}.</s>",
    "alternating": "Yes {}.<end_of_turn>",
    "plain": "Yes {}.\n\nUser:",
}
Load = Callable[..., ChatTemplate]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    made: dict[tuple[str, Policy], ChatTemplate] = {}

    def load(kind: str, thinking: Policy = "preserve") -> ChatTemplate:
        if (kind, thinking) not in made:
            template, special, plain = KINDS[kind]
            tokenizer = files.with_tokens(None, special, plain)
            folder = files.save(tmp_path_factory.mktemp("kind"), tokenizer, template, bos_token="<s>", eos_token="</s>")
            made[kind, thinking] = ChatTemplate.load(folder, thinking)
        return made[kind, thinking]

    return load


def raw(template: ChatTemplate, ids: Sequence[int]) -> str:
    return template.tokenizer.decode(list(ids), skip_special_tokens=False)


def sampled(template: ChatTemplate, text: str) -> list[int]:
    """The ids that a model would sample for `text`, its control tokens included."""
    return template.tokenizer.encode(text, add_special_tokens=False).ids


class Chat:
    """A chat that goes on turn by turn, as the service has it; `prompts` and `written` were sent and sampled."""

    def __init__(self, template: ChatTemplate, system: str = "") -> None:
        self.template = template
        self.entries = [Entry("system", system)] if system else []
        self.prompts: list[list[int]] = []
        self.written: list[list[int]] = []

    def turn(self, text: str, reply: str) -> str:
        """Ask `text` and sample `reply`; what a person sees of it."""
        template = self.template
        self.entries.append(Entry("user", text))
        segments = template.fill(self.entries)
        self.entries = [Entry(e.role, e.text, ids) for e, ids in zip(self.entries, segments, strict=True)]
        self.prompts.append(template.prompt(self.entries, segments))
        shown = ReplyText(template, stop_ids=[*template.end_ids, template.tokenizer.token_to_id("<|return|>") or 0])
        self.written.append(sampled(template, reply))
        shown.push(self.written[-1])
        shown.finish()
        self.entries.append(Entry("assistant", shown.text, shown.delivered_ids()))
        return shown.text

    def common(self, turn: int) -> int:
        """How many tokens the prompt of this turn shares with what the model had read and written in the one before."""
        known, now = [*self.prompts[turn - 1], *self.written[turn - 1]], self.prompts[turn]
        return shared(known, now)


def shared(one: Sequence[int], other: Sequence[int]) -> int:
    """How many first tokens are the same."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def held(template: ChatTemplate, reply: str, system: str = "", turns: int = 4) -> Chat:
    chat = Chat(template, system)
    for turn in range(turns):
        chat.turn(f"  What about {turn}? é👩\n", reply.format(turn))
    return chat


# --- preserve ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("system", ["", "Be brief."])
@pytest.mark.parametrize("kind", KINDS)
def test_a_turn_reads_again_nothing_of_the_one_before(load, kind, system):
    template = load(kind)
    assert template.stable
    chat = held(template, (REASONING | PLAIN_REPLIES)[kind], system)
    moves = KINDS[kind][0] == files.WANDERING and bool(system)
    assert template._is_stable(chat.entries) != moves
    if moves:
        return  # held below
    replies = [entry.token_ids for entry in chat.entries if entry.role == "assistant"]
    for turn in range(1, 4):
        kept = shared(replies[turn - 1], chat.written[turn - 1])
        assert kept >= len(replies[turn - 1]) - (kind == "plain")  # its stop string may begin inside a token
        assert chat.common(turn) >= len(chat.prompts[turn - 1]) + kept


@pytest.mark.parametrize("kind", KINDS)
def test_a_first_prompt_is_a_fresh_rendering(load, kind):
    template = load(kind)
    chat = held(template, "Yes.", turns=1)
    message = {"role": "user", "content": chat.entries[0].text}
    assert raw(template, chat.prompts[0]) == template._render([message], generation=True)


@pytest.mark.parametrize("system", ["", "Be brief."])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if not kind.startswith("opened")])
def test_a_prompt_without_reasoning_is_a_fresh_rendering_of_the_whole_chat(load, kind, system):
    template = load(kind)
    end = next((raw(template, [index]) for index in template.end_ids), "\n\nUser:")
    direct = "<|channel|>final<|message|>" if kind == "channels" else ""
    space = " " if KINDS[kind][0] == files.WANDERING else ""  # the template writes it where a model samples it
    chat = held(template, f"{direct}{space}Yes {{}}.{end}", system)
    answer = lambda entry: entry.text.removeprefix(space) if entry.role == "assistant" else entry.text  # noqa: E731
    messages = [{"role": entry.role, "content": answer(entry)} for entry in chat.entries[:-1]]
    assert raw(template, chat.prompts[-1]) == template._render(messages, generation=True)


def test_a_system_prompt_that_moves_with_the_last_message_is_rendered_anew(load):
    template = load("wandering")
    chat = held(template, " Yes {}.</s>", "Be brief.")
    assert raw(template, chat.prompts[3]).count("Be brief.") == 1
    for turn in range(1, 4):  # all before the message that carried it
        first = raw(template, chat.prompts[turn - 1]).rpartition("[INST]")[0]
        assert chat.common(turn) >= len(sampled(template, first))


# --- strip ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", REASONING)
def test_stripped_reasoning_goes_back_to_where_the_reply_began(load, kind):
    template = load(kind, "strip")
    chat = held(template, REASONING[kind])
    opened = len(template._openings.generation) - len(template._openings.history)
    for turn in range(1, 4):
        common = chat.common(turn)
        assert common >= len(chat.prompts[turn - 1]) - max(opened, 0)
        assert common <= len(chat.prompts[turn - 1]) + 1  # and no further than the mark
    text = raw(template, chat.prompts[3])
    assert "hm, hm" not in text
    assert [f"Yes {turn}." in text for turn in range(4)] == [True, True, True, False]
    assert chat.entries[1].token_ids == tuple(chat.written[0][: len(chat.entries[1].token_ids)])  # the ledger has all


@pytest.mark.parametrize("kind", REASONING)
def test_a_prompt_with_stripped_reasoning_is_what_the_template_makes_of_the_answers(load, kind):
    template = load(kind, "strip")
    chat = held(template, REASONING[kind])
    messages = [{"role": e.role, "content": split_reply(e.text).answer} for e in chat.entries[:-1]]
    assert raw(template, chat.prompts[3]) == template._render(messages, generation=True)


@pytest.mark.parametrize("kind", REASONING)
def test_what_a_person_sees_has_reasoning_and_answer_apart(load, kind):
    for policy in ("preserve", "strip"):
        chat = Chat(load(kind, policy))
        parts = split_reply(chat.turn("one", REASONING[kind].format("sir")))
        assert parts == ("hm, hm", "Yes sir.", False)


@pytest.mark.parametrize("kind", REASONING)
@pytest.mark.parametrize("end", ["hm", "hm,"])
def test_a_reply_cut_inside_its_reasoning_leaves_nothing_of_it(load, kind, end):
    template = load(kind, "strip")
    chat = Chat(template)
    cut = REASONING[kind].partition("hm")[0] + end
    assert split_reply(chat.turn("one", cut)).open
    chat.turn("two", REASONING[kind].format(2))
    text = raw(template, chat.prompts[1])
    assert "hm" not in text
    assert text == template._render(
        [{"role": role, "content": content} for role, content in (("user", "one"), ("assistant", ""), ("user", "two"))],
        generation=True,
    )


@pytest.mark.parametrize("kind", ["opened", "opened by words"])
@pytest.mark.parametrize("reply", ["", "</s>"])
def test_a_reply_that_never_began_leaves_no_open_reasoning(load, kind, reply):
    template = load(kind, "strip")
    chat = Chat(template)
    chat.turn("one", reply)
    chat.turn("two", "hm</think>Yes.</s>")
    assert raw(template, chat.prompts[1]) == "<s><|user|>one<|assistant|></s><|user|>two<|assistant|><think>\n"


def test_an_answer_in_the_middle_of_a_token_is_kept(load):
    template = load("opened by words", "strip")
    chat = Chat(template)
    chat.turn("one", "hm</think>")
    tail = template.tokenizer.token_to_id(">(")
    ids = [*sampled(template, "hm</think"), tail, *sampled(template, "so")]
    entries = [*chat.entries[:1], Entry("assistant", "", tuple(ids)), Entry("user", "two")]
    assert "<|assistant|>(so</s><|user|>two" in raw(template, template.prompt(entries, template.fill(entries)))


def test_a_reply_put_in_as_text_is_no_reasoning_though_replies_begin_with_it(load):
    template = load("opened", "strip")
    entries = [Entry("user", "one"), Entry("assistant", "Two."), Entry("user", "three")]
    text = raw(template, template.prompt(entries, template.fill(entries)))
    assert text == "<s><|user|>one<|assistant|>Two.</s><|user|>three<|assistant|><think>\n"


def test_reasoning_that_comes_with_a_text_is_left_out(load):
    for kind in ("stripping", "dated"):
        template = load(kind)
        entries = [Entry("user", "one"), Entry("assistant", "<think>hm</think>\n\nTwo."), Entry("user", "three")]
        text = raw(template, template.prompt(entries, template.fill(entries)))
        assert "assistant\nTwo.<|im_end|>" in text
        assert "hm" not in text


# --- notes ------------------------------------------------------------------------------------------------------------


def test_what_a_person_is_told_of_a_model(load):
    assert (load("dated").notes.notice, load("dated").notes.thinking) == ("", None)
    assert load("stripping").notes.thinking == "preserve"
    assert load("channels", "strip").notes.thinking == "strip"
    assert "no chat template" in load("plain").notes.notice


def test_replies_end_where_the_template_ends_them(load):
    ends = {kind: [raw(load(kind), [index]) for index in load(kind).end_ids] for kind in KINDS}
    assert ends == {
        "stripping": ["<|im_end|>"],
        "opened": ["</s>"],
        "opened by words": ["</s>"],
        "dated": ["<|im_end|>"],
        "wandering": ["</s>"],
        "alternating": ["<end_of_turn>"],
        "channels": [],  # what is written after a reply stands inside one too
        "special marks": ["</s>"],
        "plain": [],
    }
    assert load("plain").stops == PLAIN_STOPS
    assert load("dated").stops == ()
