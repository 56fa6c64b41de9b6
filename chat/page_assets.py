"""Where the page's own files are, and the addresses under which the browser gets them."""

from __future__ import annotations

import hashlib
from pathlib import Path

FOLDER = Path(__file__).parent.parent / "assets" / "page"
PREFIX = "/page/assets"


def head_tags() -> str:
    """The page's style, and the scripts of the parts that stand for themselves, for the head."""
    scripts = "".join(f'<script src="{_address(name)}"></script>' for name in ("models.js", "warmth.js"))
    return f'<link rel="stylesheet" href="{_address("page.css")}">{scripts}'


def script_tag() -> str:
    """The page's script. Gradio runs what a component does on load only once this has been loaded."""
    return f'<script src="{_address("page.js")}"></script>'


def _address(name: str) -> str:
    """Named by its content, so that a browser never keeps an old one."""
    digest = hashlib.sha256((FOLDER / name).read_bytes()).hexdigest()[:12]
    return f"{PREFIX}/{name}?v={digest}"
