"""The table of `make mutants` fits the code: each text is there once, each test file exists."""

from __future__ import annotations

import ast
import shlex
from pathlib import Path

import pytest

from tests.mutants.table import MUTANTS, Mutant

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_has_its_place(mutant: Mutant) -> None:
    text = (ROOT / mutant.path).read_text()
    assert text.count(mutant.text) == 1
    if mutant.path.endswith(".py"):  # A test that cannot import the module notices nothing.
        ast.parse(text.replace(mutant.text, mutant.instead))
    assert mutant.text != mutant.instead
    files = [word for word in shlex.split(mutant.tests) if word.startswith("tests/")]
    assert files
    assert all((ROOT / file).exists() for file in files)
