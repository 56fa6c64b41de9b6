"""Model folders as far as chats read them: a real tokenizer of each kind, and chat templates of the shapes in use."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

CHATML = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
BRACKETS = """{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[{{ m.content }}]{% else %}{{
m.content }}{{ eos_token }}{% endif %}{% endfor %}"""
HOLLOW = """{% for m in messages %}{{ m.role }}: {{ m.content }}
{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"""

# Reasoning is taken out of earlier replies, as Qwen3 does; its last empty block is only for a reply that ends the chat.
STRIPPING = """{%- for m in messages %}{%- if m.role == 'assistant' %}
    {%- set content = m.content.split('</think>')[-1].lstrip('\\n') %}
    {%- if loop.last %}{%- set content = '<think>\\n\\n</think>\\n\\n' + content %}{%- endif %}
{%- else %}{%- set content = m.content %}{%- endif %}
{{- '<|im_start|>' + m.role + '\\n' + content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
# The generation prompt opens the reasoning, as DeepSeek-R1 does, and earlier replies have none.
OPENED = """{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% elif m.role == 'user'
%}{{ '<|user|>' + m.content }}{% else %}{{ '<|assistant|>' + m.content.split('</think>')[-1] + eos_token }}{% endif %}{%
endfor %}{% if add_generation_prompt %}{{ '<|assistant|><think>\\n' }}{% endif %}"""
# The date stands in the system part, as in Llama 3.
DATED = """{{ '<|im_start|>system\\nToday is ' + strftime_now('%d %b %Y') + '.' }}{% if messages[0].role == 'system'
%}{{ '\\n' + messages[0].content }}{% set rest = messages[1:] %}{% else %}{% set rest = messages %}{% endif %}<|im_end|>
{% for m in rest %}<|im_start|>{{ m.role }}
{{ m.content | trim }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
# The system prompt goes to the last user message, and turns must alternate, as in Mistral's.
WANDERING = """{{ bos_token }}{% if messages[0].role == 'system' %}{% set system = messages[0].content %}{%
set turns = messages[1:] %}{% else %}{% set turns = messages %}{% endif %}{% for m in turns %}{%
if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate user and assistant') }}{%
endif %}{% if m.role == 'assistant' %}{{ ' ' + m.content + eos_token }}{%
elif loop.last and system is defined %}{{ '[INST] ' + system + '\\n\\n' + m.content + '[/INST]' }}{%
else %}{{ '[INST] ' + m.content + '[/INST]' }}{% endif %}{% endfor %}"""
# No system prompt is taken, and turns must alternate, as in Gemma's.
ALTERNATING = """{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported')
}}{% endif %}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{
raise_exception('Conversation roles must alternate') }}{% endif %}{{ '<start_of_turn>' + ('model' if m.role ==
'assistant' else m.role) + '\\n' + m.content | trim + '<end_of_turn>\\n' }}{% endfor %}{% if add_generation_prompt %}{{
'<start_of_turn>model\\n' }}{% endif %}"""
# Reasoning and answer are messages of their own, in channels, as gpt-oss has them.
CHANNELS = """{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|start|>assistant<|channel|>final<|message|>' +
m.content }}{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}{% else %}{{ '<|start|>' +
m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}{% if add_generation_prompt
%}<|start|>assistant{% endif %}{# <|channel|>analysis<|message|> #}"""
MARKS_OF_CHANNELS = ["<|start|>", "<|end|>", "<|return|>", "<|channel|>", "<|message|>"]


def save(folder: Path, tokenizer: Tokenizer, template: str | None, **names: str) -> Path:
    """Write a model folder without weights; `names` are `bos_token` and its like."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def with_tokens(
    tokenizer_file: Path | None, special: Sequence[str] = (), plain: Sequence[str] = (), normalized: Sequence[str] = ()
) -> Tokenizer:
    """The tokenizer in the file (or one of bytes) with more tokens: special ones, others, and others that are looked
    for in what the normaliser made."""
    tokenizer = Tokenizer.from_file(str(tokenizer_file)) if tokenizer_file else without_added(add_prefix_space=False)
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in special])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in plain])
    tokenizer.add_tokens([AddedToken(text, normalized=True) for text in normalized])
    return tokenizer


def rewriting(tokenizer_file: Path, normalizer: normalizers.Normalizer) -> Tokenizer:
    """The tokenizer in the file behind a normaliser, with `<think>` as a token of what that makes."""
    tokenizer = with_tokens(tokenizer_file, normalized=["<think>", "</think>"])
    tokenizer.normalizer = normalizer
    return tokenizer


def byte_fallback() -> Tokenizer:
    """As Llama 2 has it: spaces as ▁, one before each text, and a token for each byte that no word has."""
    words = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *"▁abcdehilnorstuwx[]:./<>",
        "▁a",
        "he",
    ]
    tokenizer = Tokenizer(
        models.BPE(
            {word: index for index, word in enumerate(words)},
            [("▁", "a"), ("h", "e")],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(word, normalized=False) for word in words[:3]])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def unigram() -> Tokenizer:
    """As T5 or XLM-R have it: compatibility characters are made plain ones, and control tokens are among the words."""
    words = [
        ("<unk>", 0.0),
        ("<s>", 0.0),
        ("</s>", 0.0),
        ("▁", -2.0),
        *((letter, -3.0) for letter in "abehnorstuw<>/:[]"),
    ]
    tokenizer = Tokenizer(models.Unigram(words, unk_id=0, byte_fallback=False))
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens([AddedToken(word, normalized=False) for word in ("<unk>", "<s>", "</s>")])
    return tokenizer


def word_pieces() -> Tokenizer:
    """As BERT has it: small letters, no accents, no white space."""
    words = ["[UNK]", "[CLS]", "[SEP]", *"abehnorstuw.,!'", *(f"##{letter}" for letter in "abehnorstuw")]
    tokenizer = Tokenizer(models.WordPiece({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens([AddedToken(word, normalized=False) for word in words[:3]])
    return tokenizer


def without_added(*, add_prefix_space: bool = True) -> Tokenizer:
    """Bytes and a few merges, and no token beside words."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {word: index for index, word in enumerate([*letters, "he", "hel", "Ġa", ">("])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("h", "e"), ("he", "l"), ("Ġ", "a"), (">", "(")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
