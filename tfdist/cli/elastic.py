"""`tfdist run --min-np A --max-np B`: jobs whose number of processes may change."""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

from tfdist.cli import logs, planning, summary
from tfdist.cli.request import Job, Request
from tfdist.config.gradient_options import GradientOptions
from tfdist.errors import ConfigError
from tfdist.launcher import elastic
from tfdist.launcher.elastic import Discovery
from tfdist.launcher.elastic_directory import ElasticDirectory
from tfdist.launcher.plan import JobPlan
from tfdist.launcher.process import Terminal
from tfdist.launcher.supervisor import Screen
from tfdist.launcher.waiting import Waiting, terminal
from tfdist.utils.atomic_io import check_writable

__all__ = ["Bounds", "supervise"]

#: Strategies whose replicas all hold the whole state.
_ELASTIC = ("horovod", "multi_worker")

#: Restarts of a job that lost a task, unless --max-restarts sets another number.
_RESTARTS = 100


@dataclasses.dataclass(frozen=True)
class Bounds:
    """The number of processes that the command line asks for.

    Attributes:
        least: `--min-np`.
        most: `--max-np`.
        script: `--host-discovery-script`.
        timeout: `--elastic-timeout`, in seconds.
    """

    least: int | None
    most: int | None
    script: Path | None
    timeout: float

    @property
    def flags(self) -> list[str]:
        """The flags that are given; if there are any, the job is elastic."""
        values = {
            "--min-np": self.least,
            "--max-np": self.most,
            "--host-discovery-script": self.script,
        }
        return [flag for flag, value in values.items() if value is not None]


def supervise(request: Request, bounds: Bounds, grace: float) -> int:
    """Runs an elastic job to its end.

    Args:
        request: the request of the command line.
        bounds: the number of processes.
        grace: seconds between TERM and KILL.

    Returns:
        The exit status.

    Raises:
        ConfigError: if the options contradict each other.
        StartError: if there are too few slots for too long.
    """
    least, most = _range(request, bounds)
    seed = request.strategy_options.get("seed")
    seed = secrets.randbelow(2**32) if seed is None else seed
    chosen = request.log_dir is not None
    log_dir = request.log_dir or logs.default_log_dir()
    states = ElasticDirectory((log_dir / "elastic").absolute())
    # Logs may go elsewhere if this directory cannot be written, but the state of `fit` must not.
    what = f"The state of an elastic job in {str(log_dir)!r}"
    check_writable(str(states.path / "state"), what, hint="Give a directory with --log-dir")
    record, begun, shown = logs.launcher_record(log_dir), time.monotonic(), False
    line = Waiting(terminal())

    @contextlib.contextmanager
    def make(count: int) -> Iterator[JobPlan]:
        nonlocal shown
        options = {**request.strategy_options, "processes": count, "seed": seed}
        sized = dataclasses.replace(request, strategy_options=options, log_dir=log_dir)
        with planning.planned(sized) as job:
            _check_strategy(job)
            plan = logs.prepare(_leaving_states(job.plan, states), chosen=chosen)
            if not shown:
                shown = True
                rows = summary.table(plan, job.resolved, job.seed, job.gpus)
                logs.describe_job(record, plan, rows, job.timeline)
            line.follow(plan)
            yield plan

    with _world(least, most, bounds, states, request.max_restarts) as world:
        screen = Screen(Terminal(), summary.note, summary.noting(record), record, line)
        outcome = elastic.run(make, world, grace=grace, screen=screen)
    return logs.note_done(outcome, log_dir, begun, record)


@contextlib.contextmanager
def _world(
    least: int, most: int, bounds: Bounds, states: ElasticDirectory, restarts: int
) -> Iterator[elastic.World]:
    """The number of processes that may run, as the user's script prints it if there is one."""
    with contextlib.ExitStack() as stack:
        discovery = None
        if bounds.script is not None:
            discovery = stack.enter_context(Discovery(_runnable(bounds.script)))
        yield elastic.World(
            least=least,
            most=most,
            slots=lambda: most if discovery is None else discovery.slots,
            problem=lambda: None if discovery is None else discovery.take_problem(),
            timeout=bounds.timeout,
            states=states,
            max_restarts=restarts or _RESTARTS,
        )


def _range(request: Request, bounds: Bounds) -> tuple[int, int]:
    if request.env_only or request.every_task:
        raise ConfigError(
            "--min-np and --max-np need `fit` to keep its state, which tfdist sees to in scripts "
            "that it runs under a strategy. Leave out --env-only and --every-task."
        )
    count = request.strategy_options.get("processes")
    if count is not None:
        raise ConfigError(
            f"-n {count} conflicts with --min-np and --max-np, which give the number of processes "
            "its bounds. Leave -n out."
        )
    least = 1 if bounds.least is None else bounds.least
    if bounds.most is None:
        raise ConfigError("--min-np needs --max-np, the number of processes that is never passed.")
    if not 1 <= least <= bounds.most:
        raise ConfigError(
            f"--min-np {least} and --max-np {bounds.most} leave no number of processes. Give "
            "1 <= min <= max."
        )
    return least, bounds.most


def _check_strategy(job: Job) -> None:
    name = None if job.resolved is None else job.resolved.config.strategy
    if name not in _ELASTIC or job.plan.cluster is None:
        raise ConfigError(
            f"--min-np and --max-np conflict with --strategy {name}. Elastic jobs run on "
            f"{' and '.join(_ELASTIC)}, started by this command alone, without TF_CONFIG."
        )
    rule = job.resolved.config.part(GradientOptions) if job.resolved else None
    if rule is not None and rule.remembers:
        raise ConfigError(
            f"--min-np and --max-np conflict with the rule {rule.described!r}: what it keeps "
            "of earlier gradients would be lost with a worker. Train with --mode sync, without "
            "--accumulate and with --compression none, bf16 or fp16; or without --max-np, with "
            "BackupAndRestore and --max-restarts."
        )
    config = None if job.resolved is None else job.resolved.config
    for name in ("zero", "mesh"):
        value = None if config is None else config.value(name)
        if value:
            raise ConfigError(
                f"--min-np and --max-np conflict with --{name} {value}: with a process its part of "
                "the model's state would be lost. Train with BackupAndRestore and --max-restarts."
            )
    if len(job.plan.cluster.computing) != len(job.plan.tasks):
        raise ConfigError(
            "--min-np and --max-np conflict with TF_CONFIG, whose other tasks are started "
            "elsewhere. Unset TF_CONFIG, or leave them out."
        )


def _leaving_states(plan: JobPlan, states: ElasticDirectory) -> JobPlan:
    tasks = tuple(
        dataclasses.replace(each, environ={**each.environ, "TFDIST_ELASTIC": str(states.path)})
        for each in plan.tasks
    )
    return dataclasses.replace(plan, tasks=tasks, settle=elastic.SETTLE_SECONDS)


def _runnable(script: Path) -> str:
    """The script's path, so that one in the present directory is found."""
    return str(script.absolute()) if script.exists() else str(script)
