"""A server of ours on a data directory of its own, for the benches that choose its flags."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


def start(data_dir: Path, flags: list[str]) -> tuple[subprocess.Popen[str], str]:
    """A server and its address, ready."""
    command = [sys.executable, "app.py", "--no-browser", "--port", "0", "--data-dir", str(data_dir), *flags]
    server = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    for line in server.stdout:
        if line.startswith("Ready") and (found := re.search(r"http://\S+:\d+", line)):
            return server, found[0]
    raise SystemExit(f"the server ended with {server.wait()} before it was ready")
