"""Checks of what belongs to one installation: settings, data directory, running server, port and database.

Reads only: it makes no file and no folder. Knows nothing of models.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

import httpx
import psutil

from chat.amounts import Bytes
from chat.doctor import Finding, count, ok
from chat.engine_config import cold_budgets, kv_dir
from chat.instance import Running
from chat.serving import ListenError, listen
from chat.settings import Settings
from engine.budgets import disk_most
from engine.room import free_disk, free_memory
from engine.words import size
from storage import DatabaseDamaged, StorageError, inspect_database

LITTLE_TIER = 2**20  # bytes; a block of 32 tokens takes 0.7 MiB with the smallest of models
LITTLE_DISK = 2**30  # bytes
PATIENCE_S = 2.0
ANOTHER = "choose another with --data-dir"


def settings(given: Settings, origins: Mapping[str, str]) -> Iterator[Finding]:
    """Each setting that is not left at its default, and who set it."""
    shown = {name: getattr(given, name) for name in sorted(origins)}
    values = [
        f"{name} = {size(value) if isinstance(value, Bytes) else value} (from {origins[name]})"
        for name, value in shown.items()
    ]
    yield ok("settings", ", ".join(values) or "all at their defaults")


def data_directory(path: Path) -> Iterator[Finding]:
    """Whether Keepwarm can keep its data there, and keep it private."""
    what = "data directory"
    if path.exists() and not path.is_dir():
        yield Finding("problem", what, f"{path} is not a folder", ANOTHER)
        return
    there = next(folder for folder in (path, *path.parents) if folder.is_dir())
    free = free_disk(path)
    detail = f"{path}, {size(free)} free on its disk"
    if there != path:
        detail += "; it is made at the first start"
    if not os.access(there, os.W_OK | os.X_OK):
        yield Finding("problem", what, f"{detail}: {there} cannot be written", f"allow it, or {ANOTHER}")
    elif there == path and os.name == "posix" and stat.S_IMODE(path.stat().st_mode) & 0o077:
        mode = f"{stat.S_IMODE(path.stat().st_mode):03o}"
        yield Finding("warn", what, f"{detail}; its mode {mode} lets others in", f"chmod 700 {path}")
    elif free < LITTLE_DISK:
        yield Finding("warn", what, detail, f"make room, or {ANOTHER}")
    else:
        yield ok(what, detail)


def cold_tiers(given: Settings, *, on_cpu: bool) -> Iterator[Finding]:
    """What main memory and the disk may hold of chats that the device has no room for."""
    settled = cold_budgets(given, on_cpu=on_cpu)
    for tier, most, room in (
        ("host", settled.host_kv or 0, free_memory()),
        ("disk", settled.disk_kv or 0, disk_most(kv_dir(given.data_dir))),
    ):
        by_default = ", by default" if getattr(given, f"{tier}_kv") is None else ""
        if most > room:
            fix = f"--{tier}-kv {room // 2**21}MiB or less"
            yield Finding("warn", f"{tier} tier", f"up to {size(most)}, and {size(room)} are free", fix)
        elif 0 < most < LITTLE_TIER:
            detail = f"up to {size(most)}, in which hardly a block has room"
            yield Finding("warn", f"{tier} tier", detail, f"--{tier}-kv 256MiB, or 0 to do without")
        elif most and tier == "disk" and given.disk_writes == 0:
            detail = f"up to {size(most)}, and nothing may be written to it: no chat survives a restart there"
            yield Finding("warn", "disk tier", detail, "raise --disk-writes, or --disk-kv 0 to do without")
        elif most:
            yield ok(f"{tier} tier", f"up to {size(most)} of the {size(room)} that are free{by_default}")
        else:
            yield ok(f"{tier} tier", f"off{by_default}")


def server(running: Running | None) -> Iterator[Finding]:
    """Whether a server uses the directory now, by what it noted there, and answers."""
    if running is None:
        yield ok("server", "none runs in the data directory")
        return
    detail = f"runs at {running.url} (process {running.pid})"
    try:
        httpx.get(f"{running.url}/healthz", timeout=PATIENCE_S, trust_env=False).raise_for_status()
    except httpx.HTTPError as error:
        yield Finding(
            "warn", "server", f"{detail}, but does not answer: {error}", f"wait, or end process {running.pid}"
        )
    else:
        yield ok("server", f"{detail}; `python app.py doctor --url` tells how it does")


def port(given: Settings, running: Running | None) -> Iterator[Finding]:
    """Whether the port can be had, or is had by the server that runs already."""
    if running is not None and running.url.endswith(f":{given.port}"):
        yield ok("port", f"{given.port}, taken by the server that runs (process {running.pid})")
        return
    try:
        listen(given.host, given.port).close()
    except ListenError as error:
        reason, _, fix = str(error).partition("; ")
        holder = _holder(given.port)
        yield Finding("problem", "port", f"{reason}{f', {holder}' if holder else ''}", fix)
    else:
        yield ok("port", f"{given.port} is free" if given.port else "a free one is taken")


def _holder(number: int) -> str:
    """Who listens on a port, as far as the operating system tells."""
    try:
        for connection in psutil.net_connections("tcp"):
            listens = connection.status == psutil.CONN_LISTEN
            if listens and getattr(connection.laddr, "port", None) == number and connection.pid:
                return f"{psutil.Process(connection.pid).name()} (process {connection.pid})"
    except (psutil.Error, OSError):
        pass
    return ""


def database(path: Path) -> Iterator[Finding]:
    """Whether the database is there, sound, and of this version."""
    try:
        report = inspect_database(path)
    except StorageError as error:
        yield _failed(str(error), ": " if isinstance(error, DatabaseDamaged) else "; ")
        return
    if report is None or report.revision is None:
        yield ok("database", "none yet; it is made at the first start")
        return
    detail = (
        f"{size(report.size)}, sound, revision {report.revision}, {count(report.chats, 'chat')}, "
        f"{count(report.api_chats, 'API chat')}, {count(len(report.backups), 'backup')}"
    )
    if report.revision != report.newest:
        detail += f"; it is upgraded to revision {report.newest} at the next start, after a backup"
    yield ok("database", detail)


def _failed(sentence: str, before_fix: str) -> Finding:
    """A storage error, whose sentence has the fix at its end where there is one."""
    reason, _, fix = sentence.rpartition(before_fix)
    return Finding("problem", "database", reason or sentence, fix if reason else ANOTHER)
