"""The settings as flags of the command line, spelt and described alike for every command. Knows no command."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from chat.settings import Settings, flag


def option(name: str, metavar: str) -> Any:
    """The flag of a setting that takes a value; `load_settings` checks it, so that every origin is checked alike."""
    field = Settings.model_fields[name]
    default = "" if field.default is None or field.default_factory else f" [default: {field.default}]"
    return typer.Option(flag(name), metavar=metavar, help=f"{field.description}{default}", show_default=False)


Host = Annotated[str | None, option("host", "ADDRESS")]
Port = Annotated[str | None, option("port", "NUMBER")]
DataDir = Annotated[str | None, option("data_dir", "FOLDER")]
Config = Annotated[str | None, option("config", "FILE")]
Model = Annotated[str | None, option("model", "MODEL")]
Adapter = Annotated[str | None, option("adapter", "ADAPTER")]
Device = Annotated[str | None, option("device", "auto|cpu|cuda|mps")]
Dtype = Annotated[str | None, option("dtype", "auto|float32|bfloat16|float16")]
Context = Annotated[str | None, option("context", "TOKENS")]
DeviceKv = Annotated[str | None, option("device_kv", "SIZE")]
Thinking = Annotated[str | None, option("thinking", "preserve|strip")]
Browser = Annotated[
    bool | None, typer.Option("--browser/--no-browser", help=Settings.model_fields["browser"].description)
]
LogLevel = Annotated[str | None, option("log_level", "debug|info|warning|error")]
