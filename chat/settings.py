"""What Keepwarm can be told: one frozen model, read from five places, of which the nearest to the person wins.

The places, strongest first: a flag, a `KEEPWARM_*` variable, the TOML file, a value saved in the app, the default. This
module knows nothing of the command line's library, of the engine or of the page.
"""

from __future__ import annotations

import ipaddress
import os
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import platformdirs
from pydantic import Field, PlainValidator, ValidationError, field_validator
from pydantic_core import PydanticCustomError
from pydantic_settings import BaseSettings, EnvSettingsSource, SettingsConfigDict
from pydantic_settings import PydanticBaseSettingsSource as Source

from chat.amounts import Bytes, Duration, Share, read_duration, read_level, read_limit, read_size
from chat.settings_errors import SettingsError, nearest, reason, shown

__all__ = ["Settings", "SettingsError", "load_settings", "nearest", "trace_settings"]

VERSION = "0.1.0"
PREFIX = "KEEPWARM_"
FILE_NAME = "keepwarm.toml"
NOT_IN_FILE = {"config"}  # it says where the file is
NOT_SAVED = {"config", "data_dir"}  # they say where the saved values are

Size = Annotated[Bytes | Share, PlainValidator(read_size)]
Limit = Annotated[Bytes | None, PlainValidator(read_limit)]
Ttl = Annotated[Duration, PlainValidator(read_duration)]
Level = Annotated[Share, PlainValidator(read_level)]


