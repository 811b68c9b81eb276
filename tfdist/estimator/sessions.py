"""The sessions of a task, this process's TensorFlow server, and the servers of other tasks."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfdist._tf.sessions import session_config_for
from tfdist.cluster.resources import inter_op_threads
from tfdist.errors import ConfigError, StartError
from tfdist.estimator.run_config import RunConfig
from tfdist.types import (
    ConfigProto,
    MonitoredSession,
    Operation,
    Scaffold,
    Server,
    Session,
    SessionHook,
)

__all__ = [
    "TRAINERS",
    "await_servers",
    "await_silence",
    "device_function",
    "ensure_server",
    "for_training",
    "local_config",
    "of_checkpoint",
    "trainers_listen",
    "without_cancelled_threads",
]

tf1 = tf.compat.v1

#: The types of tasks that train.
TRAINERS = ("chief", "master", "worker")

#: Seconds between two looks of a worker whether the chief has initialized the variables.
_INITIALIZED_EVERY = 1
#: Seconds between two looks at a server, for an answer, and between two words about waiting.
_POLL_SECONDS = 0.5
_ANSWER_WITHIN = 2.0
_WARN_EVERY = 30.0
#: Seconds that threads of queues have to end before the session closes, as in TensorFlow; with
#: parameter servers; and after it.
_GRACE, _GRACE_WITH_SERVERS, _GRACE_AFTER = 120, 1, 1

#: The server of this process, with its place. It runs until the process ends.
_own_server: list[tuple[Any, Server]] = []


def local_config(config: RunConfig) -> ConfigProto:
    """The configuration of a session in this process."""
    own = _proto(config, allow_soft_placement=True)
    del own.device_filters[:]
    if "CPU" not in own.device_count:  # A session knows nothing of the logical devices.
        own.device_count["CPU"] = len(tf.config.list_logical_devices("CPU"))
    return own


def _proto(config: RunConfig, **defaults: bool) -> Any:
    """The user's configuration of sessions, or one with some defaults."""
    own = tf1.ConfigProto(**defaults)
    if config.session_config is not None:
        own.CopyFrom(config.session_config)
    return own


def _cluster_config(config: RunConfig) -> ConfigProto:
    """The configuration of a session on the cluster: it sees this task and the servers alone.

    Otherwise it would wait for other workers, and fail with them.
    """
    settings = _proto(config, allow_soft_placement=True)
    if not settings.device_filters:
        own = f"/job:{config.task_type}/task:{config.task_id}"
        settings.device_filters.extend(["/job:ps", own])
    return settings


def device_function(config: RunConfig) -> str | Callable[[Operation], str] | None:
    """The device of each training op: variables on parameter servers, the rest on this task."""
    own = f"/job:{config.task_type}/task:{config.task_id}"
    if config.device_fn is not None or not config.master:
        return config.device_fn
    if not config.num_ps_replicas:
        # Ops without a device would go to the first task. Strategies know no type "master".
        return own.replace("/job:master/", "/job:chief/")
    return tf1.train.replica_device_setter(
        ps_tasks=config.num_ps_replicas,
        worker_device=own,
        merge_devices=True,
        cluster=config.cluster_spec,
    )


def of_checkpoint(
    scaffold: Scaffold, checkpoint: str | None, config: RunConfig, hooks: Sequence[SessionHook]
) -> MonitoredSession:
    """A session in this process with the variables of a checkpoint, or initial ones."""
    creator = tf1.train.ChiefSessionCreator(
        scaffold=scaffold or tf1.train.Scaffold(),
        checkpoint_filename_with_path=checkpoint,
        config=local_config(config),
    )
    return tf1.train.MonitoredSession(session_creator=creator, hooks=list(hooks))


def for_training(
    scaffold: Scaffold, config: RunConfig, hooks: Sequence[SessionHook], replicas: Any = None
) -> MonitoredSession:
    """The session in which this task trains, with the `Distribution` or None."""
    master, settings = "", local_config(config)
    if config.num_ps_replicas:
        master, settings = ensure_server(config), _cluster_config(config)
        await_servers(config, ("ps",))
    elif replicas is not None and replicas.workers > 1:
        master, settings = config.master, session_config_for(replicas.strategy, settings)
    creator: object = tf1.train.ChiefSessionCreator(
        scaffold, master=master, config=settings, checkpoint_dir=config.model_dir
    )
    if config.num_ps_replicas and not config.is_chief:
        creator = _SoonWorkerSessionCreator(scaffold, master, config)
    return tf1.train.MonitoredSession(
        session_creator=creator,
        hooks=hooks,
        stop_grace_period_secs=_GRACE_WITH_SERVERS if config.num_ps_replicas else _GRACE,
    )


