"""The models that were loaded once, and the queries about them.

`Catalog` belongs to a `Store`, which lends it its threads; each query takes an open transaction.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

from sqlalchemy import delete, func, select, update
from sqlalchemy.orm import Session

from storage.models import ModelRow, SessionRow
from storage.records import ModelRecord, new_id
from storage.threads import Threads

_MODEL = [ModelRow.__table__.c[name] for name in ModelRecord.__dataclass_fields__]


class Catalog:
    """The models; every method may raise a StorageError."""

    def __init__(self, threads: Threads, clock: Callable[[], float]) -> None:
        self._threads = threads
        self._clock = clock

    async def save_model(self, *, name: str, source: str, adapter: str = "") -> ModelRecord:
        """The model of this source and adapter, made now if it is new; `name` gets a number where it is taken."""
        now = self._clock()
        return await self._threads.write(lambda db: save_model(db, name, source, adapter, now))

    async def models(self) -> list[ModelRecord]:
        """All models that were loaded once, the last used first."""
        return await self._threads.read(list_models)

    async def touch_model(self, model_id: str) -> bool:
        """Note that a model is used now; False when there is no such model."""
        now = self._clock()
        return await self._threads.write(lambda db: touch_model(db, model_id, now))

    async def chats_of_model(self, model_id: str) -> int:
        """How many chats of the page are held with a model."""
        return await self._threads.read(lambda db: chats_of(db, model_id))

    async def delete_model(self, model_id: str) -> bool:
        """Forget a model; its sessions then have none. False when there is no such model."""
        return await self._threads.write(lambda db: delete_model(db, model_id))


def save_model(db: Session, name: str, source: str, adapter: str, now: float) -> ModelRecord:
    """The model of this source and adapter, used `now`; a new one gets `name`, with a number where that is taken."""
    statement = select(ModelRow).where(ModelRow.source == source, ModelRow.adapter == adapter)
    row = db.scalar(statement)
    if row is None:
        row = ModelRow(
            id=new_id(), name=_free_name(db, name), source=source, adapter=adapter, created_at=now, used_at=now
        )
        db.add(row)
    row.used_at = now
    db.flush()
    return ModelRecord(**{name: getattr(row, name) for name in ModelRecord.__dataclass_fields__})


def list_models(db: Session) -> list[ModelRecord]:
    """All of them, the last used first."""
    statement = select(*_MODEL).order_by(ModelRow.used_at.desc(), ModelRow.id)
    return [ModelRecord(**row._mapping) for row in db.execute(statement)]


def touch_model(db: Session, model_id: str, now: float) -> bool:
    """Note that it is used `now`; False when there is none."""
    statement = update(ModelRow).where(ModelRow.id == model_id).values(used_at=now)
    return db.execute(statement).rowcount > 0  # type: ignore[attr-defined,no-any-return]


def chats_of(db: Session, model_id: str) -> int:
    """How many sessions of people, not of API clients, are held with it."""
    statement = select(func.count()).where(SessionRow.model_id == model_id, SessionRow.origin == "chat")
    return db.scalar(statement) or 0


def delete_model(db: Session, model_id: str) -> bool:
    """Forget it; its sessions then have none. False when there is none."""
    return db.execute(delete(ModelRow).where(ModelRow.id == model_id)).rowcount > 0  # type: ignore[attr-defined,no-any-return]


def _free_name(db: Session, name: str) -> str:
    taken = set(db.scalars(select(ModelRow.name)))
    if name not in taken:
        return name
    return next(numbered for number in count(2) if (numbered := f"{name} ({number})") not in taken)
