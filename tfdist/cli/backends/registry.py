"""All engines by name, and which one a command line asks for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import typer

from tfdist.cli import planning
from tfdist.cli.backends import kubernetes, mpi, ray, slurm
from tfdist.cli.backends.request import EngineOptions, Order, counts_of, words_of
from tfdist.cli.request import Request
from tfdist.errors import ConfigError

__all__ = ["ENGINES", "HERE", "Engine", "chosen", "options_of", "start"]

_ELASTIC = ("min_np", "max_np", "host_discovery_script")

#: Engines whose tasks this very command starts.
HERE = {"local": "this machine", "ssh": "the machines of --hosts or --hostfile, by ssh"}


@dataclasses.dataclass(frozen=True)
class Engine:
    """An engine that starts tasks itself.

    Attributes:
        start: hands it a job; returns the exit status.
        options: the fields of `EngineOptions` that it has.
        restarts: the mechanism that starts a failed job again there, instead of --max-restarts.
    """

    start: Callable[[Order], int]
    options: tuple[str, ...]
    restarts: str


#: Every other engine by name.
ENGINES: dict[str, Engine] = {
    "slurm": Engine(
        slurm.start,
        ("engine_args", "gpus_per_task", "job_name", "detach"),
        "`scontrol requeue` does, and Slurm itself when a node fails",
    ),
    "mpi": Engine(mpi.start, ("engine_args",), "`mpirun` does not; start it again"),
    "kubernetes": Engine(
        kubernetes.start,
        (
            *("engine_args", "gpus_per_task", "image", "namespace", "job_name", "manifest"),
            "detach",
        ),
        "a Job that has failed stays so; start it again",
    ),
    "ray": Engine(
        ray.start, ("engine_args", "gpus_per_task", "job_name"), "nothing does; start it again"
    ),
}


def chosen(on: str | None, request: Request) -> str | None:
    """The engine that a command line asks for, or None if this command starts the tasks.

    Raises:
        ConfigError: if there is no such engine, or another option asks for another one.
    """
    hosts = request.hosts is not None or request.hostfile is not None
    if on is None:
        return None
    if on not in (*HERE, *ENGINES):
        names = ", ".join((*HERE, *ENGINES))
        raise ConfigError(f"Unknown engine --on {on!r}. There are: {names}.")
    if on == "ssh" and not hosts:
        raise ConfigError("--on ssh needs the machines: add --hosts a:2,b:2 or --hostfile PATH.")
    if on == "local" and hosts:
        raise ConfigError(
            "--on local conflicts with --hosts and --hostfile, which name other machines. Leave "
            "one of them out."
        )
    return None if on in HERE else on


def options_of(engine: str | None, given: Mapping[str, Any]) -> EngineOptions:
    """The options of an engine.

    Args:
        engine: a key of `ENGINES`, or None.
        given: the values of the command line.

    Raises:
        ConfigError: if one is set that the engine does not have.
    """
    fields = dataclasses.fields(EngineOptions)
    has = ENGINES[engine].options if engine is not None else ()
    for each in fields:
        if given[each.name] not in (None, each.default) and each.name not in has:
            flag = f"--{each.name.replace('_', '-')}"
            owners = [name for name, other in ENGINES.items() if each.name in other.options]
            raise ConfigError(
                f"{flag} goes with --on {' or '.join(owners)}. Add that, or leave {flag} out."
            )
    told = {each.name: given[each.name] for each in fields if given[each.name] is not None}
    return EngineOptions(**told)


def start(
    name: str,
    request: Request,
    options: EngineOptions,
    context: typer.Context,
    *,
    grace: float,
    dry_run: bool,
) -> int:
    """Hands a job to an engine; returns the exit status.

    Args:
        name: a key of `ENGINES`.
        request: the request of the command line.
        options: the options that engines have.
        context: the command line itself, which goes on to the tasks.
        grace: seconds between TERM and KILL when the job is stopped.
        dry_run: print the plan, and do nothing.

    Raises:
        ConfigError: for a mistake in the command line.
        StartError: if the engine does not take the job.
    """
    _check(name, request, context)
    resolved = planning.resolved_for(request)
    order = Order(
        request=request,
        resolved=resolved,
        words=words_of(context),
        counts=counts_of(resolved),
        options=options,
        grace=grace,
        dry_run=dry_run,
    )
    return ENGINES[name].start(order)


def _check(name: str, request: Request, context: typer.Context) -> None:
    if request.env_only or request.every_task:
        raise ConfigError(
            f"--on {name} starts each task by `tfdist run`, which --env-only and --every-task "
            "leave without a strategy. Leave them out, or write the engine's script by hand (see "
            "cluster/)."
        )
    if request.max_restarts:
        raise ConfigError(
            f"--max-restarts {request.max_restarts} conflicts with --on {name}, which starts the "
            f"tasks itself: {ENGINES[name].restarts}."
        )
    elastic = [each for each in _ELASTIC if context.params[each] is not None]
    if elastic:
        raise ConfigError(
            f"--{elastic[0].replace('_', '-')} conflicts with --on {name}: elastic jobs are "
            "started by this command alone. Leave one of them out."
        )
