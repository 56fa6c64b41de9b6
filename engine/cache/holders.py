"""Which session holds what on disk, one small file each: deletion and recency survive a restart."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import threading
from pathlib import Path

import msgspec

from engine.cache.block_file import writing
from engine.cache.files import (
    TEMPORARY,
    files_below,
    is_of_the_file,
    opening,
    private_folder,
    remove,
    require_writable,
    sync_folder,
)
from engine.cache.records import read_record, write_record

log = logging.getLogger(__name__)

SUFFIX = ".msgpack"


class SessionRecord(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One session: when it was last used (Unix time), and by fingerprint the keys of its blocks on disk."""

    session_id: str
    used_at: float
    keys: dict[bytes, list[bytes]] = {}


class HolderFiles:
    """`root/sessions/<digest of the session's id>.msgpack`, so that no id becomes a path.

    A session lives as long as its record is there: what the headers of blocks say of others counts for nothing, and
    so nothing brings a deleted one back. One owner at a time; any of its threads may call. `damaged` counts the records
    removed because they could not be read. Raises `DiskUnusable` at the start; later errors are of one session each.
    """

    def __init__(self, root: Path) -> None:
        self.damaged = 0
        self._root, self._folder = root, root / "sessions"
        self._removed: set[str] = set()  # names of damaged records: their sessions live
        self._lock = threading.Lock()  # so that nothing brings back what was deleted meanwhile
        with opening(root):
            private_folder(self._folder)
            require_writable(self._folder)
            for entry in files_below(self._folder):
                if entry.name.startswith(TEMPORARY):
                    remove(Path(entry.path))

    def save(self, record: SessionRecord) -> None:
        """Replace what is known of a session. Raises `DiskFull` or `BlockWriteFailed`; then nothing has changed."""
        with self._lock:
            self._save(record)

    def introduce(self, session_id: str) -> None:
        """Note that a session is there, if nothing is known of it. Raises what `save` raises."""
        path = self._path(session_id)
        with self._lock, writing(path):
            if not path.exists():
                self._save(SessionRecord(session_id=session_id, used_at=0.0))

    def _save(self, record: SessionRecord) -> None:
        path = self._path(record.session_id)
        with writing(path):
            if not self._folder.is_dir():  # a person may remove all of it at any time
                self._root.mkdir(mode=0o700, exist_ok=True)
                private_folder(self._folder)
            write_record(path, record)

    def lives(self, session_id: str) -> bool:
        """Whether a record of it is there, or was and had to be removed because it was damaged."""
        with self._lock:
            return _name(session_id) in self._removed or os.path.lexists(self._path(session_id))

    def touch(self, session_id: str, used_at: float) -> bool:
        """Note a use; False where nothing is known of the session. Raises what `save` raises."""
        path = self._path(session_id)
        with self._lock, writing(path):
            try:
                record = _checked(path)
            except FileNotFoundError:
                return False
            except ValueError as error:
                self._discard(path, error)
                return False
            write_record(path, msgspec.structs.replace(record, used_at=used_at))
            return True

    def delete(self, session_id: str) -> None:
        """Forget a session, safe from a loss of power; missing is fine. Raises `BlockWriteFailed` when it is not."""
        path = self._path(session_id)
        with self._lock, writing(path, "delete"):
            self._removed.discard(path.name)
            remove(path)
            with contextlib.suppress(FileNotFoundError):
                sync_folder(self._folder)

    def load_all(self) -> list[SessionRecord]:
        """Every session's record; damaged ones are removed, and only headers name their blocks. Does not raise."""
        found = []
        with self._lock:
            for path in sorted(self._folder.glob(f"*{SUFFIX}")):
                try:
                    found.append(_checked(path))
                except ValueError as error:
                    self._discard(path, error)
                except OSError as error:
                    log.warning("a session is left out: %s", error)
        return found

    def _discard(self, path: Path, error: Exception) -> None:
        log.warning("the record %s is removed: %s", path.name, error)
        self.damaged += 1
        self._removed.add(path.name)
        try:
            remove(path)
        except OSError as failed:
            log.error("%s", failed)

    def _path(self, session_id: str) -> Path:
        return self._folder / _name(session_id)


def _checked(path: Path) -> SessionRecord:
    """The record in a file. `ValueError` for what is not of the session that the file's name stands for."""
    try:
        record = read_record(path, SessionRecord)
    except OSError as error:
        if is_of_the_file(error):
            raise ValueError(f"{path.name} cannot be read ({error.strerror})") from error
        raise
    if path.name != _name(record.session_id):
        raise ValueError(f"{path.name} is the record of another session")
    return record


def _name(session_id: str) -> str:
    return hashlib.blake2b(session_id.encode(), digest_size=16, person=b"keepwarm-session").hexdigest() + SUFFIX
