"""`make http-path`: what the way over HTTP adds to the engine's own time to the first token, part by part.

A whole server in this process, its engine in one of its own, and a client in a third that has short turns with chats
that return, over one connection. The moments of a turn are noted where it passes; all three processes share the clock.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from tests.bench.cache_engine import HERE, MODELS, ROOT
from tests.bench.cache_report import Report, at_most, facts

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

GOAL_MS = 5.0
PAUSE_S = 0.4  # between two turns: what the last one left is being saved meanwhile
TOKENS = 8  # of a reply
CLOCK = time.perf_counter
PARTS = {
    "client, and the request on its way": ("began", "arrived"),
    "reading the request": ("arrived", "asked"),
    "finding the chat in storage": ("asked", "matched"),
    "template and tokenizer": ("matched", "composed"),
    "session, request to the engine": ("composed", "submitted"),
    "pipe to the engine and back": ("submitted", "token"),
    "token to text, to the first chunk": ("token", "sent"),
    "the chunk on its way, and client": ("sent", "received"),
}
PIPE = "pipe to the engine and back"

Moments = dict[str, float]


class Marks:
    """The moments of the turn that is under way, by name, the first of each name."""

    def __init__(self) -> None:
        self.now: Moments = {}
        self.turns: list[Moments] = []

    def note(self, name: str) -> None:
        """This happens now."""
        self.now.setdefault(name, CLOCK())

    def end(self) -> None:
        """The turn is over."""
        self.turns.append(self.now)
        self.now = {}

    def around(self, work: Callable[..., Awaitable[Any]], before: str = "", after: str = "") -> Callable[..., Any]:
        """`work`, noting when it begins and ends."""

        async def run(*args: Any, **more: Any) -> Any:
            if before:
                self.note(before)
            result = await work(*args, **more)
            if after:
                self.note(after)
            return result

        return run


class Watched:
    """The web application, noting when a request comes and when its first text goes."""

    def __init__(self, app: ASGIApp, marks: Marks) -> None:
        self._app, self._marks = app, marks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http" or not scope["path"].endswith("/completions"):
            await self._app(scope, receive, send)
            return
        self._marks.note("arrived")

        async def sending(message: Message) -> None:
            await send(message)
            if b'"content":' in message.get("body", b"") and b'"content":""' not in message["body"]:
                self._marks.note("sent")

        await self._app(scope, receive, sending)
        self._marks.end()


def watch(marks: Marks, engine: Any) -> None:
    """Have the moments noted of whatever turn passes."""
    from chat import completion
    from chat.model import LoadedModel
    from chat.service import ChatService
    from engine.protocol import Finished, Submit, Tokens

    ChatService.complete = marks.around(ChatService.complete, before="asked")  # type: ignore[method-assign]
    completion.longest_match = marks.around(completion.longest_match, after="matched")
    LoadedModel.compose = marks.around(LoadedModel.compose, after="composed")  # type: ignore[method-assign]
    send, on_event = engine._send, engine._on_event

    def sending(command: Any) -> None:
        if isinstance(command, Submit):
            marks.note("submitted")
        send(command)

    def hearing(event: Any) -> None:
        if isinstance(event, Tokens):
            marks.note("token")
        elif isinstance(event, Finished):
            marks.now["engine_s"] = event.usage.first_token_s or 0.0
        on_event(event)

    engine._send, engine._on_event = sending, hearing


async def serve(args: argparse.Namespace, folder: Path) -> tuple[list[Moments], list[Moments]]:
    """The moments of all turns but each chat's first, as the server and as the client saw them."""
    from chat.engine_config import engine_config
    from chat.service import ChatService
    from chat.serving import Server, listen
    from chat.settings import load_settings
    from chat.web import build_app
    from engine.client import EngineClient
    from storage import Store

    listener = listen("127.0.0.1", 0)
    given = {"data_dir": folder, "model": args.model, "port": listener.getsockname()[1], "device_kv": "512MiB"}
    settings = load_settings(given, lambda _: {})
    engine, marks = EngineClient(engine_config(settings)), Marks()
    await engine.start()
    store = await Store.open(folder)
    service = ChatService(store, engine)
    await service.start()
    server = Server(Watched(build_app(service, settings), marks))  # type: ignore[arg-type]
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    await engine.wait_ready()
    watch(marks, engine)
    url = f"http://127.0.0.1:{settings.port}/v1"
    command = [sys.executable, "-m", "tests.bench.http_path", "--ask", url]
    command += ["--chats", str(args.chats), "--turns", str(args.turns)]
    client = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, cwd=ROOT)
    told = (await client.communicate())[0]
    server.should_exit = True
    await service.close()
    await asyncio.gather(serving, engine.close())
    await store.close()
    if client.returncode:
        raise SystemExit("the client failed")
    skip = args.chats
    return marks.turns[skip:], json.loads(told)[skip:]


