"""Gradio's theme for the page: system fonts alone, and Keepwarm's colours where Gradio draws controls.

The same colours stand as custom properties at the top of `assets/page.css`, which draws everything else.
"""

from __future__ import annotations

from chat.quick_gradio import gr

Font = gr.themes.utils.fonts.Font

TEXT_FONTS = ("ui-sans-serif", "system-ui", "-apple-system", "Segoe UI", "Roboto", "Noto Sans", "sans-serif")
CODE_FONTS = ("ui-monospace", "SFMono-Regular", "Menlo", "Consolas", "DejaVu Sans Mono", "monospace")

PAPER, PAPER_DARK = "#fdfbf8", "#191715"
INK, INK_DARK = "#2a2622", "#ece6df"


def page_theme() -> gr.themes.Base:
    """The theme; nothing in it is fetched from elsewhere."""
    theme = gr.themes.Base(
        primary_hue=gr.themes.colors.orange,
        neutral_hue=gr.themes.colors.stone,
        radius_size=gr.themes.sizes.radius_md,
        font=[Font(name) for name in TEXT_FONTS],
        font_mono=[Font(name) for name in CODE_FONTS],
    )
    return theme.set(
        body_background_fill=PAPER,
        body_background_fill_dark=PAPER_DARK,
        body_text_color=INK,
        body_text_color_dark=INK_DARK,
        background_fill_primary="transparent",
        background_fill_primary_dark="transparent",
        block_background_fill="transparent",
        block_background_fill_dark="transparent",
        block_border_width="0px",
        block_border_width_dark="0px",
        block_shadow="none",
        block_shadow_dark="none",
        block_padding="0px",
        block_label_background_fill="transparent",
        block_label_background_fill_dark="transparent",
        input_background_fill="var(--kw-field)",
        input_background_fill_dark="var(--kw-field)",
        input_background_fill_focus="var(--kw-field)",
        input_background_fill_focus_dark="var(--kw-field)",
        input_border_color="var(--kw-line)",
        input_border_color_dark="var(--kw-line)",
        input_border_color_focus="var(--kw-ember)",
        input_border_color_focus_dark="var(--kw-ember)",
        slider_color="var(--kw-ember)",
        slider_color_dark="var(--kw-ember)",
    )
