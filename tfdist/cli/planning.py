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
from tfdist.cli import every_task, hosts, launchers, logs
from tfdist.cli.jobs import Job, Request, check_count, hold_ports, place_of
from tfdist.cluster import gpus as gpu_lists
from tfdist.cluster.launch.plan import local_cluster, plan_local, plan_member
from tfdist.cluster.launch.program import SERVED, STAGED, Program, Role
from tfdist.cluster.launch.ssh import plan_hosts
from tfdist.cluster.listing import own_tf_config
from tfdist.cluster.spec import ClusterSpec, Task
from tfdist.cluster.tf_config import check_tf_config, parse_tf_config, refuse_gaps
from tfdist.config import CLUSTERED, StrategyConfig
from tfdist.errors import ConfigError
from tfdist.files import check_writable
from tfdist.pipelines import timeline_picture
from tfdist.resolution import Resolved, load_file, resolve

__all__ = ["Job", "Request", "planned", "program_of", "resolved_for"]


#: The strategies that have one device in each process.
_ONE_DEVICE = ("parameter_server", "horovod")


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
    making = every_task.planned(request) if request.every_task else _under_a_strategy(request)
    with making as job:
        yield dataclasses.replace(
            job, plan=dataclasses.replace(job.plan, max_restarts=request.max_restarts)
        )


@contextlib.contextmanager
def _under_a_strategy(request: Request) -> Iterator[Job]:
    environ: Mapping[str, str] = environment.snapshot()
    gpus = gpu_lists.visible(environ)
    machines = hosts.of(request.hosts, request.hostfile)
    if machines is not None:
        request = _with_slots(request, machines)
    resolved = _resolve(request, own_tf_config(environ), environ, len(gpus))
    launchers.check_horovod(resolved.config)
    if machines is not None:
        with _on_hosts(request, resolved, machines, environ, gpus) as job:
            yield job
        return
    with launchers.cluster_here(resolved.config, environ, request.environment) as here:
        environ = here.environ
        text = own_tf_config(environ)
        if text is not None and resolved.config.strategy in CLUSTERED:
            making = _as_member(request, resolved, text, here, gpus)
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
    here: launchers.Here,
    gpus: tuple[str, ...],
) -> Iterator[Job]:
    """One task of a cluster whose other tasks are started by others."""
    cluster, task = _member(text, resolved)
    resolved = _for_cluster(resolved, cluster)
    seed = resolved.config.seed
    plan = plan_member(
        program_of(request, resolved.config, seed),
        cluster=cluster,
        task=task,
        log_dir=request.log_dir or logs.default_place(),
        environ=here.environ,
        gpus=gpus,
        gpus_each=here.gpus_each,
    )
    yield Job(plan, resolved, seed, gpus)


@contextlib.contextmanager
def _on_hosts(
    request: Request,
    resolved: Resolved,
    machines: Mapping[str, int],
    environ: Mapping[str, str],
    gpus: tuple[str, ...],
) -> Iterator[Job]:
    """All processes of a job, on several machines."""
    config = resolved.config
    seed = secrets.randbelow(2**32) if config.seed is None else config.seed
    ssh = hosts.ssh_of(request.ssh_args, request.remote_python)
    with hosts.cluster_of(config, machines, ssh, dry_run=request.dry_run) as (cluster, here):
        plan = plan_hosts(
            program_of(request, config, seed),
            cluster=cluster,
            here=here,
            ssh=ssh,
            log_dir=request.log_dir or logs.default_place(),
            environ=environ,
            gpus=gpus,
        )
        yield Job(plan, resolved, seed, gpus)


def resolved_for(request: Request) -> Resolved:
    """The configuration of a job for other machines: GPUs and TF_CONFIG of this one do not count.

    Raises:
        ConfigError: for a mistake in the command line or the strategy file.
    """
    machines = hosts.of(request.hosts, request.hostfile)
    if machines is not None:
        request = _with_slots(request, machines)
    flags, file = _flags(request)
    return resolve(flags, file, {}, gpus=0)


def _with_slots(request: Request, machines: Mapping[str, int]) -> Request:
    """The request for as many processes as the machines have slots, unless -n says it."""
    if request.given.get("processes") is not None:
        return request
    slots = sum(machines.values())
    return dataclasses.replace(request, given={**request.given, "processes": slots})


@contextlib.contextmanager
def _as_rank(
    request: Request, resolved: Resolved, environ: Mapping[str, str], gpus: tuple[str, ...]
) -> Iterator[Job]:
    """One process of a job that Horovod's own launcher has started."""
    resolved = launchers.with_size(resolved, environ)
    seed = resolved.config.seed
    plan = plan_local(
        program_of(request, resolved.config, seed),
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
    _check_timeline(config)
    seed = secrets.randbelow(2**32) if config.seed is None else config.seed
    with _local_cluster(config) as cluster:
        plan = plan_local(
            program_of(request, config, seed),
            cluster=cluster,
            log_dir=request.log_dir or logs.default_place(),
            environ=environ,
            gpus=gpus,
            devices=1 if config.strategy in _ONE_DEVICE else config.devices,
        )
        yield Job(plan, resolved, seed, gpus)


def _check_timeline(config: StrategyConfig) -> None:
    """Finds out before anything is started whether the timeline could be written.

    Raises:
        ConfigError: if not.
    """
    path, drawn = config.timeline, config.strategy == "pipeline"
    if path is None:
        return
    check_writable(path, f"--timeline {path}", parents=drawn)  # Horovod makes no directories.
    if drawn and path.endswith(".png"):
        timeline_picture.check_installed()


@contextlib.contextmanager
def _local_cluster(config: StrategyConfig) -> Iterator[ClusterSpec | None]:
    """The tasks of this machine on ports that are held, or None for a single process."""
    counts = config.counts
    if config.strategy not in CLUSTERED or (config.strategy == "pipeline" and not counts["worker"]):
        yield None
        return
    with hold_ports(sum(counts.values())) as held:
        yield local_cluster(held.ports, chief="chief" in counts, ps=counts.get("ps", 0))


def _roles(config: StrategyConfig) -> Mapping[str, Role]:
    """The roles of the tasks that serve the chief."""
    if config.strategy == "pipeline":
        return STAGED if config.processes > 1 else {}
    return SERVED if config.strategy == "parameter_server" else {}


def program_of(request: Request, config: StrategyConfig, seed: int | None) -> Program:
    """What every task of a job runs."""
    return Program(
        script=request.script,
        args=request.args,
        config=config.to_json(),
        seed=seed,
        env_only=request.env_only,
        roles=_roles(config),
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


def _member(text: str, resolved: Resolved) -> tuple[ClusterSpec, Task]:
    """The cluster and the task of a TF_CONFIG, checked for the strategy."""
    cluster, task = place_of(text)
    config = resolved.config
    refuse_gaps(cluster, f"strategy={config.strategy!r}")
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
        if name in resolved.reasons:
            check_count(name, getattr(config, name), resolved.said(name), cluster)
    return cluster, task


def _for_cluster(resolved: Resolved, cluster: ClusterSpec) -> Resolved:
    """The configuration with the cluster's size, so that all tasks have the same."""
    counts: dict[str, Any] = {"processes": max(1, len(cluster.computing))}
    if resolved.config.strategy == "parameter_server":
        workers, servers = cluster.addresses["worker"], cluster.addresses["ps"]
        counts = {"processes": len(workers), "ps": len(servers)}
    config = dataclasses.replace(resolved.config, **counts)
    return dataclasses.replace(resolved, config=config)
