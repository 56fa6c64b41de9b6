"""How this process ends: part by part, then at once."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Awaitable
from contextlib import suppress
from typing import NoReturn

CLOSE_LIMIT = 1.5  # seconds that a part may take to close before it is left behind; Ctrl-C ends within 3

log = logging.getLogger("keepwarm")
_left_behind: list[str] = []  # what did not close in time, and may still be writing


async def close(what: str, closing: Awaitable[object]) -> None:
    """Close one part; one that fails or hangs is logged and does not keep the others from closing."""
    try:
        await asyncio.wait_for(closing, CLOSE_LIMIT)
    except TimeoutError:
        log.warning("%s did not end within %s s", what, CLOSE_LIMIT)
        _left_behind.append(what)
    except Exception:
        log.exception("%s did not end cleanly", what)


def leave(code: int) -> NoReturn:
    """End the process with this exit code, once everything is closed.

    Python would take up to half a second to take itself apart, in which it no longer catches Ctrl-C: one would kill it.
    Where something did not close in time, Python's way is taken all the same: it waits for what is still being written.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # whoever read it is gone
            stream.flush()
    if _left_behind:
        sys.exit(code)
    os._exit(code)
