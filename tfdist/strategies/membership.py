"""A task's way into its cluster, before TensorFlow is imported."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import secrets
import socket
from collections.abc import Callable, Iterator, Mapping

from tfdist.cluster.rendezvous import liveness
from tfdist.cluster.rendezvous.background import in_background
from tfdist.cluster.rendezvous.join import JoinReport, identity, join
from tfdist.cluster.spec import ClusterSpec, Task
from tfdist.cluster.tf_config import parse_tf_config, refuse_gaps
from tfdist.config.strategy_config import StrategyConfig
from tfdist.config.strategy_spec import spec_of
from tfdist.errors import ConfigError
from tfdist.utils.messages import logger, name_task

__all__ = ["Member", "ServerMember", "join_as_server", "join_cluster", "joining_cluster"]


@dataclasses.dataclass(frozen=True)
class Member:
    """A task that has joined.

    Attributes:
        cluster: the tasks that compute, and those that hold weights.
        task: this one.
        seed: the chief's seed for all, for programs that were given no seed.
        offer: the values that the chief sent to all tasks.
    """

    cluster: ClusterSpec
    task: Task
    seed: int
    offer: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class ServerMember:
    """A task that has joined in order to serve its chief.

    Attributes:
        cluster: the chief, the workers and the parameter servers.
        task: this one.
        line: the connection to the chief, which lasts as long as the chief; None for a task that
            takes the place of one that has died.
    """

    cluster: ClusterSpec
    task: Task
    line: socket.socket | None


def join_cluster(
    text: str,
    config: StrategyConfig,
    offer: Callable[[ClusterSpec], Mapping[str, str]] | None = None,
) -> Member:
    """Waits until all tasks of a cluster are there, in a task that runs the script.

    With `parameter_server` and `pipeline` that is the chief. The servers' connections to it are
    then held open until this process ends (see `tfdist.cluster.rendezvous.liveness`).

    Args:
        text: this task's TF_CONFIG.
        config: the configuration; with `multi_worker` and `horovod` the same for all tasks.
        offer: called on the chief of several tasks before they meet, with the tasks; gives the
            values that the others must be given.

    Raises:
        ConfigError: if TF_CONFIG has a mistake, or the task does not run the script.
        StartError: if a task does not join before `config.start_timeout`.
    """
    cluster, task, offered = _script_task(text, config, offer)
    if offered is None:
        return _member(cluster, task, None)
    return _member(cluster, task, _join_as_script(cluster, task, config, offered))


@contextlib.contextmanager
def joining_cluster(text: str, config: StrategyConfig) -> Iterator[Callable[[], Member]]:
    """As `join_cluster`, while the block goes on, which should import TensorFlow.

    Mistakes of TF_CONFIG are found before the block. It may use no thread before it calls what it
    is given, which waits for the other tasks.
    """
    cluster, task, offered = _script_task(text, config, None)
    if offered is None:
        yield lambda: _member(cluster, task, None)
        return
    meet = functools.partial(_join_as_script, cluster, task, config, offered)
    with in_background(meet) as joined:
        yield lambda: _member(cluster, task, joined())


def _script_task(
    text: str,
    config: StrategyConfig,
    offer: Callable[[ClusterSpec], Mapping[str, str]] | None,
) -> tuple[ClusterSpec, Task, dict[str, str] | None]:
    """The cluster, this task of it, and what it offers; None if it has nobody to meet."""
    cluster, task = _read(text, config)
    runs = ("chief",) if spec_of(config.strategy).chief_runs_script else ("chief", "worker")
    if task is None or task.type not in runs or task not in cluster.computing:
        raise ConfigError(_wrong_task(text, task, config))
    if len(list(cluster.tasks())) == 1:
        return cluster, task, None
    offered = {"seed": str(secrets.randbelow(2**32))}
    if offer is not None and task == cluster.chief:
        offered.update(offer(cluster))
    return cluster, task, offered


def _join_as_script(
    cluster: ClusterSpec, task: Task, config: StrategyConfig, offered: dict[str, str]
) -> JoinReport:
    keep = spec_of(config.strategy).chief_runs_script
    return _join(cluster, task, config, keep_lines=keep, offer=offered)


def _member(cluster: ClusterSpec, task: Task, report: JoinReport | None) -> Member:
    if report is None:
        return Member(cluster, task, secrets.randbelow(2**32))
    liveness.hold(report.lines)
    return Member(cluster, task, int(report.offer["seed"]), report.offer)


def join_as_server(text: str, config: StrategyConfig) -> ServerMember:
    """Waits until all tasks of a cluster are there, in a task that serves the chief.

    A worker of `parameter_server` may find that the training is under way: it then takes the place
    of one that has died. A ps or a stage cannot, since the weights of its predecessor are lost: it
    waits for a new start.

    Args:
        text: this task's TF_CONFIG.
        config: the configuration; the strategy and `start_timeout` count.

    Raises:
        ConfigError: if TF_CONFIG has a mistake, or the task is not a server.
        StartError: if a task does not join before `config.start_timeout`.
    """
    cluster, task = _read(text, config)
    if task is None or task.type not in ("worker", "ps"):
        raise ConfigError(
            f"TF_CONFIG={text!r} makes this process {task or 'no task'}, but only tasks of type "
            "worker and ps are servers. Correct `task`."
        )
    late = task.type == "worker" and spec_of(config.strategy).has_servers
    report = _join(cluster, task, config, keep_lines=True, may_be_late=late)
    return ServerMember(cluster, task, None if report.late else report.lines[0])


def _read(text: str, config: StrategyConfig) -> tuple[ClusterSpec, Task | None]:
    """The tasks that meet, and this one."""
    cluster, task = parse_tf_config(text)
    if task is not None:
        name_task(str(task))
    refuse_gaps(cluster, f"strategy={config.strategy!r}")
    servers = ("ps",) if spec_of(config.strategy).has_servers else ()
    kinds = ("chief", "worker", *servers)
    meeting = {kind: a for kind, a in cluster.addresses.items() if kind in kinds}
    indices = {kind: i for kind, i in cluster.indices.items() if kind in kinds}
    return ClusterSpec(meeting, indices), task


def _join(
    cluster: ClusterSpec,
    task: Task,
    config: StrategyConfig,
    *,
    keep_lines: bool,
    may_be_late: bool = False,
    offer: dict[str, str] | None = None,
) -> JoinReport:
    return join(
        cluster,
        task,
        timeout=config.start_timeout,
        identity=identity(_shared(config)),
        offer=offer,
        report=logger.info,
        keep_lines=keep_lines,
        may_be_late=may_be_late,
    )


def _shared(config: StrategyConfig) -> str:
    """The text that all tasks must have alike. Servers take no options: the chief's count."""
    return config.strategy if spec_of(config.strategy).has_servers else config.to_json()


def _wrong_task(text: str, task: Task | None, config: StrategyConfig) -> str:
    role = f"TF_CONFIG={text!r} makes this process {task or 'no task'}, but "
    if not spec_of(config.strategy).chief_runs_script:
        return (
            f"{role}strategy={config.strategy!r} runs on tasks of type chief and worker. "
            "Correct `task`."
        )
    return (
        f"{role}with strategy={config.strategy!r} only the chief runs the script. Start the other "
        f"tasks with `tfdist run --strategy {config.strategy} SCRIPT`, which makes them serve, or "
        "correct `task`."
    )
