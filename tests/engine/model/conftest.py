"""A model's folder to be damaged, and a pickle that does harm when it is loaded, for tests that it never is."""

from __future__ import annotations

import pickle
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engine.model import kernels


class Harm:
    """Writes a file when its pickle is loaded."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return subprocess.call, (["touch", str(self.mark)],)


@pytest.fixture
def harm(tmp_path: Path) -> Path:
    """A pickle that does harm, and the proof that it can."""
    file, mark = tmp_path / "harm.pkl", tmp_path / "harmed"
    file.write_bytes(pickle.dumps(Harm(mark)))
    pickle.loads(file.read_bytes())
    assert mark.exists()
    mark.unlink()
    return file


@pytest.fixture
def model(tiny_model: Path, tmp_path: Path) -> Path:
    """A copy to be damaged."""
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture(scope="session")
def llama_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole GGUF file, to be copied and damaged."""
    from tests.engine.model.gguf_files import LLAMA, llama, write

    file = tmp_path_factory.mktemp("gguf") / "llama.gguf"
    write(file, llama(), "llama", LLAMA)
    return file


@pytest.fixture(scope="session")
def native_kernels(tmp_path_factory: pytest.TempPathFactory) -> kernels.Kernels:
    """The compiled kernels in float32; every machine that tests has a compiler."""
    chosen = kernels.choose(torch.device("cpu"), torch.float32, tmp_path_factory.mktemp("kernels"))
    assert chosen.name == "native"
    return chosen
