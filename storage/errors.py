"""The errors that storage raises, each short, typed and with the value and the fix in its text.

This is also the one place where errors of sqlite3 and SQLAlchemy become ours. It knows no query and no table.
"""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy.exc import DBAPIError

ROOM = 64 * 1024  # bytes that the files beside the database need at least


class StorageError(Exception):
    """Anything that storage refuses or cannot do; the text is meant for a person."""


class StoreClosed(StorageError):  # noqa: N818 - a state, said as people say it
    """A call after `Store.close`."""

    def __init__(self) -> None:
        super().__init__("the store is closed")


class DataDirectoryError(StorageError):
    """The data directory cannot be made or used."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"cannot use the data directory {path}: {reason}; choose another with --data-dir")
        self.path = path


class DatabaseDamaged(StorageError):  # noqa: N818
    """The file is not a Keepwarm database or SQLite cannot read it. It is left as it is."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(
            f"{path} is not a sound Keepwarm database ({reason}); it was left untouched: "
            "move it away or restore a copy of it, or choose another --data-dir"
        )
        self.path = path


class DatabaseTooNew(StorageError):  # noqa: N818
    """A newer program version wrote the file."""

    def __init__(self, path: Path, found: str, known: str) -> None:
        super().__init__(
            f"{path} is at revision {found}, but this program knows revisions only up to {known}; "
            "update Keepwarm, or choose another --data-dir"
        )
        self.path, self.found, self.known = path, found, known


class MigrationFailed(StorageError):  # noqa: N818
    """An upgrade of the database was rolled back; the file is as it was before."""

    def __init__(self, path: Path, found: str, known: str, reason: str) -> None:
        super().__init__(f"{path} could not be upgraded from revision {found} to {known}: {reason}; nothing changed")
        self.path, self.found, self.known = path, found, known


class DatabaseBusy(StorageError):  # noqa: N818
    """Another process held the write lock for longer than the busy timeout."""

    def __init__(self, path: Path) -> None:
        super().__init__(f"{path} is locked by another process; close that one and try again")
        self.path = path


class DiskFull(StorageError):  # noqa: N818
    """There is no room left to write; nothing of the refused call was stored."""

    def __init__(self, path: Path) -> None:
        super().__init__(f"the disk that holds {path} is full; nothing was stored: make room and try again")
        self.path = path


class DatabaseFailed(StorageError):  # noqa: N818
    """Any other failure of SQLite or the file system below it."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = path


class UnknownSession(StorageError):  # noqa: N818
    """No session has this id (it may have been deleted meanwhile)."""

    def __init__(self, session_id: str) -> None:
        super().__init__(f"no session {session_id!r}; it may have been deleted")
        self.session_id = session_id


class UnknownMessage(StorageError):  # noqa: N818
    """No message of that session has this id."""

    def __init__(self, message_id: str, session_id: str | None = None) -> None:
        where = f" in session {session_id!r}" if session_id else ""
        super().__init__(f"no message {message_id!r}{where}; it may have been deleted")
        self.message_id = message_id


class UnknownModel(StorageError):  # noqa: N818
    """No model has this id."""

    def __init__(self, model_id: str) -> None:
        super().__init__(f"no model {model_id!r}; it may have been forgotten")
        self.model_id = model_id


class InvalidText(StorageError):  # noqa: N818
    """A text with a lone surrogate: it has no UTF-8 form, so no file, tokenizer or page could hold it."""

    def __init__(self, code: int, position: int) -> None:
        super().__init__(f"the text holds the lone surrogate U+{code:04X} at character {position}; remove it")
        self.position = position


class InvalidValue(StorageError):  # noqa: N818
    """A value that a column does not allow, such as an unknown role."""


@contextmanager
def typed_errors(path: Path) -> Iterator[None]:
    """Turn what sqlite3 and SQLAlchemy raise about the database at `path` into the errors above."""
    try:
        yield
    except UnicodeEncodeError as error:
        raise InvalidText(ord(error.object[error.start]), error.start) from None
    except DBAPIError as error:
        raise _typed(error.orig, path) from error
    except sqlite3.Error as error:
        raise _typed(error, path) from error


def _typed(error: BaseException | None, path: Path) -> StorageError:
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return DatabaseDamaged(path, str(error))
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return DatabaseBusy(path)
    if code == sqlite3.SQLITE_FULL or (code == sqlite3.SQLITE_IOERR and _has_no_room(path)):
        return DiskFull(path)
    if code == sqlite3.SQLITE_CONSTRAINT:
        return InvalidValue(f"refused by the database: {error}")
    return DatabaseFailed(path, str(error))


def _has_no_room(path: Path) -> bool:
    """Whether the disk is full: SQLite tells that of its main file, and of those beside it only that writing failed."""
    try:
        return shutil.disk_usage(path.parent).free < ROOM
    except OSError:
        return False
