"""What all tests share: the real embedded model, converted once and kept, and nothing from a network."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")
# OpenMP threads spin while they wait for each other: on a busy machine of few cores two of them can be ten times slower
# than one, and tests are busy. Engine processes that tests start inherit this.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# No example is timed. In CI they are the same in every run, so that a change is judged by what it changed; elsewhere
# they are fresh.
settings.register_profile(
    "keepwarm", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=bool(os.environ.get("CI"))
)
settings.load_profile("keepwarm")

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def model_cache() -> Path:
    """Where converted weights are kept from one run of the tests to the next; a fresh clone converts once (20 s)."""
    folder = ROOT / ".cache" / "models"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def embedded_model(model_cache: Path) -> Path:
    """The directory of the embedded model: config, tokenizer, safetensors."""
    from engine.model.sources import EMBEDDED, prepare

    return prepare(EMBEDDED, model_cache, lambda *_: None).path


@pytest.fixture(scope="session")
def tiny_model(embedded_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-layer llama with random weights and the embedded model's real tokenizer: loads in a blink."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("tiny") / "tiny-llama"
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(embedded_model)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
