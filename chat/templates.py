"""Turn chats into token ids: the model's own chat template, and the rules of the token ledger.

Knows nothing of storage, of the engine or of HTTP, and imports no torch.

The ledger cuts a chat into one segment per message. Concatenated they are the prompt:

    [ system | user 1 … generation prompt | sampled ids of reply 1 | closing, user 2 … generation prompt | sampled …

A reply's segment is what the model sampled, never its text encoded again. What closes a reply (`<|im_end|>\\n`) belongs
to the user message after it, and only as far as the reply did not sample it. Of messages in a row that are no replies,
the last carries the tokens of all, and the others are empty; only a system prompt at the beginning has its own. So
history is never encoded again, and a prompt always begins with exactly the tokens that the engine has seen.

Reasoning is part of a reply's segment. Under "preserve" it stays in the prompt for the same reason, also where the
template would take it out of earlier replies. Under "strip" the prompt leaves it out, and a reply is opened as the
template opens those that it has; so each new message goes back to where the reply before it began.

Rendering is one pass over the whole chat, however many messages it has: every reply is put in as a mark, and what the
template writes between two marks is the text of the segments between those replies.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, takewhile
from pathlib import Path

from chat.encoding import TextEncoder, unused_characters
from chat.entries import Entry, Layout, stretches
from chat.errors import ChatError, PromptTooLong, TemplateError, UnusableModel
from chat.openings import Openings
from chat.rendering import PLAIN, PLAIN_NOTICE, PLAIN_STOPS, Renderer
from chat.template_files import TemplateFiles, beginning_of_texts, read_template_files, showing
from chat.template_traits import probe
from chat.thinking import STORED, Marks, Policy, Splitter, find_marks, reasoning_tokens, stored_form
from chat.views import ModelNotes
from storage.reasoning import split_reply

__all__ = ["ChatTemplate", "Entry"]

LARGE = 100_000  # characters; longer texts are not encoded, which takes seconds, where they surely do not fit


class ChatTemplate:
    """The tokenizer and chat template of one model directory. Immutable after loading; safe to use from threads.

    `identity` names the vocabulary, the one thing that sampled ids depend on; `rendering` names it and the template,
    which wrote all others. `notes` are for people. A reply ends before the first of `stops`.
    """

    def __init__(self, files: TemplateFiles, thinking: Policy = "preserve") -> None:
        self.identity, self.rendering = files.identity, files.rendering
        source, names = files.source or PLAIN, files.names
        self.stops: tuple[str, ...] = ()
        if files.source is None:
            names, self.stops = {"beginning": beginning_of_texts(files.tokenizer)}, PLAIN_STOPS
        added = [token.content for token in files.tokenizer.get_added_tokens_decoder().values()]
        self._marks = find_marks(added, source)
        self._stripped = self._marks if thinking == "strip" else None
        self.notes = ModelNotes("" if files.source else PLAIN_NOTICE, thinking if self._marks else None)
        marks = f"{self._marks.opening} {self._marks.closing} {self._marks.direct}" if self._marks else ""
        self.tokenizer = showing(files.tokenizer, [token for token in added if token in marks])
        self._encoder = TextEncoder(self.tokenizer, f"{source} {marks}")
        renderer = Renderer(source, names)
        self._render, self._merges_system = renderer.render, renderer.merges_system
        self._traits = probe(renderer)
        self._openings = Openings.of(self._encoder, self._traits, self._marks)
        self._preset_ids = self._probe_preset()

    @classmethod
    def load(cls, directory: str | Path, thinking: Policy = "preserve") -> ChatTemplate:
        """The tokenizer and chat template in `directory`; where there is no template, the plain one.

        Raises UnusableModel when a file is missing or damaged, or the template cannot be rendered.
        """
        files = read_template_files(directory)
        try:
            return cls(files, thinking)
        except ChatError as error:
            raise UnusableModel(f"The model {Path(directory).name!r} cannot chat. {error}") from error

    @property
    def stable(self) -> bool:
        """Whether the template leaves the beginning of a chat alone as it grows; with a system prompt it may not.

        Where it does not, `prompt` renders the whole chat each time, with the sampled ids of replies in their places.
        """
        return self._traits.stable

    def fill(self, entries: Sequence[Entry], limit: int | None = None) -> list[tuple[int, ...]]:
        """The segment of every entry: its own where it has one, otherwise made now.

        Raises TemplateError, InvalidText, and PromptTooLong as soon as what is there surely reaches `limit` tokens.
        """
        segments: list[tuple[int, ...]] = []
        cut, texts = "", None
        used, stable = 0, self._is_stable(entries)
        for number, (run, reply) in enumerate(stretches(entries)):
            between: list[int] = []
            placed = reply
            made = self._must_make(run, reply, stable)
            if made:
                if texts is None:
                    cut, pieces = self._pieces(entries)
                    texts = dict(pieces)
                text = self._between(texts.get(number), segments[-1] if segments else (), stable)
                text, placed = self._placed(text, reply)
                least = used + self._encoder.least_tokens(text.replace(cut, "")) if len(text) > LARGE else 0
                if limit is not None and least >= limit:
                    raise PromptTooLong(least, limit, at_least=True)
                between = self._encoder.encode(text, cut, start=number == 0)
            if run:
                segments.extend(self._cut(run, between, cut, number == 0) if made else (entry.ids for entry in run))
            if placed is None:
                break
            segments.append(self._reply_ids(placed))
            if made and not run:  # nobody else carries what the template writes before this reply
                segments[-1] = (*between, *segments[-1])
            if stable and not self._stripped:
                used += sum(map(len, segments[-len(run) - 1 :]))
            if limit is not None and used >= limit:
                raise PromptTooLong(used, limit, so_far=True)
        return segments

    def prompt(self, entries: Sequence[Entry], segments: Sequence[tuple[int, ...]]) -> list[int]:
        """The token ids to send."""
        return self.lay_out(entries, segments).prompt

    def lay_out(self, entries: Sequence[Entry], segments: Sequence[tuple[int, ...]]) -> Layout:
        """The prompt: the segments in a row, or the whole rendered anew where the template is not stable."""
        sent = self._without_reasoning(entries, segments)
        altered = frozenset(at for at, segment in enumerate(sent) if segment != segments[at])
        if self._is_stable(entries):
            starts = tuple(accumulate(map(len, sent[:-1]), initial=0)) if sent else ()
            return Layout([token for segment in sent for token in segment], starts, altered)
        places = [index for index, entry in enumerate(entries) if entry.role == "assistant"]
        cut, pieces = self._pieces(entries)
        ids: list[int] = []
        for (number, written), (following, _) in zip(pieces, [*pieces[1:], (0, "")], strict=True):
            before = sent[places[number - 1]] if number else ()
            text = self._between(written, before, stable=False)
            if following and self._openings.asked(sent, places[following - 1]):
                text = text.removesuffix(self._traits.history) + self._traits.generation
            ids.extend(before)
            ids.extend(self._encoder.encode(text, cut, start=number == 0))
        return Layout(ids, None, altered)

    def shared_length(self, entries: Sequence[Entry], segments: Sequence[tuple[int, ...]]) -> int:
        """How many first tokens of the prompt no user typed: the template's preset, if no system prompt is set."""
        if not entries or entries[0].role == "system" or not self._is_stable(entries):
            return 0
        pairs = zip(segments[0], self._preset_ids, strict=False)  # they may part where the template writes the date
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

    def closes(self, token_id: int) -> bool:
        """Whether `token_id` is what the template itself writes after a reply, so that it may end a stored reply."""
        return self._traits.closing.startswith(self._encoder.added.get(token_id, "\0"))

    @property
    def end_ids(self) -> list[int]:
        """The control tokens that the template writes after a reply and nowhere in it, so that one of them ends it."""
        inside = self._marks.closing if self._marks else ""
        return [index for index, text in self._encoder.control.items() if self.closes(index) and text not in inside]

    def ends_prompt(self, token_ids: Sequence[int]) -> bool:
        """Whether this segment ends in the generation prompt, so that a reply can follow it."""
        return self._openings.end(token_ids)

    def splitter(self) -> Splitter | None:
        """What tells the reasoning of a new reply from its answer; None where the model marks none."""
        return Splitter(self._marks, opened=self._openings.reasons) if self._marks else None

    def encode_text(self, text: str) -> list[int]:
        """Token ids of text in the middle of a chat; the texts of control tokens in it stay plain text."""
        return self._encoder.encode_text(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of these tokens, without control tokens but for marks of reasoning; U+FFFD for broken bytes."""
        return self._encoder.decode(token_ids)

    def ends_in_mark(self, token_ids: Sequence[int]) -> bool:
        """Whether these tokens end in U+FFFD as somebody writes it, and not in bytes that make no character."""
        return self._encoder.ends_in_mark(token_ids)

    # --- inside ---------------------------------------------------------------------------------------------------

    def _is_stable(self, entries: Sequence[Entry]) -> bool:
        has_system = any(entry.role == "system" for entry in entries)
        return self._traits.stable_with_system if has_system else self._traits.stable

    def _must_make(self, run: Sequence[Entry], reply: Entry | None, stable: bool) -> bool:
        """Whether the text of this stretch is needed: a segment is missing, or a reply is to come and none ends so."""
        if not run:
            return stable and reply is not None and reply.token_ids is None
        missing = any(entry.token_ids is None for entry in run)
        return missing or (reply is None and not self.ends_prompt(run[-1].ids))

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
        began = next((entry.at for entry in entries if entry.at is not None), None)
        first, *rest = re.split(f"{mark}([0-9]+){mark}", self._render(messages, generation=True, at=began))
        return cut, [(0, first), *((int(number), text) for number, text in zip(rest[::2], rest[1::2], strict=True))]

    def _between(self, text: str | None, before: Sequence[int], stable: bool) -> str:
        """What is to be encoded after the reply whose segment is `before`; `text` None: the template drops that reply.

        A control token at the beginning of `text` is left out where the reply ended in that very token.
        """
        if text is None:
            if stable:
                raise TemplateError("The model's chat template drops earlier replies, so this chat cannot go on.")
            return ""  # the prompt is rendered anew anyway
        closed = self._encoder.added.get(before[-1]) if before else None
        if not closed or not text.startswith(closed):
            return text
        rest = text.removeprefix(closed)
        return rest.lstrip() if before[-1] in self._encoder.swallows else rest

    def _placed(self, text: str, reply: Entry | None) -> tuple[str, Entry | None]:
        """What is written anew before this reply, and the reply, without ids if they cannot follow it.

        Ids that begin inside the reasoning, or with what the template would write, follow the request for a reply. If
        this template opens no reasoning there, the answer has to be encoded.
        """
        if reply is None or reply.token_ids is None:
            return text, reply
        traits, said = self._traits, self.decode(reply.ids)
        inside = reply.text.startswith(STORED.opening) and said != reply.text
        if inside and stored_form(said, self.splitter()) != reply.text:
            return text, replace(reply, token_ids=None)
        added = traits.history.removeprefix(traits.generation)
        asked = inside or (added and "".join(self._encoder.pieces(reply.ids)).startswith(added))
        return (text.removesuffix(traits.history) + traits.generation if asked and traits.stable else text), reply

    def _cut(self, run: Sequence[Entry], ids: Sequence[int], cut: str, start: bool) -> list[tuple[int, ...]]:
        """Segments of `run`, which together are `ids`."""
        done = self._system_length(run[0], ids, cut) if start and len(run) > 1 and run[0].role == "system" else 0
        rest = [*((),) * (len(run) - 1), tuple(ids[done:])]
        return [tuple(ids[:done]), *rest[1:]] if done else rest

    def _system_length(self, system: Entry, ids: Sequence[int], cut: str) -> int:
        """How many first tokens of a chat are those of its system prompt alone; 0 where the template mixes it in."""
        if self._merges_system:
            return 0
        message = {"role": "system", "content": self._encoder.defuse(system.text, cut)}
        try:
            text = self._render([message], generation=False, at=system.at)
        except TemplateError:  # it wants more messages
            return 0
        alone = self._encoder.encode(text, cut, start=True)
        return len(alone) if len(alone) < len(ids) and list(ids[: len(alone)]) == alone else 0

    def _reply_ids(self, reply: Entry) -> tuple[int, ...]:
        """A reply's segment. Of one that was not sampled here its answer is encoded, as templates have it."""
        return tuple(self.encode_text(split_reply(reply.text).answer)) if reply.token_ids is None else reply.token_ids

    def _without_reasoning(
        self, entries: Sequence[Entry], segments: Sequence[tuple[int, ...]]
    ) -> list[tuple[int, ...]]:
        """The segments as they are sent: under "strip" without the reasoning of replies, and what opened it."""
        sent = list(segments)
        for index, entry in enumerate(entries):
            if self._stripped is None or entry.role != "assistant":
                continue
            asked = self._openings.asked(segments, index)
            sent[index] = self._answer_ids(segments[index], self._stripped, asked and self._openings.reasons)
            if asked and (self._openings.reasons or sent[index] != segments[index]):
                sent[index - 1] = self._openings.in_history(segments[index - 1])
        return sent

    def _answer_ids(self, reply: tuple[int, ...], marks: Marks, opened: bool) -> tuple[int, ...]:
        """A reply's segment without its reasoning. What is left of a token that reaches beyond it is encoded again."""
        ended = bool(reply) and self.closes(reply[-1])
        body = reply[:-1] if ended else reply
        count, rest = reasoning_tokens(self._encoder.pieces(body), marks, opened=opened)
        return (*(self.encode_text(rest) if rest else ()), *reply[count:])

    def _probe_preset(self) -> tuple[int, ...]:
        """The ids that come before anything a user types, when no system prompt is set."""
        now = time.time()
        prompts = [self.fill([Entry("user", text, at=now)])[0] for text in ("one", "2", "Three")]
        columns = zip(*prompts, strict=False)
        return tuple(column[0] for column in takewhile(lambda column: len(set(column)) == 1, columns))
