"""The layouts of a job's weights, for its dry run: `python -m tfdist.cli.describe SCRIPT [ARGS]`.

Runs the script until it would train, in one process that keeps what the first one of the job would
keep. The script's output goes to standard error, the layouts as JSON to standard output.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from tfdist import environment
from tfdist.cli import summary, task
from tfdist.cli.request import Job
from tfdist.config.sharding_options import MeshOptions, ShardingOptions, check_size
from tfdist.launcher.plan import TASK_MODULE
from tfdist.utils.imports import quiet_import

__all__ = ["layouts_of"]


def layouts_of(job: Job) -> tuple[int, Mapping[str, Any] | None]:
    """The layouts of the weights of a job's model.

    Args:
        job: the job.

    Returns:
        The exit status of the script, and the layouts; None if the job divides nothing, or the
        script has failed.
    """
    config = None if job.resolved is None else job.resolved.config
    cluster, command = job.plan.cluster, job.plan.tasks[0].command
    divides = config is not None and bool(
        config.part(ShardingOptions).zero or config.part(MeshOptions).divides_layers
    )
    mesh = None if config is None else config.part(MeshOptions).parsed
    if mesh is not None and cluster is not None:
        check_size(mesh, len(cluster.computing))
    if config is None or cluster is None or not divides or TASK_MODULE not in command:
        return 0, None
    whole = dataclasses.replace(config, processes=len(cluster.computing))
    variables = {
        **job.plan.tasks[0].environ,
        **{"TFDIST_CONFIG": whole.to_json(), "TF_CONFIG": None, "TFDIST_RECORD": None},
        "CUDA_VISIBLE_DEVICES": "-1",
    }
    words = command[command.index(TASK_MODULE) + 1 :]
    done = subprocess.run(
        [sys.executable, "-m", __spec__.name, *words],
        env=environment.merged(variables),
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    layouts = json.loads(done.stdout) if done.returncode == 0 else None
    if layouts is not None and not layouts["weights"]:
        summary.note("the script made no weights in the strategy's scope, so none has a layout")
    elif layouts is not None and layouts["optimizer"] is None:
        summary.note("the script ended before it trained: weights may be missing below")
    return done.returncode, layouts


def main(argv: Sequence[str]) -> int:
    """Runs a script until it would train, and prints the layouts.

    Args:
        argv: the script's path, or `-m` and the name of a module, and its arguments.

    Returns:
        The exit status, as `task.main` has it.
    """
    made: list[Any] = []

    def make() -> Any:
        with quiet_import():
            from tfdist.strategies.described import Described
            from tfdist.strategies.factory import activate
        task.seed(environment.read("TFDIST_SEED"))
        config = task.config_of_task()
        made.append(Described(config))
        return activate(made[0], config)

    with os.fdopen(os.dup(1), "w") as output:
        os.dup2(2, 1)
        status = task.main(argv, make)
        if status == 0:
            json.dump(made[0].description, output)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
