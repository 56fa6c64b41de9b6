"""The chat page: its layout in Gradio, and what each of its events asks of the chat service.

Every value that belongs to one chat goes to the browser as a *packet* that names the chat, and `assets/page.js` shows
a packet only while its chat is the one on the screen: a late answer cannot land in another chat. The browser owns
which chat that is (the address says it), the service owns everything else, and this module keeps nothing. Replies in
the making do not pass here: `chat.page_routes` streams them.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import Any

from chat import page_html as html
from chat.errors import ChatError, InvalidRequest, SessionNotFound, StorageFailed
from chat.page_assets import script_tag
from chat.quick_gradio import gr
from chat.service import ChatService
from chat.views import SessionDetail, TurnOptions
from engine.protocol import Sampling
from storage.errors import StorageError

NEW = "new-"  # the browser's names for chats that have no message yet, and so are not stored
NOWHERE = NEW + "0"  # the new chat that stands in for one that does not exist
OWN_SAMPLING, MY_SAMPLING = "Model's own", "Set here"
MOST, NUMERALS = 2**63 - 1, 19  # the greatest number in the settings, and how many digits it has

log = logging.getLogger(__name__)

Packet = dict[str, Any]
Outputs = dict[Any, Any]

_DIGITS = gr.InputHTMLAttributes(autocomplete="off")
_SLOT = "${{window.keepwarm ? keepwarm.accept('{name}', value) : ''}}"
_SLOT_JS = "keepwarm.slot('{name}', props, watch);"
_EVENTS_JS = "keepwarm.bind(trigger, ['open', 'retry', 'stop', 'rename', 'remove', 'restore']);"


def build_page(service: ChatService) -> gr.Blocks:
    """The page as Blocks, to be mounted by `chat.web`, which also adds its style and script."""
    return ChatPage(service).blocks


class ChatPage:
    """One instance serves all tabs; it keeps nothing of any of them."""

    def __init__(self, service: ChatService) -> None:
        self._service = service
        with gr.Blocks(title="Keepwarm", analytics_enabled=False, fill_width=True) as self.blocks:
            self._render()
            self._wire()

    # --- layout -----------------------------------------------------------------------------------------------------

    def _render(self) -> None:
        with gr.Row(elem_id="kw-app", equal_height=False):
            with gr.Column(elem_id="kw-side", min_width=0):
                gr.HTML(html.SHELL_SIDE, js_on_load=None, apply_default_css=False)
            with gr.Column(elem_id="kw-main", min_width=0):
                self._header = self._slot("header")
                with gr.Column(elem_id="kw-scroll", min_width=0):
                    self._transcript = self._slot("transcript")
                    self._live = self._slot("live")
                self._render_composer()
            with gr.Column(elem_id="kw-settings", min_width=0):
                self._render_settings()
        self._events = gr.HTML("", visible="hidden", head=script_tag(), js_on_load=_EVENTS_JS, apply_default_css=False)

    def _render_composer(self) -> None:
        with gr.Column(elem_id="kw-composer", min_width=0):
            self._notice = self._slot("notice")
            gr.HTML(html.SHELL_NOTICE, js_on_load=None, apply_default_css=False)
            with gr.Row(elem_id="kw-entry", equal_height=False):
                self._box = gr.Textbox(
                    elem_id="kw-box", label="Message", show_label=False, container=False, lines=1, max_lines=10,
                    placeholder="Write a message", html_attributes=gr.InputHTMLAttributes(autocomplete="off"),
                )  # fmt: skip
                gr.HTML(html.READY, js_on_load=None, apply_default_css=False)
                self._send = gr.Button("Send", elem_id="kw-send", min_width=0, scale=0)
                gr.HTML(
                    '<button type="button" id="kw-stop" data-act="stop">Stop</button>',
                    js_on_load=None, apply_default_css=False,
                )  # fmt: skip
            self._chat = gr.Textbox(elem_id="kw-chat", visible="hidden", label="Chat")
            self._model = gr.Textbox(elem_id="kw-chosen-model", visible="hidden", label="Model")

    def _render_settings(self) -> None:
        gr.HTML(html.SHELL_SETTINGS, js_on_load=None, apply_default_css=False)
        self._prompt = gr.Textbox(
            elem_id="kw-prompt", label="System prompt", lines=5, max_lines=14, placeholder="The model's own default",
        )  # fmt: skip
        gr.HTML(html.PROMPT_NOTE, js_on_load=None, apply_default_css=False)
        self._mode = gr.Radio(
            [OWN_SAMPLING, MY_SAMPLING], value=OWN_SAMPLING, label="How words are chosen", elem_id="kw-mode"
        )
        with gr.Column(elem_id="kw-sampling", visible=False, min_width=0) as self._sampling:
            self._temperature = gr.Slider(
                0, 2, 0.7, step=0.05, label="Temperature", info="0 always takes the likeliest token"
            )
            self._top_p = gr.Slider(0.05, 1, 0.95, step=0.01, label="Top-p", info="1 leaves nothing out")
            self._seed = gr.Textbox(
                label="Seed", placeholder="Fresh each time", lines=1, max_lines=1, html_attributes=_DIGITS
            )
        self._max_tokens = gr.Textbox(
            label="Longest reply, in tokens", placeholder="As long as it needs", lines=1, max_lines=1,
            html_attributes=_DIGITS,
        )  # fmt: skip
        gr.HTML(html.OPTIONS_NOTE, js_on_load=None, apply_default_css=False)

    @staticmethod
    def _slot(name: str) -> gr.HTML:
        """A place that shows packets; `page.js` decides whether a packet belongs to the chat on the screen."""
        return gr.HTML(
            None, elem_id=f"kw-{name}", html_template=_SLOT.format(name=name), head=script_tag(),
            js_on_load=_SLOT_JS.format(name=name), apply_default_css=False,
        )  # fmt: skip

    # --- events -----------------------------------------------------------------------------------------------------

    def _wire(self) -> None:
        slots = [self._header, self._transcript, self._live, self._notice]
        call: dict[str, Any] = {
            "queue": False, "show_progress": "hidden", "trigger_mode": "multiple", "concurrency_limit": None,
            "api_visibility": "private",
        }  # fmt: skip
        self._events.open(self._on_open, None, slots, **call)
        self._events.retry(self._on_retry, self._options, slots, **call)
        self._events.stop(self._on_stop, None, None, **call)
        self._events.rename(self._on_rename, None, slots, **call)
        self._events.remove(self._on_remove, None, slots, **call)
        sending = self._send.click(
            self._on_send, [self._chat, self._model, self._box, self._prompt, *self._options], slots,
            js="(chat, model, ...rest) => [keepwarm.chat(), keepwarm.model(), ...rest]", **call,
        )  # fmt: skip
        sending.failure(None, None, None, js="() => keepwarm.sent()")
        gr.on(
            [option.change for option in self._options], None, self._options, None,
            js="(...values) => keepwarm.keepOptions(values)", **call,
        )  # fmt: skip
        self._events.restore(None, None, self._options, js="() => keepwarm.keptOptions()", **call)
        self._mode.change(lambda mode: gr.update(visible=mode == MY_SAMPLING), self._mode, self._sampling, **call)

    @property
    def _options(self) -> list[Any]:
        return [self._mode, self._temperature, self._top_p, self._seed, self._max_tokens]

    async def _on_open(self, event: gr.EventData) -> Outputs:
        chat = str(event.chat)
        if chat.startswith(NEW):
            return {**self._show_new(chat), self._notice: {"chat": chat, "html": ""}}
        try:
            return {**await self._show(chat), self._notice: {"chat": chat, "html": ""}}
        except SessionNotFound as error:
            instead = {**self._show_new(NOWHERE), self._notice: {"chat": NOWHERE, "html": html.notice(str(error))}}
            return {slot: {**packet, "was": chat} for slot, packet in instead.items()}
        except Exception as error:
            return self._problem(chat, error)

    async def _on_send(self, chat: str, model: str, text: str, prompt: str, *options: Any) -> Outputs:
        """Send `text`; a new chat is stored with its first message. On an error the text stays in its box."""
        was, user = chat, self._service.user.id
        try:
            chosen = turn_options(*options)
            if chat.startswith(NEW):
                chat = (await self._service.create_session(user, prompt, model or None)).id
            try:
                await self._service.send(user, chat, text, chosen)
            except Exception:
                if was != chat:
                    with suppress(SessionNotFound):  # deleted in another tab meanwhile
                        await self._service.delete_session(user, chat)
                raise
            shown = await self._show(chat)
        except Exception as error:
            return self._problem(was, error)
        shown[self._notice] = {"chat": chat, "html": "", "sent": True}
        return {slot: {**packet, "was": was} for slot, packet in shown.items()}

    async def _on_retry(self, event: gr.EventData, *options: Any) -> Outputs:
        chat = str(event.chat)
        try:
            await self._service.retry(self._service.user.id, chat, turn_options(*options))
            return {**await self._show(chat), self._notice: {"chat": chat, "html": ""}}
        except Exception as error:
            return self._problem(chat, error)

    async def _on_stop(self, event: gr.EventData) -> None:
        with suppress(SessionNotFound):  # deleted in another tab, and so stopped
            await self._service.stop(self._service.user.id, str(event.chat))

    async def _on_rename(self, event: gr.EventData) -> Outputs:
        chat = str(event.chat)
        try:
            await self._service.rename(self._service.user.id, chat, str(event.title))
            detail = await self._service.session(self._service.user.id, chat)
        except Exception as error:
            return self._problem(str(event.current), error)
        return {self._header: self._header_packet(detail)}

    async def _on_remove(self, event: gr.EventData) -> Outputs:
        try:
            await self._service.delete_session(self._service.user.id, str(event.chat))
        except SessionNotFound:
            pass  # another tab was first; gone is what was asked for
        except Exception as error:
            return self._problem(str(event.current), error)
        return {self._notice: gr.skip()}

    # --- packets ----------------------------------------------------------------------------------------------------

    async def _show(self, chat: str) -> Outputs:
        """A stored chat, and the beginning of the reply being written in it, as packets for the slots."""
        turn = self._service.live_turn(chat)  # before the chat is read: a turn that ends meanwhile is read whole
        detail = await self._service.session(self._service.user.id, chat)
        if turn is not None and turn.view.state == "done":
            turn = None
        live = html.live_reply(turn.view) if turn else ""
        return {
            self._header: self._header_packet(detail),
            self._transcript: {"chat": chat, "html": html.transcript(detail, turn.message_id if turn else None)},
            self._live: {"chat": chat, "html": live, "running": turn is not None},
        }

    def _problem(self, chat: str, error: Exception) -> Outputs:
        """What went wrong as a notice above the message box, whose text is left alone."""
        if isinstance(error, StorageError):
            log.error("the page could not do what was asked: %s", error)
            error = StorageFailed(error)
        if isinstance(error, ChatError):
            text = str(error)
        else:
            log.error("the page could not do what was asked", exc_info=error)
            text = "That did not work: something went wrong inside Keepwarm. Its log has the details."
        return {self._notice: {"chat": chat, "html": html.notice(text)}}

    def _show_new(self, chat: str) -> Outputs:
        return {
            self._header: {
                "chat": chat, "html": html.chat_header(""), "title": "", "prompt": None, "fixed": False,
            },
            self._transcript: {"chat": chat, "html": html.empty_chat()},
            self._live: {"chat": chat, "html": "", "running": False},
        }  # fmt: skip

    @staticmethod
    def _header_packet(detail: SessionDetail) -> Packet:
        return {
            "chat": detail.id,
            "html": html.chat_header(detail.title, detail.context_tokens, detail.context_length),
            "title": detail.title,
            "prompt": detail.system_prompt,
            "model": detail.model_id or "",
            "fixed": detail.system_prompt_fixed,
        }


def turn_options(mode: str, temperature: float, top_p: float, seed: str | None, max_tokens: str | None) -> TurnOptions:
    """The settings area's values as the service takes them; an empty number means "the default", as none does.

    Raises InvalidRequest for what is no whole number, or one out of its range.
    """
    sampling = None
    if mode == MY_SAMPLING:
        sampling = Sampling(temperature=float(temperature), top_p=float(top_p), seed=_whole("Seed", seed, 0))
    return TurnOptions(sampling=sampling, max_tokens=_whole("Longest reply", max_tokens, 1))


def _whole(label: str, given: str | None, least: int) -> int | None:
    """The number in `given`, from `least` to `MOST`; None when it is empty."""
    text = (given or "").strip()
    digits = text.replace(",", "")
    if not digits:
        return None
    plain = digits.isascii() and digits.isdigit()
    number = int(digits[-NUMERALS:]) if plain and not digits[:-NUMERALS].strip("0") else -1
    if not least <= number <= MOST:
        shown = text if len(text) <= 2 * NUMERALS else f"{text[: 2 * NUMERALS]}…"
        raise InvalidRequest(
            f"{label} in the settings is “{shown}”; it takes a whole number from {least} to {MOST}, or none."
        )
    return number
