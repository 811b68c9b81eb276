"""The reference of all options: `python -m tfdist.cli.reference > docs/options.md`."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer.main
from typer.core import TyperGroup, TyperOption

from tfdist.cli.main import app
from tfdist.config.option import Option
from tfdist.config.strategy_config import all_options
from tfdist.config.strategy_spec import having

__all__ = ["page"]

_HEAD = """# Options

Each option of a strategy is a flag of `tfdist run`, a key of a
[strategy file](../strategies/README.md) and an argument of `tfdist.strategy`. A flag wins over the
file; the table at the start says so. After them come the
[flags of `tfdist run` alone](#flags-of-tfdist-run-alone) and those of the
[other commands](#other-commands).
`tfdist run --help STRATEGY` shows the options of one strategy, `tfdist run --help` the flags that
are used most, and `tfdist run --help all` all of them.

`python -m tfdist.cli.reference > docs/options.md` writes this page from the descriptions in
`tfdist/config/` and from the commands.
"""

#: The heading of options that the help shows before all panels.
_FIRST = "All or several strategies"

#: Values of flags by their types.
_KINDS: dict[Any, str] = {int: "a whole number", float: "a number", Path: "a path"}


def page() -> str:
    """The page, in Markdown."""
    panels: dict[str, list[Option]] = {}
    for option in all_options().values():
        panels.setdefault(option.about.panel or _FIRST, []).append(option)
    root = typer.main.get_command(app)
    assert isinstance(root, TyperGroup)
    run = {each.name: each for each in root.commands["run"].params if isinstance(each, TyperOption)}
    lines = [_HEAD]
    for panel, options in panels.items():
        lines += [f"## {panel}\n", *_of_strategies(options, run)]
    alone = [each for name, each in run.items() if name not in all_options()]
    lines += ["## Flags of `tfdist run` alone\n", *_flags(alone), "## Other commands\n"]
    others = {f"tfdist {name}": each for name, each in root.commands.items() if name != "run"}
    for name, command in {"tfdist": root, **others}.items():
        flags = [each for each in command.params if isinstance(each, TyperOption)]
        lines += [f"### `{name}`\n", *_flags(flags)] if flags else []
    return "\n".join(lines)


def _of_strategies(options: list[Option], flags: Mapping[str, TyperOption]) -> Iterator[str]:
    yield _row("flag", "key", "value", "default", "strategies", "meaning")
    yield "|---|---|---|---|---|---|"
    for option in options:
        yield _row(
            _names(flags[option.name]),
            f"`{option.name}`",
            ", ".join(f"`{choice}`" for choice in option.choices)
            or option.allowed.removesuffix(" in quotes"),
            option.shown or ("off" if option.kind is bool else ""),
            _strategies(option.name),
            option.about.help,
        )
    yield ""


def _flags(flags: Sequence[TyperOption]) -> Iterator[str]:
    """The flags of a command, in the parts of its help."""
    panels: dict[str, list[TyperOption]] = {}
    for flag in flags:
        panels.setdefault(flag.rich_help_panel or "", []).append(flag)
    for panel, its in sorted(panels.items(), key=lambda item: item[0] != ""):
        if panel:
            yield f"{panel}:\n"
        yield _row("flag", "value", "default", "meaning")
        yield "|---|---|---|---|"
        for flag in its:
            yield _row(_names(flag), _value(flag), _default(flag), flag.help or "")
        yield ""


def _row(*cells: str) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _names(flag: TyperOption) -> str:
    return ", ".join(f"`{each}`" for each in (*flag.opts, *flag.secondary_opts))


def _value(flag: TyperOption) -> str:
    """The values that a flag takes; nothing if it takes none."""
    kind = flag.type_descriptor.annotation
    if flag.is_flag or flag.metavar:
        return "" if flag.is_flag else str(flag.metavar)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return ", ".join(f"`{each.value}`" for each in kind)
    least = "" if flag.min is None else f" of {flag.min:g} or more"
    return _KINDS.get(kind, "text") + least


def _default(flag: TyperOption) -> str:
    """The value of a flag that is not given, as the help shows it."""
    if isinstance(flag.show_default, str):
        return flag.show_default
    default: Any = flag.default.value if isinstance(flag.default, enum.Enum) else flag.default
    if flag.is_flag:
        return "on" if default else "off"
    if isinstance(default, float):
        return f"{default:g}"
    return "" if default is None else str(default)


def _strategies(name: str) -> str:
    """The strategies that have an option; "all" if each does."""
    every = having(lambda spec: True)
    names = having(lambda spec: spec.has_option(name))
    return ", ".join(f"`{each}`" for each in names) if 0 < len(names) < len(every) else "all"


if __name__ == "__main__":
    print(page(), end="")
