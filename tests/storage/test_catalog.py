"""Models that were loaded once, and the sessions that chat with them."""

from __future__ import annotations

import pytest

from storage import Store
from storage.errors import UnknownModel
from tests.storage.conftest import Clock


async def test_a_model_is_one_by_what_was_named(store: Store, clock: Clock) -> None:
    first = await store.catalog.save_model(name="tiny", source="/models/tiny")
    clock.now += 1
    again = await store.catalog.save_model(name="tiny", source="/models/tiny")
    assert (again.id, again.name, again.created_at) == (first.id, "tiny", first.created_at)
    assert again.used_at > first.used_at
    clock.now += 1
    adapted = await store.catalog.save_model(name="tiny+x", source="/models/tiny", adapter="/adapters/x")
    assert [model.id for model in await store.catalog.models()] == [adapted.id, first.id]


async def test_two_models_of_one_name_are_told_apart(store: Store) -> None:
    names = [
        (await store.catalog.save_model(name="tiny", source=source)).name for source in ("/a/tiny", "/b/tiny", "c/tiny")
    ]
    assert names == ["tiny", "tiny (2)", "tiny (3)"]
    assert (await store.catalog.save_model(name="tiny", source="/b/tiny")).name == "tiny (2)"


async def test_the_model_used_last_comes_first(store: Store, clock: Clock) -> None:
    one = await store.catalog.save_model(name="one", source="one")
    clock.now += 1
    two = await store.catalog.save_model(name="two", source="two")
    assert [model.name for model in await store.catalog.models()] == ["two", "one"]
    clock.now += 1
    await store.catalog.touch_model(one.id)
    assert [model.name for model in await store.catalog.models()] == ["one", "two"]
    assert two in await store.catalog.models()


async def test_a_session_remembers_its_model_until_that_is_forgotten(store: Store) -> None:
    user = await store.implicit_admin()
    model = await store.catalog.save_model(name="tiny", source="/models/tiny")
    session = await store.create_session(user.id)
    assert session.model_id is None
    changed = await store.update_session(user.id, session.id, model_id=model.id)
    assert changed is not None
    assert changed.model_id == model.id
    other = await store.create_session(user.id, model_id=model.id)
    assert await store.catalog.delete_model(model.id)
    assert not await store.catalog.delete_model(model.id)
    for session_id in (session.id, other.id):
        record = await store.session(user.id, session_id)
        assert record is not None
        assert record.model_id is None


async def test_a_session_takes_a_title_and_a_model_where_it_has_none(store: Store) -> None:
    user = await store.implicit_admin()
    one, two = [(await store.catalog.save_model(name=name, source=name)).id for name in ("one", "two")]
    for given, kept in (
        (("", None), ("first", one)),
        (("mine", None), ("mine", one)),
        (("", two), ("first", two)),
        (("mine", two), ("mine", two)),
    ):
        session = await store.create_session(user.id, title=given[0], model_id=given[1])
        await store.settle_session(session.id, title="first", model_id=one)
        record = await store.session(user.id, session.id)
        assert record is not None
        assert (record.title, record.model_id, record.updated_at) == (*kept, session.updated_at)
    session = await store.create_session(user.id)
    await store.settle_session(session.id, title="first", model_id="forgotten")
    record = await store.session(user.id, session.id)
    assert record is not None
    assert (record.title, record.model_id) == ("first", None)


async def test_a_model_that_is_not_there_is_named(store: Store) -> None:
    user = await store.implicit_admin()
    session = await store.create_session(user.id)
    with pytest.raises(UnknownModel, match="'gone'"):
        await store.create_session(user.id, model_id="gone")
    with pytest.raises(UnknownModel, match="'gone'"):
        await store.update_session(user.id, session.id, model_id="gone", title="changed")
    assert [(each.id, each.title) for each in await store.sessions(user.id)] == [(session.id, "")]
    assert not await store.catalog.touch_model("gone")
