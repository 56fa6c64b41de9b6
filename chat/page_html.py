"""The chat page's HTML, as pure functions of the service's views.

Every text that a person or a model wrote is escaped, or rendered by `page_markdown`. Knows nothing of Gradio, of the
service or of time. What can be clicked carries `data-act`, which `assets/page.js` listens for.
"""

from __future__ import annotations

import re
from functools import lru_cache
from html import escape

from chat.page_icons import icon
from chat.page_markdown import render_growing, render_markdown
from chat.views import Figures, MessageView, MissCause, MissView, Role, SessionDetail, TurnView
from storage.reasoning import Parts, split_reply

EXAMPLES = (
    ("Explain", "Explain how a rainbow forms, in three sentences."),
    ("Code", "Write a Python function that checks whether a word is a palindrome."),
    ("Plan", "Plan a quiet weekend in Lyon, as a list."),
    ("Write", "Write a short, friendly note to a new neighbour."),
)

WHOSE: dict[Role, str] = {"system": "the system prompt", "user": "one of your messages", "assistant": "a reply"}
WHY: dict[MissCause, str] = {
    "new": "nobody had read it",
    "diverged": "the chat went on otherwise before",
    "edited": "the chat was changed there",
    "template": "the model’s template writes earlier messages anew",
    "other_model": "another model wrote the reply before",
    "evicted": "it had to make room",
    "lost": "it was not kept when the engine was started anew",
    "unreadable": "its copy was damaged",
    "slower": "that was quicker than bringing it back",
}

_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|[^\W_]+")  # each character, where words are not set apart

SHELL_SIDE = f"""
<div class="kw-side-head">
  <a class="kw-brand" href="/" data-act="new" aria-label="Keepwarm: new chat">{icon("ember")}<span>Keepwarm</span></a>
  <button type="button" class="kw-icon kw-phone" data-act="menu" aria-label="Close the list of chats">
  {icon("close")}</button>
</div>
<button type="button" id="kw-new" class="kw-new" data-act="new">{icon("plus")}<span>New chat</span></button>
<nav id="kw-chats" class="kw-chats" aria-label="Chats"></nav>
"""

SHELL_NOTICE = """
<p id="kw-model-note" class="kw-model-note" role="note" hidden></p>
<div id="kw-status" class="kw-status" role="status" aria-live="polite" hidden></div>
<button type="button" id="kw-down" class="kw-down" data-act="down" aria-label="Go to the newest text" hidden>↓</button>
"""

READY = """
<span id="kw-ready" title="How soon a reply would begin now, by what was measured so far" hidden></span>
"""

SHELL_SETTINGS = f"""
<div class="kw-settings-head"><h2>Settings</h2>
<button type="button" class="kw-icon" data-act="settings" aria-label="Close settings">{icon("close")}</button></div>
<div class="kw-own-model"><span>Model</span>
<button type="button" class="kw-model" data-act="models" aria-haspopup="dialog"></button>
<p class="kw-note" id="kw-thinking" hidden></p></div>
"""

PROMPT_NOTE = """
<p class="kw-note" id="kw-prompt-open">Read before the first message; a chat keeps the one it started with.</p>
<div class="kw-note" id="kw-prompt-fixed" hidden><p>This chat started with this prompt, and all that was said builds on
it. To use another, start a new chat.</p>
<button type="button" class="kw-quiet" data-act="new-with-prompt">New chat with this prompt</button></div>
<p class="kw-note" id="kw-prompt-default" hidden>This chat started without a prompt and uses the model's own default. To
set one, start a new chat.</p>
"""

OPTIONS_NOTE = """
<p class="kw-note">How words are chosen and the longest reply apply to all chats in this browser.</p>
"""


