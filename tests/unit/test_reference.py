"""The reference of options and the help of `tfdist run`, which all come from one description."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer.main

from tfdist.cli import reference
from tfdist.cli.main import app
from tfdist.config.strategy_config import all_options

ROOT = Path(__file__).parents[2]
FROZEN = Path(__file__).parent / "frozen_options.txt"


def test_the_page_is_that_of_the_descriptions() -> None:
    stale = "write it again: python -m tfdist.cli.reference > docs/options.md"
    assert (ROOT / "docs/options.md").read_text() == reference.page(), stale


def shown(option: Any) -> str:
    """A flag of `tfdist run` with its default and its help; strategies' with their key."""
    default = option.default if option.show_default is True else option.show_default
    key = f" = {option.name}" if option.name in all_options() else ""
    panel = option.rich_help_panel or "Options"
    return f"{' '.join(option.opts)}{key} [{default or ''}] ({panel})\n    {option.help}\n"


def test_help_and_keys_are_frozen() -> None:
    """What users read and write. A change here is one for them, so the file is changed by hand."""
    command = typer.main.get_command(app).commands["run"]  # type: ignore[attr-defined]
    options = [each for each in command.params if each.param_type_name == "option"]
    found = sorted(shown(each) for each in options)
    assert "".join(found).splitlines() == FROZEN.read_text().splitlines()


def test_a_row_says_which_strategies_have_an_option() -> None:
    rows = {
        line.split(" | ")[1]: line.split(" | ")[4]
        for line in reference.page().splitlines()
        if line.startswith("| `")
    }
    assert rows["`ps`"] == "`parameter_server`"
    assert rows["`mode`"] == rows["`seed`"] == "all"
    assert rows["`period`"] == "`mirrored`, `multi_worker`, `horovod`"
    assert rows["`staleness`"] == "`mirrored`, `multi_worker`, `horovod`, `parameter_server`"
    assert rows["`lr_rule`"] == "`single`, `mirrored`, `multi_worker`, `horovod`, `pipeline`"
