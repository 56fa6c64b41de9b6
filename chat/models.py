"""The models that people chat with: which there are, which one is meant, and each one's tokenizer and template.

Stands between the catalog in storage, which remembers them, and the engine, which serves them. Knows no session. A
model is loaded when somebody wants it; after a restart the engine serves only the default, the one it starts with.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from dataclasses import replace
from pathlib import Path

from chat.errors import (
    ChatError,
    InvalidRequest,
    ModelNotFound,
    ModelNotLoadable,
    ModelUnavailable,
    NotReady,
    UnusableModel,
    check_text,
)
from chat.model import LoadedModel
from chat.sampling import recommended
from chat.templates import ChatTemplate
from chat.thinking import Policy
from chat.views import ModelNotes, ModelView
from engine.client import EngineClient
from engine.errors import EngineUnavailable, ModelLoadError
from engine.protocol import Capabilities
from storage.records import ModelRecord
from storage.store import Store

DEFAULT = "default"  # what clients may call the model that the server started with, whichever it is


class Models:
    """The one owner of what is known of served models. Made and used on one event loop."""

    def __init__(self, engine: EngineClient, store: Store, thinking: Policy = "preserve") -> None:
        self._engine = engine
        self._store = store
        self._thinking = thinking
        self._reading = asyncio.Lock()
        self._read: dict[str, LoadedModel] = {}  # by catalog id
        self._default: tuple[str, ModelRecord] | None = None  # with its fingerprint
        self._problem = ""

    # --- the default ------------------------------------------------------------------------------------------------

    @property
    def problem(self) -> str:
        """Why the default model, though the engine serves it, cannot chat; "" when it can, or when there is none."""
        return self._problem if self._engine.state.phase == "ready" else ""

    @property
    def default_id(self) -> str | None:
        """The catalog's id of the default model; None before it was ready for the first time."""
        return self._default[1].id if self._default else None

    async def follow(self) -> None:
        """Read the default's files as soon as the engine is ready, so that no first message waits for them."""
        async for state in self._engine.watch():
            if state.phase == "ready":
                with contextlib.suppress(ChatError):  # told by `problem`, and to whoever sends a message
                    await self.get()

    # --- one model --------------------------------------------------------------------------------------------------

    async def get(self, model_id: str | None = None) -> LoadedModel:
        """The model of this id, loaded now if it has to be; None is the default.

        Raises NotReady while no engine serves, ModelNotFound, ModelUnavailable when it cannot be loaded, UnusableModel
        when it cannot chat.
        """
        capabilities = self._ready()
        default = await self._default_record(capabilities)
        if model_id is None or model_id == default.id:
            try:
                loaded = await self._files_of(default, capabilities)
            except UnusableModel as error:
                self._problem = error.message
                raise
            self._problem = ""
            return loaded
        if (known := self.known(model_id)) is not None:
            return known
        return await self._load(await self._record(model_id))

    async def named(self, name: str) -> LoadedModel:
        """The model that a client names. Raises as `get`."""
        await self._default_record(self._ready())  # its name is known from then on
        return await self.get(None if name == DEFAULT else (await self.view(name)).id)

    async def loaded(self, name: str) -> LoadedModel:
        """The model that a client names, loading no other. Raises ModelNotFound, and NotReady where it is away."""
        default = await self._default_record(self._ready())
        wanted = default.id if name == DEFAULT else (await self.view(name)).id
        if wanted == default.id:  # it is served, though its files may not have been read yet
            return await self.get()
        if (known := self.known(wanted)) is None:
            raise NotReady("The model is not loaded; the next message for it loads it.")
        return known

    def known(self, model_id: str | None) -> LoadedModel | None:
        """The model of this id if it is served and read already; None is the default's."""
        loaded = self._read.get(model_id or self.default_id or "")
        return loaded if loaded and self._engine.serves(loaded.capabilities.fingerprint) else None

    def notes(self, model_id: str | None) -> ModelNotes:
        """What a person should know of a model, as far as it is known already."""
        known = self.known(model_id)
        return known.template.notes if known else ModelNotes()

    async def add(self, source: str, adapter: str = "") -> LoadedModel:
        """Load a model by its folder, hub id or .gguf file, and remember it.

        Raises InvalidRequest, InvalidText, NotReady, ModelNotLoadable, UnusableModel.
        """
        source, adapter = (_place(check_text(text, "model").strip()) for text in (source, adapter))
        if not source or "\0" in source + adapter:
            raise InvalidRequest("Name a model: a folder, a .gguf file, or a hub id such as owner/name.", "model")
        self._ready()
        try:
            capabilities = await self._served("That model", source, adapter)
        except ModelUnavailable as error:
            raise ModelNotLoadable(error.message) from error
        record = await self._store.catalog.save_model(name=capabilities.model_name, source=source, adapter=adapter)
        self._read.pop(record.id, None)  # its tokenizer or template may be what was changed
        try:
            return await self._kept(record, capabilities)
        except UnusableModel:
            if record.used_at == record.created_at:  # new, and of no use to anybody
                await self._store.catalog.delete_model(record.id)
            raise

    async def forget(self, model_id: str) -> None:
        """Take it from the list.

        Raises ModelNotFound, and InvalidRequest for the default and for a model that chats are held with.
        """
        if model_id == self.default_id:
            raise InvalidRequest("The model that Keepwarm started with stays in the list while it runs.", "model")
        if chats := await self._store.catalog.chats_of_model(model_id):
            which = "1 chat is" if chats == 1 else f"{chats:,} chats are"
            raise InvalidRequest(
                f"{which} held with this model; choose another for them, or delete them, first.", "model"
            )
        if not await self._store.catalog.delete_model(model_id):
            raise ModelNotFound(model_id)
        self._read.pop(model_id, None)

    # --- all of them ------------------------------------------------------------------------------------------------

    async def views(self) -> list[ModelView]:
        """All models that were ever loaded, the default first, then the last used first."""
        records = await self._store.catalog.models()
        return [self._view(record) for record in sorted(records, key=lambda record: record.id != self.default_id)]

    async def view(self, name: str) -> ModelView:
        """The model of this name. Raises ModelNotFound."""
        views = await self.views()
        for view in views:
            if view.name == name or (view.default and name == DEFAULT):
                return view
        raise ModelNotFound(name, [view.name for view in views])

    # --- inside -----------------------------------------------------------------------------------------------------

    def _view(self, record: ModelRecord) -> ModelView:
        known = self.known(record.id)
        return ModelView(
            id=record.id,
            name=record.name,
            source=record.source,
            adapter=record.adapter,
            default=record.id == self.default_id,
            served=known is not None,
            context_length=known.capabilities.context_length if known else 0,
            device=known.capabilities.device if known else "",
            dtype=known.capabilities.dtype if known else "",
            weights=known.capabilities.weights if known else "",
            notes=self.notes(record.id),
        )

    def _ready(self) -> Capabilities:
        state = self._engine.state
        if state.phase != "ready" or state.capabilities is None:
            raise NotReady(not_ready_sentence(state.phase, state.stage, state.message))
        return state.capabilities

    async def _default_record(self, capabilities: Capabilities) -> ModelRecord:
        async with self._reading:
            if self._default is None or self._default[0] != capabilities.fingerprint:
                config = self._engine.config
                source, adapter = _place(config.model), _place(config.adapter or "")
                record = await self._store.catalog.save_model(
                    name=capabilities.model_name, source=source, adapter=adapter
                )
                self._default = (capabilities.fingerprint, record)
            return self._default[1]

    async def _record(self, model_id: str) -> ModelRecord:
        for record in await self._store.catalog.models():
            if record.id == model_id:
                return record
        raise ModelNotFound(model_id)

    async def _load(self, record: ModelRecord) -> LoadedModel:
        capabilities = await self._served(f"The model {record.name!r}", record.source, record.adapter)
        return await self._kept(record, capabilities)

    async def _kept(self, record: ModelRecord, capabilities: Capabilities) -> LoadedModel:
        """The model with its files. Raises ModelNotFound when it was forgotten while it was loaded."""
        loaded = await self._files_of(record, capabilities)
        if not await self._store.catalog.touch_model(record.id):
            self._read.pop(record.id, None)
            raise ModelNotFound(record.name)
        return loaded

    async def _served(self, what: str, source: str, adapter: str) -> Capabilities:
        try:
            config = self._engine.config
            return await self._engine.load(source, adapter or None, config.dtype, config.weights)
        except ModelLoadError as error:
            raise ModelUnavailable(f"{what} cannot be loaded: {error}.") from error
        except EngineUnavailable as error:
            raise NotReady(f"{error}.") from error

    async def _files_of(self, record: ModelRecord, capabilities: Capabilities) -> LoadedModel:
        """The model with its tokenizer and template, read beside the event loop where they are not yet."""
        async with self._reading:
            loaded = self._read.get(record.id)
            if loaded is None or not _same(loaded.capabilities, capabilities):
                template = await asyncio.to_thread(ChatTemplate.load, capabilities.model_path, self._thinking)
                sampling = recommended(capabilities.model_path, capabilities.model_name)
                loaded = LoadedModel(capabilities, template, sampling, record.id, record.name)
            self._read[record.id] = replace(loaded, capabilities=capabilities)
            return self._read[record.id]


def not_ready_sentence(phase: str, stage: str, message: str) -> str:
    """Why no reply can be written now, for people."""
    if phase == "loading":
        return f"The model is still loading{f' ({stage})' if stage else ''}; try again when it is ready."
    if phase == "restarting":
        return f"The engine is starting again{f' ({stage})' if stage else ''}; try again when it is ready."
    return message or f"The engine is {phase}."


def _place(source: str) -> str:
    """One spelling for a file or folder, however it is spelt; a hub id as it is."""
    try:
        path = Path(source).expanduser()
        return os.path.normpath(path.absolute()) if source and path.exists() else source
    except (OSError, ValueError, RuntimeError):  # no path at all, or nobody's home
        return source


def _same(one: Capabilities, other: Capabilities) -> bool:
    return (one.fingerprint, one.model_path) == (other.fingerprint, other.model_path)
