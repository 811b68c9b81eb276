"""The base of job engines: what all of them are asked for, check and do in the same order."""

from __future__ import annotations

import abc
import dataclasses
import shlex
import shutil
import sys
from pathlib import Path
from typing import ClassVar

import typer
from typer.core import TyperOption

from tfdist.cli.request import Request
from tfdist.config.resolution import Resolved
from tfdist.errors import ConfigError

__all__ = ["Engine", "EngineOptions", "Order", "words_of"]

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


@dataclasses.dataclass(frozen=True)
class Order:
    """A job for an engine.

    Attributes:
        request: the request of the command line.
        resolved: the strategy's configuration.
        words: the options of the tasks' `tfdist run` as they were given, without those of the
            launch, of the number of tasks, and without the script.
        options: the engine's options.
        grace: seconds between TERM and KILL when the job is stopped.
    """

    request: Request
    resolved: Resolved
    words: tuple[str, ...]
    options: EngineOptions
    grace: float

    @property
    def counts(self) -> dict[str, int]:
        """The number of tasks of each type, in the order of their ranks."""
        return self.resolved.config.counts

    @property
    def tasks(self) -> int:
        """The number of all tasks."""
        return sum(self.counts.values())

    @property
    def name(self) -> str:
        """The job's name: the one that was given, or that of the script or module."""
        return self.options.job_name or Path(self.request.file_name).stem

    def engine_arguments(self) -> tuple[str, ...]:
        """The words of `--engine-args`.

        Raises:
            ConfigError: if a quote is left open.
        """
        text = self.options.engine_args or ""
        try:
            return tuple(shlex.split(text))
        except ValueError as error:
            raise ConfigError(
                f"--engine-args {text!r} cannot be split into words: {error}. Write it as on a "
                "command line, such as '--partition=long --time=60'."
            ) from None

    def tfdist(self) -> tuple[str, ...]:
        """The command `tfdist`, by the interpreter of the tasks: by default this one's path."""
        return (self.request.remote_python or sys.executable, "-m", "tfdist.cli.main")

    def command(self, environment: str, *options: str) -> tuple[str, ...]:
        """The words after `tfdist` of each task: `run --environment ENGINE … SCRIPT ARGS`.

        A strategy that "auto" has chosen here is passed on: a task would choose by the devices that
        it sees.

        Args:
            environment: the environment that the tasks believe.
            options: further options of `tfdist run`.
        """
        sizes = ["--ps", str(self.counts["ps"])] if "ps" in self.counts else []
        if "processes" in self.resolved.overridden:
            # The tasks read the file too, and would miss the flag that wins over it.
            sizes += ["--processes", str(self.resolved.config.processes)]
        auto = self.request.strategy in (None, "auto")
        strategy = ["--strategy", self.resolved.config.strategy] if auto else []
        return (
            *("run", "--environment", environment, *self.words, *strategy, *sizes, *options),
            *(self.request.script, *self.request.args),
        )


class Engine(abc.ABC):
    """A job on an engine, which starts the tasks instead of this command.

    Args:
        order: the job.

    Attributes:
        name: the value of `--on`.
        options: the fields of `EngineOptions` that it has.
        restarts: the mechanism that starts a failed job again there, not `--max-restarts`.
        remedy: the action where a program of the engine is missing.
        placement: how the engine places tasks, so that `--hosts` conflicts; None if it takes them.
    """

    name: ClassVar[str]
    options: ClassVar[tuple[str, ...]]
    restarts: ClassVar[str]
    remedy: ClassVar[str] = ""
    placement: ClassVar[str | None] = None

    def __init__(self, order: Order) -> None:
        self.order = order

    def run(self) -> int:
        """Starts the tasks and stays until their end, or prints what a dry run shows.

        Returns:
            The exit status: that of the task to blame.

        Raises:
            ConfigError: for a mistake in the options, or if the engine is missing.
            StartError: if the engine does not take the job, or is not heard of any more.
        """
        hosts = self.order.request.hosts is not None or self.order.request.hostfile is not None
        if hosts and self.placement is not None:
            raise ConfigError(
                f"--on {self.name} conflicts with --hosts and --hostfile: {self.placement}"
            )
        text = self.text()
        if self.order.request.dry_run:
            print(text, end="")
            return 0
        for program in self.programs():
            if shutil.which(program) is None:
                raise ConfigError(
                    f"--on {self.name} needs {program}, which is not in PATH. {self.remedy}"
                )
        sys.stdout.flush()
        return self.start()

    def programs(self) -> tuple[str, ...]:
        """The programs that this machine needs."""
        return ()

    @abc.abstractmethod
    def text(self) -> str:
        """The text that a dry run prints: the engine's script, manifest or command.

        Raises:
            ConfigError: for a mistake in the options.
        """

    @abc.abstractmethod
    def start(self) -> int:
        """Starts the tasks and stays until their end; returns the exit status."""


def words_of(context: typer.Context) -> tuple[str, ...]:
    """The options that stand on a command line, written again, but for those of the launch."""
    words: list[str] = []
    for parameter in context.command.params:
        name = str(parameter.name)
        source = context.get_parameter_source(name)
        if source is None or source.name != "COMMANDLINE" or name in _OF_THE_LAUNCH:
            continue
        if isinstance(parameter, TyperOption):
            words += _written(parameter, context.params[name])
    return tuple(words)


def _written(option: TyperOption, value: object) -> list[str]:
    flag = max(option.opts, key=len)
    if option.is_flag:
        return [flag] if value else []
    return [flag, str(value)]
