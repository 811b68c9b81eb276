"""The reference of all options: `python -m tfdist.cli.reference > docs/options.md`."""

from __future__ import annotations

from collections.abc import Iterator

from tfdist.config.option import Option
from tfdist.config.strategy_config import all_options
from tfdist.config.strategy_spec import having

__all__ = ["page"]

_HEAD = """# Options of strategies

Each option is a flag of `tfdist run`, a key of a [strategy file](../strategies/README.md) and an
argument of `tfdist.strategy`. A flag wins over the file; the table at the start says so.
`tfdist run --help STRATEGY` shows the options of one strategy, `tfdist run --help` the flags that
are used most, and `tfdist run --help all` all of them.

`python -m tfdist.cli.reference > docs/options.md` writes this page from the descriptions in
`tfdist/config/`.
"""

#: The heading of options that the help shows before all panels.
_FIRST = "All or several strategies"


def page() -> str:
    """The page, in Markdown."""
    panels: dict[str, list[Option]] = {}
    for option in all_options().values():
        panels.setdefault(option.about.panel or _FIRST, []).append(option)
    return "\n".join([_HEAD, *(line for item in panels.items() for line in _section(*item))])


def _section(panel: str, options: list[Option]) -> Iterator[str]:
    yield f"## {panel}\n"
    yield "| flag | key | value | default | strategies | meaning |"
    yield "|---|---|---|---|---|---|"
    for option in options:
        cells = (
            ", ".join(f"`{flag}`" for flag in option.flags),
            f"`{option.name}`",
            ", ".join(f"`{choice}`" for choice in option.choices)
            or option.allowed.removesuffix(" in quotes"),
            option.shown or ("off" if option.kind is bool else ""),
            _strategies(option.name),
            option.about.help,
        )
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
    yield ""


def _strategies(name: str) -> str:
    """The strategies that have an option; "all" if each does."""
    every = having(lambda spec: True)
    names = having(lambda spec: spec.has_option(name))
    return ", ".join(f"`{each}`" for each in names) if 0 < len(names) < len(every) else "all"


if __name__ == "__main__":
    print(page(), end="")
