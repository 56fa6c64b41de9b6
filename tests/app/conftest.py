"""A home of its own for every test here: no settings file, no variables and no data directory of whoever runs it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home folder, also for the processes that a test starts."""
    for key in [key for key in os.environ if key.upper().startswith("KEEPWARM_")]:
        monkeypatch.delenv(key)
    folder = tmp_path / "home"
    for key, place in {"HOME": "", "XDG_CONFIG_HOME": "config", "XDG_DATA_HOME": "data"}.items():
        (folder / place).mkdir(parents=True, exist_ok=True)
        monkeypatch.setenv(key, str(folder / place))
    return folder
