"""The configuration of a training: the options of all strategies and those of the chosen one."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import msgspec

from tfdist.cluster.environments.base import Roles
from tfdist.config.option import About, Option, Options, Positive, Seconds, options_of
from tfdist.config.server_options import ServerOptions
from tfdist.config.strategy_spec import Refusal, StrategySpec, having, spec_of, specs
from tfdist.config.update_options import Mode, UpdateOptions
from tfdist.errors import ConfigError
from tfdist.utils.validation import check_choice

__all__ = ["MODES", "STRATEGIES", "StrategyConfig", "accepted", "all_options"]

#: Every strategy with its devices, in the order in which they grow.
STRATEGIES: dict[str, str] = {name: spec.summary for name, spec in specs().items()}

#: The update modes of each strategy.
MODES: dict[str, tuple[str, ...]] = {name: spec.modes for name, spec in specs().items()}

_Kind = TypeVar("_Kind", bound=Options)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StrategyConfig(Options):
    """The configuration of a training. `StrategyConfig.of` makes it of options by name.

    Attributes:
        parts: the options of the strategy, one value of each class in its `StrategySpec`; those
            left out have their defaults.

    Raises:
        ConfigError: for a value of another type or out of bounds, or options that conflict.
    """

    strategy: Annotated[
        str,
        About(
            f"auto, {', '.join(STRATEGIES)}, or a TOML file of options.",
            shown="auto",
            example='"multi_worker"',
            flags=("--strategy", "-s"),
            metavar="NAME|FILE",
        ),
    ]
    processes: Annotated[
        Positive,
        About(
            "Processes; workers of parameter_server; stages of pipeline; devices of mirrored's one "
            "process.",
            shown="",
            flags=("-n", "--processes"),
        ),
    ] = 1
    devices: Annotated[
        Positive | None, About("GPUs of each process, or CPU devices where there are no GPUs.")
    ] = None
    seed: Annotated[
        Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)] | None,
        About("Seed of all processes.", shown="drawn"),
    ] = None
    start_timeout: Annotated[
        Seconds,
        About(
            "Seconds until all processes must have joined.", why="It is in seconds.", example="60.0"
        ),
    ] = 60.0
    parts: tuple[Options, ...] = ()

    @classmethod
    def of(cls, **options: object) -> StrategyConfig:
        """Makes the configuration of options by name, of all strategies and of the chosen one.

        Raises:
            ConfigError: for an unknown option, one that the strategy does not have, or as the
                constructor.
        """
        values = {name: accepted(name, value) for name, value in options.items()}
        spec = spec_of(values.get("strategy", "auto"))
        own = options_of(cls)
        of_strategy = {name: value for name, value in values.items() if name not in own}
        _check_mode(spec, values.get("mode", UpdateOptions.mode))
        _refuse_foreign(spec, of_strategy)
        parts = [
            kind(**{name: value for name, value in values.items() if name in options_of(kind)})
            for kind in spec.options
        ]
        return cls(parts=tuple(parts), **{name: values[name] for name in own if name in values})

    @property
    def mode(self) -> Mode:
        """The update mode."""
        return self.part(UpdateOptions).mode

    @property
    def roles(self) -> Roles:
        """The roles of a scheduler's ranks: with servers, the first is chief, the last are ps."""
        chief = spec_of(self.strategy).chief_runs_script
        return Roles(chief=chief, ps=self.counts.get("ps", 0))

    @property
    def counts(self) -> dict[str, int]:
        """The number of tasks of each type, in the order of their ranks."""
        spec = spec_of(self.strategy)
        if spec.has_servers:
            return {"chief": 1, "worker": self.processes, "ps": self.part(ServerOptions).ps}
        if spec.has_stages:
            return {"chief": 1, "worker": self.processes - 1}
        return {"worker": self.processes if spec.is_clustered else 1}

    def find(self, kind: type[_Kind]) -> _Kind | None:
        """The strategy's options of a class; None if it has none of them."""
        return next((part for part in self.parts if isinstance(part, kind)), None)

    def part(self, kind: type[_Kind]) -> _Kind:
        """The strategy's options of a class, with their defaults if it has none of them."""
        return self.find(kind) or kind()

    def values(self) -> dict[str, Any]:
        """All options by name."""
        holders: tuple[Options, ...] = (self, *self.parts)
        return {name: getattr(each, name) for each in holders for name in options_of(type(each))}

    def value(self, name: str) -> Any:
        """An option's value; the default of one that the strategy does not have."""
        return self.values().get(name, all_options()[name].default)

    def replaced(self, **changes: object) -> StrategyConfig:
        """The configuration with other values for some options, by name."""
        return StrategyConfig.of(**{**self.values(), **changes})

    def check(self) -> None:
        """Refuses options that conflict; see `Options.check`."""
        spec = spec_of(self.strategy)
        foreign = [type(part).__name__ for part in self.parts if type(part) not in spec.options]
        if foreign:
            raise ConfigError(f"strategy={spec.name!r} has no {foreign[0]}.")
        parts = tuple(self.part(kind) for kind in spec.options)
        object.__setattr__(self, "parts", parts)
        _check_mode(spec, self.mode)
        _refuse_foreign(
            spec, {name: getattr(part, name) for part in parts for name in options_of(type(part))}
        )
        if self.processes > 1 and not spec.is_clustered:
            raise ConfigError(
                f"processes={self.processes} conflicts with strategy={spec.name!r}, which runs "
                "in one process. Choose strategy='multi_worker', or leave processes out."
            )
        spec.check(self)

    def to_json(self) -> str:
        """The configuration as JSON text, for the tasks of a job."""
        return json.dumps(self.values(), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> StrategyConfig:
        """Reads a text of `to_json`.

        Raises:
            ConfigError: if the text is not a configuration.
        """
        try:
            return cls.of(**json.loads(text))
        except (TypeError, json.JSONDecodeError, ConfigError) as error:
            raise ConfigError(
                f"TFDIST_CONFIG={text!r} is not a configuration written by this version of tfdist "
                f"({error}). Unset it; `tfdist run` sets it for its tasks."
            ) from error


@functools.cache
def all_options() -> Mapping[str, Option]:
    """The options of all strategies and of each one, by name, in the order of the help.

    Raises:
        ConfigError: if two strategies describe an option of one name in two ways.
    """
    options = dict(options_of(StrategyConfig))
    last = {name: options.pop(name) for name in ("seed", "start_timeout")}
    for spec in specs().values():
        for kind in spec.options:
            for name, option in options_of(kind).items():
                if options.setdefault(name, option) != option:
                    raise ConfigError(
                        f"{kind.__name__} of strategy {spec.name!r} describes the option {name!r} "
                        "in another way than another strategy. Give it another name."
                    )
    return {**options, **last}


def accepted(name: str, value: object) -> Any:
    """A value as the option of a name takes it, apart from all other options.

    Raises:
        ConfigError: for an unknown name, or a value of another type or out of bounds.
    """
    check_choice("option", name, all_options())
    return all_options()[name].accept(value)


def _check_mode(spec: StrategySpec, mode: str) -> None:
    if mode not in spec.modes:
        raise ConfigError(
            f"mode={mode!r} does not go with strategy={spec.name!r}, which has "
            f"{', '.join(spec.modes)}. Strategies with that mode: "
            f"{', '.join(having(lambda other: mode in other.modes))}."
        )


def _refuse_foreign(spec: StrategySpec, options: Mapping[str, object]) -> None:
    """Refuses options that a strategy does not have.

    Those of its own classes of options may have their defaults, which they have if nothing is set.
    """
    for name, value in options.items():
        own = name in spec.option_names
        if value is None or (own and value == all_options()[name].default):
            continue
        refusal = next((each for each in spec.refuses if name in each.names), None)
        if refusal is None and own:
            continue
        refusal = refusal or _refusal_of_foreign(name)
        raise ConfigError(
            f"{name}={value!r} conflicts with strategy={spec.name!r}{refusal.why} "
            f"Choose strategy={refusal.instead!r}, or leave {name} out."
        )


def _refusal_of_foreign(name: str) -> Refusal:
    """The refusal of an option by a strategy that has none of its class."""
    owner, kind = next(
        (spec, kind)
        for spec in specs().values()
        for kind in spec.options
        if name in options_of(kind)
    )
    return Refusal(names=(name,), instead=owner.name, why=kind.lacking)