async def ask(url: str, chats: int, turns: int) -> list[Moments]:
    """Have these chats one turn after another in turn; the moments at which each request began and text came."""
    said = [json.loads(line)["turns"][0][:120] for line in (HERE / "mt_bench.jsonl").read_text("utf-8").splitlines()]
    histories: list[list[dict[str, str]]] = [[] for _ in range(chats)]
    found = []
    async with httpx.AsyncClient(timeout=120) as client:
        for turn in range(turns):
            for number, messages in enumerate(histories):
                messages.append({"role": "user", "content": said[(turn * chats + number) % len(said)]})
                body = {"model": "default", "messages": messages, "max_tokens": TOKENS, "stream": True}
                moments, text = {"began": CLOCK()}, ""
                async with client.stream("POST", f"{url}/chat/completions", json={**body, "temperature": 0}) as answer:
                    answer.raise_for_status()
                    async for line in answer.aiter_lines():
                        if '"content":"' not in line or '"content":""' in line:
                            continue
                        moments.setdefault("received", CLOCK())
                        text += json.loads(line[6:])["choices"][0]["delta"]["content"]
                messages.append({"role": "assistant", "content": text})
                found.append(moments)
                await asyncio.sleep(PAUSE_S)
    return found


def tell(report: Report, turns: list[Moments]) -> None:
    """Print the parts and judge the sum."""
    rows = []
    for part, (start, end) in PARTS.items():
        taken = [turn[end] - turn[start] - (turn["engine_s"] if part == PIPE else 0.0) for turn in turns]
        rows.append([part, *_figures(taken)])
    whole = [turn["received"] - turn["began"] for turn in turns]
    added = [seconds - turn["engine_s"] for seconds, turn in zip(whole, turns, strict=True)]
    rows += [
        ["ADDED TO THE ENGINE'S TIME", *_figures(added)],
        ["the engine's own time", *_figures([turn["engine_s"] for turn in turns])],
        ["time to the first text", *_figures(whole)],
    ]
    report.table(f"to the first text of {len(turns)} turns; ms", ["", "median", "p95", "least"], rows)
    report.results["turns"] = turns
    report.goals.append(at_most("added by HTTP at the median, ms", 1e3 * statistics.median(added), GOAL_MS))


def _figures(seconds: list[float]) -> list[str]:
    ranked = sorted(seconds)
    middle = statistics.median(ranked)
    return [f"{1e3 * value:.2f}" for value in (middle, ranked[int(0.95 * (len(ranked) - 1))], ranked[0])]


def main() -> int:
    """Measure and tell; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--chats", type=int, default=4, help="that return")
    parser.add_argument("--turns", type=int, default=8, help="turns of each; the first of each does not count")
    parser.add_argument("--ask", metavar="URL", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=ROOT / ".cache" / f"http-{time.strftime('%Y%m%d-%H%M%S')}.json")
    args = parser.parse_args()
    if args.ask:
        print(json.dumps(asyncio.run(ask(args.ask, args.chats, args.turns))))
        return 0
    MODELS.mkdir(parents=True, exist_ok=True)
    report = Report(facts(model=args.model))
    with tempfile.TemporaryDirectory(dir=ROOT / ".cache", prefix="http-") as folder:
        data = Path(folder) / "data"
        shutil.copytree(MODELS, data / "models", copy_function=os.link)  # nothing is converted again
        seen, asked = asyncio.run(serve(args, data))
    tell(report, [{**here, **there} for here, there in zip(seen, asked, strict=True)])
    return report.end(args.out)


if __name__ == "__main__":
    raise SystemExit(main())
