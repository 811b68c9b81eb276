"""`tfdist run --on ray`: a placement group of Ray with an actor for each task."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from tfdist import environment
from tfdist.cli import logs, planning, summary
from tfdist.cli.backends.base import Engine, Order
from tfdist.config.strategy_spec import spec_of
from tfdist.errors import ConfigError
from tfdist.launcher import supervisor
from tfdist.launcher.backends import ray_actor
from tfdist.launcher.backends.ray import Session, Wish, bundles, options, plan_on
from tfdist.launcher.plan import JobPlan, Program, task_plan
from tfdist.launcher.process import Terminal

__all__ = ["Ray"]


class Ray(Engine):
    """Runs the tasks in actors; this command is their launcher.

    Raises:
        ConfigError: for a mistake in the options.
    """

    name = "ray"
    options = ("engine_args", "gpus_per_task", "job_name")
    restarts = "nothing does; start it again"

    def __init__(self, order: Order) -> None:
        super().__init__(order)
        self._wish = _wish_of(order)
        self._seed = planning.seed_of(order.resolved.config)
        self._program = planning.program_of(order.request, order.resolved.config, self._seed)
        self._log_dir = order.request.log_dir or logs.default_log_dir()

    def text(self) -> str:
        """See `Engine`."""
        python = self.order.request.remote_python
        return f"{_shown(self._wish, self._program, self._log_dir, python)}\n"

    def start(self) -> int:
        """See `Engine`."""
        order, config = self.order, self.order.resolved.config
        ray_actor.check()
        planning.check_runnable(config)
        with Session(self._wish, summary.note) as session:
            placed = tuple(zip(self._wish.bundles, session.seats, strict=True))
            plan = plan_on(
                self._program,
                placed,
                clustered=spec_of(config.strategy).is_clustered,
                log_dir=self._log_dir,
                environ=environment.snapshot(),
                python=order.request.remote_python,
            )
            plan = logs.prepare(plan, chosen=order.request.log_dir is not None)
            gpus = max((seat.gpus for bundle, seat in placed if bundle.gpus), default=())
            summary.table(plan, order.resolved, self._seed, gpus)
            outcome = supervisor.run(
                session.relayed(plan, split=not (os.isatty(1) and os.isatty(2))),
                grace=order.grace,
                terminal=Terminal(),
                complain=summary.note,
                notify=summary.note,
            )
        return summary.conclude(outcome)


def _wish_of(order: Order) -> Wish:
    """The command line's request to Ray."""
    request = order.request
    flags = {
        "--hosts": request.hosts,
        "--hostfile": request.hostfile,
        "--ssh-args": request.ssh_args,
    }
    for flag, value in flags.items():
        if value is not None:
            raise ConfigError(
                f"{flag} {value} conflicts with --on ray, which chooses the nodes itself. Leave "
                "one of them out."
            )
    asked = options(order.options.engine_args)
    return Wish(
        name=order.name,
        bundles=bundles(order.counts, asked.cpus_per_task, order.options.gpus_per_task or 0),
        options=asked,
        folder=os.getcwd(),
        seconds=order.resolved.config.start_timeout,
    )


def _shown(wish: Wish, program: Program, log_dir: Path, python: str | None) -> str:
    """The placement group, and for each bundle its task's command."""
    where = wish.options.address or "at RAY_ADDRESS, or on this machine, or of the job's own"
    there = dataclasses.replace(program, python=python or "python")
    tasks = tuple(
        task_plan(there, None, bundle.task, log_dir, {}, None if bundle.gpus else ())
        for bundle in wish.bundles
    )
    plan = JobPlan(tasks=tasks, cluster=None, shown=tasks[0].task, log_dir=log_dir)
    heading = f"# Ray {where}: placement group {wish.name!r}, {wish.options.placement}, within "
    listed = [f"#   {bundle.task}: {bundle}" for bundle in wish.bundles]
    remark = "# Each task of a cluster also gets TF_CONFIG, as soon as Ray has placed all."
    return "\n".join((f"{heading}{wish.seconds:g} s:", *listed, remark, summary.commands(plan)))
