"""`--help` and the README say every setting, and what the README names is there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer

import app
from chat.doctor_questions import FIRST_TOKEN_HIGH_S, FLAT, PER_TOKEN_HIGH_S, TPOT, TTFT
from chat.figures import PATH, REMEMBERED
from chat.settings import Settings, flag, variable

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
ABSENT = {
    "data_dir": "see Data and privacy",
    "config": "see above",
    "adapter": "none",
    "context": "the model's own",
    "device_kv": "two full contexts, at least 256 MiB",
    "host_kv": "a part of what is free",
    "disk_kv": "a part of what is free",
    "device_low": "5 points less",
    "host_low": "10 points less",
    "disk_low": "10 points less",
    "disk_writes": "`100GB`",
}


def table_row(name: str) -> str:
    """The README's line for a setting."""
    field = Settings.model_fields[name]
    default = ABSENT.get(name) or f"`{str(field.default).lower()}`"
    key = "" if name == "config" else f"`{name}`"
    return f"| `{flag(name)}` | `{variable(name)}` | {key} | {default} | {field.description} |"


@pytest.mark.parametrize("name", Settings.model_fields)
def test_the_readme_has_every_setting(name: str) -> None:
    assert table_row(name) in README.splitlines()


def test_the_readme_has_no_setting_that_is_gone() -> None:
    assert set(re.findall(r"KEEPWARM_[A-Z_]+", README)) == {variable(name) for name in Settings.model_fields}


def test_help_has_every_setting() -> None:
    shown = subprocess.run(
        [sys.executable, "app.py", "--help"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    words = " ".join(shown.split())
    assert "doctor Say what is wrong, and what to do about it." in words
    for name, field in Settings.model_fields.items():
        assert f"{flag(name)} " in words
        assert " ".join(str(field.description).split()) in words


def test_every_make_target_is_in_the_readme() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    phony = re.search(r"^\.PHONY: (.+)$", makefile, re.MULTILINE)
    assert phony
    assert set(re.findall(r"^\| `make ([\w-]+)` \|", README, re.MULTILINE)) == set(phony[1].split())


def test_what_the_readme_shows_is_there() -> None:
    tree = README.split("## What is where")[1].split("```")[1]
    folder, absent = ROOT, []
    for indent, names in re.findall(r"^( *)(\S+(?:, \S+)*)  ", tree, re.MULTILINE):
        if not indent:
            folder = ROOT / names if names.endswith("/") else ROOT
        parent = folder if indent else ROOT
        absent += [name for name in names.split(", ") if not list(parent.glob(name.rstrip("/")))]
    assert folder != ROOT
    assert absent == []
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_both_locks_agree_and_hold_nothing_that_only_one_machine_has() -> None:
    pins = {}
    for name in ("requirements.lock", "requirements-dev.lock"):
        text = (ROOT / name).read_text(encoding="utf-8")
        lines = [line.split("#")[0].strip() for line in text.splitlines()]
        pins[name] = {line for line in lines if line}
        assert all(re.fullmatch(r"[a-z0-9.-]+==[^ +]+( ; .+)?", line) for line in pins[name])
        assert not re.search(r"^(nvidia|cuda|triton)", text, re.MULTILINE)
        assert "://" not in text
    assert pins["requirements.lock"] < pins["requirements-dev.lock"]


def test_what_the_readme_says_of_the_doctor_is_so() -> None:
    section = README.split("## When something is wrong\n")[1].split("\n## ")[0]
    command = typer.main.get_command(app.cli).commands["doctor"]  # type: ignore[attr-defined]
    known = {word for parameter in command.params for word in parameter.opts}
    assert set(re.findall(r"--[a-z]+(?:-[a-z]+)*", section)) <= known
    assert {"--size", "--context", "--sessions", "--url", "--load", "--json"} <= known
    for words in (
        f"the median is over {FIRST_TOKEN_HIGH_S:g} second",
        f"the median is over {PER_TOKEN_HIGH_S:g} seconds",
        f"less than {FLAT:g} times",
        f"the last {REMEMBERED} replies",
        TTFT,
        TPOT,
    ):
        assert words in section
    assert f"`GET {PATH}`" in README
