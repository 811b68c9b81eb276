"""Descriptions of strategies for the rest of tfdist, one for each, without TensorFlow.

A strategy is a package with a `spec.py`. The command line, the planner, the doctor and the checks
of options read the specs; nothing else compares names of strategies. Other packages add strategies
by an entry point of the group `tfdist.strategies` that names a `StrategySpec`.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from typing import Any, Literal

from tfdist.cluster.spec import ClusterUse, Topology
from tfdist.config.gradient_options import OF_EXCHANGE, GradientOptions
from tfdist.config.option import Option, Options, options_of
from tfdist.errors import ConfigError
from tfdist.utils.validation import check_choice

__all__ = ["NO_EXCHANGE", "Refusal", "StrategySpec", "having", "resolve_path", "spec_of", "specs"]

#: The strategies of tfdist, in the order in which they grow. A new one is one line.
_BUILT_IN = (
    "tfdist.strategies.single.spec:SPEC",
    "tfdist.strategies.mirrored.spec:SPEC",
    "tfdist.strategies.multi_worker.spec:SPEC",
    "tfdist.strategies.horovod.spec:SPEC",
    "tfdist.strategies.parameter_server.spec:SPEC",
    "tfdist.strategies.pipeline.spec:SPEC",
)

#: The group of entry points by which other packages add strategies.
ENTRY_POINTS = "tfdist.strategies"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Refusal:
    """Options that a strategy does not have, though they are of a class of options that it has.

    Attributes:
        names: the options.
        instead: a strategy that has them.
        why: the end of a sentence about the strategy, such as ", whose weights are on one device."
    """

    names: tuple[str, ...]
    instead: str
    why: str


#: The options that strategies without an exchange of gradients do not have.
NO_EXCHANGE = Refusal(
    names=OF_EXCHANGE,
    instead="multi_worker",
    why=", whose replicas exchange no gradients.",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StrategySpec:
    """One strategy.

    Attributes:
        name: the value of `--strategy`.
        summary: the devices it runs on, in a few words.
        create: the import path, `"module:function"`, of the function that makes the strategy of a
            `StrategyConfig`, and of this task if it has joined its cluster already, or None.
        topology: the tasks that it runs on.
        modes: its update modes.
        options: its options besides those of all strategies, in classes of them. Flags, keys of
            strategy files and arguments of `tfdist.strategy` follow from them.
        refuses: options of these classes that it does not have.
        check: raises a ConfigError for a `StrategyConfig` that conflicts with itself.
        exchanges_gradients: whether replicas exchange gradients by collectives.
        one_device: whether each process has one device, whatever the value of `devices`.
        processes_are_devices: whether `-n` counts the devices of its one process.
        verified_by: whether `tfdist verify` gives it several processes or several devices; None if
            it cannot compare what they observe.
        draws_timelines: whether it writes timelines, and pictures of them, by itself.
        tensorflow_connects: whether its tasks meet when TensorFlow starts, so that the strategy
            must be made before any other TensorFlow operation.
        describe: gives rows of the start table by name, of a `StrategyConfig`; None for the update
            mode alone.
        problem: the import path of a function that returns why the strategy cannot run on this
            machine, or None if it can; None if it can run on every machine.
        started_elsewhere: the import path of a function that returns whether another launcher than
            tfdist has started this process, as one of several; None if there is no such launcher.
    """

    name: str
    summary: str
    create: str
    topology: Topology = Topology.ONE_PROCESS
    modes: tuple[str, ...] = ("sync",)
    options: tuple[type[Options], ...] = (GradientOptions,)
    refuses: Sequence[Refusal] = ()
    check: Callable[[Any], None] = lambda config: None
    exchanges_gradients: bool = False
    one_device: bool = False
    processes_are_devices: bool = False
    verified_by: Literal["processes", "devices"] | None = None
    draws_timelines: bool = False
    tensorflow_connects: bool = False
    describe: Callable[[Any], Mapping[str, str]] | None = None
    problem: str | None = None
    started_elsewhere: str | None = None

    @property
    def option_names(self) -> frozenset[str]:
        """The names of its options besides those of all strategies."""
        return frozenset(name for kind in self.options for name in options_of(kind))

    def has_option(self, name: str) -> bool:
        """Whether an option is among its own, of one of its modes, and is not refused."""
        known = {name: option for kind in self.options for name, option in options_of(kind).items()}
        refused = any(name in each.names for each in self.refuses)
        return not refused and name in known and known[name].about.mode in (None, *self.modes)

    def help_of(self, option: Option) -> str:
        """The help text of an option, with its own update modes instead of all."""
        if option.name != "mode":
            return option.about.help
        return option.about.help.replace(", ".join(option.choices), ", ".join(self.modes))

    @property
    def use(self) -> ClusterUse:
        """The use that it makes of a cluster."""
        return ClusterUse(
            strategy=self.name,
            topology=self.topology,
            tensorflow_connects=self.tensorflow_connects,
        )

    @property
    def has_servers(self) -> bool:
        """Whether its weights are on tasks of type ps."""
        return self.topology is Topology.SERVERS

    @property
    def has_stages(self) -> bool:
        """Whether its tasks compute parts of the model instead of replicas."""
        return self.topology is Topology.STAGES

    @property
    def chief_runs_script(self) -> bool:
        """Whether the chief alone runs the script, and the other tasks serve it."""
        return self.has_servers or self.has_stages

    @property
    def is_clustered(self) -> bool:
        """Whether it runs on a cluster of tasks."""
        return self.topology is not Topology.ONE_PROCESS

    def missing(self) -> str | None:
        """The reason why the strategy cannot run on this machine; None if there is none."""
        return None if self.problem is None else resolve_path(self.problem)()

    def is_started_elsewhere(self, environ: Mapping[str, str] | None = None) -> bool:
        """Whether another launcher than tfdist has started this process."""
        path = self.started_elsewhere
        return path is not None and bool(resolve_path(path)(environ))


@functools.cache
def specs() -> Mapping[str, StrategySpec]:
    """All strategies by name, tfdist's own first."""
    loaded = [resolve_path(path) for path in _BUILT_IN]
    loaded += [each.load() for each in metadata.entry_points(group=ENTRY_POINTS)]
    return {spec.name: spec for spec in loaded}


def spec_of(name: str) -> StrategySpec:
    """The description of a strategy.

    Raises:
        ConfigError: if there is no strategy of that name.
    """
    check_choice("strategy", name, ("auto", *specs()))
    if name == "auto":
        raise ConfigError("strategy='auto' stands for no strategy until it has been resolved.")
    return specs()[name]


def having(trait: Callable[[StrategySpec], object]) -> list[str]:
    """The names of the strategies that have a trait."""
    return [name for name, spec in specs().items() if trait(spec)]


def resolve_path(path: str) -> Any:
    """The object at an import path `"module:name"`."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)
