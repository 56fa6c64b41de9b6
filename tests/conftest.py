"""What all tests share: the real embedded model, converted once and kept, and nothing from a network."""

from __future__ import annotations

import asyncio
import functools
import os
import shutil
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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

# The kernels are compiled once, not by every engine that a test starts; engine processes inherit this too.
if os.name == "posix" and (compiler := shutil.which(os.environ.get("CC", "cc"))) and "TEST_CC" not in os.environ:
    once = {"CC": ROOT / "tests" / "compile_once", "TEST_CC": compiler, "TEST_COMPILED": ROOT / ".cache" / "compiled"}
    os.environ.update({name: str(value) for name, value in once.items()})


# What takes longest begins first: whoever got it last would work alone for a minute or more.
FIRST = ("tests/browser/", "tests/stress/")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The files in `FIRST` before all others, which stay in their order."""
    items.sort(key=lambda item: [not item.nodeid.startswith(place) for place in FIRST])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Hand out files as `tests.distribution` says, where `--dist loadfile` is asked for."""
    if config.getoption("dist") != "loadfile":
        return None
    from tests.distribution import Together

    return Together(config, log)


@pytest.fixture(scope="session", autouse=True)
def certificates_once() -> Iterator[None]:
    """The certificates are read once. Every HTTP client reads them when it is made, which takes 0.1 s of computing, and
    none of the hundreds here speaks TLS.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ssl, "create_default_context", functools.cache(ssl.create_default_context))
        yield


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


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data directory with a migrated database, to be copied, because migrating takes longer than most tests."""
    from storage.store import Store

    folder = tmp_path_factory.mktemp("empty")

    async def make() -> None:
        await (await Store.open(folder)).close()

    asyncio.run(make())
    return folder
