"""`tfdist run --on slurm`: in an allocation one `srun`, else a batch job that is watched."""

from __future__ import annotations

import dataclasses
import os
import shlex
from collections.abc import Mapping
from pathlib import Path

from tfdist import environment
from tfdist.cli import logs, planning, summary
from tfdist.cli.backends.base import Engine, Order
from tfdist.cluster.environments import slurm as detected
from tfdist.cluster.environments.base import Absent, ProcessContext, number
from tfdist.cluster.spec import Task, counted
from tfdist.config.strategy_spec import spec_of
from tfdist.errors import ConfigError
from tfdist.launcher import root_cause, supervisor
from tfdist.launcher.backends import slurm
from tfdist.launcher.plan import JobPlan
from tfdist.launcher.supervisor import Requests, stop_requests

__all__ = ["Slurm"]

#: Bytes at the end of a log in which the cause of a failure is looked for.
_TAIL = 1 << 16


class Slurm(Engine):
    """Starts the tasks by `srun`, in the allocation at hand or in one of the job's own.

    Raises:
        ConfigError: for a mistake in the options, or if this process is a task of Slurm itself.
    """

    name = "slurm"
    options = ("engine_args", "gpus_per_task", "job_name", "detach")
    restarts = "`scontrol requeue` does, and Slurm itself when a node fails"
    remedy = "Log in to a machine of the cluster from which jobs are submitted, or leave --on out."
    placement = (
        "Slurm chooses the nodes. Name them to it instead, such as --engine-args "
        "'--nodelist=a,b --ntasks-per-node=2'."
    )

    def __init__(self, order: Order) -> None:
        self._environ = environment.snapshot()
        self._inside = _is_inside(self._environ)
        if self._inside and order.options.detach:
            raise ConfigError(
                "--detach conflicts with the allocation that this runs in (SLURM_JOB_ID is set): "
                "there the tasks end with it. Leave --detach out, or run this outside."
            )
        super().__init__(_with_allocation(order, self._environ) if self._inside else order)
        self._step = self._planned()
        self._srun = slurm.srun(self._step, self._environ.get("SLURM_CPUS_PER_TASK"))

    def programs(self) -> tuple[str, ...]:
        """See `Engine`."""
        if self._inside:
            return ("srun", "squeue", "scancel")
        return ("sbatch", "scontrol", "scancel")

    def text(self) -> str:
        """See `Engine`."""
        if self._inside:
            return f"{shlex.join(self._srun)}\n"
        return slurm.batch_script(self._step)

    def start(self) -> int:
        """See `Engine`."""
        _make_log_dir(self._step.log_dir, chosen=self.order.request.log_dir is not None)
        return self._in_allocation() if self._inside else self._as_batch_job()

    def _planned(self) -> slurm.Step:
        order = self.order
        log_dir = (order.request.log_dir or logs.default_log_dir()).absolute()
        return slurm.Step(
            name=f"{order.name}-{os.getpid()}" if self._inside else order.name,
            tasks=order.tasks,
            command=(*order.tfdist(), *order.command("slurm", "--log-dir", str(log_dir))),
            log_dir=log_dir,
            gpus_per_task=order.options.gpus_per_task,
            arguments=order.engine_arguments(),
        )

    def _in_allocation(self) -> int:
        job = self._environ["SLURM_JOB_ID"]
        counts = counted(self.order.counts)
        summary.note(f"srun starts {counts} in job {job}. Logs: {self._step.log_dir}")
        with stop_requests() as requests:
            status, lines = slurm.run(self._srun, self._step.name, job, requests)
        return self._conclude(status, lines, requests)

    def _as_batch_job(self) -> int:
        log_dir = self._step.log_dir
        script = log_dir / "job.sbatch"
        script.write_text(slurm.batch_script(self._step))
        with stop_requests() as requests:
            job = slurm.submit(script)
            summary.note(f"job {job} has {counted(self.order.counts)}. Logs: {log_dir}")
            if self.order.options.detach and not requests.received:
                out, _ = slurm.output_files(log_dir, job)
                summary.note(f"its state: squeue --jobs={job}")
                summary.note(f"its output: {shlex.join(('tail', '-F', str(out)))}")
                summary.note(f"this cancels it: scancel {job}")
                return 0
            state, lines = slurm.watch(job, log_dir, requests, summary.note)
        status = self._conclude(state.status, lines, requests)
        explained = state.name == "FAILED" and slurm.failures(lines)
        if state.name == "COMPLETED" or explained or requests.received:
            return status
        why = f" ({state.reason})" if state.reason else ""
        summary.note(
            f"job {job} has ended as {state.name}{why}. What Slurm knows: scontrol show job {job}"
        )
        return status or 1

    def _conclude(self, status: int, lines: list[str], requests: Requests) -> int:
        """Shows the user how the tasks ended; returns the exit status."""
        if requests.received:
            outcome = supervisor.outcome_of(None, (), (), requests)
            summary.note(outcome.message)
            return outcome.status
        endings = [self._ending(failure) for failure in slurm.failures(lines)]
        root = root_cause.root_cause(endings)
        if status == 0 or root is None:
            return status
        summary.note(root_cause.describe(root, endings))
        return root_cause.exit_status(root.returncode)

    def _ending(self, failure: slurm.Failure) -> root_cause.Ending:
        counts, log_dir = self.order.counts, self._step.log_dir
        tasks = [Task(kind, index) for kind, count in counts.items() for index in range(count)]
        task = tasks[failure.rank]
        files = [log_dir / f"{task.type}-{task.index}.log"]
        if failure.rank:
            files.append(slurm.stderr_file(log_dir, failure.rank))
        log, lines = next(((log, last) for log in files if (last := _last_lines(log))), (None, []))
        return root_cause.Ending(
            task=task,
            returncode=failure.returncode,
            log=log,
            lines=lines,
            stopped=failure.stopped,
            shown=failure.rank == 0,
            host=failure.node,
        )