def chat_header(title: str, context_tokens: int = 0, context_length: int = 0) -> str:
    """The line above a chat: its title, the model (filled in by the page), how full the context is, the settings."""
    meter = ""
    if context_tokens and context_length:
        share = min(100, round(100 * context_tokens / context_length))
        meter = (
            f'<span class="kw-meter" title="{context_tokens:,} of the {context_length:,} tokens that a chat with '
            f'this model can have"><meter min="0" max="100" high="85" value="{share}" aria-label="Context in use">'
            f"</meter>"
            f"<span>{context_tokens:,} / {context_length:,}</span></span>"
        )
    return (
        f'<button type="button" class="kw-icon kw-phone" data-act="menu" aria-label="Show the list of chats">'
        f"{icon('menu')}</button>"
        f'<h1 class="kw-title" title="{escape(title)}">{escape(title) or "New chat"}</h1>'
        f'<button type="button" class="kw-model" data-act="models" aria-haspopup="dialog"></button>{meter}'
        f'<button type="button" class="kw-icon" data-act="settings" aria-expanded="false" '
        f'aria-controls="kw-settings" aria-label="Settings" title="Settings">{icon("sliders")}</button>'
    )


def empty_chat() -> str:
    """What a chat shows before its first message."""
    examples = "".join(
        f'<button type="button" class="kw-example" data-act="example" data-text="{escape(text)}">'
        f"<span>{escape(kind)}</span>{escape(text)}</button>"
        for kind, text in EXAMPLES
    )
    return (
        f'<section class="kw-empty">{icon("ember")}<h2>What shall we talk about?</h2>'
        "<p>Everything said here stays on this machine, and stays warm: a new turn reads only what is new.</p>"
        f'<div class="kw-examples">{examples}</div></section>'
    )


def transcript(detail: SessionDetail, live_message: str | None = None) -> str:
    """All messages of a chat; the one being written (`live_message`, its id) is left to `live_reply`."""
    shown = [message for message in detail.messages if message.id != live_message]
    if not shown:
        return empty_chat() if live_message is None else ""
    last = shown[-1]
    retry = detail.can_retry and live_message is None
    parts = [_message(message, retry and message is last) for message in shown]
    if retry and last.role == "user":
        parts.append(notice("This message has no reply yet.", retry=True, calm=True))
    return "\n".join(parts)


def live_reply(view: TurnView) -> str:
    """The reply in the making: its place in the queue, the reading of the prompt, or the text so far."""
    if view.text:
        parts = split_reply(view.text)
        answer = f'<div class="kw-text kw-growing">{render_growing(parts.answer)}</div>' if parts.answer else ""
        return _reply(_thought(view.message_id, parts, growing=not parts.answer) + answer)
    if view.state == "reading" and view.total:
        done = view.reused + view.read
        reused = f" · {view.reused:,} reused" if view.reused else ""
        return _reply(
            f'<div class="kw-reading"><progress max="{view.total}" value="{done}" aria-label="Reading"></progress>'
            f"<span>Reading {done:,} of {view.total:,} tokens{reused}</span></div>"
        )
    label = "Waiting for its turn" if view.state == "waiting" else "Writing"
    return _reply(f'<div class="kw-waiting"><i></i><i></i><i></i><span>{label}</span></div>')


def notice(text: str, *, retry: bool = False, calm: bool = False) -> str:
    """A sentence about something that went wrong (or, calm, about what simply is), with Retry where that may help."""
    button = '<button type="button" class="kw-retry" data-act="retry">Retry</button>' if retry else ""
    role = "note" if calm else "alert"
    return f'<div class="kw-notice{" kw-calm" if calm else ""}" role="{role}"><p>{escape(text)}</p>{button}</div>'


