"""Sessions: their configuration, and how a task comes by one."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfdist.errors import StartError
from tfdist.estimator import servers
from tfdist.estimator.run_config import RunConfig
from tfdist.types import ConfigProto, MonitoredSession, Operation, Scaffold, Session, SessionHook

__all__ = [
    "device_function",
    "for_training",
    "local_config",
    "of_checkpoint",
    "without_cancelled_threads",
]

tf1 = tf.compat.v1

#: Seconds between two looks of a worker whether the chief has initialized the variables.
_LOOK_EVERY = 1
#: Seconds that threads of queues have to end before the session closes, and after it.
_GRACE = 1


def local_config(config: RunConfig) -> ConfigProto:
    """The configuration of a session in this process."""
    own = tf1.ConfigProto(allow_soft_placement=True)
    if config.session_config is not None:
        own.CopyFrom(config.session_config)
        del own.device_filters[:]
    if "CPU" not in own.device_count:  # A session knows nothing of the logical devices.
        own.device_count["CPU"] = len(tf.config.list_logical_devices("CPU"))
    return own


def _cluster_config(config: RunConfig) -> ConfigProto:
    """The configuration of a session on the cluster: it sees this task and the servers alone.

    Otherwise it would wait for other workers, and fail with them.
    """
    settings = tf1.ConfigProto(allow_soft_placement=True)
    if config.session_config is not None:
        settings.CopyFrom(config.session_config)
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
    """A session in this process with the variables of a checkpoint.

    Args:
        scaffold: the scaffold, or None for the default one.
        checkpoint: the checkpoint's prefix; None initializes the variables.
        config: the run's configuration.
        hooks: the session's hooks.
    """
    creator = tf1.train.ChiefSessionCreator(
        scaffold=scaffold or tf1.train.Scaffold(),
        checkpoint_filename_with_path=checkpoint,
        config=local_config(config),
    )
    return tf1.train.MonitoredSession(session_creator=creator, hooks=list(hooks))


def for_training(
    scaffold: Scaffold, config: RunConfig, hooks: Sequence[SessionHook], replicas: Any = None
) -> MonitoredSession:
    """The session in which this task trains.

    Args:
        scaffold: the model's.
        config: the run's configuration.
        hooks: the session's hooks; on the chief also those that write.
        replicas: the `Distribution`, or None.

    Raises:
        StartError: if other tasks do not come in time.
    """
    if not config.num_ps_replicas:
        together = replicas is not None and replicas.workers > 1
        settings = local_config(config)
        creator: object = tf1.train.ChiefSessionCreator(
            scaffold=scaffold,
            master=config.master if together else "",
            checkpoint_dir=config.model_dir,
            config=replicas.session_config(settings) if together else settings,
        )
        return tf1.train.MonitoredSession(session_creator=creator, hooks=hooks)
    master = servers.ensure(config)
    servers.await_servers(config, ("ps",))
    if config.is_chief:
        creator = tf1.train.ChiefSessionCreator(
            scaffold=scaffold,
            master=master,
            checkpoint_dir=config.model_dir,
            config=_cluster_config(config),
        )
    else:
        creator = _SoonWorkerSessionCreator(scaffold, master, config)
    return tf1.train.MonitoredSession(
        session_creator=creator, hooks=hooks, stop_grace_period_secs=_GRACE
    )


class _SoonWorkerSessionCreator(tf.compat.v1.train.SessionCreator):  # type: ignore[misc]
    """Waits for the chief's variables; TensorFlow's own looks every 30 seconds only."""

    def __init__(self, scaffold: Scaffold, master: str, config: RunConfig) -> None:
        self._scaffold = scaffold
        self._master = master
        self._config = config

    def create_session(self) -> Session:
        """A session on initialized variables.

        Raises:
            StartError: if the chief has not initialized them in time.
        """
        self._scaffold.finalize()
        manager = tf1.train.SessionManager(
            local_init_op=self._scaffold.local_init_op,
            ready_op=self._scaffold.ready_op,
            ready_for_local_init_op=self._scaffold.ready_for_local_init_op,
            graph=tf1.get_default_graph(),
            recovery_wait_secs=_LOOK_EVERY,
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

    def told(arguments: Any) -> None:
        if not isinstance(arguments.exc_value, tf.errors.CancelledError):
            before(arguments)

    threading.excepthook = told
    try:
        yield
    finally:
        end = time.monotonic() + _GRACE
        for thread in set(threading.enumerate()) - known:
            if "QueueRunner" in thread.name:
                thread.join(max(0.0, end - time.monotonic()))
        threading.excepthook = before
