"""Turn chats into token ids: the model's own chat template, and the rules of the token ledger.

Knows nothing of storage, of the engine or of HTTP, and imports no torch: transformers' rendering of Jinja templates is
used as it is, so that a first turn is what `apply_chat_template` would make of it.

The ledger cuts a chat into one segment per message. Concatenated they are the prompt:

    [ system | user 1 … generation prompt | sampled ids of reply 1 | closing, user 2 … generation prompt | sampled …

A reply's segment is what the model sampled, never its text encoded again. What closes a reply (`<|im_end|>\\n`) belongs
to the user message after it, and only as far as the reply did not sample it. Of messages in a row that are no replies,
the last carries the tokens of all, and the others are empty; only a system prompt at the beginning has its own. So
history is never encoded again, and a prompt always begins with exactly the tokens that the engine has seen. Reasoning
that a template would strip from earlier replies stays in the prompt for the same reason.

Rendering is one pass over the whole chat, however many messages it has: every reply is put in as a mark, and what the
template writes between two marks is the text of the segments between those replies.
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

from chat.encoding import TextEncoder, unused_characters
from chat.errors import PromptTooLong, TemplateError, UnusableModel
from chat.thinking import Policy
from chat.views import ModelNotes, Role

SHOWN_ROLES = 8  # in an error about the order of messages


@dataclass(frozen=True)
class Entry:
    """One message as the ledger sees it; `token_ids` None: it has no segment yet (for this tokenizer).

    `at`: when it was stored, in seconds since the epoch; None: it is new.
    """

    role: Role
    text: str
    token_ids: tuple[int, ...] | None = None
    at: float | None = None


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
        self.notes = ModelNotes()
        self._encoder = TextEncoder(tokenizer)
        self.stable = self._probe_stability()
        self._closing = self._probe_closing()
        self._generation_ids = self._probe_generation()
        self._preset_ids = self._probe_preset()

    @classmethod
    def load(cls, directory: str | Path, thinking: Policy = "preserve") -> ChatTemplate:
        """Read `tokenizer.json`, `tokenizer_config.json` and the chat template of `directory`.

        Raises UnusableModel when a file is missing or damaged, or the template is missing or cannot be rendered.
        """
        path = Path(directory)
        try:
            raw = (path / "tokenizer.json").read_bytes()
            tokenizer = Tokenizer.from_str(raw.decode())
            config_path = path / "tokenizer_config.json"
            config: dict[str, Any] = json.loads(config_path.read_text("utf-8")) if config_path.is_file() else {}
            template = _read_template(path, config)
        except Exception as error:  # tokenizers raises bare Exceptions
            raise UnusableModel(f"The tokenizer of the model in {path} cannot be read: {error}") from error
        tokenizer.no_truncation()
        tokenizer.no_padding()
        if template is None:
            raise UnusableModel(
                f"The model {path.name!r} has no chat template: it was not made for chatting; choose an instruct model."
            )
        try:
            return cls(tokenizer, template, _special_tokens(config), hashlib.sha256(raw).hexdigest()[:16])
        except TemplateError as error:
            raise UnusableModel(f"The model {path.name!r} cannot chat. {error}") from error

    def fill(self, entries: Sequence[Entry], limit: int | None = None) -> list[tuple[int, ...]]:
        """The segment of every entry: its own where it has one, otherwise made now.

        Raises TemplateError, and PromptTooLong as soon as what comes before the last messages reaches `limit` tokens.
        """
        segments: list[tuple[int, ...]] = []
        cut, texts = "", None
        used = 0
        for number, (run, reply) in enumerate(_stretches(entries)):
            between: list[int] = []
            made = self._must_make(run, reply)
            if made:
                if texts is None:
                    cut, pieces = self._pieces(entries)
                    texts = dict(pieces)
                between = self._encode_piece(texts.get(number), segments[-1] if segments else (), cut, number == 0)
            if run:
                segments.extend(self._cut(run, between, cut, number == 0) if made else map(_ids, run))
            if reply is None:
                break
            ids = reply.token_ids
            segments.append(tuple(self.encode_text(reply.text) if ids is None else ids))
            if made and not run:  # nobody else carries what the template writes before this reply
                segments[-1] = (*between, *segments[-1])
            used += sum(map(len, segments[-len(run) - 1 :]))
            if limit is not None and used >= limit and self.stable:
                raise PromptTooLong(used, limit, so_far=True)
        return segments

    def prompt(self, entries: Sequence[Entry], segments: Sequence[tuple[int, ...]]) -> list[int]:
        """The token ids to send: the segments in a row, or the whole rendered anew where the template is not stable."""
        if self.stable:
            return [token for segment in segments for token in segment]
        replies = [segment for entry, segment in zip(entries, segments, strict=True) if entry.role == "assistant"]
        cut, pieces = self._pieces(entries)
        ids: list[int] = []
        for number, text in pieces:
            before = replies[number - 1] if number else ()
            ids.extend(before)
            ids.extend(self._encode_piece(text, before, cut, number == 0))
        return ids

    def shared_length(self, entries: Sequence[Entry], segments: Sequence[tuple[int, ...]]) -> int:
        """How many first tokens of the prompt no user typed: the template's preset, if no system prompt is set."""
        if not entries or entries[0].role == "system" or not self.stable:
            return 0
        first = segments[0][: len(self._preset_ids)]
        return len(first) if first == self._preset_ids else 0

    def closes(self, token_id: int) -> bool:
        """Whether `token_id` is what the template itself writes after a reply, so that it may end a stored reply."""
        return self._closing.startswith(self._encoder.added.get(token_id, "\0"))

    def ends_prompt(self, token_ids: Sequence[int]) -> bool:
        """Whether this segment ends in the generation prompt, so that a reply can follow it."""
        start = len(token_ids) - len(self._generation_ids)
        return bool(token_ids) and start >= 0 and tuple(token_ids[start:]) == self._generation_ids

    def encode_text(self, text: str) -> list[int]:
        """Token ids of text in the middle of a chat; the texts of control tokens in it stay plain text."""
        return self._encoder.encode_text(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of these tokens, without control tokens; U+FFFD where bytes make no character."""
        return self._encoder.decode(token_ids)

    # --- inside ---------------------------------------------------------------------------------------------------

    def _must_make(self, run: Sequence[Entry], reply: Entry | None) -> bool:
        """Whether the text of this stretch is needed: a segment is missing, or a reply is to come and none ends so."""
        if not run:
            return self.stable and reply is not None and reply.token_ids is None
        missing = any(entry.token_ids is None for entry in run)
        return missing or (reply is None and not self.ends_prompt(_ids(run[-1])))

    def _pieces(self, entries: Sequence[Entry]) -> tuple[str, list[tuple[int, str]]]:
        """The whole chat rendered once: what comes before all replies (0), and what follows reply 1, 2, … in its order.

        Before them the character that cuts what users typed; see `TextEncoder.encode`.
        """
        cut, mark = unused_characters((entry.text for entry in entries), 2)
        messages, replies = [], 0
        for entry in entries:
            if entry.role == "assistant":
                replies += 1
                content = f"{mark}{replies}{mark}"
            else:
                content = self._encoder.defuse(entry.text, cut)
            messages.append({"role": entry.role, "content": content})
        first, *rest = re.split(f"{mark}([0-9]+){mark}", self._render(messages, generation=True))
        return cut, [(0, first), *((int(number), text) for number, text in zip(rest[::2], rest[1::2], strict=True))]

    def _encode_piece(self, text: str | None, before: tuple[int, ...], cut: str, start: bool) -> list[int]:
        """The ids of what the template writes after the reply whose segment is `before`; None: it drops that reply."""
        if text is None:
            if self.stable:
                raise TemplateError("The model's chat template drops earlier replies, so this chat cannot go on.")
            return []  # the prompt is rendered anew anyway
        return self._encoder.encode(self._without_closed(text, before), cut, start=start)

    def _cut(self, run: Sequence[Entry], ids: Sequence[int], cut: str, start: bool) -> list[tuple[int, ...]]:
        """Segments of `run`, which together are `ids`."""
        done = self._system_length(run[0], ids, cut) if start and len(run) > 1 and run[0].role == "system" else 0
        rest = [*((),) * (len(run) - 1), tuple(ids[done:])]
        return [tuple(ids[:done]), *rest[1:]] if done else rest

    def _system_length(self, system: Entry, ids: Sequence[int], cut: str) -> int:
        """How many first tokens of a chat are those of its system prompt alone; 0 where the template mixes it in."""
        try:
            text = self._render(
                [{"role": "system", "content": self._encoder.defuse(system.text, cut)}], generation=False
            )
        except TemplateError:  # it wants more messages
            return 0
        alone = self._encoder.encode(text, cut, start=True)
        return len(alone) if len(alone) < len(ids) and list(ids[: len(alone)]) == alone else 0

    def _without_closed(self, text: str, before: Sequence[int]) -> str:
        """`text` without the control token at its beginning if the reply `before` it ended in that very token."""
        closed = self._encoder.added.get(before[-1]) if before else None
        if not closed or not text.startswith(closed):
            return text
        rest = text.removeprefix(closed)
        return rest.lstrip() if before[-1] in self._encoder.swallows else rest

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
            roles = ", ".join(message["role"] for message in messages[:SHOWN_ROLES])
            more = f", … {len(messages):,} in all" if len(messages) > SHOWN_ROLES else ""
            raise TemplateError(
                f"The model's chat template refuses messages in this order ({roles}{more}): {error}"
            ) from None
        return str(rendered[0])

    def _probe_closing(self) -> str:
        """What the template writes after a reply."""
        mark = chr(0x10FFFD)
        messages = [{"role": "user", "content": "one"}, {"role": "assistant", "content": mark}]
        return self._render(messages, generation=False).rpartition(mark)[2]

    def _probe_generation(self) -> tuple[int, ...]:
        """The ids of the generation prompt; empty when the template has none, or none of its own tokens."""
        user = {"role": "user", "content": "one"}
        bare, whole = (
            self._encoder.encode_bare(self._render([user], generation=generation)) for generation in (False, True)
        )
        return tuple(whole[len(bare) :]) if whole[: len(bare)] == bare else ()

    def _probe_preset(self) -> tuple[int, ...]:
        """The ids that come before anything a user types, when no system prompt is set."""
        prompts = [self.fill([Entry("user", text)])[0] for text in ("one", "2", "Three")]
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


def _stretches(entries: Sequence[Entry]) -> Iterator[tuple[Sequence[Entry], Entry | None]]:
    """Each reply with the messages between the one before and it; last, with None, the messages after all replies."""
    start = 0
    for index, entry in enumerate(entries):
        if entry.role == "assistant":
            yield entries[start:index], entry
            start = index + 1
    yield entries[start:], None


def _ids(entry: Entry) -> tuple[int, ...]:
    return entry.token_ids or ()


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
