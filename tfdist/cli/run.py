"""`tfdist run`: plans the job, starts its tasks and stays until they have ended."""

from __future__ import annotations

import dataclasses
import difflib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer

from tfdist import environment
from tfdist.cli import describe, elastic, logs, options, planning, summary
from tfdist.cli.backends.base import Engine, EngineOptions, Order, words_of
from tfdist.cli.backends.kubernetes import Kubernetes
from tfdist.cli.backends.mpi import Mpi
from tfdist.cli.backends.ray import Ray
from tfdist.cli.backends.slurm import Slurm
from tfdist.cli.request import Request, settled
from tfdist.cluster import resources as gpu_lists
from tfdist.cluster.validation.machine import require_tensorflow
from tfdist.config.strategy_config import all_options
from tfdist.config.strategy_file import is_file, load_file
from tfdist.errors import ConfigError
from tfdist.launcher import supervisor
from tfdist.launcher.plan import JobPlan
from tfdist.launcher.process import Terminal
from tfdist.launcher.waiting import Waiting, terminal
from tfdist.utils.run_record import Record

__all__ = ["run"]

#: Engines whose tasks this very command starts.
_HERE = ("local", "ssh")

#: Every other engine by name.
_ENGINES: dict[str, type[Engine]] = {each.name: each for each in (Slurm, Mpi, Kubernetes, Ray)}


@options.with_all
def run(
    context: typer.Context,
    script: options.Script,
    args: options.Args = None,
    module: options.Module = False,
    strategy: options.Strategy = None,
    max_restarts: options.MaxRestarts = 0,
    hosts: options.Hosts = None,
    hostfile: options.Hostfile = None,
    ssh_args: options.SshArgs = None,
    remote_python: options.RemotePython = None,
    environment: options.Environment = None,
    min_np: options.MinNp = None,
    max_np: options.MaxNp = None,
    host_discovery_script: options.HostDiscoveryScript = None,
    elastic_timeout: options.ElasticTimeout = 600.0,
    grace: options.Grace = supervisor.DEFAULT_GRACE,
    log_dir: options.LogDir = None,
    dry_run: options.DryRun = False,
    as_json: options.AsJson = False,
    env_only: options.EnvOnly = False,
    every_task: options.EveryTask = False,
    evaluator: options.Evaluator = False,
    task_flags: options.TaskFlags = False,
    **others: object,
) -> None:
    """Run SCRIPT, unmodified, under a strategy.

    Each process enters the strategy's scope and runs SCRIPT; with parameter_server the chief alone
    does. The terminal shows the chief's output; each process has a log file. The first failure ends
    the job, or starts it again (--max-restarts).

    Where TF_CONFIG is set, this runs the one task that it names; the same command with each task's
    TF_CONFIG on the other machines makes the cluster.

    Example: tfdist run --strategy multi_worker -n 2 train.py --epochs 3

    Exit status: 0, or that of the failed task (128 + n for signal n); 2 for a mistake in the call.
    """
    request = settled(_request(context.params))
    engine = _engine(context.params["on"], request)
    of_engine = _options_of(engine, context.params)
    bounds = elastic.Bounds(min_np, max_np, host_discovery_script, elastic_timeout)
    if engine is not None:
        _check_for(engine, request, bounds)
        resolved, words = planning.resolved_for(request), words_of(context)
        raise typer.Exit(engine(Order(request, resolved, words, of_engine, grace)).run())
    if bounds.flags and not dry_run:
        raise typer.Exit(elastic.supervise(request, bounds, grace))
    raise typer.Exit(_run_here(request, grace, dry_run, as_json))


def _run_here(request: Request, grace: float, dry_run: bool, as_json: bool) -> int:
    """Starts the tasks and stays until they have ended; returns the exit status."""
    if not dry_run:
        require_tensorflow()
    with planning.planned(request) as job:
        if dry_run:
            status, layouts = describe.layouts_of(job)
            print(summary.as_json(job, layouts) if as_json else summary.commands(job.plan, layouts))
            return status
        if request.env_only or request.every_task:
            gpu_lists.check_tensorflow(job.gpus)
        failing = None if job.gpus else gpu_lists.failure(environment.snapshot())
        if failing is not None:
            summary.note(f"{failing}; CUDA_VISIBLE_DEVICES=-1 says that this is meant")
        plan = logs.prepare(job.plan, chosen=request.log_dir is not None)
        rows = summary.table(plan, job.resolved, job.seed, job.gpus, job.why)
        here = plan.cluster is None or len(plan.tasks) == len(list(plan.cluster.tasks()))
        record = logs.launcher_record(plan.log_dir, None if here else plan.shown)
        logs.describe_job(record, plan, rows, job.timeline)
        return _supervise(plan, grace, record)