class _SoonWorkerSessionCreator(tf.compat.v1.train.SessionCreator):  # type: ignore[misc]
    """Waits for the chief's variables; TensorFlow's own looks every 30 seconds only."""

    def __init__(self, scaffold: Scaffold, master: str, config: RunConfig) -> None:
        self._scaffold = scaffold
        self._master = master
        self._config = config

    def create_session(self) -> Session:
        self._scaffold.finalize()
        manager = tf1.train.SessionManager(
            local_init_op=self._scaffold.local_init_op,
            ready_op=self._scaffold.ready_op,
            ready_for_local_init_op=self._scaffold.ready_for_local_init_op,
            graph=tf1.get_default_graph(),
            recovery_wait_secs=_INITIALIZED_EVERY,
        )
        limit = self._config.session_creation_timeout_secs
        try:
            return manager.wait_for_session(
                self._master, config=_cluster_config(self._config), max_wait_secs=limit
            )
        except tf.errors.DeadlineExceededError as error:
            raise StartError(
                f"{self._config.task_type} {self._config.task_id} has waited {limit:g} s for the "
                "chief to initialize the variables. Look at the chief's log, or raise "
                "session_creation_timeout_secs of RunConfig."
            ) from error


@contextlib.contextmanager
def without_cancelled_threads() -> Iterator[None]:
    """Keeps threads silent that wait in a session when it closes, as those of queues do."""
    before, known = threading.excepthook, set(threading.enumerate())

    def excepthook(arguments: Any) -> None:
        if not isinstance(arguments.exc_value, tf.errors.CancelledError):
            before(arguments)

    threading.excepthook = excepthook
    try:
        yield
    finally:
        end = time.monotonic() + _GRACE_AFTER
        for thread in set(threading.enumerate()) - known:
            if "QueueRunner" in thread.name:
                thread.join(max(0.0, end - time.monotonic()))
        threading.excepthook = before


def ensure_server(config: RunConfig) -> str:
    """The address of this task's server, which is started unless it runs already."""
    own = (config.cluster_spec, config.task_type, config.task_id)
    if not _own_server:
        _own_server.append((own, _started(config)))
    if _own_server[0][0] != own:
        raise ConfigError(
            f"This process has a server for {config.task_type} {config.task_id} of another "
            "cluster. A process is one task: start another for the other cluster."
        )
    return config.master


def _started(config: RunConfig) -> Server:
    settings = _proto(config)
    if not settings.inter_op_parallelism_threads:
        settings.inter_op_parallelism_threads = inter_op_threads(
            config.task_type, workers=config.num_worker_replicas, cores=os.cpu_count() or 1
        )
    settings.gpu_options.allow_growth = True
    try:
        return tf.distribute.Server(
            config.cluster_spec,
            job_name=config.task_type,
            task_index=config.task_id,
            protocol="grpc",
            config=settings,
        )
    except tf.errors.OpError as error:
        raise StartError(
            f"TensorFlow's server of {config.task_type} {config.task_id} cannot start at "
            f"{config.master}. Another program may have taken its port. TensorFlow says: "
            f"{error.message}"
        ) from error


def await_servers(config: RunConfig, kinds: tuple[str, ...]) -> None:
    """Waits until all tasks of some types listen; a session would wait for them for ever."""
    waiting = _addresses(config, kinds)
    begun = warned = time.monotonic()
    limit = config.session_creation_timeout_secs
    while waiting := {name: at for name, at in waiting.items() if not _listens(at)}:
        now = time.monotonic()
        who = ", ".join(f"{name} at {address}" for name, address in waiting.items())
        if now - begun > limit:
            raise StartError(
                f"{config.task_type} {config.task_id} has waited {limit:g} s for {who}. Look at "
                "their logs, or raise session_creation_timeout_secs of RunConfig."
            )
        if now - warned > _WARN_EVERY:
            warned = now
            tf1.logging.warning("Waiting for %s", who)
        time.sleep(_POLL_SECONDS)


def await_silence(config: RunConfig, seconds: float) -> None:
    """Waits until no task that trains has listened for some seconds.

    It has no deadline of its own: parameter servers live as long as their workers.
    """
    heard = time.monotonic()
    while time.monotonic() - heard < seconds:
        time.sleep(_ANSWER_WITHIN)
        if trainers_listen(config):
            heard = time.monotonic()


def trainers_listen(config: RunConfig) -> bool:
    """Whether some task that trains listens."""
    return any(map(_listens, _addresses(config, TRAINERS).values()))


def _addresses(config: RunConfig, kinds: tuple[str, ...]) -> dict[str, str]:
    """The addresses of the tasks of some types, by the names of the tasks."""
    return {
        f"{kind} {index}": address
        for kind in kinds
        for index, address in enumerate(config.training_cluster.get(kind, ()))
    }


def _listens(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _ANSWER_WITHIN).close()
    except OSError:
        return False
    return True