class Settings(BaseSettings):
    """Every setting, validated and immutable. `load_settings` builds it; the constructor reads no other place."""

    model_config = SettingsConfigDict(
        frozen=True, extra="forbid", env_prefix=PREFIX, env_ignore_empty=True, validate_default=False
    )

    host: str = Field("127.0.0.1", description="Address to listen on; only this machine can reach a loopback address.")
    port: int = Field(7860, ge=0, le=65535, description="Port to listen on; 0 takes a free one.")
    data_dir: Path = Field(
        default_factory=lambda: platformdirs.user_data_path("keepwarm", appauthor=False),
        description="Folder of the chats and the converted model; one server at a time.",
    )
    config: Path | None = Field(None, description=f"Settings file; otherwise {FILE_NAME} in the settings folder.")
    model: str = Field(
        "smollm2", min_length=1, description="The embedded model, a Hugging Face folder or hub id, or a .gguf file."
    )
    adapter: str | None = Field(
        None, min_length=1, description="LoRA adapter for the model: a folder in PEFT's form, or its hub id."
    )
    device: Literal["auto", "cpu", "cuda", "mps"] = Field("auto", description="Where the model computes.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="Number format of the weights and the cache; float32 repeats a reply exactly."
    )
    weights: Literal["auto", "bf16", "int8", "int4"] = Field(
        "auto",
        description="Bits of the weights on a CPU: auto takes as few as a model's own numbers have, 4, 8 or 16.",
    )
    context: int | None = Field(
        None,
        ge=1,
        lt=2**31,
        description="The most tokens that a chat may have; otherwise as many as the model was made for.",
    )
    device_kv: Size | None = Field(
        None,
        description="Memory of the device that holds warm chats, of all models together: like 256MiB, or 25% of what "
        "is free at the start.",
    )
    host_kv: Size | None = Field(
        None, description="Main memory for chats that the device has no room for, in the same forms; 0 does without."
    )
    disk_kv: Size | None = Field(
        None, description="Disk for chats that memory has no room for, and for the next start; 0 does without."
    )
    device_ttl: Ttl = Field(
        Duration("inf"), description="How long an unused chat stays on the device: like 90s, 30m, 12h, 30d, or never."
    )
    host_ttl: Ttl = Field(Duration("inf"), description="The same for main memory.")
    disk_ttl: Ttl = Field(Duration(30 * 86400), description="The same for the disk.")
    device_high: Level = Field(Share(1), description="How full the device's share may get before chats move down.")
    device_low: Level | None = Field(None, description="How full it is after that.")
    host_high: Level = Field(Share(1), description="The same for main memory.")
    host_low: Level | None = Field(None, description="How full that is afterwards.")
    disk_high: Level = Field(Share(1), description="The same for the disk.")
    disk_low: Level | None = Field(None, description="How full that is afterwards.")
    policy: Literal["lru", "cost"] = Field(
        "lru",
        description="Who gives way first: lru, who was used longest ago; cost, who is quickest to read again.",
    )
    cold_kv_dtype: Literal["auto", "int8"] = Field(
        "auto", description="Number format in main memory and on disk: auto is exact, int8 takes half and is not."
    )
    disk_writes: Limit = Field(
        Bytes(100 * 10**9), description="The most that is written to the disk in a day; unlimited is a word for none."
    )
    speculate: Literal["auto", "off"] = Field(
        "auto",
        description="Guess the next tokens where a text repeats itself, as far as that is quicker, and check them.",
    )
    thinking: Literal["preserve", "strip"] = Field(
        "preserve",
        description="Whether the model goes on reading the reasoning of earlier replies, or only their answers.",
    )
    browser: bool = Field(True, description="Open the page in a browser when it is ready.")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "warning", description="How much the terminal tells."
    )

    @field_validator("host")
    @classmethod
    def _loopback(cls, host: str) -> str:
        if not is_loopback(host):
            raise PydanticCustomError(
                "loopback", "only a loopback address is allowed until there are users with passwords; use 127.0.0.1"
            )
        return host

    @field_validator("device_kv")
    @classmethod
    def _something(cls, size: Bytes | Share | None) -> Bytes | Share | None:
        if size is not None and not size:
            raise PydanticCustomError("nothing", "nothing")
        return size

    @field_validator("port", "context", mode="before")
    @classmethod
    def _no_yes_or_no(cls, number: object) -> object:
        if isinstance(number, bool):  # which Python counts as a number
            raise PydanticCustomError("number", "not a number")
        return number

    @field_validator("data_dir", "config", mode="before")
    @classmethod
    def _not_empty(cls, path: object) -> object:
        if path == "":
            raise PydanticCustomError("empty", "empty")
        return path

    @field_validator("data_dir", "config")
    @classmethod
    def _absolute(cls, path: Path | None) -> Path | None:
        try:
            if path is not None and "\0" in str(path):
                raise ValueError("a path holds no such character")
            return path if path is None else path.expanduser().absolute()
        except (RuntimeError, ValueError) as error:  # RuntimeError: ~somebody who does not exist
            raise PydanticCustomError("path", "not a path") from error

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: Source,
        env_settings: Source,
        dotenv_settings: Source,
        file_secret_settings: Source,
    ) -> tuple[Source, ...]:
        """Take what `load_settings` merged and nothing else, so that every value's origin is known."""
        return (init_settings,)


