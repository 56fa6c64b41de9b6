"""Everything Keepwarm remembers between starts: users, sessions, messages with their token ids, turns, settings.

The only package with queries; knows nothing of the engine and the web.
"""

from storage.errors import (
    DatabaseBusy,
    DatabaseDamaged,
    DatabaseFailed,
    DatabaseTooNew,
    DataDirectoryError,
    DiskFull,
    InvalidText,
    InvalidValue,
    MigrationFailed,
    StorageError,
    StoreClosed,
    UnknownMessage,
    UnknownSession,
)
from storage.inspection import SQLITE, DatabaseReport, inspect_database
from storage.records import (
    KEEP,
    CacheEventRecord,
    KeptSession,
    MessageRecord,
    ModelRecord,
    SessionRecord,
    SessionSummary,
    StoredPath,
    TraceRecord,
    TurnRecord,
    UserRecord,
)
from storage.saved import read_saved_settings
from storage.store import Store

__all__ = [
    "KEEP",
    "SQLITE",
    "CacheEventRecord",
    "DataDirectoryError",
    "DatabaseBusy",
    "DatabaseDamaged",
    "DatabaseFailed",
    "DatabaseReport",
    "DatabaseTooNew",
    "DiskFull",
    "InvalidText",
    "InvalidValue",
    "KeptSession",
    "MessageRecord",
    "MigrationFailed",
    "ModelRecord",
    "SessionRecord",
    "SessionSummary",
    "StorageError",
    "Store",
    "StoreClosed",
    "StoredPath",
    "TraceRecord",
    "TurnRecord",
    "UnknownMessage",
    "UnknownSession",
    "UserRecord",
    "inspect_database",
    "read_saved_settings",
]
