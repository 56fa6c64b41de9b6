"""`python -m tests.mutants [words]`: apply each sabotage to a copy of the tree; its tests must turn red.

Only those whose name contains all the words run. Exits 1 when one survives, is not applicable (its text is not there
exactly once) or breaks the tests instead of failing them, or when the tests are red without it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.mutants import copies, mutants, speculation, speed, tiers
from tests.mutants.mutants import Mutant

MUTANTS = (*mutants.MUTANTS, *tiers.MUTANTS, *copies.MUTANTS, *speculation.MUTANTS, *speed.MUTANTS)
ROOT = Path(__file__).resolve().parent.parent.parent
LEFT_OUT = (".git", ".venv", ".cache", "__pycache__", ".*_cache", ".hypothesis", "*.egg-info", "node_modules")
PASSED, FAILED = 0, 1  # pytest's exit codes; others mean that it could not run the tests
SECONDS = 600


def main(words: list[str]) -> int:
    """Run the chosen mutants and print a table; the exit code."""
    chosen = [mutant for mutant in MUTANTS if all(word in mutant.name for word in words)]
    if not chosen:
        print(f"no mutant's name contains {' '.join(words)}")
        return 1
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(*LEFT_OUT))
        if (ROOT / ".cache").is_dir():
            (tree / ".cache").symlink_to(ROOT / ".cache")  # converted weights
        for tests in dict.fromkeys(mutant.tests for mutant in chosen):
            if run(tree, tests) != PASSED:
                print(f"{' '.join(tests)} is red without any mutant")
                return 1
        survivors = [mutant.name for mutant in chosen if not killed(tree, mutant)]
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} mutants were killed")
    return 1 if survivors else 0


def killed(tree: Path, mutant: Mutant) -> bool:
    """Whether the tests notice; prints a line of the table."""
    path = tree / mutant.file
    text = path.read_text(encoding="utf-8")
    started = time.monotonic()
    found = text.count(mutant.old)
    if found == 1:
        path.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
        code = run(tree, mutant.tests)
        path.write_text(text, encoding="utf-8")
        outcome = {PASSED: "SURVIVED", FAILED: "killed"}.get(code, f"BROKEN (pytest ended with {code})")
    else:
        outcome = f"NOT APPLIED (its text is there {found} times)"
    print(f"{outcome:10} {time.monotonic() - started:5.1f} s  {mutant.file:26} {mutant.name}", flush=True)
    return outcome == "killed"


def run(tree: Path, tests: tuple[str, ...]) -> int:
    """pytest's exit code; a run that hangs counts as failed."""
    # a sabotaged file has its old size and may have its old time: stale bytecode must not stand in for it
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(tree)}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    try:
        return subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, timeout=SECONDS, check=False
        ).returncode
    except subprocess.TimeoutExpired:
        return FAILED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
