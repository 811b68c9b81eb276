"""The table of `make mutants` fits the code: each text is there once, each test file exists."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from tests.mutants.table import MUTANTS, Mutant

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_has_its_place(mutant: Mutant) -> None:
    assert (ROOT / mutant.path).read_text().count(mutant.text) == 1
    assert mutant.text != mutant.instead
    files = [word for word in shlex.split(mutant.tests) if word.startswith("tests/")]
    assert files
    assert all((ROOT / file).exists() for file in files)
