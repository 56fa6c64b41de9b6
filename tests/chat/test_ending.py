"""The end of the process: at once where everything has closed, and not before what is still being written is."""

from __future__ import annotations

import asyncio
import subprocess
import sys

SCRIPT = """
import asyncio, sys, threading, time
from chat import ending

def write():
    time.sleep(0.5)
    print("written", flush=True)

async def part(seconds):
    await asyncio.sleep(seconds)

ending.CLOSE_LIMIT = 0.1
threading.Thread(target=write).start()
asyncio.run(ending.close("the store", part(float(sys.argv[1]))))
ending.leave(7)
"""


def ended(seconds: float) -> tuple[int, str]:
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(seconds)], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout.strip()


async def test_what_did_not_close_in_time_is_waited_for() -> None:
    assert await asyncio.to_thread(ended, 5) == (7, "written")


async def test_once_everything_is_closed_it_ends_at_once() -> None:
    assert await asyncio.to_thread(ended, 0) == (7, "")
