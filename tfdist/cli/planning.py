"""From the command line of `tfdist run` to the plan of a job."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tfdist import environment
from tfdist.cli import launchers, logs
from tfdist.cluster import gpus as gpu_lists
from tfdist.cluster.launch.plan import (
    BETWEEN_GRAPH,
    SERVED,
    JobPlan,
    Program,
    local_cluster,
    plan_local,
    plan_member,
)
from tfdist.cluster.ports import HeldPorts
from tfdist.cluster.spec import ClusterSpec, Task
from tfdist.cluster.tf_config import check_tf_config, parse_tf_config
from tfdist.config import Resolved, StrategyConfig, load_file, resolve
from tfdist.errors import ConfigError

__all__ = ["Job", "Request", "planned"]

#: The strategies of several tasks.
CLUSTERED = ("multi_worker", "horovod", "parameter_server")

#: The options with which `--every-task` goes.
_OF_EVERY_TASK = ("processes", "ps")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """What the command line asks for.

    Attributes:
        script: the script.
        args: its arguments.
        strategy: the name of a strategy, a file, or None.
        given: the strategy's options; None for those that were not given.
        env_only: whether the script makes its own strategy.
        every_task: whether each task of the cluster runs the script itself.
        task_flags: whether each then gets its place as flags.
        max_restarts: how often what has failed is started again.
        log_dir: where the logs go, or None for a place of the job's own.
    """

    script: str
    args: tuple[str, ...]
    strategy: str | None
    given: Mapping[str, Any]
    env_only: bool = False
    every_task: bool = False
    task_flags: bool = False
    max_restarts: int = 0
    log_dir: Path | None = None


@dataclasses.dataclass(frozen=True)
class Job:
    """What is about to run.

    Attributes:
        plan: the commands.
        resolved: the strategy's configuration; None where the script makes what it trains with.
        seed: the job's seed; None where the chief draws it.
        gpus: the GPUs of this machine.
    """

    plan: JobPlan
    resolved: Resolved | None
    seed: int | None
    gpus: tuple[str, ...]


@contextlib.contextmanager
def planned(request: Request) -> Iterator[Job]:
    """Plans the job that the command line asks for; its ports are held within the block.

    Raises:
        ConfigError: for a mistake in the command line, the strategy file or TF_CONFIG.
    """
    if request.task_flags and not request.every_task:
        raise ConfigError(
            "--task-flags gives the flags of TensorFlow 1 to a script that each task runs itself. "
            "Add --every-task, or leave it out."
        )
    making = _every_task(request) if request.every_task else _under_a_strategy(request)
    with making as job:
        yield dataclasses.replace(
            job, plan=dataclasses.replace(job.plan, max_restarts=request.max_restarts)
        )


@contextlib.contextmanager
def _under_a_strategy(request: Request) -> Iterator[Job]:
    environ: Mapping[str, str] = environment.snapshot()
    gpus = gpu_lists.visible(environ)
    resolved = _resolve(request, environment.read("TF_CONFIG", environ), environ, len(gpus))
    launchers.check_horovod(resolved.config)
    with launchers.cluster_of_mpi(resolved.config, environ) as environ:
        text = environment.read("TF_CONFIG", environ)
        if text is not None and resolved.config.strategy in CLUSTERED:
            making = _as_member(request, resolved, text, environ, gpus)
        elif launchers.is_rank(resolved.config, environ):
            making = _as_rank(request, resolved, environ, gpus)
        else:
            making = _on_this_machine(request, resolved, environ, gpus)
        with making as job:
            yield job


@contextlib.contextmanager
def _as_member(
    request: Request,
    resolved: Resolved,
    text: str,
    environ: Mapping[str, str],
    gpus: tuple[str, ...],
) -> Iterator[Job]:
    """One task of a cluster whose other tasks are started by others."""
    cluster, task = _member(text, resolved)
    resolved = _for_cluster(resolved, cluster)
    seed = resolved.config.seed
    plan = plan_member(
        _program(request, resolved.config, seed),
        cluster=cluster,
        task=task,
        log_dir=request.log_dir or logs.default_place(),
        environ=environ,
        gpus=gpus,
    )
    yield Job(plan, resolved, seed, gpus)


@contextlib.contextmanager
def _as_rank(
    request: Request, resolved: Resolved, environ: Mapping[str, str], gpus: tuple[str, ...]
) -> Iterator[Job]:
    """One process of a job that Horovod's own launcher has started."""
    resolved = launchers.with_size(resolved, environ)
    seed = resolved.config.seed
    plan = plan_local(
        _program(request, resolved.config, seed),
        cluster=None,
        log_dir=request.log_dir or logs.default_place(),
        environ=environ,
    )
    yield Job(plan, resolved, seed, gpus)


