"""Turn a model's Markdown into HTML that can do nothing but be read.

Raw HTML in the text stays visible as text; images become links, so that a reply cannot make the browser fetch
anything; links go to http, https and mailto only. Knows nothing of messages, chats or Gradio.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from html import escape
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.token import Token
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name
from pygments.util import ClassNotFound

HIGHLIGHT_LIMIT = 20_000  # characters; longer code is shown plain, since lexing it would hold up the page
_SAFE_SCHEMES = ("http://", "https://", "mailto:")
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")
_CONTINUES = re.compile(r"\s|[-*+>]|\d+[.)]")  # a blank line, an indent, a list item or a quote
_formatter = HtmlFormatter(nowrap=True, classprefix="hl-")


@lru_cache(maxsize=512)
def render_markdown(text: str) -> str:
    """`text` as safe HTML: paragraphs (single line breaks kept), lists, tables, code with a copy button."""
    return str(_markdown.render(text))


def render_growing(text: str) -> str:
    """`text` that is still being written, as `render_markdown` shows it, at the price of its last section alone.

    Sections are cut where a blank line outside a code block is followed by what cannot continue a list or a quote, so
    that each finished one is rendered once and then found in the cache.
    """
    return "".join(render_markdown(section) for section in sections(text))


def sections(text: str) -> list[str]:
    """`text` in pieces whose renderings, joined, are the rendering of the whole; the pieces join to `text`."""
    pieces: list[str] = []
    start = position = 0
    fence = ""
    after_blank = False
    for line in text.splitlines(keepends=True):
        if after_blank and not fence and position > start and not _CONTINUES.match(line):
            pieces.append(text[start:position])
            start = position
        marker = _FENCE.match(line)
        if marker and not fence:
            fence = marker[1]
        elif marker and marker[1].startswith(fence) and not line.strip().strip(fence[0]):
            fence = ""
        after_blank = not line.strip()
        position += len(line)
    return [*pieces, text[start:]]


@lru_cache(maxsize=512)
def render_code(code: str, language: str = "") -> str:
    """One code block: its language, a copy button, and the code, coloured where the language is known."""
    label = escape(language) or "text"
    return (
        f'<figure class="kw-code"><figcaption><span>{label}</span>'
        '<button type="button" class="kw-quiet" data-act="copy-code">Copy</button></figcaption>'
        f'<pre tabindex="0" aria-label="{label} code"><code>{_coloured(code, language)}</code></pre></figure>\n'
    )


def _coloured(code: str, language: str) -> str:
    if not language or len(code) > HIGHLIGHT_LIMIT:
        return escape(code, quote=False)
    try:
        lexer = get_lexer_by_name(language, stripnl=False)
    except ClassNotFound:
        return escape(code, quote=False)
    return str(highlight(code, lexer, _formatter))


def _fence(tokens: Sequence[Token], index: int, _options: Any, _env: Any) -> str:
    token = tokens[index]
    return render_code(token.content, token.info.split()[0] if token.info.strip() else "")


def _image(tokens: Sequence[Token], index: int, _options: Any, _env: Any) -> str:
    token = tokens[index]
    source = str(token.attrs.get("src", ""))
    text = escape(token.content or source)
    return f'<a href="{escape(source)}" target="_blank" rel="noopener noreferrer">{text}</a>'


def _link_open(tokens: Sequence[Token], index: int, _options: Any, _env: Any) -> str:
    href = escape(str(tokens[index].attrs.get("href", "")))
    return f'<a href="{href}" target="_blank" rel="noopener noreferrer">'


def _is_safe_link(url: str) -> bool:
    return url.strip().lower().startswith(_SAFE_SCHEMES)


def _build() -> MarkdownIt:
    markdown = MarkdownIt("commonmark", {"html": False, "breaks": True}).enable(["table", "strikethrough"])
    markdown.validateLink = _is_safe_link  # type: ignore[method-assign]
    rules: dict[str, Any] = markdown.renderer.rules  # type: ignore[attr-defined]
    rules["fence"] = rules["code_block"] = _fence
    rules["image"] = _image
    rules["link_open"] = _link_open
    rules["table_open"] = lambda *_: '<div class="kw-table" tabindex="0"><table>\n'
    rules["table_close"] = lambda *_: "</table></div>\n"
    return markdown


_markdown = _build()
