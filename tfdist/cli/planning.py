"""From the command line of `tfdist run` to the plan of a job."""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
from collections.abc import Iterator, Mapping
from typing import Any

from tfdist import environment
from tfdist.cli import hosts, logs
from tfdist.cli.options import in_flags
from tfdist.cli.request import Job, Request, check_count, cluster_and_task, hold_ports
from tfdist.cluster import resources as gpu_lists
from tfdist.cluster.environments import detection
from tfdist.cluster.spec import ClusterSpec, Task
from tfdist.cluster.tf_config import check_tf_config, own_tf_config, parse_tf_config, refuse_gaps
from tfdist.config.resolution import Resolved, resolve
from tfdist.config.strategy_config import StrategyConfig, all_options
from tfdist.config.strategy_spec import having, spec_of
from tfdist.config.timeline_options import TimelineOptions, is_picture
from tfdist.errors import ConfigError
from tfdist.launcher.plan import (
    BETWEEN_GRAPH,
    ESTIMATORS,
    STAGED,
    WITH_SERVERS,
    Program,
    Role,
    local_cluster,
    plan_local,
    plan_member,
)
from tfdist.launcher.ssh import plan_hosts
from tfdist.strategies.pipeline.trace import check_installed
from tfdist.utils.atomic_io import check_writable

__all__ = ["check_runnable", "planned", "program_of", "resolved_for", "seed_of"]


# `tfdist run --every-task`: between-graph programs, which each task runs by itself.

#: The options with which `--every-task` goes.
_OF_EVERY_TASK = ("processes", "ps")


def _without_strategy(request: Request, held: contextlib.ExitStack) -> Job:
    """The job of a between-graph program: all tasks run the script, under no strategy."""
    counts = _counts(request)
    chief = request.strategy is not None  # As jobs of Estimators have one.
    environ = environment.snapshot()
    gpus = gpu_lists.visible(environ)
    text = environment.read("TF_CONFIG", environ)
    log_dir = request.log_dir or logs.default_log_dir()
    program = Program(
        script=request.script,
        args=request.args,
        module=request.module,
        config="",
        seed=None,
        env_only=True,
        roles=ESTIMATORS if chief else BETWEEN_GRAPH,
        task_flags=request.task_flags,
    )
    if text is not None:
        cluster, task = cluster_and_task(text)
        for name, count in counts.items():
            flag = "--ps" if name == "ps" else "-n"
            check_count(name, count, f"{flag} {count}", cluster)
        plan = plan_member(
            program, cluster=cluster, task=task, log_dir=log_dir, environ=environ, gpus=gpus
        )
    else:
        ps = counts.get("ps", 1)
        count = counts.get("processes", 1) + ps + request.evaluator
        ports = held.enter_context(hold_ports(count)).ports
        cluster = local_cluster(ports, chief=chief, ps=ps, evaluator=request.evaluator)
        plan = plan_local(program, cluster=cluster, log_dir=log_dir, environ=environ, gpus=gpus)
    return Job(plan, None, None, gpus, request.why_every_task)


def _with_servers() -> list[str]:
    return having(lambda spec: spec.has_servers)


def _counts(request: Request) -> dict[str, int]:
    """The numbers of tasks that were given; nothing else goes with `--every-task`."""
    options = request.asked
    name = options.pop("strategy", None)
    others = [] if name in (None, *_with_servers()) else ["strategy"]
    others += [name for name in options if name not in _OF_EVERY_TASK]
    if others:
        flag = f"--{others[0].replace('_', '-')}"
        value = request.strategy if others[0] == "strategy" else options[others[0]]
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
        if options.get(name, 1) < 1:
            raise ConfigError(
                f"{flag} {options[name]} conflicts with --every-task, which starts workers and "
                "parameter servers. Give a number of 1 or more."
            )
    return options


# A process that something else has started: a scheduler, `mpirun` or `horovodrun`.


def check_runnable(config: StrategyConfig) -> None:
    """Checks the requirements of the strategy before anything is started.

    Raises:
        ConfigError: if one is missing, such as Horovod for the installed TensorFlow.
    """
    problem = spec_of(config.strategy).missing()
    if problem is not None:
        raise ConfigError(problem)