def figures_line(figures: Figures) -> str:
    """The quiet line under a reply: "1,180 tokens reused (80 from disk) · 42 read · 0.09 s to first token · 54 tok/s".

    Where they came from and why the others were not found is in its tooltip.
    """
    tiers = ((figures.host_tokens, "from RAM"), (figures.disk_tokens, "from disk"))
    cold = ", ".join(f"{count:,} {where}" for count, where in tiers if count)
    parts = [
        f"{figures.reused_tokens:,} tokens reused{f' ({cold})' if cold else ''}",
        f"{figures.computed_tokens:,} read",
    ]
    if figures.ttft_s is not None:
        parts.append(f"{figures.ttft_s:.2f} s to first token")
    if figures.tokens_per_s is not None:
        rate = figures.tokens_per_s
        parts.append(f"{rate:.1f} tok/s" if rate < 10 else f"{rate:,.0f} tok/s")
    hint = (
        f"Of {figures.prompt_tokens:,} prompt tokens, {figures.reused_tokens:,} were still warm"
        f"{f' ({cold}, brought back in {figures.restore_s:.2f} s)' if cold else ''} and "
        f"{figures.computed_tokens:,} were read anew; the reply has {figures.output_tokens:,} tokens."
    )
    if figures.recomputed_tokens:
        hint += f" {figures.recomputed_tokens:,} were read again, because the memory was full meanwhile."
    if figures.drafted_tokens:
        hint += f" {figures.accepted_tokens:,} of {figures.drafted_tokens:,} tokens that were guessed came true."
    if figures.miss is not None and figures.miss.cause != "new":
        hint += f" {miss_sentence(figures.miss)}"
    return (
        f'<span class="kw-figures" title="{escape(hint)}">{" · ".join(f"<span>{part}</span>" for part in parts)}</span>'
    )


def miss_sentence(miss: MissView) -> str:
    """Why the tokens from some point on had to be read, for people: "Read again from your message on, because …"."""
    where = "" if miss.role is None else f" from {WHOSE[miss.role]} on"
    return f"Read again{where}, because {WHY[miss.cause]}{f' ({miss.detail})' if miss.detail else ''}."


@lru_cache(maxsize=2048)
def _message(message: MessageView, retry: bool) -> str:
    if message.role == "user":
        return f'<article class="kw-user" aria-label="You"><div class="kw-typed">{escape(message.text)}</div></article>'
    parts = split_reply(message.text)
    text = f'<div class="kw-text">{render_markdown(parts.answer)}</div>' if parts.answer else ""
    return _reply(_thought(message.id, parts) + text + _ending(message, parts, retry) + _foot(message, parts.answer))


def _thought(message_id: str, parts: Parts, *, growing: bool = False) -> str:
    """A reply's reasoning, closed until somebody opens it; `page.js` keeps it open while the reply grows."""
    if not parts.reasoning and not (growing and parts.open):
        return ""
    count = len(_WORD.findall(parts.reasoning))
    label = f"Thought in {count:,} {'word' if count == 1 else 'words'}"
    if growing:
        label = '<span class="kw-waiting"><i></i><i></i><i></i></span>Thinking'
    render = render_growing if growing else render_markdown
    return (
        f'<details class="kw-thought" data-thought="{escape(message_id)}"><summary>{label}</summary>'
        f'<div class="kw-text">{render(parts.reasoning)}</div></details>'
    )


def _foot(message: MessageView, answer: str) -> str:
    """Under a reply: its figures and what can be done with its answer."""
    figures = figures_line(message.figures) if message.figures else ""
    copy = ""
    if answer:
        copy = (
            f'<button type="button" class="kw-icon kw-small" data-act="copy-reply" data-text="{escape(answer)}" '
            f'aria-label="Copy this reply" title="Copy">{icon("copy")}</button>'
        )
    return f'<div class="kw-foot">{copy}{figures}</div>' if figures or copy else ""


def _ending(message: MessageView, parts: Parts, retry: bool) -> str:
    """Why a reply ended, where it did not simply come to its end."""
    if message.status == "failed":
        return notice(message.error or "This reply could not be finished.", retry=retry)
    if message.status == "interrupted":
        text = message.error or "This reply was interrupted when Keepwarm ended; what had arrived is kept."
        return notice(text, retry=retry)
    if message.status == "stopped":
        return notice("You stopped this reply.", retry=retry, calm=True)
    if message.finish_reason == "length":
        count = f" of {message.figures.output_tokens:,} tokens" if message.figures else ""
        return notice(message.error or f"This reply ended at its limit{count}.", calm=True)
    if message.status == "complete" and parts.reasoning and not parts.answer:
        return notice("The model thought, and then wrote no answer.", calm=True)
    return ""


def _reply(inner: str) -> str:
    return f'<article class="kw-reply" aria-label="Keepwarm">{inner}</article>'
