"""Every sabotage can be made: its text is in its file, once, and its tests are there."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.mutants.__main__ import MUTANTS, ROOT
from tests.mutants.mutants import Mutant


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_sabotage_has_a_place(mutant: Mutant) -> None:
    text = (ROOT / mutant.file).read_text(encoding="utf-8")
    assert text.count(mutant.old) == 1
    assert mutant.new != mutant.old
    assert all((ROOT / test.partition("::")[0]).exists() for test in mutant.tests)


def test_no_two_have_one_name() -> None:
    assert [name for name, count in Counter(mutant.name for mutant in MUTANTS).items() if count > 1] == []