def _cluster_here(
    config: StrategyConfig,
    environ: Mapping[str, str],
    chosen: str | None,
    held: contextlib.ExitStack,
) -> tuple[Mapping[str, str], int | None]:
    """The environment, with TF_CONFIG if a scheduler or `mpirun` has started this process.

    Args:
        config: the configuration.
        environ: the process's environment; one that has TF_CONFIG is left as it is.
        chosen: the name of the environment to believe; None looks for all.
        held: keeps the port of this process if it was chosen here.

    Returns:
        Also the GPUs that each task has by the scheduler; None if that does not set them.
    """
    assigned = own_tf_config(environ) or environment.read("TFDIST_LAUNCHED", environ)
    if assigned is not None or not spec_of(config.strategy).is_clustered:
        return environ, None
    job = held.enter_context(detection.current_job(environ, config.roles, chosen))
    if job is None:
        return environ, None
    return {**environ, "TF_CONFIG": job.cluster.tf_config(job.task)}, job.devices


def _with_size(resolved: Resolved, environ: Mapping[str, str]) -> Resolved:
    """The configuration with the number of processes that Horovod's launcher has started."""
    text = environment.read("HOROVOD_SIZE", environ) or "1"
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"HOROVOD_SIZE={text!r} is no number of processes. Unset it.")
    size, asked = int(text), resolved.config.processes
    if "processes" in resolved.reasons and asked != size:
        raise ConfigError(
            f"{resolved.as_set('processes')} conflicts with HOROVOD_SIZE={size}: horovodrun has "
            f"started {size} processes. Leave it out here, or give -n {size}, or start with "
            "`tfdist run` alone."
        )
    return dataclasses.replace(
        resolved, config=dataclasses.replace(resolved.config, processes=size)
    )


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
    with contextlib.ExitStack() as held:
        make = _without_strategy if request.every_task else _under_a_strategy
        job = make(request, held)
        yield dataclasses.replace(
            job, plan=dataclasses.replace(job.plan, max_restarts=request.max_restarts)
        )


def _under_a_strategy(request: Request, held: contextlib.ExitStack) -> Job:
    environ: Mapping[str, str] = environment.snapshot()
    gpus = gpu_lists.visible(environ)
    machines = hosts.of(request.hosts, request.hostfile)
    if machines is not None:
        request = _with_slots(request, machines)
    here = machines is None and not request.env_only
    resolved = _resolve(request, own_tf_config(environ), environ, len(gpus), on_this_machine=here)
    check_runnable(resolved.config)
    if machines is not None:
        return _on_hosts(request, resolved, machines, environ, gpus, held)
    environ, each = _cluster_here(resolved.config, environ, request.environment, held)
    text, spec = own_tf_config(environ), spec_of(resolved.config.strategy)
    if text is not None and spec.is_clustered:
        return _as_member(request, resolved, text, environ, gpus, each)
    if spec.is_started_elsewhere(environ):
        return _as_rank(request, resolved, environ, gpus)
    return _on_this_machine(request, resolved, environ, gpus, held)


def _as_member(
    request: Request,
    resolved: Resolved,
    text: str,
    environ: Mapping[str, str],
    gpus: tuple[str, ...],
    gpus_each: int | None,
) -> Job:
    """One task of a cluster whose other tasks are started by others."""
    cluster, task = _member(text, resolved)
    resolved = _for_cluster(resolved, cluster)
    seed = resolved.config.seed
    plan = plan_member(
        program_of(request, resolved.config, seed),
        cluster=cluster,
        task=task,
        log_dir=request.log_dir or logs.default_log_dir(),
        environ=environ,
        gpus=gpus,
        gpus_each=gpus_each,
    )
    return Job(plan, resolved, seed, gpus)


