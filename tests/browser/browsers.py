"""Find an installed Chromium or Chrome; knows nothing of the tests."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "msedge")
PLACES = (
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
    "/Applications/Chromium.app/Contents/MacOS/Chromium",
    r"C:\Program Files\Google\Chrome\Application\chrome.exe",
    r"C:\Program Files (x86)\Google\Chrome\Application\chrome.exe",
    r"C:\Program Files (x86)\Microsoft\Edge\Application\msedge.exe",
)
# A browser that asks its own makers for nothing while the tests watch what the page asks for.
ARGUMENTS = (
    "--disable-gpu", "--disable-background-networking", "--disable-component-update", "--no-first-run",
    "--disable-dev-shm-usage",
)  # fmt: skip


def find_browser() -> str | None:
    """The path of an installed Chromium-like browser: TEST_BROWSER, one on PATH, or in its usual place."""
    named = os.environ.get("TEST_BROWSER")
    if named:
        return named
    found = (shutil.which(name) for name in NAMES)
    return next((path for path in found if path), next((place for place in PLACES if Path(place).exists()), None))


def arguments() -> list[str]:
    """How to start it; root (as in a container) cannot have Chromium's sandbox."""
    is_root = sys.platform == "linux" and os.geteuid() == 0
    return [*ARGUMENTS, *(["--no-sandbox"] if is_root else [])]