def _request(params: dict[str, Any]) -> Request:
    """The values of the command line, sorted by who needs them."""
    if not params["module"]:
        _check_script(params["script"])
    of_strategy = set(all_options()) - {"strategy"}
    own = {field.name for field in dataclasses.fields(Request)} - {
        *("args", "strategy_options", "file", "why_every_task")
    }
    strategy = params["strategy"]
    return Request(
        args=tuple(params["args"] or ()),
        strategy_options={name: value for name, value in params.items() if name in of_strategy},
        file=load_file(Path(strategy)) if strategy and is_file(strategy) else None,
        **{name: value for name, value in params.items() if name in own},
    )


def _supervise(plan: JobPlan, grace: float, record: Record) -> int:
    alone, begun = plan.cluster is None, time.monotonic()
    outcome = supervisor.run(
        plan,
        grace=grace,
        terminal=Terminal(stdin=0 if alone else None),
        complain=summary.note,
        notify=summary.noting(record),
        record=record,
        waiting=Waiting(terminal(), plan),
    )
    return logs.note_done(outcome, plan.log_dir, begun, record)


def _engine(on: str | None, request: Request) -> type[Engine] | None:
    """The engine that a command line asks for, or None if this command starts the tasks."""
    hosts = request.hosts is not None or request.hostfile is not None
    if on not in (None, *_HERE, *_ENGINES):
        names = ", ".join((*_HERE, *_ENGINES))
        raise ConfigError(f"Unknown engine --on {on!r}. There are: {names}.")
    if on == "ssh" and not hosts:
        raise ConfigError("--on ssh needs the machines: add --hosts a:2,b:2 or --hostfile PATH.")
    if on == "local" and hosts:
        raise ConfigError(
            "--on local conflicts with --hosts and --hostfile, which name other machines. Leave "
            "one of them out."
        )
    return None if on is None else _ENGINES.get(on)


def _options_of(engine: type[Engine] | None, params: Mapping[str, Any]) -> EngineOptions:
    """The options of an engine; one that is set and belongs to another is an error."""
    fields = dataclasses.fields(EngineOptions)
    has = engine.options if engine is not None else ()
    for each in fields:
        if params[each.name] not in (None, each.default) and each.name not in has:
            flag = f"--{each.name.replace('_', '-')}"
            owners = [name for name, other in _ENGINES.items() if each.name in other.options]
            raise ConfigError(
                f"{flag} goes with --on {' or '.join(owners)}. Add that, or leave {flag} out."
            )
    _check_json(engine, params)
    chosen = {each.name: params[each.name] for each in fields if params[each.name] is not None}
    return EngineOptions(**chosen)


def _check_json(engine: type[Engine] | None, params: Mapping[str, Any]) -> None:
    if params["as_json"] and engine is not None:
        raise ConfigError(
            f"--json conflicts with --on {engine.name}, whose dry run prints what the engine "
            "takes, not tasks that this command starts. Leave one of them out."
        )
    if params["as_json"] and not params["dry_run"]:
        raise ConfigError("--json prints the plan of a dry run. Add --dry-run, or leave it out.")


def _check_for(engine: type[Engine], request: Request, bounds: elastic.Bounds) -> None:
    """Refuses options of jobs whose tasks this command starts."""
    if request.env_only or request.every_task:
        raise ConfigError(
            f"--on {engine.name} starts each task by `tfdist run`, which --env-only and "
            "--every-task leave without a strategy. Leave them out, or write the engine's script "
            "by hand (see cluster/)."
        )
    if request.max_restarts:
        raise ConfigError(
            f"--max-restarts {request.max_restarts} conflicts with --on {engine.name}, which "
            f"starts the tasks itself: {engine.restarts}."
        )
    if bounds.flags:
        raise ConfigError(
            f"{bounds.flags[0]} conflicts with --on {engine.name}: elastic jobs are started by "
            "this command alone. Leave one of them out."
        )


def _check_script(script: str) -> None:
    path = Path(script)
    if path.is_file():
        return
    if path.is_dir():
        inside = sorted(each.name for each in path.glob("*.py"))
        contents = f" It has: {', '.join(inside[:5])}." if inside else ""
        raise ConfigError(f"The script {script!r} is a directory. Give a Python file.{contents}")
    near = [str(each) for each in path.parent.glob("*.py")] if path.parent.is_dir() else []
    close = difflib.get_close_matches(str(path), near, n=1, cutoff=0.5)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise ConfigError(f"The script {script!r} does not exist in {str(Path.cwd())!r}.{hint}")