class Given(NamedTuple):
    """A raw value and where it came from, in words for the error line."""

    value: Any
    origin: str


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`, an address or the name `localhost`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def flag(name: str) -> str:
    """The command line's word for a setting: `data_dir` is `--data-dir`, and `browser` is turned off."""
    return "--no-browser" if name == "browser" else "--" + name.replace("_", "-")


def variable(name: str) -> str:
    """The environment's word for a setting: `data_dir` is `KEEPWARM_DATA_DIR`."""
    return PREFIX + name.upper()


def default_file() -> Path:
    """Where the settings file is looked for when none is named."""
    return platformdirs.user_config_path("keepwarm", appauthor=False) / FILE_NAME


def load_settings(flags: Mapping[str, Any], read_saved: Callable[[Path], Mapping[str, str]] | None = None) -> Settings:
    """Merge the five places and validate what won.

    `flags` holds the settings given on the command line (None: not given); `read_saved` returns what the app saved in a
    data directory. Raises SettingsError for the first unknown key or bad value, also for one that a stronger place
    hides; only a saved one may be hidden, because the app that could change it would not start.
    """
    return trace_settings(flags, read_saved)[0]


def trace_settings(
    flags: Mapping[str, Any], read_saved: Callable[[Path], Mapping[str, str]] | None = None
) -> tuple[Settings, dict[str, str]]:
    """As `load_settings`, and where each setting that is not left at its default came from, in words for people."""
    given: dict[str, Given] = {}
    _add(given, {name: Given(value, flag(name)) for name, value in flags.items() if value is not None})
    _add(given, _from_environment())
    _add(given, _from_file(given.get("config")))
    settings = _validate(given)
    if read_saved is not None:
        saved = read_saved(settings.data_dir)
        _merge(
            given,
            {name: Given(saved[name], "the value saved in the app") for name in _known(NOT_SAVED) if name in saved},
        )
        settings = _validate(given)
    _check_levels(settings, given)
    return settings, {name: value.origin for name, value in given.items()}


def _add(given: dict[str, Given], weaker: Mapping[str, Given]) -> None:
    _validate(weaker)
    _merge(given, weaker)


def _merge(given: dict[str, Given], weaker: Mapping[str, Given]) -> None:
    for name, value in weaker.items():
        given.setdefault(name, value)


def _known(without: Iterable[str] = ()) -> list[str]:
    return [name for name in Settings.model_fields if name not in set(without)]


def _from_environment() -> dict[str, Given]:
    known = [variable(name) for name in _known()]
    for key in os.environ:
        if key.upper().startswith(PREFIX) and key.upper() not in known:
            raise SettingsError(f"unknown variable {key}; the nearest known one is {nearest(key, known)}")
    return {name: Given(value, variable(name)) for name, value in EnvSettingsSource(Settings)().items()}


def _from_file(config: Given | None) -> dict[str, Given]:
    path = Path(config.value).expanduser().absolute() if config else default_file()
    if config is None and not path.is_file():
        return {}
    try:
        # "utf-8-sig" takes the mark that some editors put before the first line
        values = tomllib.loads(path.read_text("utf-8-sig")) if path.is_file() else None
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"the settings file {path} is not valid TOML: {error}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"the settings file {path} cannot be read: {error}") from error
    if values is None:
        raise SettingsError(f"config = {str(path)!r} (from {config.origin if config else ''}): there is no such file")
    known = _known(NOT_IN_FILE)
    for key in values:
        if key not in known:
            raise SettingsError(f"unknown key {key!r} in {path}; the nearest known one is {nearest(key, known)!r}")
    if isinstance(values.get("data_dir"), str):  # relative to the file, wherever the command was typed
        values["data_dir"] = path.parent / Path(values["data_dir"]).expanduser()
    return {name: Given(value, str(path)) for name, value in values.items()}


def _validate(given: Mapping[str, Given]) -> Settings:
    try:
        return Settings(**{name: value for name, (value, _) in given.items()})
    except ValidationError as error:
        details = error.errors(include_url=False)[0]
        name = str(details["loc"][0])
        value, origin = given[name]
        annotation = Settings.model_fields[name].annotation
        raise SettingsError(
            f"{name} = {shown(value)} (from {origin}): {reason(name, annotation, value, details)}"
        ) from error


def _check_levels(settings: Settings, given: Mapping[str, Given]) -> None:
    """Each tier is emptied to a level that is not above the one at which that begins. Raises SettingsError."""
    for tier in ("device", "host", "disk"):
        low, high = f"{tier}_low", f"{tier}_high"
        if low in given and getattr(settings, low) > getattr(settings, high):
            value, origin = given[low]
            other = f" (from {given[high].origin})" if high in given else ", its default"
            raise SettingsError(
                f"{low} = {shown(value)} (from {origin}): above {high} = '{getattr(settings, high)}'{other}; "
                f"lower {low} or raise {high}"
            )
