"""A small random model as files, and transformers' own reading of it, which has no cache, as the judge of replies."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from tests.engine.model import tiny

CONTEXT, BLOCK = 512, 16
FIRST, VOCABULARY = 3, tiny.VOCABULARY  # ids below the first are special
BYTES_PER_TOKEN = 3 * 2 * 4 * 64 * 4  # layers, K and V, heads, dimensions, float32
TIE = 1e-4  # of the largest logit: float32 rounds differently by the shape of a sum


def make(folder: Path) -> Path:
    """The model's folder. Its K and V are large for its size, so that a few hundred chats fill real segments."""
    config = tiny.config_of(
        "llama",
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=CONTEXT,
    )
    path = tiny.save(config, folder / "stressed").path
    words = models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0")
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words)).save_pretrained(path)
    return path


@dataclass(frozen=True)
class Verdict:
    """Of one greedy reply: `wrong` says where it is not what the model says, "" nowhere; `ties` may go either way."""

    wrong: str
    ties: int


class Judge:
    """Reads a prompt with its reply in one pass and looks whether each token is the likeliest after those before it.

    That is the same as generating the reply anew and comparing, but for two tokens that are equally likely.
    """

    def __init__(self, folder: Path) -> None:
        self._module = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", local_files_only=True
        ).eval()

    def judge(self, prompt: list[int], reply: list[int]) -> Verdict:
        """Judge a reply of at least one token."""
        logits = tiny.eager(self._module, [*prompt, *reply[:-1]])[len(prompt) - 1 :]
        chosen = logits.gather(1, torch.tensor(reply).unsqueeze(1)).squeeze(1)
        behind = logits.max(dim=1).values - chosen
        margin = TIE * logits.abs().max()
        for number in (behind > margin).nonzero().flatten().tolist():
            right = int(logits[number].argmax())
            sentence = (
                f"token {number} of the reply, at position {len(prompt) + number}, is {reply[number]} and not {right}, "
                f"which is likelier by {float(behind[number]):.4f}"
            )
            return Verdict(sentence, 0)
        return Verdict("", int((behind > 0).sum()))
