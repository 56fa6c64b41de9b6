"""Imports go one way, and the engine runs where neither gradio nor sqlalchemy is installed."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
WEB = {"gradio", "fastapi", "starlette", "uvicorn", "pydantic_settings", "typer"}
DATABASE = {"sqlalchemy", "alembic", "sqlite3"}

# Where it is forbidden (a package or module, in whole) -> what may not be imported there.
FORBIDDEN = {
    "engine": {"app", "chat", "storage", "tests"} | WEB | DATABASE,
    "storage": {"app", "chat", "engine", "tests", "torch", "transformers"} | WEB,
    "chat": {"app", "tests", "torch"} | DATABASE,
    "app": {"tests", "torch", "transformers"} | DATABASE,
    "engine.cache": {"transformers", "engine.model", "engine.loop", "engine.client"},
}
MAY_USE_TORCH = {f"engine.cache.{name}" for name in ("copies", "host", "image", "pool", "segments")}
ON_TOP_OF_TORCH = {
    f"engine.cache.{name}"
    for name in ("cold_laws", "disk_tier", "holdings", "outlook", "residency", "restores", "saver", "tiers")
}

BLOCKED = """
import importlib, sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked!r}:
            raise ImportError(f"{{name}} is blocked by this test")
sys.meta_path.insert(0, Blocker())
for name in {modules!r}:
    importlib.import_module(name)
print(sorted(name for name in {watched!r} if name in sys.modules))
"""


def module_name(path: Path) -> str:
    """`engine/cache/pool.py` is `engine.cache.pool`, and a package is called by its folder."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def modules(package: str) -> dict[str, Path]:
    """Every module of a package, or the one module of that name."""
    folder = ROOT / package.replace(".", "/")
    paths = sorted(folder.rglob("*.py")) if folder.is_dir() else [folder.with_suffix(".py")]
    return {module_name(path): path for path in paths}


def imports(path: Path) -> Iterator[str]:
    """Every module that a file imports anywhere in it, spelt in full, names imported from packages included."""
    package = module_name(path).split(".") if path.name == "__init__.py" else module_name(path).split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*base, *filter(None, [node.module])])
            yield source
            yield from (f"{source}.{alias.name}" for alias in node.names)


def covers(forbidden: str, imported: str) -> bool:
    return imported == forbidden or imported.startswith(f"{forbidden}.")


def run_blocked(names: list[str], blocked: set[str], watched: set[str]) -> str:
    script = BLOCKED.format(blocked=blocked, modules=names, watched=watched)
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("package", FORBIDDEN)
def test_imports_go_one_way(package: str) -> None:
    found = modules(package)
    assert found
    wrong = {
        f"{name} imports {imported}"
        for name, path in found.items()
        for imported in imports(path)
        for forbidden in FORBIDDEN[package]
        if covers(forbidden, imported)
    }
    assert wrong == set()


def test_the_cache_is_without_torch_but_for_its_pool() -> None:
    users = {name for name, path in modules("engine.cache").items() if any(covers("torch", i) for i in imports(path))}
    assert users == MAY_USE_TORCH


def test_gradio_is_imported_only_where_that_is_quick() -> None:
    """Whoever came first otherwise would have Gradio write its type stubs, which takes seconds."""
    files = {**modules("app"), **modules("chat"), **modules("tests")}
    users = {name for name, path in files.items() if any(covers("gradio", imported) for imported in imports(path))}
    assert users == {"chat.quick_gradio"}


def test_the_scan_sees_every_kind_of_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.test_structure.ROOT", tmp_path)
    file = tmp_path / "engine" / "cache" / "x.py"
    file.parent.mkdir(parents=True)
    file.write_text("import a.b\nfrom c import d\nfrom . import e\nfrom ..f import g\ndef h():\n    import i\n")
    assert set(imports(file)) == {
        "a.b", "c", "c.d", "engine.cache", "engine.cache.e", "engine.f", "engine.f.g", "i",
    }  # fmt: skip


def test_the_engine_needs_neither_web_nor_database() -> None:
    names = [name for name in modules("engine") if name != "engine.__main__"]
    assert run_blocked(names, WEB | {"sqlalchemy", "alembic"}, {"torch", "transformers"}) == "['torch', 'transformers']"


def test_the_engines_client_side_needs_no_torch() -> None:
    names = ["engine.client", "engine.config", "engine.protocol"]
    assert run_blocked(names, {"torch", "transformers"}, {"torch"}) == "[]"


def test_the_cache_is_testable_without_torch() -> None:
    names = [name for name in modules("engine.cache") if name not in MAY_USE_TORCH | ON_TOP_OF_TORCH]
    assert run_blocked(names, {"torch", "transformers"}, {"torch"}) == "[]"


def test_the_command_line_answers_before_anything_heavy_is_imported() -> None:
    heavy = {"torch", "transformers", "gradio", "sqlalchemy", "fastapi"}
    assert run_blocked(["app"], heavy, heavy) == "[]"
