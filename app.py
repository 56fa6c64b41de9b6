"""The command line: reads the settings, builds storage, engine, service and web app, and closes them in reverse.

It knows how the parts are put together and how they end, and nothing of what they do.
"""

from __future__ import annotations

import os
import signal

if __name__ == "__main__":  # the imports take a second, and nothing is open before them
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))

import asyncio
import importlib
import logging
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from chat import flags
from chat.doctor import DoctorError, WrongQuestion
from chat.doctor_command import doctor_command
from chat.ending import close, leave
from chat.instance import AlreadyRunning, DataDirError, Instance
from chat.settings import PREFIX, VERSION, Settings, SettingsError, load_settings, nearest

if TYPE_CHECKING:
    from chat.service import ChatService
    from chat.serving import Server
    from engine.client import EngineClient
    from engine.protocol import Capabilities
    from storage import Store

BROWSER_SECONDS = 3.0  # that a browser may take to open before a second start ends
USAGE_ERROR = 2
ANOTHER_DIR = "choose another with --data-dir"

cli = typer.Typer(add_completion=False, rich_markup_mode=None, subcommand_metavar="[doctor]")


class StartError(Exception):
    """Keepwarm cannot start. `str()` is one line for the terminal."""


# --- the command line -------------------------------------------------------------------------------------------------


