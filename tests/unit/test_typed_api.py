"""Type checkers see the names and options of tfdist, and refuse others."""

from __future__ import annotations

import os
import subprocess
import sys
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest

import tfdist
from tfdist.config.option import Option
from tfdist.config.strategy_config import all_options
from tfdist.config.strategy_keywords import StrategyKeywords

ROOT = Path(__file__).parents[2]

#: Lines of a program, each with the code of the error that mypy gives it, or what it reveals.
PROGRAM = {
    'strategy = tfdist.strategy("mirrored", devices=2, mode="local", seed=None or 3)': "",
    "reveal_type(strategy)": "tfdist.strategies.base.StrategyMixin",
    "reveal_type(strategy.num_replicas_in_sync)": '"int"',
    "strategy.gather([], axis=0)": "",
    "tfdist.stratgy()": "[attr-defined]",
    'tfdist.strategy("mirrored", devcies=2)': "[call-arg]",
    'tfdist.strategy("mirrored", devices="2")': "[arg-type]",
    'tfdist.strategy(mode="synk")': "[arg-type]",
    "error: tfdist.ConfigError": "",
    "tfdist.place, tfdist.plan_placement, tfdist.export, tfdist.estimator.Estimator": "",
    'tfdist.Mirrored(["CPU:0"]), tfdist.Single(), tfdist.Pipeline(["CPU:0"])': "",
}


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """What mypy says of each line of the program."""
    program = tmp_path_factory.mktemp("typed") / "program.py"
    program.write_text("\n".join(["import tfdist", *PROGRAM]))
    command = (sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"))
    done = subprocess.run(
        (*command, "--follow-imports=silent", str(program)),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    found: dict[int, str] = {}
    for line in done.stdout.splitlines():
        place, _, message = line.partition(": ")
        number = place.rpartition(":")[2]
        if number.isdecimal():
            found[int(number)] = found.get(int(number), "") + message
    assert found, done.stdout + done.stderr
    return found


@pytest.mark.parametrize("line", PROGRAM)
def test_a_line_of_a_program(said: dict[int, str], line: str) -> None:
    told = said.get(2 + list(PROGRAM).index(line), "")
    if PROGRAM[line]:
        assert PROGRAM[line] in told
    else:
        assert told == ""


#: The tables that Python takes besides the text of a flag.
TABLES = {
    "mesh": str | Mapping[str, int],
    "layouts": str | Mapping[str, str | Sequence[str | None]],
}


def typed(option: Option) -> Any:
    if option.about.separator:
        return TABLES[option.name]
    if option.choices:
        return Literal[option.choices]
    return str | os.PathLike[str] if option.name == "timeline" else option.kind


def test_the_keywords_are_the_options() -> None:
    expected = {name: typed(option) for name, option in all_options().items()}
    del expected["strategy"]
    assert typing.get_type_hints(StrategyKeywords) == expected


def test_names_for_type_checkers_are_the_public_ones() -> None:
    source = (ROOT / "tfdist/__init__.py").read_text()
    imports = source.partition("if TYPE_CHECKING:")[2].partition("else:")[0]
    names = {
        name.strip()
        for line in imports.splitlines()
        for name in line.partition(" import ")[2].split(",")
        if name
    }
    assert names == set(tfdist.__all__)
