"""The queries about settings saved in the app, and a way to read them before the store is open."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from sqlalchemy import delete, select
from sqlalchemy.dialects.sqlite import insert
from sqlalchemy.orm import Session

from storage.database import FILE_NAME, connect
from storage.errors import typed_errors
from storage.models import SettingRow


def saved_settings(db: Session) -> dict[str, str]:
    """Every saved setting, by key."""
    return {row.key: row.value for row in db.execute(select(SettingRow.key, SettingRow.value).order_by(SettingRow.key))}


def save_setting(db: Session, key: str, value: str) -> None:
    """Set one, replacing an older value."""
    statement = insert(SettingRow).values(key=key, value=value)
    db.execute(statement.on_conflict_do_update(index_elements=[SettingRow.key], set_={"value": value}))


def forget_setting(db: Session, key: str) -> bool:
    """Remove one; False when it was not saved."""
    return db.execute(delete(SettingRow).where(SettingRow.key == key).returning(SettingRow.key)).first() is not None


def read_saved_settings(data_dir: Path) -> dict[str, str]:
    """The settings saved in the database of `data_dir`, read without opening a store; {} where there are none yet.

    Changes no row, runs no migration, makes no file. Raises DatabaseDamaged or DatabaseBusy.
    """
    path = data_dir.absolute() / FILE_NAME
    if not path.is_file():
        return {}
    with typed_errors(path), closing(connect(path, read_only=True)) as connection:
        if connection.execute("SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = 'settings'").fetchone():
            return dict(connection.execute("SELECT key, value FROM settings ORDER BY key"))
    return {}
