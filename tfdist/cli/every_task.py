"""`tfdist run --every-task`: between-graph programs, which each task runs by itself."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from tfdist import environment
from tfdist.cli import logs
from tfdist.cli.estimator_jobs import given_by_file
from tfdist.cli.jobs import Job, Request, check_count, hold_ports, place_of
from tfdist.cluster import gpus as gpu_lists
from tfdist.cluster.launch.plan import local_cluster, plan_local, plan_member
from tfdist.cluster.launch.program import BETWEEN_GRAPH, ESTIMATORS, Program
from tfdist.errors import ConfigError

__all__ = ["planned"]

#: The options with which `--every-task` goes.
_OF_EVERY_TASK = ("processes", "ps")


@contextlib.contextmanager
def planned(request: Request) -> Iterator[Job]:
    """The job of a between-graph program: all tasks run the script, under no strategy.

    Raises:
        ConfigError: for options that do not go with it.
    """
    counts = _counts(request)
    chief = request.strategy is not None  # As jobs of Estimators have one.
    environ = environment.snapshot()
    gpus = gpu_lists.visible(environ)
    text = environment.read("TF_CONFIG", environ)
    place = request.log_dir or logs.default_place()
    program = Program(
        script=request.script,
        args=request.args,
        config="",
        seed=None,
        env_only=True,
        roles=ESTIMATORS if chief else BETWEEN_GRAPH,
        task_flags=request.task_flags,
    )
    if text is not None:
        cluster, task = place_of(text)
        for name, count in counts.items():
            flag = "--ps" if name == "ps" else "-n"
            check_count(name, count, f"{flag} {count}", cluster)
        plan = plan_member(
            program, cluster=cluster, task=task, log_dir=place, environ=environ, gpus=gpus
        )
        yield Job(plan, None, None, gpus, request.why_every_task)
        return
    ps = counts.get("ps", 1)
    with hold_ports(counts.get("processes", 1) + ps + request.evaluator) as held:
        cluster = local_cluster(held.ports, chief=chief, ps=ps, evaluator=request.evaluator)
        plan = plan_local(program, cluster=cluster, log_dir=place, environ=environ, gpus=gpus)
        yield Job(plan, None, None, gpus, request.why_every_task)


def _counts(request: Request) -> dict[str, int]:
    """The numbers of tasks that were given; nothing else goes with `--every-task`."""
    file = dict(given_by_file(request.strategy))
    name = file.pop("strategy", None)
    given = {name: value for name, value in request.given.items() if value is not None}
    others = [] if name in (None, "parameter_server") else ["strategy"]
    given = {**file, **given}
    others += [name for name in given if name not in _OF_EVERY_TASK]
    if others:
        flag = f"--{others[0].replace('_', '-')}"
        value = request.strategy if others[0] == "strategy" else given[others[0]]
        why = request.why_every_task
        raise ConfigError(
            f"{flag} {value} conflicts with {why or '--every-task'}: each task then runs "
            f"{request.script!r} itself, which makes what it trains with. Leave one of them out."
        )
    if request.hosts is not None or request.hostfile is not None:
        raise ConfigError(
            f"--hosts and --hostfile conflict with {request.why_every_task or '--every-task'}: "
            "such jobs start their tasks on this machine. On others, run the same command with "
            "each task's TF_CONFIG."
        )
    for name, flag in (("processes", "-n"), ("ps", "--ps")):
        if given.get(name, 1) < 1:
            raise ConfigError(
                f"{flag} {given[name]} conflicts with --every-task, which starts workers and "
                "parameter servers. Give a number of 1 or more."
            )
    return given
