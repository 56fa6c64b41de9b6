"""`python app.py doctor`: its flags, and which checks are made for which of them.

Knows how the checks are put together; each is in a `doctor_*` module of its own.
"""

from __future__ import annotations

import asyncio
import json
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from chat import flags
from chat.amounts import Bytes
from chat.doctor import DoctorError, Finding, WrongQuestion, exit_code, guarded
from chat.settings import Settings, trace_settings
from engine.room import free_disk

if TYPE_CHECKING:
    from chat.doctor_machine import Device
    from chat.doctor_size import Room

NOT_OURS = ("browser", "log_level")  # what only a start needs

Output = tuple[str, list[Finding]]


@flags.settings_flags(*(name for name in Settings.model_fields if name not in NOT_OURS))
def doctor_command(
    call: typer.Context,
    given: dict[str, Any],
    *,
    address: Annotated[str, typer.Argument(metavar="URL", help="With --url: the server to ask.")] = "",
    size: Annotated[
        str | None, typer.Option("--size", metavar="MODEL", help="What a model takes; only its configuration is read.")
    ] = None,
    sessions: Annotated[
        int | None, typer.Option("--sessions", metavar="N", help="With --size: whether so many sessions fit.")
    ] = None,
    url: Annotated[
        bool, typer.Option("--url", help="Why a running server is slow: the data directory's, or the one at URL.")
    ] = False,
    load: Annotated[
        bool, typer.Option("--load", help="Load the model too, check its attention and measure it.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Check this machine, settings, model and data; or size a model; or say why a server is slow."""
    settings, origins = trace_settings({**(call.obj or {}), **given}, _read_saved)
    _check_modes(bool(size), url or bool(address), load, sessions is not None)
    if size:
        answer = _sized(settings, size, sessions, as_json=as_json)
    elif url or address:
        answer = _asked(settings, address, as_json=as_json)
    else:
        answer = _checked(settings, origins, load=load, as_json=as_json)
    text, findings = answer
    typer.echo(text)
    raise typer.Exit(exit_code(findings))


def _check_modes(size: bool, url: bool, load: bool, sessions: bool) -> None:
    if size + url + load > 1:
        raise WrongQuestion("--size, --url and --load are three questions: ask one at a time")
    if sessions and not size:
        raise WrongQuestion("--sessions belongs to --size MODEL: name the model")


def _read_saved(data_dir: Path) -> dict[str, str]:
    """The settings saved in the app; none where the database cannot be read, which is a finding of its own."""
    from storage import StorageError, read_saved_settings

    try:
        return read_saved_settings(data_dir)
    except StorageError:
        return {}


def _shown(findings: Sequence[Finding], *, as_json: bool) -> str:
    from chat import doctor_text

    if as_json:
        return doctor_text.as_json(findings)
    return doctor_text.as_text(findings, width=doctor_text.width_here(), colour=doctor_text.colours_here())


# --- the three questions ----------------------------------------------------------------------------------------------


def _checked(settings: Settings, origins: dict[str, str], *, load: bool, as_json: bool) -> Output:
    """Everything that can be told without a server."""
    from chat import doctor_data, doctor_machine
    from chat.instance import read_note

    running = read_note(settings.data_dir)
    findings = [
        *guarded("versions", doctor_machine.versions),
        *guarded("machine", doctor_machine.machine),
        *guarded("memory", doctor_machine.memory),
        *guarded("settings", lambda: doctor_data.settings(settings, origins)),
        *guarded("data directory", lambda: doctor_data.data_directory(settings.data_dir)),
        *guarded("cold tiers", lambda: doctor_data.cold_tiers(settings, on_cpu=doctor_machine.on_cpu(settings))),
        *guarded("server", lambda: doctor_data.server(running)),
        *guarded("port", lambda: doctor_data.port(settings, running)),
        *guarded("database", lambda: doctor_data.database(settings.data_dir)),
        *guarded("model", lambda: _model(settings, running=running is not None)),
    ]
    if load:
        findings += guarded("load", lambda: asyncio.run(_loaded(settings)))
    return _shown(findings, as_json=as_json), findings


def _model(settings: Settings, *, running: bool) -> list[Finding]:
    """The device and the model on it."""
    _quieten()
    from chat import doctor_machine, doctor_model

    cache_dir = settings.data_dir / "models"
    findings, device = doctor_machine.device(settings, doctor_model.recorded(settings, cache_dir))
    if device is None:
        return findings
    findings += doctor_machine.weights(settings, device)
    located = doctor_model.locate(settings, cache_dir, device.dtype)
    if isinstance(located, Finding):
        return [*findings, located]
    findings += [Finding("ok", "model", located.detail), *doctor_model.adapter(settings)]
    sized, finding = doctor_model.architecture(settings.model, located)
    findings.append(finding)
    if sized is not None:
        free = free_disk(settings.data_dir)
        findings += doctor_model.fit(sized, located, settings, device, running=running, disk_free=free)
        findings += doctor_model.chatting(located.folder, settings) if located.folder else []
    return findings


async def _loaded(settings: Settings) -> list[Finding]:
    from chat.doctor_load import loaded
    from chat.engine_config import engine_config

    config = engine_config(settings.model_copy(update={"host_kv": Bytes(0), "disk_kv": Bytes(0)}))  # touches no file
    return [finding async for finding in loaded(config)]


def _sized(settings: Settings, model: str, sessions: int | None, *, as_json: bool) -> Output:
    """What `model` takes on this machine."""
    _quieten()
    from chat import doctor_machine, doctor_size
    from engine.errors import ModelLoadError
    from engine.model import sizing

    try:
        sized = sizing.size(model)
    except ModelLoadError as error:
        raise DoctorError(str(error)) from error
    _, device = doctor_machine.device(settings, None)
    if device is None:
        raise DoctorError(f"device {settings.device!r} is not there: use --device auto")
    question = doctor_size.Question.of(sized, settings.context, sessions)
    room = _room(settings, device)
    names = [settings.dtype] if settings.dtype != "auto" else sorted({"float32", "bfloat16", device.dtype})
    columns = [doctor_size.Sizes.of(sized, name, question, room) for name in reversed(names)]
    here = next(column for column in columns if column.dtype == device.dtype)
    findings = [doctor_size.verdict(here, question, room)]
    if as_json:
        facts = {"model": asdict(sized), "question": asdict(question), "room": asdict(room)}
        return json.dumps(
            {**facts, "sizes": [asdict(c) for c in columns], "fit": asdict(findings[0])}, indent=2
        ), findings
    table = doctor_size.report(sized, columns, question, room, device)
    return f"{table}\n\n{_shown(findings, as_json=False)}", findings


def _room(settings: Settings, device: Device) -> Room:
    """What there is for K and V on this machine, tier by tier."""
    from chat.doctor_size import Room
    from chat.engine_config import budget, cold_budgets, kv_dir
    from engine.budgets import disk_room

    cold = cold_budgets(settings, on_cpu=device.name == "cpu")
    return Room(
        device_kv=budget(settings.device_kv, lambda: device.free),
        memory=device.free,
        host_kv=cold.host_kv or 0,
        disk_kv=cold.disk_kv or 0,
        disk=disk_room(kv_dir(settings.data_dir)),
        cold_dtype=settings.cold_kv_dtype,
        chosen=tuple(name for name in ("device_kv", "host_kv", "disk_kv") if getattr(settings, name) is not None),
    )


def _asked(settings: Settings, address: str, *, as_json: bool) -> Output:
    """What a running server's figures say."""
    import msgspec

    from chat import doctor_server, doctor_text

    url = doctor_server.server_url(address, settings.data_dir)
    figures = doctor_server.fetch(url)
    findings = doctor_server.examine(url, figures)
    if as_json:
        return doctor_text.as_json(findings, figures=msgspec.to_builtins(figures)), findings
    return _shown(findings, as_json=False), findings


def _quieten() -> None:
    """Keep libraries from writing between the findings."""
    from transformers.utils import logging as transformers_logging

    warnings.simplefilter("ignore")
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