def _on_hosts(
    request: Request,
    resolved: Resolved,
    machines: Mapping[str, int],
    environ: Mapping[str, str],
    gpus: tuple[str, ...],
    held: contextlib.ExitStack,
) -> Job:
    """All processes of a job, on several machines."""
    config = resolved.config
    seed = seed_of(config)
    ssh = hosts.ssh_of(request.ssh_args, request.remote_python)
    cluster, here = held.enter_context(
        hosts.cluster_of(config, machines, ssh, dry_run=request.dry_run)
    )
    plan = plan_hosts(
        program_of(request, config, seed),
        cluster=cluster,
        here=here,
        ssh=ssh,
        log_dir=request.log_dir or logs.default_log_dir(),
        environ=environ,
        gpus=gpus,
    )
    return Job(plan, resolved, seed, gpus)


def resolved_for(request: Request) -> Resolved:
    """The configuration of a job for other machines: GPUs and TF_CONFIG of this one do not count.

    Raises:
        ConfigError: for a mistake in the command line or the strategy file.
    """
    machines = hosts.of(request.hosts, request.hostfile)
    if machines is not None:
        request = _with_slots(request, machines)
    return _of_flags_and_file(_flags(request), request, {}, gpus=0)


def _with_slots(request: Request, machines: Mapping[str, int]) -> Request:
    """The request for as many processes as the machines have slots, unless -n sets a number."""
    if request.strategy_options.get("processes") is not None:
        return request
    slots = sum(machines.values())
    options = {**request.strategy_options, "processes": slots}
    return dataclasses.replace(request, strategy_options=options)


def _as_rank(
    request: Request, resolved: Resolved, environ: Mapping[str, str], gpus: tuple[str, ...]
) -> Job:
    """One process of a job that Horovod's own launcher has started."""
    resolved = _with_size(resolved, environ)
    seed = resolved.config.seed
    plan = plan_local(
        program_of(request, resolved.config, seed),
        cluster=None,
        log_dir=request.log_dir or logs.default_log_dir(),
        environ=environ,
    )
    return Job(plan, resolved, seed, gpus)


def _on_this_machine(
    request: Request,
    resolved: Resolved,
    environ: Mapping[str, str],
    gpus: tuple[str, ...],
    held: contextlib.ExitStack,
) -> Job:
    """All processes of a job."""
    config = resolved.config
    _check_timeline(config)
    seed, counts, cluster = seed_of(config), config.counts, None
    spec = spec_of(config.strategy)
    if spec.is_clustered and counts["worker"]:
        ports = held.enter_context(hold_ports(sum(counts.values()))).ports
        cluster = local_cluster(ports, chief="chief" in counts, ps=counts.get("ps", 0))
    plan = plan_local(
        program_of(request, config, seed),
        cluster=cluster,
        log_dir=request.log_dir or logs.default_log_dir(),
        environ=environ,
        gpus=gpus,
        devices=1 if spec.one_device else config.devices,
    )
    return Job(plan, resolved, seed, gpus)


def _check_timeline(config: StrategyConfig) -> None:
    """Finds out before anything is started whether the timeline could be written."""
    drawn = spec_of(config.strategy).draws_timelines
    path = config.part(TimelineOptions).timeline
    if path is None:
        return
    check_writable(path, f"--timeline {path}", parents=drawn)  # Horovod makes no directories.
    if drawn and is_picture(path):
        check_installed()


def _roles(config: StrategyConfig) -> Mapping[str, Role]:
    """The roles of the tasks that serve the chief."""
    spec = spec_of(config.strategy)
    if spec.has_stages:
        return STAGED if config.processes > 1 else {}
    return WITH_SERVERS if spec.has_servers else {}


def seed_of(config: StrategyConfig) -> int:
    """The seed of a job, drawn here if none is given."""
    return secrets.randbelow(2**32) if config.seed is None else config.seed


#: The module that runs a function of `tfdist.launch` in each task; it is not loaded for its name.
_LAUNCH = "tfdist.cli.launch"


def program_of(request: Request, config: StrategyConfig, seed: int | None) -> Program:
    """The program that every task of a job runs."""
    return Program(
        script=request.script,
        args=request.args,
        module=request.module,
        config=config.to_json(),
        seed=seed,
        env_only=request.env_only,
        roles=_roles(config),
        # The options of `tfdist.launch`, which makes a command of them, are written in Python.
        written=tuple(sorted(all_options() if request.script == _LAUNCH else request.written)),
    )