@contextlib.contextmanager
def _on_this_machine(
    request: Request, resolved: Resolved, environ: Mapping[str, str], gpus: tuple[str, ...]
) -> Iterator[Job]:
    """All processes of a job."""
    config = resolved.config
    seed = secrets.randbelow(2**32) if config.seed is None else config.seed
    with _local_cluster(config) as cluster:
        plan = plan_local(
            _program(request, config, seed),
            cluster=cluster,
            log_dir=request.log_dir or logs.default_place(),
            environ=environ,
            gpus=gpus,
            devices=1 if config.strategy in ("parameter_server", "horovod") else config.devices,
        )
        yield Job(plan, resolved, seed, gpus)


@contextlib.contextmanager
def _every_task(request: Request) -> Iterator[Job]:
    """The job of a between-graph program: all tasks run the script, under no strategy."""
    counts = _counts_of_every_task(request)
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
        roles=BETWEEN_GRAPH,
        task_flags=request.task_flags,
    )
    if text is not None:
        cluster, task = _place(text)
        for name, count in counts.items():
            _check_count(name, count, f"--{name}" if name == "ps" else "-n", cluster)
        plan = plan_member(
            program, cluster=cluster, task=task, log_dir=place, environ=environ, gpus=gpus
        )
        yield Job(plan, None, None, gpus)
        return
    ps = counts.get("ps", 1)
    with HeldPorts(counts.get("processes", 1) + ps) as held:
        cluster = local_cluster(held.ports, ps=ps)
        plan = plan_local(program, cluster=cluster, log_dir=place, environ=environ, gpus=gpus)
        yield Job(plan, None, None, gpus)


def _counts_of_every_task(request: Request) -> dict[str, int]:
    """The numbers of tasks that were given; nothing else goes with `--every-task`."""
    given = {name: value for name, value in request.given.items() if value is not None}
    others = ["strategy"] if request.strategy is not None else []
    others += [name for name in given if name not in _OF_EVERY_TASK]
    if others:
        flag = f"--{others[0].replace('_', '-')}"
        value = request.strategy if others[0] == "strategy" else given[others[0]]
        raise ConfigError(
            f"{flag} {value} conflicts with --every-task: each task then runs "
            f"{request.script!r} itself, which makes what it trains with. Leave one of them out."
        )
    for name, flag in (("processes", "-n"), ("ps", "--ps")):
        if given.get(name, 1) < 1:
            raise ConfigError(
                f"{flag} {given[name]} conflicts with --every-task, which starts workers and "
                "parameter servers. Give a number of 1 or more."
            )
    return given


@contextlib.contextmanager
def _local_cluster(config: StrategyConfig) -> Iterator[ClusterSpec | None]:
    """The tasks of this machine on ports that are held, or None for a single process."""
    if config.strategy in ("multi_worker", "horovod"):
        with HeldPorts(config.processes) as held:
            yield local_cluster(held.ports)
    elif config.strategy == "parameter_server":
        with HeldPorts(1 + config.processes + config.ps) as held:
            yield local_cluster(held.ports, chief=True, ps=config.ps)
    else:
        yield None


def _program(request: Request, config: StrategyConfig, seed: int | None) -> Program:
    return Program(
        script=request.script,
        args=request.args,
        config=config.to_json(),
        seed=seed,
        env_only=request.env_only,
        roles=SERVED if config.strategy == "parameter_server" else {},
    )


def _resolve(request: Request, text: str | None, environ: Mapping[str, str], gpus: int) -> Resolved:
    flags, file = _flags(request)
    from_cluster = _counts_of_cluster(text, flags, file)
    resolved = resolve({**flags, **from_cluster}, file, environ, gpus=gpus)
    reasons = {name: why for name, why in resolved.reasons.items() if name not in from_cluster}
    return dataclasses.replace(resolved, reasons=reasons)


