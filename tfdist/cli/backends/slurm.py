"""`tfdist run --on slurm`: in an allocation one `srun`, else a batch job that is watched."""

from __future__ import annotations

import dataclasses
import os
import shlex
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from tfdist import environment
from tfdist.cli import logs, planning, summary
from tfdist.cli.backends.request import Order, counts_of
from tfdist.cluster.environments import slurm as detected
from tfdist.cluster.environments.base import Absent, Surroundings, counted, number
from tfdist.cluster.spec import Task
from tfdist.config.strategy_spec import spec_of
from tfdist.errors import ConfigError
from tfdist.launch import root_cause, supervisor
from tfdist.launch.backends import slurm, slurm_watch
from tfdist.launch.plan import JobPlan
from tfdist.launch.supervisor import Requests, stop_requests

__all__ = ["start", "step_of"]

_SETTER = "Slurm"
#: Bytes at the end of a log in which the cause of a failure is looked for.
_TAIL = 1 << 16


def start(order: Order) -> int:
    """Starts the tasks and stays until their end; the exit status is that of the task to blame.

    Raises:
        ConfigError: for a mistake in the options, or if Slurm's commands are missing.
        StartError: if Slurm does not take the job, or is not heard of any more.
    """
    environ = environment.snapshot()
    inside = _is_inside(environ)
    _check(order, inside)
    order = _with_allocation(order, environ) if inside else order
    step = step_of(order)
    if inside:
        step = dataclasses.replace(step, name=f"{step.name}-{os.getpid()}")
    if order.dry_run:
        print(_srun(step, environ) if inside else slurm.batch_script(step), end="\n" * inside)
        return 0
    for program in ("srun", "squeue", "scancel") if inside else ("sbatch", "scontrol", "scancel"):
        if shutil.which(program) is None:
            raise ConfigError(
                f"--on slurm needs {program}, which is not in PATH. Log in to a machine of the "
                "cluster from which jobs are submitted, or leave --on out."
            )
    _make_log_dir(step.log_dir, chosen=order.request.log_dir is not None)
    sys.stdout.flush()
    return _in_allocation(order, step, environ) if inside else _as_batch_job(order, step)


def step_of(order: Order) -> slurm.Step:
    """The step that Slurm is to start.

    Raises:
        ConfigError: if the engine's arguments are not of the form of a command line.
    """
    request, options = order.request, order.options
    log_dir = (request.log_dir or logs.default_place()).absolute()
    return slurm.Step(
        name=options.job_name or Path(request.script).stem,
        tasks=order.tasks,
        command=(
            *(request.remote_python or sys.executable, "-m", "tfdist.cli.main"),
            *order.command("slurm", "--log-dir", str(log_dir)),
        ),
        log_dir=log_dir,
        gpus_per_task=options.gpus_per_task,
        arguments=order.engine_arguments(),
    )


def _make_log_dir(place: Path, *, chosen: bool) -> None:
    """Makes the directory of the logs, where all nodes are to write.

    Raises:
        ConfigError: if it cannot be written.
    """
    nothing = JobPlan(tasks=(), cluster=None, shown=Task("worker", 0), log_dir=place)
    if logs.prepare(nothing, chosen=chosen).log_dir != place:
        raise ConfigError(
            f"--on slurm needs a directory for logs that all nodes have, and {str(place)!r} cannot "
            "be written. Name another with --log-dir."
        )


def _is_inside(environ: Mapping[str, str]) -> bool:
    """Whether this process has an allocation of Slurm to start tasks in.

    Raises:
        ConfigError: if it is one of the tasks itself.
    """
    if not environ.get("SLURM_JOB_ID"):
        return False
    place = detected.place(Surroundings(environ=environ))
    if isinstance(place, Absent):
        return True
    raise ConfigError(
        f"--on slurm starts tasks by srun, but this process is itself one ({place.reason}). Leave "
        "--on out in what srun starts; in an interactive session, use the shell of salloc."
    )


def _check(order: Order, inside: bool) -> None:
    if order.request.hosts is not None or order.request.hostfile is not None:
        raise ConfigError(
            "--on slurm conflicts with --hosts and --hostfile: Slurm chooses the nodes. Name them "
            "to it instead, such as --engine-args '--nodelist=a,b --ntasks-per-node=2'."
        )
    if inside and order.options.detach:
        raise ConfigError(
            "--detach conflicts with the allocation that this runs in (SLURM_JOB_ID is set): there "
            "the tasks end with it. Leave --detach out, or run this outside."
        )


