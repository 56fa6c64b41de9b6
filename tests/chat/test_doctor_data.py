"""What the doctor says of an installation's data: folder, server, port, database; and that it touches nothing."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import sqlite3
from collections import namedtuple
from contextlib import closing
from pathlib import Path

import pytest

from chat import doctor_data, engine_config
from chat.doctor_data import cold_tiers, data_directory, database, port, server, settings
from chat.instance import Running
from chat.settings import Settings, load_settings
from engine import budgets
from storage import Store
from storage.database import FILE_NAME
from tests.chat.serving import serving

OLD = Path(__file__).parents[1] / "data" / "0001.sqlite3"


def test_settings_are_told_with_where_they_came_from() -> None:
    (none,) = settings(Settings(), {})
    assert none.detail == "all at their defaults"
    given = Settings(port=8001, dtype="float32", device_kv="100MiB")
    (some,) = settings(given, {"port": "--port", "dtype": "KEEPWARM_DTYPE", "device_kv": "k.toml"})
    assert some.detail == (
        "device_kv = 100 MiB (from k.toml), dtype = float32 (from KEEPWARM_DTYPE), port = 8001 (from --port)"
    )


def test_the_cold_tiers_are_told_and_held_against_what_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (doctor_data, engine_config, budgets):
        monkeypatch.setattr(module, "free_memory", lambda: 8 * 2**30)
    monkeypatch.setattr(budgets, "free_disk", lambda _: 100 * 2**30)
    host, disk = cold_tiers(Settings(data_dir=tmp_path), on_cpu=True)
    assert (host.what, host.detail) == ("host tier", "up to 410 MiB of the 8 GiB that are free, by default")
    assert (disk.what, disk.detail) == ("disk tier", "up to 10 GiB of the 100 GiB that are free, by default")
    host, _ = cold_tiers(Settings(data_dir=tmp_path), on_cpu=False)
    assert host.detail == "up to 2 GiB of the 8 GiB that are free, by default"
    host, disk = cold_tiers(Settings(data_dir=tmp_path, host_kv="9GiB", disk_kv="50%"), on_cpu=True)
    assert (host.level, host.detail) == ("warn", "up to 9 GiB, and 8 GiB are free")
    assert host.fix == "--host-kv 4096MiB or less"
    assert (disk.level, disk.detail) == ("ok", "up to 50 GiB of the 100 GiB that are free")
    assert next(iter(cold_tiers(Settings(data_dir=tmp_path, host_kv=0), on_cpu=True))).detail == "off"


# --- the folder -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "what", "detail", "fix"),
    [
        (
            {"host_kv": "512"},
            "host tier",
            "up to 512 bytes, in which hardly a block has room",
            "--host-kv 256MiB, or 0 to do without",
        ),
        (
            {"disk_kv": "600KiB"},
            "disk tier",
            "up to 600 KiB, in which hardly a block has room",
            "--disk-kv 256MiB, or 0 to do without",
        ),
        (
            {"disk_kv": "64MiB", "disk_writes": "0"},
            "disk tier",
            "up to 64 MiB, and nothing may be written to it: no chat survives a restart there",
            "raise --disk-writes, or --disk-kv 0 to do without",
        ),
    ],
)
def test_tiers_that_can_keep_nothing_are_warned_of(
    tmp_path: Path, flags: dict[str, str], what: str, detail: str, fix: str
) -> None:
    given = load_settings({"data_dir": str(tmp_path), **flags})
    findings = {found.what: found for found in cold_tiers(given, on_cpu=True)}
    assert (findings[what].level, findings[what].detail, findings[what].fix) == ("warn", detail, fix)


def test_a_folder_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    (finding,) = data_directory(tmp_path / "a" / "b")
    assert finding.level == "ok"
    assert finding.detail.startswith(f"{tmp_path / 'a' / 'b'}, ")
    assert finding.detail.endswith("; it is made at the first start")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.name != "posix", reason="modes are POSIX's")
def test_a_folder_that_lets_others_in_is_a_warning(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (finding,) = data_directory(tmp_path)
    assert (finding.level, finding.fix) == ("warn", f"chmod 700 {tmp_path}")
    assert "its mode 755 lets others in" in finding.detail
    tmp_path.chmod(0o700)
    (finding,) = data_directory(tmp_path)
    assert finding.level == "ok"


def test_a_folder_that_cannot_be_written_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write everywhere
    (finding,) = data_directory(tmp_path)
    assert (finding.level, finding.fix) == ("problem", "allow it, or choose another with --data-dir")
    assert finding.detail.endswith(f"{tmp_path} cannot be written")


def test_a_file_in_its_place_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "data").touch()
    (finding,) = data_directory(tmp_path / "data")
    assert (finding.level, finding.detail) == ("problem", f"{tmp_path / 'data'} is not a folder")


def test_a_full_disk_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o700)
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10, 9, 5 * 2**20))
    (finding,) = data_directory(tmp_path)
    assert (finding.level, finding.fix) == ("warn", "make room, or choose another with --data-dir")
    assert "5 MiB free on its disk" in finding.detail


# --- the server and its port ------------------------------------------------------------------------------------------


async def test_a_server_that_answers_is_told(service) -> None:
    async with serving(service) as url:
        (finding,) = await asyncio.to_thread(lambda: list(server(Running(url, 7))))
    assert (finding.level, finding.detail) == (
        "ok",
        f"runs at {url} (process 7); `python app.py doctor --url` tells how it does",
    )


def test_a_server_that_does_not_answer_is_a_warning() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
    (finding,) = server(Running(f"http://127.0.0.1:{number}", 7))
    assert (finding.level, finding.fix) == ("warn", "wait, or end process 7")
    assert finding.detail.startswith(f"runs at http://127.0.0.1:{number} (process 7), but does not answer: ")
    (none,) = server(None)
    assert (none.level, none.detail) == ("ok", "none runs in the data directory")


def test_a_port_in_use_is_a_problem_that_names_who_has_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        (finding,) = port(Settings(port=number), None)
        assert finding.level == "problem"
        assert finding.detail.startswith(f"port {number} is in use by another program, ")
        assert finding.detail.endswith(f"(process {os.getpid()})")
        assert finding.fix.startswith("choose another with --port ")
        (ours,) = port(Settings(port=number), Running(f"http://127.0.0.1:{number}", 7))
        assert (ours.level, ours.detail) == ("ok", f"{number}, taken by the server that runs (process 7)")
    (free,) = port(Settings(port=number), None)
    assert (free.level, free.detail) == ("ok", f"{number} is free")
    (any_one,) = port(Settings(port=0), None)
    assert any_one.detail == "a free one is taken"


def test_a_port_without_a_known_holder_is_a_problem_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_data, "_holder", lambda _: "")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        (finding,) = port(Settings(port=taken.getsockname()[1]), None)
    assert finding.detail.endswith("is in use by another program")


# --- the database -----------------------------------------------------------------------------------------------------


async def test_a_sound_database_is_counted(tmp_path: Path) -> None:
    (none,) = database(tmp_path)
    assert none.detail == "none yet; it is made at the first start"
    store = await Store.open(tmp_path)
    await store.create_session((await store.implicit_admin()).id)
    (finding,) = database(tmp_path)
    await store.close()
    assert finding.level == "ok"
    assert finding.detail.endswith("1 chat, no API chats, no backups")


async def test_an_old_database_is_said_to_be_upgraded(tmp_path: Path) -> None:
    shutil.copy(OLD, tmp_path / FILE_NAME)
    (finding,) = database(tmp_path)
    assert finding.level == "ok"
    assert "revision 0001" in finding.detail
    assert finding.detail.endswith("at the next start, after a backup")


def test_a_damaged_or_newer_database_is_a_problem_with_its_fix(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_text("a diary, " * 1000)
    (damaged,) = database(tmp_path)
    assert damaged.level == "problem"
    assert damaged.detail.startswith(f"{tmp_path / FILE_NAME} is not a sound Keepwarm database")
    assert damaged.fix == "move it away or restore a copy of it, or choose another --data-dir"
    (tmp_path / FILE_NAME).unlink()
    shutil.copy(OLD, tmp_path / FILE_NAME)
    with closing(sqlite3.connect(tmp_path / FILE_NAME)) as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
        connection.commit()
    (newer,) = database(tmp_path)
    assert (newer.level, newer.fix) == ("problem", "update Keepwarm, or choose another --data-dir")
