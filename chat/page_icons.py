"""The page's icons as inline SVG, drawn for Keepwarm on a 20-pixel grid; they take the colour of the text around."""

from __future__ import annotations

from typing import Literal

Name = Literal["ember", "plus", "close", "menu", "sliders", "copy", "pencil", "trash"]

_PATHS: dict[Name, str] = {
    "ember": (
        '<path d="M10 2.2c.5 3-3.9 4.9-3.9 9.2A3.9 3.9 0 0 0 10 15.4a3.9 3.9 0 0 0 3.9-4c0-1.7-.8-2.7-1.4-3.5'
        '-.2 1-.7 1.5-1.3 1.7.5-2.7-.1-5.5-1.2-7.4Z" fill="currentColor" stroke="none"/>'
        '<path d="M5 18h10"/>'
    ),
    "plus": '<path d="M10 4.5v11M4.5 10h11"/>',
    "close": '<path d="m5.5 5.5 9 9m0-9-9 9"/>',
    "menu": '<path d="M3.5 6h13M3.5 10h13M3.5 14h13"/>',
    "sliders": '<path d="M3.5 6.5h7m3.5 0h2.5M3.5 13.5H6m3.5 0h7"/><circle cx="12.2" cy="6.5" r="1.7"/>'
    '<circle cx="7.8" cy="13.5" r="1.7"/>',
    "copy": '<rect x="7" y="7" width="9.5" height="9.5" rx="2"/><path d="M13 7V5.5a2 2 0 0 0-2-2H5.5a2 2 0 0 0-2 2V11'
    'a2 2 0 0 0 2 2H7"/>',
    "pencil": '<path d="m4 16 .7-3.2L13 4.5a1.6 1.6 0 0 1 2.3 0l.2.2a1.6 1.6 0 0 1 0 2.3l-8.3 8.3L4 16Z"/>',
    "trash": '<path d="M4 6h12M8 6V4.2h4V6m-6.5 0 .7 10h7.6l.7-10M8.5 9v4.5m3-4.5v4.5"/>',
}


def icon(name: Name) -> str:
    """The icon as an `<svg>` that screen readers skip; the button around it carries the label."""
    return (
        '<svg class="kw-svg" viewBox="0 0 20 20" width="20" height="20" fill="none" stroke="currentColor" '
        f'stroke-width="1.5" stroke-linecap="round" stroke-linejoin="round" aria-hidden="true">{_PATHS[name]}</svg>'
    )
