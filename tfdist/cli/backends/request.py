"""The request to an engine: the same command in each task, and how many tasks there are."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping
from typing import Any

import typer

from tfdist.cli.request import Request
from tfdist.config.resolution import Resolved
from tfdist.errors import ConfigError

__all__ = ["EngineOptions", "Order", "counts_of", "words_of"]

#: Options that are about the launch itself, so that they do not go to the tasks.
_OF_THE_LAUNCH = {
    *("on", "engine_args", "gpus_per_task", "image", "namespace", "job_name", "manifest"),
    *("detach", "dry_run", "hosts", "hostfile", "ssh_args", "remote_python", "environment"),
    *("processes", "ps", "log_dir", "max_restarts", "script", "args"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """The options of `tfdist run` that only engines have.

    Attributes:
        engine_args: further arguments of the engine's command, as on a command line.
        gpus_per_task: GPUs that the engine gives each task that trains; None leaves them out.
        image: the container image of Kubernetes and Compose.
        namespace: Kubernetes' namespace, or None for that of its context.
        job_name: the job's name; None takes the script's name.
        manifest: which manifest of Kubernetes: `"plain"`, `"tfjob"`, or `"compose"`.
        detach: leave the job running and return, instead of staying until its end.
    """

    engine_args: str | None = None
    gpus_per_task: int | None = None
    image: str | None = None
    namespace: str | None = None
    job_name: str | None = None
    manifest: str = "plain"
    detach: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Order:
    """A job for an engine.

    Attributes:
        request: the request of the command line.
        resolved: the strategy's configuration.
        words: the options of the tasks' `tfdist run` as they were given, without those of the
            launch, of the number of tasks, and without the script.
        counts: how many tasks there are of each type, in the order of their ranks.
        options: the engine's options.
        grace: seconds between TERM and KILL when the job is stopped.
        dry_run: print the plan, and do nothing.
    """

    request: Request
    resolved: Resolved
    words: tuple[str, ...]
    counts: Mapping[str, int]
    options: EngineOptions
    grace: float
    dry_run: bool = False

    @property
    def tasks(self) -> int:
        """The number of all tasks."""
        return sum(self.counts.values())

    def engine_arguments(self) -> tuple[str, ...]:
        """The words of `--engine-args`.

        Raises:
            ConfigError: if a quote is left open.
        """
        return _split(self.options.engine_args or "")

    def command(self, engine: str, *options: str) -> tuple[str, ...]:
        """The words after `tfdist` of each task: `run --environment ENGINE … SCRIPT ARGS`.

        A strategy that "auto" has chosen here is passed on: a task would choose by the devices that
        it sees.

        Args:
            engine: the environment that the tasks believe.
            options: further options of `tfdist run`.
        """
        sizes = ["--ps", str(self.counts["ps"])] if "ps" in self.counts else []
        if "processes" in self.resolved.overridden:
            # The tasks read the file too, and would miss the flag that wins over it.
            sizes += ["--processes", str(self.resolved.config.processes)]
        auto = self.request.strategy in (None, "auto")
        strategy = ["--strategy", self.resolved.config.strategy] if auto else []
        return (
            *("run", "--environment", engine, *self.words, *strategy, *sizes, *options),
            *(self.request.script, *self.request.args),
        )


def _split(text: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise ConfigError(
            f"--engine-args {text!r} cannot be split into words: {error}. Write it as on a command "
            "line, such as '--partition=long --time=60'."
        ) from None


def words_of(context: typer.Context) -> tuple[str, ...]:
    """The options that stand on a command line, written again, but for those of the launch."""
    words: list[str] = []
    for parameter in context.command.params:
        name = str(parameter.name)
        source = context.get_parameter_source(name)
        if source is None or source.name != "COMMANDLINE" or name in _OF_THE_LAUNCH:
            continue
        words += _written(parameter, context.params[name])
    return tuple(words)


def _written(option: Any, value: Any) -> list[str]:
    flag = max(option.opts, key=len)
    if option.is_flag:
        return [flag] if value else []
    return [flag, str(value)]


def counts_of(resolved: Resolved) -> dict[str, int]:
    """The number of tasks of each type that a strategy needs, in the order of their ranks."""
    return resolved.config.counts
