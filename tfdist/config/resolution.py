"""Makes one configuration of flags, a strategy file and the environment.

A flag wins over the file, and the file's value is then shown as overridden. Of the environment only
TF_CONFIG and schedulers matter, which set the number of tasks: another number in a flag or a file
is an error.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from tfdist import environment
from tfdist.cluster.environments import detection
from tfdist.cluster.environments.base import ProcessContext
from tfdist.cluster.tf_config import own_tf_config
from tfdist.cluster.validation.structure import read
from tfdist.config.strategy_config import StrategyConfig, accepted, all_options
from tfdist.config.strategy_file import StrategyFile
from tfdist.config.strategy_spec import spec_of
from tfdist.errors import ConfigError

__all__ = ["Resolved", "resolve"]


@dataclasses.dataclass(frozen=True)
class Resolved:
    """A configuration and where each of its options came from.

    Attributes:
        config: the configuration; its strategy is never `"auto"`.
        reasons: for each option that was set or chosen, where or why.
        overridden: the values of the strategy file in whose place flags have set others.
        left_out: the values of the file that belong to another mode than that of a flag.
    """

    config: StrategyConfig
    reasons: Mapping[str, str]
    overridden: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    left_out: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def as_set(self, name: str) -> str:
        """An option as it was set: `-n 3`, or `processes=2 of strategies/stale.toml`."""
        source, value = self.reasons[name], self.config.value(name)
        return f"{source} {value}" if source.startswith("-") else f"{name}={value!r} of {source}"


def resolve(
    flags: Mapping[str, object],
    file: StrategyFile | None = None,
    environ: Mapping[str, str] | None = None,
    gpus: int = 0,
    *,
    on_this_machine: bool = False,
) -> Resolved:
    """Puts flags, a strategy file and the environment together. A flag wins over the file.

    Args:
        flags: options by name as the command line or the caller gave them; None means not given.
        file: a strategy file.
        environ: environment variables; by default the process's own.
        gpus: number of GPUs that this machine has.
        on_this_machine: whether all tasks run here, on strategies of tfdist's, so that what is
            installed here is there for all.

    Raises:
        ConfigError: for an unknown option, a conflict, or a value of a wrong type or out of range.
            If there is a file, the message begins with it.
    """
    chosen = {name: accepted(name, value) for name, value in flags.items() if value is not None}
    written: Mapping[str, Any] = {} if file is None else file.values
    left_out = _of_another_mode(written, chosen)
    written = {name: value for name, value in written.items() if name not in left_out}
    values: dict[str, Any] = {**written, **chosen}
    reasons = {name: str(file.path) for name in written} if file is not None else {}
    reasons |= {name: _flag(name) for name in chosen}
    overridden = {n: value for n, value in written.items() if n in chosen and chosen[n] != value}
    if values.get("strategy", "auto") == "auto":
        by_ring = on_this_machine and not gpus and _goes_by_ring(values)
        values["strategy"], reasons["strategy"] = _choose(values, environ, gpus, by_ring=by_ring)
    try:
        return Resolved(StrategyConfig.of(**values), reasons, overridden, left_out)
    except ConfigError as error:
        if file is None:
            raise
        others = f" with {', '.join(map(_flag, chosen))}" if chosen else ""
        raise ConfigError(f"{file.path}{others}: {error}") from error


def _of_another_mode(written: Mapping[str, Any], chosen: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a file that are of no use in the mode that a flag sets."""
    if "mode" not in chosen:
        return {}
    options, of_use = all_options(), (None, chosen["mode"])
    left = written.keys() - chosen.keys()
    return {n: v for n, v in written.items() if n in left and options[n].about.mode not in of_use}


def _flag(name: str) -> str:
    return all_options()[name].flags[0]


def _goes_by_ring(values: Mapping[str, Any]) -> bool:
    """Whether Horovod is built here, and has all options that were set."""
    try:
        config = StrategyConfig.of(**{**values, "strategy": "horovod"})
    except ConfigError:
        return False
    return spec_of(config.strategy).missing() is None


def _choose(
    values: Mapping[str, Any], environ: Mapping[str, str] | None, gpus: int, *, by_ring: bool
) -> tuple[str, str]:
    """The strategy that `auto` picks, and why."""
    text = own_tf_config(environ)
    if text and read(text).of_type("ps"):
        return "parameter_server", "auto: TF_CONFIG lists parameter servers"
    if text:
        return "multi_worker", "auto: TF_CONFIG is set"
    if environment.read("HOROVOD_RANK", environ):
        return "horovod", "auto: horovodrun has started this process"
    if environment.read("TFDIST_LAUNCHED", environ) is None:
        assignment = detection.detect(ProcessContext(environ=environment.merged({}, environ)))
        if assignment.size > 1:
            return "multi_worker", f"auto: {assignment.counted} by {assignment.environment}"
    if "ps" in values:
        return "parameter_server", "auto: parameter servers were asked for"
    if values.get("processes", 1) > 1:
        asked = f"auto: {values['processes']} processes were asked for"
        if by_ring:
            return "horovod", f"{asked}, on CPUs, and Horovod is built"
        return "multi_worker", asked
    if values.get("devices", 1) > 1:
        return "mirrored", f"auto: {values['devices']} devices were asked for"
    if gpus > 1:
        return "mirrored", f"auto: this machine has {gpus} GPUs"
    return "single", f"auto: no TF_CONFIG and {gpus or 'no'} GPU{'s' if gpus != 1 else ''}"
