"""The engine's errors: short sentences for people, that name the value and the fix."""

from __future__ import annotations


class EngineError(Exception):
    """Base of all errors that the engine raises on purpose."""


class ModelLoadError(EngineError):
    """The model cannot be loaded or served; the message says which value is wrong and what to do."""


class StepError(EngineError):
    """A forward pass gave something that must not reach a person, such as logits that are not numbers."""


class EngineUnavailable(EngineError):  # noqa: N818 - a state, named as the field names it
    """The engine is loading, restarting or gone; the message says which."""
