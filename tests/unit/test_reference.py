"""The reference of options and the help of `tfdist run`, which all come from one description."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

from tfdist.cli import reference
from tfdist.cli.main import app
from tfdist.config.option import options_of
from tfdist.config.strategy_config import StrategyConfig, all_options
from tfdist.config.strategy_spec import spec_of, specs

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


def test_the_page_has_every_flag_of_every_command() -> None:
    found: dict[str, set[str]] = {}
    for section in re.split(r"^##+ ", reference.page(), flags=re.MULTILINE)[1:]:
        title, _, rows = section.partition("\n")
        name = re.search(r"`(tfdist.*)`", title)
        cells = (row.split(" | ")[0] for row in rows.splitlines() if row.startswith("| `"))
        flags = {flag for cell in cells for flag in re.findall(r"`(-[^`]*)`", cell)}
        found.setdefault(name[1] if name else "tfdist run", set()).update(flags)
    root = typer.main.get_command(app)
    commands = {f"tfdist {name}": each for name, each in root.commands.items()}  # type: ignore[attr-defined]
    for name, command in {"tfdist": root, **commands}.items():
        options = [each for each in command.params if each.param_type_name == "option"]
        flags = {flag for each in options for flag in (*each.opts, *each.secondary_opts)}
        assert found.get(name, set()) == flags, name


def test_rows_of_flags_have_their_value_and_default() -> None:
    rows = reference.page().splitlines()
    for row in (
        "| `--hosts` | a:2,b:2 |  | Start the processes on these machines by ssh, each with so "
        "many slots. |",
        "| `--grace` | a number of 0 or more | 5 | Seconds between TERM and KILL for the others of "
        "a failure. |",
        "| `--dry-run` |  | off | Print the plan, with --zero and --mesh the layouts. |",
        "| `--precision` | `float32`, `float16`, `int8`, `int8_static` | float32 | What an ONNX "
        "model computes in. |",
    ):
        assert row in rows


def helped(*words: str) -> str:
    """What `tfdist run --help` shows on a terminal of 80 columns."""
    shown = CliRunner().invoke(app, ["run", *words], env={"COLUMNS": "80", "NO_COLOR": "1"})
    assert shown.exit_code == 0, shown.output
    return shown.stdout


def flags_in(text: str) -> set[str]:
    """The flags that have a row of their own."""
    return set(re.findall(r"^│ (?:\* )?\s*(--[a-z-]+) ", text, re.MULTILINE))


@pytest.mark.parametrize("words", [("--help",), ("-h",), ("-n", "2", "--help")])
def test_the_help_is_one_page_and_names_the_others(words: tuple[str, ...]) -> None:
    text = helped(*words)
    assert len(text.splitlines()) <= 60
    assert {"--strategy", "--processes", "--on", "--hosts", "--dry-run"} < flags_in(text)
    assert "tfdist run --help STRATEGY" in text
    for name in specs():
        assert name in text


@pytest.mark.parametrize("name", specs())
def test_the_help_of_a_strategy_has_its_options(name: str) -> None:
    spec, general = spec_of(name), options_of(StrategyConfig)
    of_it = [each for each in all_options() if each in general or spec.has_option(each)]
    flags = {max(all_options()[each].flags, key=len) for each in of_it}
    assert flags_in(helped("--help", name)) == flags | {"--help"}


def test_the_help_of_a_strategy_has_its_modes_alone() -> None:
    for name, modes in (("parameter_server", "sync, async, stale"), ("pipeline", "sync")):
        text = " ".join(helped("--help", name).replace("│", " ").split())
        assert f"When a gradient becomes an update: {modes}. " in text
    assert "an update: sync, stale, local, async. " in " ".join(
        helped("--help").replace("│", " ").split()
    )


def test_all_of_the_help_has_every_flag() -> None:
    command = typer.main.get_command(app).commands["run"]  # type: ignore[attr-defined]
    options = [each for each in command.params if each.param_type_name == "option"]
    flags = {max(each.opts, key=len) for each in options}
    assert flags_in(helped("--help", "all")) == flags | {"--help"}


def test_a_page_that_is_not_there() -> None:
    done = CliRunner().invoke(app, ["run", "--help", "pipelin"])
    assert done.exit_code == 2
    assert "--help 'pipelin' names no page of the help. Give a strategy (single, " in done.stderr


def test_a_row_says_which_strategies_have_an_option() -> None:
    rows = {
        line.split(" | ")[1]: line.split(" | ")[4]
        for line in reference.page().partition("## Flags of")[0].splitlines()
        if line.startswith("| `")
    }
    assert rows["`ps`"] == "`parameter_server`"
    assert rows["`communication`"] == "`multi_worker`"
    assert rows["`mode`"] == rows["`seed`"] == "all"
    assert rows["`period`"] == "`mirrored`, `multi_worker`, `horovod`"
    assert rows["`staleness`"] == "`mirrored`, `multi_worker`, `horovod`, `parameter_server`"
    assert rows["`lr_rule`"] == "`single`, `mirrored`, `multi_worker`, `horovod`, `pipeline`"
