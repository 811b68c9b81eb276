"""A task's way into its cluster, before TensorFlow is imported."""

from __future__ import annotations

import dataclasses
import secrets
import sys

from tfdist.cluster.join import identity, join
from tfdist.cluster.spec import ClusterSpec, Task
from tfdist.cluster.tf_config import parse_tf_config
from tfdist.config import StrategyConfig
from tfdist.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Member:
    """A task that has joined.

    Attributes:
        cluster: the tasks that compute.
        task: this one.
        seed: what the chief drew for all, for programs that were given no seed.
    """

    cluster: ClusterSpec
    task: Task
    seed: int


def join_cluster(text: str, config: StrategyConfig) -> Member:
    """Waits until all tasks of a cluster are there.

    Args:
        text: this task's TF_CONFIG.
        config: the configuration, the same for all tasks.

    Raises:
        ConfigError: if TF_CONFIG has a mistake, or the task does not compute.
        StartError: if a task does not join before `config.start_timeout`.
    """
    cluster, task = parse_tf_config(text)
    if task is None or task not in cluster.computing:
        raise ConfigError(
            f"TF_CONFIG={text!r} makes this process {task or 'no task'}, but "
            "strategy='multi_worker' runs on tasks of type chief and worker. Correct `task`."
        )
    computing = ClusterSpec(
        {kind: a for kind, a in cluster.addresses.items() if kind in ("chief", "worker")}
    )
    seed = secrets.randbelow(2**32)
    if len(computing.computing) > 1:
        report = join(
            computing,
            task,
            timeout=config.start_timeout,
            identity=identity(config.to_json()),
            offer={"seed": str(seed)},
            report=lambda message: print(f"tfdist: {message}", file=sys.stderr, flush=True),
        )
        seed = int(report.offer["seed"])
    return Member(computing, task, seed)
