"""The settings as flags of the command line, spelt and described alike for every command. Knows no command."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any, Literal, get_args, get_origin

import typer

from chat.settings import Settings, flag

METAVARS = {
    "host": "ADDRESS",
    "port": "NUMBER",
    "data_dir": "FOLDER",
    "config": "FILE",
    "model": "MODEL",
    "adapter": "ADAPTER",
    "context": "TOKENS",
    "disk_writes": "SIZE",
}
KINDS = {"kv": "SIZE", "ttl": "TIME", "high": "SHARE", "low": "SHARE"}  # of a tier's settings


def settings_flags(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command a flag for each of these settings.

    The command finds those that were given in its parameter `given`, a dict by name of setting, as they were typed:
    `load_settings` checks them, so that every origin is checked alike.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def called(*args: Any, **arguments: Any) -> None:
            given = {name: arguments.pop(name, None) for name in names}
            command(*args, given={name: value for name, value in given.items() if value is not None}, **arguments)

        own = inspect.signature(command, eval_str=True).parameters.values()
        kind = inspect.Parameter.KEYWORD_ONLY
        shown = [
            *(each.replace(kind=kind) for each in own if each.name != "given"),
            *(inspect.Parameter(name, kind, default=None, annotation=_option(name)) for name in names),
        ]
        vars(called)["__signature__"] = inspect.Signature(shown)
        called.__annotations__ = {each.name: each.annotation for each in shown}
        return called

    return decorate


def _option(name: str) -> Any:
    field = Settings.model_fields[name]
    if field.annotation is bool:
        words = f"{flag(name).replace('--no-', '--')}/{flag(name)}"
        return Annotated[bool | None, typer.Option(words, help=field.description, show_default=False)]
    default = "" if field.default is None or field.default_factory else f" [default: {field.default}]"
    shown = typer.Option(flag(name), metavar=_metavar(name), help=f"{field.description}{default}", show_default=False)
    return Annotated[str | None, shown]


def _metavar(name: str) -> str:
    annotation = Settings.model_fields[name].annotation
    if get_origin(annotation) is Literal:
        return "|".join(get_args(annotation))
    return METAVARS.get(name) or KINDS[name.rpartition("_")[2]]
