"""Turn chats into token ids: the model's own chat template and tokenizer, and the rules of the token ledger.

Knows nothing of storage, of the engine or of HTTP, and imports no torch: `tokenizers` encodes, and transformers'
rendering of Jinja templates is used as it is, so that a first turn is what `apply_chat_template` would make of it.

The ledger cuts a chat into one segment per message. Concatenated they are the prompt:

    [ system | user 1 … generation prompt | sampled ids of reply 1 | closing, user 2 … generation prompt | sampled …

A reply's segment is what the model sampled, never its text encoded again. What closes a reply (`<|im_end|>\\n`) belongs
to the user message after it, and only as far as the reply did not sample it. So history is never re-rendered, and a
prompt always begins with exactly the tokens that the engine has seen. Reasoning that a template would strip from
earlier replies stays in the prompt for the same reason.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from chat.errors import TemplateError
from chat.views import Role

_PRIVATE_USE = range(0x100000, 0x10FFFE)  # code points that no text means anything by


@dataclass(frozen=True)
class Entry:
    """One message as the ledger sees it; `token_ids` None: it has no segment yet (for this tokenizer)."""

    role: Role
    text: str
    token_ids: tuple[int, ...] | None = None


class ChatTemplate:
    """The tokenizer and chat template of one model directory. Immutable after loading; safe to use from threads.

    `identity` names the vocabulary: token ids of a stored message mean something only under the same one.
    `stable` says whether the template leaves the beginning of a chat alone as the chat grows. When it does not,
    `prompt` renders the whole chat each time, with the sampled ids of replies in their places.
    """

    def __init__(self, tokenizer: Tokenizer, template: str, special: dict[str, str], identity: str) -> None:
        self.tokenizer = tokenizer
        self.identity = identity
        self._template = template
        self._special = special
        added = tokenizer.get_added_tokens_decoder()
        self._added = {index: token.content for index, token in added.items()}
        self._control = {index: token.content for index, token in added.items() if token.special}
        self._swallows = {index for index, token in added.items() if token.rstrip}  # white space that follows it
        longest_first = sorted(self._control.values(), key=len, reverse=True)
        self._control_re = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._anchor_id = min(self._control, key=lambda index: (index in self._swallows, index), default=None)
        self._closing = self._probe_closing()
        self._generation_ids = self._probe_generation()
        self._preset_ids = self._probe_preset()
        self.stable = self._probe_stability()

    @classmethod
    def load(cls, directory: str | Path) -> ChatTemplate:
        """Read `tokenizer.json`, `tokenizer_config.json` and the chat template of `directory`.

        Raises TemplateError when a file is missing or damaged, or the template is missing or cannot be rendered.
        """
        path = Path(directory)
        try:
            raw = (path / "tokenizer.json").read_bytes()
            tokenizer = Tokenizer.from_str(raw.decode())
            config_path = path / "tokenizer_config.json"
            config: dict[str, Any] = json.loads(config_path.read_text("utf-8")) if config_path.is_file() else {}
            template = _read_template(path, config)
        except Exception as error:  # tokenizers raises bare Exceptions
            raise TemplateError(f"The tokenizer of the model in {path} cannot be read: {error}") from error
        tokenizer.no_truncation()
        tokenizer.no_padding()
        if template is None:
            raise TemplateError(
                f"The model {path.name!r} has no chat template: it was not made for chatting; choose an instruct model."
            )
        return cls(tokenizer, template, _special_tokens(config), hashlib.sha256(raw).hexdigest()[:16])

    def fill(self, entries: Sequence[Entry]) -> list[tuple[int, ...]]:
        """The segment of every entry: its own where it has one, otherwise made now. Raises TemplateError.

        Consecutive messages that are no replies are encoded together, so that the tokens are those of the text, and
        then cut where the template allows a cut; where it does not, the later message carries the earlier one's tokens.
        """
        segments: list[tuple[int, ...]] = []
        start = 0
        while start < len(entries):
            entry = entries[start]
            if entry.role == "assistant":
                ids = self.encode_text(entry.text) if entry.token_ids is None else entry.token_ids
                segments.append(tuple(ids))
                start += 1
                continue
            end = start
            while end < len(entries) and entries[end].role != "assistant":
                end += 1
            run = entries[start:end]
            stored = [item.token_ids for item in run]
            if any(ids is None for ids in stored):
                segments.extend(self._run_segments(entries[:start], run, segments[-1] if segments else ()))
            else:
                segments.extend(ids for ids in stored if ids is not None)
            start = end
        return segments

    def prompt(self, entries: Sequence[Entry], segments: Sequence[tuple[int, ...]]) -> list[int]:
        """The token ids to send: the segments in a row, or the whole rendered anew where the template is not stable."""
        if self.stable:
            return [token for segment in segments for token in segment]
        sentinels = self._unused_characters(entries, len(entries) + 1)
        cut, marks = sentinels[0], sentinels[1:]
        messages = [
            {"role": entry.role, "content": mark if entry.role == "assistant" else self._defuse(entry.text, cut)}
            for entry, mark in zip(entries, marks, strict=True)
        ]
        text = self._render(messages, generation=True)
        ids: list[int] = []
        before: tuple[int, ...] = ()
        pieces = re.split(f"([{marks[0]}-{marks[-1]}])", text)
        for number, piece in enumerate(pieces):
            if number % 2:
                before = segments[marks.index(piece)]
                ids.extend(before)
            else:
                ids.extend(self._encode_template_text(self._without_closed(piece, before), cut, start=number == 0))
        return ids

    def shared_length(self, entries: Sequence[Entry], segments: Sequence[tuple[int, ...]]) -> int:
        """How many first tokens of the prompt no user typed: the template's preset, if no system prompt is set."""
        if not entries or entries[0].role == "system" or not self.stable:
            return 0
        first = segments[0][: len(self._preset_ids)]
        return len(first) if first == self._preset_ids else 0

    def closes(self, token_id: int) -> bool:
        """Whether `token_id` is what the template itself writes after a reply, so that it may end a stored reply."""
        return self._closing.startswith(self._added.get(token_id, "\0"))

    def ends_prompt(self, token_ids: Sequence[int]) -> bool:
        """Whether this segment ends in the generation prompt, so that a reply can follow it."""
        length = len(self._generation_ids)
        return len(token_ids) >= length and tuple(token_ids[len(token_ids) - length :]) == self._generation_ids

    def encode_text(self, text: str) -> list[int]:
        """Token ids of text in the middle of a chat; the texts of control tokens in it stay plain text."""
        cut = next(self._unused(text))
        return self._encode_template_text(self._defuse(text, cut), cut, start=False)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of these tokens, without control tokens; U+FFFD where bytes make no character."""
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=True)

    # --- inside ---------------------------------------------------------------------------------------------------

    def _run_segments(
        self, history: Sequence[Entry], run: Sequence[Entry], before: tuple[int, ...]
    ) -> list[tuple[int, ...]]:
        """Segments of `run`, which follows `history` (empty, or ending in a reply whose segment is `before`)."""
        cut, mark = self._unused_characters([*history, *run], 2)
        messages = [{"role": entry.role, "content": self._defuse(entry.text, cut)} for entry in (*history, *run)]
        if history:
            messages[len(history) - 1]["content"] = mark

        def encode(count: int, generation: bool) -> list[int]:
            text = self._render(messages[: len(history) + count], generation=generation)
            if history:
                _, found, text = text.rpartition(mark)
                if not found:
                    raise TemplateError("The model's chat template drops earlier replies, so this chat cannot go on.")
                text = self._without_closed(text, before)
            return self._encode_template_text(text, cut, start=not history)

        whole = encode(len(run), True)
        segments: list[tuple[int, ...]] = []
        done = 0
        for count in range(1, len(run)):
            try:
                part = encode(count, False)
            except TemplateError:  # the template wants more messages; the next one carries this one's tokens
                part = []
            end = len(part) if done < len(part) < len(whole) and whole[: len(part)] == part else done
            segments.append(tuple(whole[done:end]))
            done = end
        return [*segments, tuple(whole[done:])]

    def _without_closed(self, text: str, before: Sequence[int]) -> str:
        """`text` without the control token at its beginning if the reply `before` it ended in that very token."""
        closed = self._added.get(before[-1]) if before else None
        if not closed or not text.startswith(closed):
            return text
        rest = text.removeprefix(closed)
        return rest.lstrip() if before[-1] in self._swallows else rest

    def _encode_template_text(self, text: str, cut: str, *, start: bool) -> list[int]:
        """Encode rendered text: control tokens count, except those that `_defuse` cut in two.

        In the middle of a chat the text is encoded behind a control token, because some tokenizers put a space before
        the first word of whatever they are given.
        """
        ids: list[int] = []
        for piece in text.split(cut):
            if piece:
                ids.extend(self._encode(piece) if start else self._encode_behind_control(piece))
                start = False
        return ids

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def _encode_behind_control(self, text: str) -> list[int]:
        anchor = self._anchor_id
        if anchor is None or (anchor in self._swallows and text[0].isspace()):
            return self._encode(text)
        ids = self._encode(self._control[anchor] + text)
        return ids[1:] if ids[0] == anchor else self._encode(text)

    def _defuse(self, text: str, cut: str) -> str:
        """`text` with `cut` inside every text that would become a control token."""
        return self._control_re.sub(lambda found: found[0][:1] + cut + self._defuse(found[0][1:], cut), text)

    def _unused(self, *texts: str) -> Iterator[str]:
        """Private-use characters that none of `texts` contains."""
        used = {character for text in texts for character in text if ord(character) >= _PRIVATE_USE.start}
        return (chr(code) for code in _PRIVATE_USE if chr(code) not in used)

    def _unused_characters(self, entries: Sequence[Entry], count: int) -> list[str]:
        unused = self._unused(*(entry.text for entry in entries))
        return [next(unused) for _ in range(count)]

    def _render(self, messages: Sequence[dict[str, str]], *, generation: bool) -> str:
        """What the model's template makes of `messages`. Raises TemplateError with the template's own words."""
        try:
            rendered, _ = render_jinja_template(
                conversations=[list(messages)],
                chat_template=self._template,
                add_generation_prompt=generation,
                **self._special,
            )
        except Exception as error:  # a template is a program that came with the model: it may raise anything
            roles = ", ".join(message["role"] for message in messages)
            raise TemplateError(
                f"The model's chat template refuses messages in this order ({roles}): {error}"
            ) from None
        return str(rendered[0])

    def _probe_closing(self) -> str:
        """What the template writes after a reply."""
        mark = chr(_PRIVATE_USE[-1])
        messages = [{"role": "user", "content": "one"}, {"role": "assistant", "content": mark}]
        return self._render(messages, generation=False).rpartition(mark)[2]

    def _probe_generation(self) -> tuple[int, ...]:
        """The ids of the generation prompt; empty when the template has none, or none of its own tokens."""
        user = {"role": "user", "content": "one"}
        bare, whole = (self._encode(self._render([user], generation=generation)) for generation in (False, True))
        return tuple(whole[len(bare) :]) if whole[: len(bare)] == bare else ()

    def _probe_preset(self) -> tuple[int, ...]:
        """The ids that come before anything a user types, when no system prompt is set."""
        prompts = [self._run_segments([], [Entry("user", text)], ())[0] for text in ("one", "2", "Three")]
        columns = zip(*prompts, strict=False)
        return tuple(column[0] for column in takewhile(lambda column: len(set(column)) == 1, columns))

    def _probe_stability(self) -> bool:
        """Whether two more turns leave the rendering of what came before as it was."""
        first, second = chr(0x10FFFC), chr(0x10FFFD)
        messages = [
            {"role": role, "content": content}
            for role, content in zip(
                ("user", "assistant", "user", "assistant", "user"), ("one", first, "two", second, "three"), strict=True
            )
        ]
        one, two, three = (self._render(messages[:count], generation=True) for count in (1, 3, 5))
        return two.startswith(one + first) and three.startswith(two + second)


def _read_template(path: Path, config: dict[str, Any]) -> str | None:
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text("utf-8")
    found = config.get("chat_template")
    if isinstance(found, list):  # several named templates
        found = next((item["template"] for item in found if item.get("name") == "default"), None)
    return found if isinstance(found, str) else None


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """`bos_token`, `eos_token`, … as templates name them; a token is a string, or an object with its `content`."""
    names = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
    values = {name: config.get(name) for name in names}
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in values.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}