def _counts_of_cluster(
    text: str | None, flags: Mapping[str, Any], file: Path | None
) -> dict[str, int]:
    """The numbers of workers and servers as TF_CONFIG has them, where nothing else gives them.

    Other options are checked against them, such as `backup_workers`.
    """
    given = {**(load_file(file) if file is not None else {}), **flags}
    if text is None or given.get("strategy", "parameter_server") not in (
        "parameter_server",
        "auto",
    ):
        return {}
    try:
        listed = parse_tf_config(text)[0].addresses
    except ConfigError:
        return {}  # Whoever needs the cluster will say what is wrong with it.
    if "ps" not in listed:
        return {}
    counts = {"processes": len(listed.get("worker", ())), "ps": len(listed["ps"])}
    return {name: count for name, count in counts.items() if count and name not in given}


def _flags(request: Request) -> tuple[dict[str, Any], Path | None]:
    """The strategy's options by name, and the strategy file if there is one."""
    strategy = request.strategy
    flags = {name: value for name, value in request.given.items() if value is not None}
    count = flags.get("processes", 1)
    if count < 1:
        raise ConfigError(f"-n {count} starts no process. Give a number of 1 or more.")
    file = Path(strategy) if strategy is not None and _is_file(strategy) else None
    if file is None and strategy is not None:
        flags["strategy"] = strategy
    name = strategy if file is None else load_file(file).get("strategy")
    if name == "mirrored" and "processes" in flags:
        _count_as_devices(flags)
    return flags, file


def _is_file(strategy: str) -> bool:
    """Whether `--strategy` names a file rather than a strategy."""
    return strategy.endswith(".toml") or os.sep in strategy


def _count_as_devices(flags: dict[str, Any]) -> None:
    """`-n` of the mirrored strategy, which has one process, counts its devices."""
    count = flags.pop("processes")
    devices = flags.setdefault("devices", count)
    if devices != count:
        raise ConfigError(
            f"-n {count} conflicts with --devices {devices}: with strategy 'mirrored' both give "
            "the number of devices of its one process. Remove one of them."
        )


def _place(text: str) -> tuple[ClusterSpec, Task]:
    """The cluster and the task of a TF_CONFIG that is set in the environment."""
    cluster, task = parse_tf_config(text)
    if task is None:
        raise ConfigError(
            f"TF_CONFIG={text!r} does not say which task this process is. Add "
            '"task": {"type": "worker", "index": 0}, or unset TF_CONFIG to run on this machine.'
        )
    return cluster, task


def _member(text: str, resolved: Resolved) -> tuple[ClusterSpec, Task]:
    """The cluster and the task of a TF_CONFIG, checked for the strategy."""
    cluster, task = _place(text)
    config, reasons = resolved.config, resolved.reasons
    if config.strategy == "parameter_server":
        found = check_tf_config(text, strategy=config.strategy)
        errors = [finding for finding in found if finding.severity == "error"]
        if errors:
            lines = "\n".join(f"  {finding}" for finding in errors)
            raise ConfigError(
                f"TF_CONFIG does not go with strategy='parameter_server':\n{lines}\n"
                "A program that workers and parameter servers all run by themselves is started "
                "with --every-task instead of a strategy."
            )
    for name in ("processes", "ps"):
        if name in reasons:
            _check_count(name, getattr(config, name), reasons[name], cluster)
    return cluster, task


def _check_count(name: str, asked: int, place: str, cluster: ClusterSpec) -> None:
    """Compares a number of tasks that was asked for with TF_CONFIG's."""
    if name == "ps":
        kind, count = "parameter server", len(cluster.addresses.get("ps", ()))
    elif "ps" in cluster.addresses:
        kind, count = "worker", len(cluster.addresses.get("worker", ()))
    else:
        kind, count = "task", len(cluster.computing)
    if asked != count:
        raise ConfigError(
            f"{place} {asked} conflicts with TF_CONFIG, whose cluster has {count} {kind}"
            f"{'s' * (count != 1)}{' that compute' * (kind == 'task')}. "
            "Leave it out to run this task of that cluster, or unset TF_CONFIG to start all "
            "processes on this machine."
        )


def _for_cluster(resolved: Resolved, cluster: ClusterSpec) -> Resolved:
    """The configuration with the cluster's size, so that all tasks have the same."""
    counts: dict[str, Any] = {"processes": max(1, len(cluster.computing))}
    if resolved.config.strategy == "parameter_server":
        workers, servers = cluster.addresses["worker"], cluster.addresses["ps"]
        counts = {"processes": len(workers), "ps": len(servers)}
    config = dataclasses.replace(resolved.config, **counts)
    return dataclasses.replace(resolved, config=config)