def whole_process() -> NoReturn:
    """Run the command line as all that this process does, and end with its exit code; 130 after a Ctrl-C too many."""
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        leave(main())
    except KeyboardInterrupt:
        leave(130)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; whatever goes wrong is one line on the error stream."""
    try:
        return int(typer.main.get_command(cli).main(arguments, standalone_mode=False) or 0)
    except typer.TyperException as error:
        return fail(usage_line(error), error.exit_code)
    except (SettingsError, WrongQuestion) as error:
        return fail(str(error), USAGE_ERROR)
    except (StartError, DataDirError, DoctorError) as error:
        return fail(str(error), 1)
    except KeyboardInterrupt:
        return 0


def usage_line(error: typer.TyperException) -> str:
    """What was typed wrongly, and for an unknown flag the nearest known one."""
    name = getattr(error, "option_name", None)
    if name and error.message.startswith("No such option"):
        flags_here = getattr(error, "ctx").command.params  # noqa: B009 - typer does not say that it has one
        known = [word for parameter in flags_here for word in (*parameter.opts, *parameter.secondary_opts)]
        return f"unknown flag {name}; the nearest known one is {nearest(name, known)}"
    return error.format_message()


def fail(line: str, code: int) -> int:
    """One line on the error stream, and the exit code to end with."""
    print(f"keepwarm: {' '.join(line.split())}", file=sys.stderr)
    return code


@cli.callback(
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=f"Each setting is also a variable ({PREFIX}DEVICE_KV for --device-kv) and a key of the settings file "
    "(device_kv). A flag wins over a variable, that over the file, that over what is saved in the app.",
)
@flags.settings_flags(*Settings.model_fields)
def serve_command(
    call: typer.Context,
    given: dict[str, Any],
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    """Chat with a model on this machine; its cache of each conversation stays warm between turns."""
    if version:
        typer.echo(f"keepwarm {VERSION}")
        raise typer.Exit
    call.obj = given
    if call.invoked_subcommand is None:
        raise typer.Exit(run(load_settings(given, read_saved)))


cli.command("doctor", short_help="Say what is wrong, and what to do about it.")(doctor_command)


def read_saved(data_dir: Path) -> dict[str, str]:
    """The settings saved in the app; none before there is a database."""
    from storage import StorageError, read_saved_settings

    try:
        return read_saved_settings(data_dir)
    except StorageError as error:
        writable = os.access(data_dir, os.W_OK)  # without it, SQLite cannot even read what was written last
        raise StartError(str(error) if writable else f"cannot write to {data_dir}; {ANOTHER_DIR}") from error


# --- one server -------------------------------------------------------------------------------------------------------


def run(settings: Settings) -> int:
    """Serve the data directory until Ctrl-C, or show the page of the server that already does; return the exit code."""
    from chat.serving import ListenError, listen

    os.umask(0o077)  # chats are for their owner alone, whatever file they end up in
    logging.basicConfig(level=settings.log_level.upper(), format="%(levelname)s %(name)s: %(message)s")
    try:
        instance = Instance.acquire(settings.data_dir)
    except AlreadyRunning as held:
        return show_running(held, settings)
    try:
        with listen(settings.host, settings.port) as listener:
            port = listener.getsockname()[1]
            return asyncio.run(serve(settings.model_copy(update={"port": port}), listener, instance))
    except ListenError as error:
        raise StartError(str(error)) from error
    finally:
        instance.close()


def show_running(held: AlreadyRunning, settings: Settings) -> int:
    """Lead to the page of the server that holds the data directory."""
    from chat.serving import open_page, say

    if held.running is None:
        raise StartError(f"another Keepwarm is starting or ending in {settings.data_dir}; try again in a moment")
    say(f"Keepwarm is already running at {held.running.url} (process {held.running.pid}).")
    if settings.browser:
        open_page(held.running.url).join(timeout=BROWSER_SECONDS)
    return 0


@dataclass
class Parts:
    """What is open so far; only this module opens and closes it."""

    engine: EngineClient
    store: Store | None = None
    service: ChatService | None = None
    server: Server | None = None
    serving: asyncio.Task[None] | None = None


async def serve(settings: Settings, listener: socket.socket, instance: Instance) -> int:
    """Open the parts, wait for a signal, close them in reverse. Returns the exit code."""
    from chat.engine_config import engine_config
    from chat.serving import catch_signals, in_thread, say
    from engine.client import EngineClient

    stop = catch_signals()
    parts = Parts(EngineClient(await in_thread(lambda: engine_config(settings))))
    opening = asyncio.create_task(open_parts(parts, settings, listener, instance))
    stopped = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({opening, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if opening.done():
            opening.result()
            await stopped
        say("Ending; everything so far is kept.")
    finally:
        instance.withdraw()
        opening.cancel()
        await asyncio.wait({opening})
        await close_parts(parts)
    return 0


async def open_parts(parts: Parts, settings: Settings, listener: socket.socket, instance: Instance) -> None:
    """Open everything and return when the model is ready.

    The engine loads in its process while the web side is still being imported, and the page is there before the model.
    """
    from chat.serving import open_page, page_url, say

    started, url = time.monotonic(), page_url(settings)
    say(f"Keepwarm {VERSION} starts at {url}, with its data in {settings.data_dir}")
    await parts.engine.start()
    telling = asyncio.create_task(tell_until_ready(parts.engine, url, started))
    opening = asyncio.create_task(open_web(parts, settings, listener))
    try:
        await asyncio.wait({telling, opening}, return_when=asyncio.FIRST_COMPLETED)
        if not opening.done():
            await telling  # a model that cannot be loaded is said before the page is there
        serving = await opening
        instance.announce(url)
        await asyncio.wait({telling, serving}, return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            raise StartError("the web server could not start; --log-level debug says more")
        await telling
    finally:
        telling.cancel()
        opening.cancel()
        await asyncio.wait({telling, opening})
    if settings.browser:
        open_page(url)


async def open_web(parts: Parts, settings: Settings, listener: socket.socket) -> asyncio.Task[None]:
    """Open what a person meets, from the store to the page. Returns the task in which the web server runs."""
    from chat.serving import Server, in_thread

    await in_thread(lambda: importlib.import_module("chat.web"))  # gradio takes seconds
    from chat.service import ChatService
    from chat.web import build_app
    from storage import StorageError, Store

    try:
        parts.store = await Store.open(settings.data_dir)
    except StorageError as error:
        raise StartError(str(error)) from error
    parts.service = ChatService(parts.store, parts.engine, thinking=settings.thinking)
    await parts.service.start()
    parts.server = Server(build_app(parts.service, settings))
    parts.serving = asyncio.create_task(parts.server.serve(sockets=[listener]))
    return parts.serving


async def close_parts(parts: Parts) -> None:
    """The server takes no more, the service ends the turns, then streams and engine end together, the store is last."""
    if parts.server:
        parts.server.should_exit = True
    if parts.service:
        await close("the chat service", parts.service.close())
    ending = [close("the engine", parts.engine.close())]
    if parts.serving:
        ending.append(close("the web server", asyncio.wait({parts.serving})))
    await asyncio.gather(*ending)
    if parts.store:
        await close("the store", parts.store.close())


def short_of_room(capabilities: Capabilities) -> str:
    """What to say where the device tier holds less than one whole context; "" where it does not."""
    room, context = capabilities.room, capabilities.context_length
    if room == context:
        return ""
    return f"A chat can have {room:,} of the model's {context:,} tokens: --device-kv has no room for more."


async def tell_until_ready(engine: EngineClient, url: str, started: float) -> None:
    """Print each stage of the load. Raises StartError when the model cannot be loaded."""
    from chat.serving import say

    stage = ""
    async for state in engine.watch():
        if state.phase == "ready":
            say(f"Ready at {url} after {time.monotonic() - started:.1f} s. Ctrl-C ends it.")
            if state.capabilities is not None and (note := short_of_room(state.capabilities)):
                say(note)
            return
        if state.phase == "failed":
            raise StartError(state.message)
        if state.stage != stage:
            stage = state.stage
            say(f"  {stage} ...")


if __name__ == "__main__":
    whole_process()
