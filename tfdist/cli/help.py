"""`tfdist run --help`: one page, the options of one strategy, or all options."""

from __future__ import annotations

import copy
from typing import Any, TypeVar

from typer.core import TyperCommand, TyperOption

from tfdist.config.option import options_of
from tfdist.config.strategy_config import StrategyConfig, all_options
from tfdist.config.strategy_spec import StrategySpec, spec_of, specs
from tfdist.errors import ConfigError

__all__ = ["HelpByTopic"]

#: The parameters on the page of `--help` alone.
_FIRST = {
    *("script", "args", "module", "strategy", "processes", "devices", "mode", "max_restarts"),
    *("log_dir", "dry_run", "hosts", "hostfile", "on"),
}

_FLAGS = ("-h", "--help")
_ALL = "all"

#: The key of the page in the context of a call.
_TOPIC = "tfdist.help"


_Parameter = TypeVar("_Parameter")


class HelpByTopic(TyperCommand):
    """A command that takes the options of all strategies, with its help in pages.

    `--help` shows the options that are used most, `--help STRATEGY` those of one strategy, and
    `--help all` all. `--help` takes a word only at the beginning of the command line.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Takes the page from the command line.

        Raises:
            ConfigError: if there is no such page.
        """
        if len(args) > 1 and args[0] in _FLAGS:
            flag, topic, *_ = args
            if topic not in (*specs(), _ALL) and not ctx.resilient_parsing:  # A shell completes.
                raise ConfigError(
                    f"{flag} {topic!r} names no page of the help. Give a strategy "
                    f"({', '.join(specs())}), or {_ALL}, or {flag} alone."
                )
            ctx.meta[_TOPIC] = topic
            args = [flag]
        return super().parse_args(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Writes the page that was asked for."""
        topic = ctx.meta.get(_TOPIC)
        page = self if topic == _ALL else self._first_page() if topic is None else self._of(topic)
        super(HelpByTopic, page).format_help(ctx, formatter)

    def _first_page(self) -> HelpByTopic:
        first, *others = str(self.help).split("\n\n")
        page = copy.copy(self)
        page.help = "\n\n".join([first, *(text for text in others if text.startswith("Example"))])
        page.params = [each for each in self.params if each.name in _FIRST]
        page.epilog = (
            f"The options of a strategy: `{_run('STRATEGY')}`, with {', '.join(specs())}.\n\n"
            f"All options, also of engines, ssh and elastic jobs: `{_run(_ALL)}`."
        )
        return page

    def _of(self, strategy: str) -> HelpByTopic:
        spec = spec_of(strategy)
        names = {"script", "args", *options_of(StrategyConfig)}
        page = copy.copy(self)
        page.help = (
            f"Run SCRIPT with `--strategy {strategy}`: {spec.summary}.\n\n"
            f"Its update modes (`--mode`): {', '.join(spec.modes)}."
        )
        page.params = [
            _described(each, spec)
            for each in self.params
            if each.name in names or spec.has_option(str(each.name))
        ]
        page.epilog = f"All options, also of engines, ssh and elastic jobs: `{_run(_ALL)}`."
        return page


def _described(parameter: _Parameter, spec: StrategySpec) -> _Parameter:
    """A parameter with the help text that a strategy's option has."""
    own = copy.copy(parameter)
    if isinstance(own, TyperOption) and own.name in all_options():
        own.help = spec.help_of(all_options()[own.name])
    return own


def _run(topic: str) -> str:
    return f"tfdist run --help {topic}"