def _make_log_dir(directory: Path, *, chosen: bool) -> None:
    """Makes the directory of the logs, where all nodes are to write."""
    nothing = JobPlan(tasks=(), cluster=None, shown=Task("worker", 0), log_dir=directory)
    if logs.prepare(nothing, chosen=chosen).log_dir != directory:
        raise ConfigError(
            f"--on slurm needs a directory for logs that all nodes have, and {str(directory)!r} "
            "cannot be written. Name another with --log-dir."
        )


def _is_inside(environ: Mapping[str, str]) -> bool:
    """Whether this process has an allocation of Slurm to start tasks in."""
    if not environ.get("SLURM_JOB_ID"):
        return False
    assignment = detected.resolve(ProcessContext(environ=environ))
    if isinstance(assignment, Absent):
        return True
    raise ConfigError(
        f"--on slurm starts tasks by srun, but this process is itself one ({assignment.reason}). "
        "Leave --on out in what srun starts; in an interactive session, use the shell of salloc."
    )


def _with_allocation(order: Order, environ: Mapping[str, str]) -> Order:
    """The order with as many tasks as the allocation has, unless the user sets their number."""
    request, config = order.request, order.resolved.config
    several = spec_of(config.strategy).is_clustered or request.strategy in (None, "auto")
    if "processes" in order.resolved.reasons or not environ.get("SLURM_NTASKS") or not several:
        return order
    others = order.tasks - config.processes
    left = number(environ, "SLURM_NTASKS", "Slurm", least=1) - others
    if left < 1:
        raise ConfigError(
            f"SLURM_NTASKS={environ['SLURM_NTASKS']} leaves no worker beside the chief and --ps "
            f"{order.counts['ps']}. Ask Slurm for more tasks, such as salloc --ntasks={others + 1}."
        )
    if left == 1:
        return order
    options = {**request.strategy_options, "processes": left}
    resolved = planning.resolved_for(dataclasses.replace(request, strategy_options=options))
    return dataclasses.replace(order, resolved=resolved)


def _last_lines(path: Path) -> list[str]:
    """The last lines of a file, or none if it cannot be read."""
    try:
        with path.open("rb") as stream:
            stream.seek(max(0, path.stat().st_size - _TAIL))
            return stream.read().decode(errors="replace").splitlines()[-100:]
    except OSError:
        return []