def _with_allocation(order: Order, environ: Mapping[str, str]) -> Order:
    """The order with as many tasks as the allocation has, unless the user sets their number."""
    request, config = order.request, order.resolved.config
    several = spec_of(config.strategy).is_clustered or request.strategy in (None, "auto")
    if "processes" in order.resolved.reasons or not environ.get("SLURM_NTASKS") or not several:
        return order
    others = order.tasks - config.processes
    left = number(environ, "SLURM_NTASKS", _SETTER, least=1) - others
    if left < 1:
        raise ConfigError(
            f"SLURM_NTASKS={environ['SLURM_NTASKS']} leaves no worker beside the chief and --ps "
            f"{order.counts['ps']}. Ask Slurm for more tasks, such as salloc --ntasks={others + 1}."
        )
    if left == 1:
        return order
    given = {**request.given, "processes": left}
    resolved = planning.resolved_for(dataclasses.replace(request, given=given))
    return dataclasses.replace(order, resolved=resolved, counts=counts_of(resolved))


def _srun(step: slurm.Step, environ: Mapping[str, str]) -> str:
    return shlex.join(slurm.srun(step, environ.get("SLURM_CPUS_PER_TASK")))


def _in_allocation(order: Order, step: slurm.Step, environ: Mapping[str, str]) -> int:
    words = slurm.srun(step, environ.get("SLURM_CPUS_PER_TASK"))
    summary.note(
        f"srun starts {counted(order.counts)} in job {environ['SLURM_JOB_ID']}. {_logs(step)}"
    )
    with stop_requests() as requests:
        status, lines = slurm_watch.run(words, step.name, environ["SLURM_JOB_ID"], requests)
    return _told(order, step, status, lines, requests)


def _as_batch_job(order: Order, step: slurm.Step) -> int:
    script = step.log_dir / "job.sbatch"
    script.write_text(slurm.batch_script(step))
    with stop_requests() as requests:
        job = slurm_watch.submit(script)
        summary.note(f"job {job} has {counted(order.counts)}. {_logs(step)}")
        if order.options.detach and not requests.received:
            out, _ = slurm.output_files(step.log_dir, job)
            summary.note(f"its state: squeue --jobs={job}")
            summary.note(f"its output: {shlex.join(('tail', '-F', str(out)))}")
            summary.note(f"this cancels it: scancel {job}")
            return 0
        state, lines = slurm_watch.watch(job, step.log_dir, requests, summary.note)
    status = _told(order, step, state.status, lines, requests)
    explained = state.name == "FAILED" and slurm.failures(lines)
    if state.name == "COMPLETED" or explained or requests.received:
        return status
    why = f" ({state.reason})" if state.reason else ""
    summary.note(
        f"job {job} has ended as {state.name}{why}. What Slurm knows: scontrol show job {job}"
    )
    return status or 1


def _logs(step: slurm.Step) -> str:
    return f"Logs: {step.log_dir}"


def _told(order: Order, step: slurm.Step, status: int, lines: list[str], requests: Requests) -> int:
    """Shows the user how the tasks ended; returns the exit status."""
    if requests.received:
        outcome = supervisor.outcome_of(None, (), (), requests)
        summary.note(outcome.message)
        return outcome.status
    endings = [_ending(order, step, failure) for failure in slurm.failures(lines)]
    root = root_cause.root_cause(endings)
    if status == 0 or root is None:
        return status
    summary.note(root_cause.describe(root, endings))
    return root_cause.exit_status(root.returncode)


def _ending(order: Order, step: slurm.Step, failure: slurm.Failure) -> root_cause.Ending:
    tasks = [Task(kind, index) for kind, n in order.counts.items() for index in range(n)]
    task = tasks[failure.rank]
    logs = [step.log_dir / f"{task.type}-{task.index}.log"]
    if failure.rank:
        logs.append(slurm.stderr_file(step.log_dir, failure.rank))
    log, lines = next(((log, said) for log in logs if (said := _last_lines(log))), (None, []))
    return root_cause.Ending(
        task=task,
        returncode=failure.returncode,
        log=log,
        lines=lines,
        stopped=failure.stopped,
        shown=failure.rank == 0,
        host=failure.node,
    )


def _last_lines(path: Path) -> list[str]:
    """The last lines of a file, or none if it cannot be read."""
    try:
        with path.open("rb") as stream:
            stream.seek(max(0, path.stat().st_size - _TAIL))
            return stream.read().decode(errors="replace").splitlines()[-100:]
    except OSError:
        return []
