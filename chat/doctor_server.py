"""Ask a running server for its figures, over HTTP and nothing else, and say in one line when it cannot tell them."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

import httpx
import msgspec

from chat.doctor import DoctorError, Finding, count, ok
from chat.doctor_questions import answers, duration
from chat.figures import PATH, ServerFigures
from chat.instance import read_note

PATIENCE_S = 10.0
REPAIR = "`python app.py doctor`, with the flags of that server, says what is wrong with the model or the machine"
START = "start Keepwarm with `python app.py`"


def server_url(address: str, data_dir: Path) -> str:
    """The server's address as a base URL; "" means the one that serves `data_dir`. Raises DoctorError."""
    if not address:
        running = read_note(data_dir)
        if running is None:
            raise DoctorError(f"no server runs in {data_dir}: {START}, or name another's address after --url")
        return running.url
    try:
        parts = urlsplit(address if "://" in address else f"http://{address}")
        port = f":{parts.port}" if parts.port else ""
    except ValueError:
        parts, port = urlsplit(""), ""
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise DoctorError(f"{address!r} is not an address: give it like http://127.0.0.1:7860")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{parts.scheme}://{host}{port}"


def fetch(url: str) -> ServerFigures:
    """The figures of the server at `url`. Raises DoctorError."""
    try:
        with httpx.Client(base_url=url, timeout=PATIENCE_S, trust_env=False) as client:
            ready = client.get("/readyz")
            if not _is_keepwarm(ready):
                raise DoctorError(f"what answers at {url} is not Keepwarm: check the address, or {START}")
            answer = client.get(PATH)
    except httpx.TimeoutException:
        raise DoctorError(f"{url} did not answer within {PATIENCE_S:.0f} s: try again, or restart it") from None
    except httpx.HTTPError as error:
        raise DoctorError(f"nothing answers at {url} ({error}): check the address, or {START}") from None
    try:
        return msgspec.json.decode(answer.content, type=ServerFigures)
    except msgspec.MsgspecError:
        raise DoctorError(
            f"the Keepwarm at {url} does not tell its figures as this version knows them: run its own `app.py doctor`"
        ) from None


def examine(url: str, figures: ServerFigures) -> list[Finding]:
    """What a server's figures say: its state and, once it is ready, the answers to the three questions."""
    who = f"Keepwarm {figures.version} at {url}, process {figures.pid}, up for {duration(figures.uptime_s)}"
    capabilities = figures.capabilities
    match figures.phase:
        case "failed" | "stopped":
            return [Finding("problem", "server", f"{who}: {figures.message or figures.phase}", REPAIR)]
        case "loading" | "restarting":
            stage = f" ({figures.stage})" if figures.stage else ""
            return [
                Finding("warn", "server", f"{who}: the model is {figures.phase}{stage}", "ask again when it is ready")
            ]
    if capabilities is None:
        return [ok("server", f"{who}, serves no model yet")]
    threads = f", {count(capabilities.threads, 'thread')}" if capabilities.device == "cpu" else ""
    others = len(figures.snapshot.models) - 1 if figures.snapshot is not None else 0
    more = f" and {count(others, 'other model')}" if others > 0 else ""
    form = capabilities.dtype + (f" with {capabilities.weights} weights" if "int" in capabilities.weights else "")
    serves = f"{capabilities.model_name}{more} in {form} on {capabilities.device}{threads}"
    return [ok("server", f"{who}, serves {serves}, {capabilities.attention}"), *answers(figures)]


def _is_keepwarm(ready: httpx.Response) -> bool:
    try:
        body = ready.json()
    except ValueError:
        return False
    return ready.status_code in (200, 503) and isinstance(body, dict) and "status" in body