def _resolve(
    request: Request,
    text: str | None,
    environ: Mapping[str, str],
    gpus: int,
    *,
    on_this_machine: bool,
) -> Resolved:
    from_cluster = _counts_of_cluster(text, request.asked)
    flags = {**_flags(request), **from_cluster}
    resolved = _of_flags_and_file(flags, request, environ, gpus, on_this_machine=on_this_machine)
    reasons = {name: why for name, why in resolved.reasons.items() if name not in from_cluster}
    return dataclasses.replace(resolved, reasons=reasons)


def _of_flags_and_file(
    flags: Mapping[str, object],
    request: Request,
    environ: Mapping[str, str],
    gpus: int = 0,
    *,
    on_this_machine: bool = False,
) -> Resolved:
    try:
        return resolve(flags, request.file, environ, gpus, on_this_machine=on_this_machine)
    except ConfigError as error:
        raise ConfigError(in_flags(str(error), request.written)) from error


def _counts_of_cluster(text: str | None, options: Mapping[str, Any]) -> dict[str, int]:
    """The numbers of workers and servers as TF_CONFIG has them, if nothing else gives them.

    Other options are checked against them, such as `backup_workers`.
    """
    if text is None or options.get("strategy", "auto") not in ("auto", *_with_servers()):
        return {}
    try:
        listed = parse_tf_config(text)[0].addresses
    except ConfigError:
        return {}  # The code that needs the cluster reports the mistake.
    if "ps" not in listed:
        return {}
    counts = {"processes": len(listed.get("worker", ())), "ps": len(listed["ps"])}
    return {name: count for name, count in counts.items() if count and name not in options}


def _flags(request: Request) -> dict[str, Any]:
    """The strategy's options by name, as the command line gives them."""
    flags = request.flags
    count = flags.get("processes", 1)
    if count < 1:
        raise ConfigError(f"-n {count} starts no process. Give a number of 1 or more.")
    name = request.named
    if name in having(lambda spec: spec.processes_are_devices) and "processes" in flags:
        _count_as_devices(str(name), flags)
    return flags


def _count_as_devices(name: str, flags: dict[str, Any]) -> None:
    """`-n` of a strategy that has one process counts its devices."""
    count = flags.pop("processes")
    devices = flags.setdefault("devices", count)
    if devices != count:
        raise ConfigError(
            f"-n {count} conflicts with --devices {devices}: with strategy {name!r} both "
            "give the number of devices of its one process. Remove one of them."
        )


def _member(text: str, resolved: Resolved) -> tuple[ClusterSpec, Task]:
    """The cluster and the task of a TF_CONFIG, checked for the strategy."""
    cluster, task = cluster_and_task(text)
    config = resolved.config
    refuse_gaps(cluster, f"strategy={config.strategy!r}")
    spec = spec_of(config.strategy)
    if spec.has_servers:
        findings = check_tf_config(text, use=spec.use)
        errors = [finding for finding in findings if finding.severity == "error"]
        if errors:
            lines = "\n".join(f"  {finding}" for finding in errors)
            raise ConfigError(
                f"TF_CONFIG does not go with strategy={spec.name!r}:\n{lines}\n"
                "A program that workers and parameter servers all run by themselves is started "
                "with --every-task instead of a strategy."
            )
    for name in ("processes", "ps"):
        if name in resolved.reasons:
            check_count(name, config.value(name), resolved.as_set(name), cluster)
    return cluster, task


def _for_cluster(resolved: Resolved, cluster: ClusterSpec) -> Resolved:
    """The configuration with the cluster's size, so that all tasks have the same."""
    counts = {"processes": max(1, len(cluster.computing))}
    if spec_of(resolved.config.strategy).has_servers:
        workers, servers = cluster.addresses["worker"], cluster.addresses["ps"]
        counts = {"processes": len(workers), "ps": len(servers)}
    return dataclasses.replace(resolved, config=resolved.config.replaced(**counts))
