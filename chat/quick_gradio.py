"""Gradio as `gr`, imported in half the time: without the type stubs for editors that it writes at every import.

It parses the source of each of its components for them, and its own folder may not even be writable. Whatever imports
Gradio itself before this module does, waits.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import spec_from_file_location
from types import ModuleType

WRITER, WRITE = "gradio.component_meta", "create_or_modify_pyi"


def no_stubs(*_: object) -> None:
    """What Gradio calls for each component instead."""


class _Loader(SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        setattr(module, WRITE, no_stubs)


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        found = PathFinder.find_spec(fullname, path) if fullname == WRITER else None
        if found is None or found.origin is None:
            return None
        return spec_from_file_location(fullname, found.origin, loader=_Loader(fullname, found.origin))


_finder = _Finder()
sys.meta_path.insert(0, _finder)
try:
    import gradio as gr
finally:
    sys.meta_path.remove(_finder)

__all__ = ["gr"]
