"""Read what a model's directory says of its tokenizer and chat template. Knows the files, and nothing of chats."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from chat.errors import UnusableModel

NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True)
class TemplateFiles:
    """A tokenizer, the `source` of its chat template (None: it has none), and the texts of tokens a template may name.

    `identity` names the vocabulary, and `rendering` all that decides how a chat is written in it.
    """

    tokenizer: Tokenizer
    source: str | None
    names: dict[str, str]
    identity: str

    @property
    def rendering(self) -> str:
        """`identity` and what names the template."""
        written = json.dumps([self.source, self.names], sort_keys=True)
        return f"{self.identity}/{hashlib.sha256(written.encode()).hexdigest()[:16]}"


def read_template_files(directory: str | Path) -> TemplateFiles:
    """Read `tokenizer.json`, `tokenizer_config.json` and the chat template, wherever it is kept.

    Raises UnusableModel when a file is damaged, or there is no tokenizer.
    """
    path = Path(directory)
    try:
        raw = (path / "tokenizer.json").read_bytes()
        tokenizer = Tokenizer.from_str(raw.decode())
        config = _object(path / "tokenizer_config.json")
        source = _source(path, config)
    except Exception as error:  # tokenizers raises bare Exceptions
        raise UnusableModel(f"The tokenizer of the model in {path} cannot be read: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return TemplateFiles(tokenizer, source, _names(config), hashlib.sha256(raw).hexdigest()[:16])


def showing(tokenizer: Tokenizer, tokens: Collection[str]) -> Tokenizer:
    """The tokenizer, or one like it that no longer leaves these special tokens out of texts."""
    added = tokenizer.get_added_tokens_decoder().values()
    if not any(token.special and token.content in tokens for token in added):
        return tokenizer
    state = json.loads(tokenizer.to_str())
    for token in state["added_tokens"]:
        token["special"] &= token["content"] not in tokens
    return Tokenizer.from_str(json.dumps(state))


def beginning_of_texts(tokenizer: Tokenizer) -> str:
    """The control tokens that the tokenizer itself puts before every text."""
    bare = tokenizer.encode("a", add_special_tokens=False).ids
    whole = tokenizer.encode("a").ids
    before = next((at for at in range(len(whole)) if whole[at : at + len(bare)] == bare), 0)
    return "".join(tokenizer.id_to_token(token) or "" for token in whole[:before])


def _source(path: Path, config: dict[str, Any]) -> str | None:
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text("utf-8") or None
    found = _object(path / "chat_template.json").get("chat_template") or config.get("chat_template")
    if isinstance(found, list):  # several named templates
        named = {item["name"]: item["template"] for item in found}
        found = named.get("default") or next(iter(named.values()), None)
    return found if found and isinstance(found, str) else None


def _names(config: dict[str, Any]) -> dict[str, str]:
    """`bos_token`, `eos_token`, … as templates name them; a token is a string, or an object with its `content`."""
    values = {name: config.get(name) for name in NAMES}
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in values.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; an empty one where there is no such file."""
    if not path.is_file():
        return {}
    value = json.loads(path.read_text("utf-8"))
    if not isinstance(value, dict):
        raise TypeError(f"{path.name} holds no object")
    return value
