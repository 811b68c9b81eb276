"""`tfdist run`: plans the job, starts its tasks and stays until they have ended."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from tfdist import environment
from tfdist.cli import logs, options, show
from tfdist.cluster import gpus as gpu_lists
from tfdist.cluster.launch import supervise
from tfdist.cluster.launch.plan import JobPlan, Program, local_cluster, plan_local, plan_member
from tfdist.cluster.launch.spawn import Terminal
from tfdist.cluster.ports import HeldPorts
from tfdist.cluster.spec import ClusterSpec, Task
from tfdist.config import Resolved, StrategyConfig, load_file, resolve
from tfdist.errors import ConfigError

__all__ = ["run"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Request:
    """What the command line asks for, apart from the strategy's own options."""

    script: str
    args: tuple[str, ...]
    env_only: bool
    log_dir: Path | None


def run(
    script: options.Script,
    args: options.Args = None,
    strategy: options.Strategy = None,
    processes: options.Processes = None,
    devices: options.Devices = None,
    mode: options.Mode = None,
    communication: options.Communication = None,
    seed: options.Seed = None,
    start_timeout: options.StartTimeout = None,
    grace: options.Grace = supervise.DEFAULT_GRACE,
    log_dir: options.LogDir = None,
    dry_run: options.DryRun = False,
    env_only: options.EnvOnly = False,
) -> None:
    """Run SCRIPT, unmodified, under a strategy.

    Each process enters the strategy's scope and runs SCRIPT. The terminal shows the chief's output;
    each process has a log file. The first failure ends the job.

    Where TF_CONFIG is set, this runs the one task that it names; the same command with each task's
    TF_CONFIG on the other machines makes the cluster.

    Example: tfdist run --strategy multi_worker -n 2 train.py --epochs 3

    Exit status: 0, or that of the failed task (128 + n for signal n); 2 for a mistake in the call.
    """
    _check_script(script)
    given: dict[str, Any] = {
        "processes": processes,
        "devices": devices,
        "mode": mode,
        "communication": communication,
        "seed": seed,
        "start_timeout": start_timeout,
    }
    request = _Request(script=script, args=tuple(args or ()), env_only=env_only, log_dir=log_dir)
    with _planned(request, strategy, given) as (plan, resolved, own_seed):
        if dry_run:
            print(show.commands(plan))
            return
        plan = logs.prepare(plan, chosen=log_dir is not None)
        show.table(plan, resolved, own_seed, gpu_lists.visible())
        status = _supervise(plan, grace)
    raise typer.Exit(status)


def _supervise(plan: JobPlan, grace: float) -> int:
    alone = plan.cluster is None
    outcome = supervise.run(
        plan, grace=grace, terminal=Terminal(stdin=0 if alone else None), complain=show.note
    )
    if outcome.message:
        show.note(outcome.message, new_line=outcome.midline)
    return outcome.status


@contextlib.contextmanager
def _planned(
    request: _Request, strategy: str | None, given: dict[str, Any]
) -> Iterator[tuple[JobPlan, Resolved, int | None]]:
    """The plan, the configuration and the seed; the plan's ports are held within the block."""
    environ = environment.snapshot()
    gpus = gpu_lists.visible(environ)
    flags, file = _flags(strategy, given)
    resolved = resolve(flags, file, environ, gpus=len(gpus))
    text = environment.read("TF_CONFIG", environ)
    place = request.log_dir or logs.default_place()
    if resolved.config.strategy == "multi_worker" and text is not None:
        cluster, task = _member(text, resolved)
        resolved = _for_cluster(resolved, cluster)
        seed = resolved.config.seed
        program = _program(request, resolved.config, seed)
        plan = plan_member(program, cluster=cluster, task=task, log_dir=place, environ=environ)
        yield plan, resolved, seed
        return
    seed = resolved.config.seed
    if seed is None:
        seed = secrets.randbelow(2**32)
    with contextlib.ExitStack() as stack:
        held = None
        if resolved.config.strategy == "multi_worker":
            held = stack.enter_context(HeldPorts(resolved.config.processes))
        plan = plan_local(
            _program(request, resolved.config, seed),
            cluster=local_cluster(held.ports) if held is not None else None,
            log_dir=place,
            environ=environ,
            gpus=gpus,
            devices=resolved.config.devices,
        )
        yield plan, resolved, seed


def _program(request: _Request, config: StrategyConfig, seed: int | None) -> Program:
    return Program(
        script=request.script,
        args=request.args,
        config=config.to_json(),
        seed=seed,
        env_only=request.env_only,
    )


def _flags(strategy: str | None, given: dict[str, Any]) -> tuple[dict[str, Any], Path | None]:
    """The strategy's options by name, and the strategy file if there is one."""
    flags = {name: value for name, value in given.items() if value is not None}
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
    """The cluster and the task of a TF_CONFIG that is set in the environment."""
    from tfdist.cluster.tf_config import parse_tf_config

    cluster, task = parse_tf_config(text)
    if task is None:
        raise ConfigError(
            f"TF_CONFIG={text!r} does not say which task this process is. Add "
            '"task": {"type": "worker", "index": 0}, or unset TF_CONFIG to run on this machine.'
        )
    computing = len(cluster.computing)
    asked = resolved.config.processes
    if "processes" in resolved.reasons and asked != computing:
        raise ConfigError(
            f"{resolved.reasons['processes']} {asked} conflicts with TF_CONFIG, whose cluster has "
            f"{computing} tasks that compute. Leave it out to run this task of that cluster, or "
            "unset TF_CONFIG to start all processes on this machine."
        )
    return cluster, task


def _for_cluster(resolved: Resolved, cluster: ClusterSpec) -> Resolved:
    """The configuration with the cluster's size, so that all tasks have the same."""
    config = dataclasses.replace(resolved.config, processes=max(1, len(cluster.computing)))
    return dataclasses.replace(resolved, config=config)


def _check_script(script: str) -> None:
    path = Path(script)
    if path.is_file():
        return
    if path.is_dir():
        inside = sorted(each.name for each in path.glob("*.py"))
        found = f" It has: {', '.join(inside[:5])}." if inside else ""
        raise ConfigError(f"The script {script!r} is a directory. Give a Python file.{found}")
    near = [str(each) for each in path.parent.glob("*.py")] if path.parent.is_dir() else []
    close = difflib.get_close_matches(str(path), near, n=1, cutoff=0.5)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise ConfigError(f"The script {script!r} does not exist in {str(Path.cwd())!r}.{hint}")
