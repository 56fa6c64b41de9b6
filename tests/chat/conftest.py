"""Real tokenizer and template for the chat tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from chat.templates import ChatTemplate


@pytest.fixture(scope="session")
def template(embedded_model: Path) -> ChatTemplate:
    """The embedded model's tokenizer and chat template."""
    return ChatTemplate.load(embedded_model)


@pytest.fixture
def with_template(embedded_model: Path, tmp_path: Path) -> Callable[[str], ChatTemplate]:
    """The embedded model's tokenizer under another chat template."""

    def load(text: str) -> ChatTemplate:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (tmp_path / name).write_bytes((embedded_model / name).read_bytes())
        (tmp_path / "chat_template.jinja").write_text(text)
        return ChatTemplate.load(tmp_path)

    return load
