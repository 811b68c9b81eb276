"""TensorFlow's server of this process, and the servers of others."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from tfdist.cluster.resources import inter_op_threads
from tfdist.errors import ConfigError, StartError
from tfdist.estimator.run_config import RunConfig
from tfdist.types import Server

__all__ = ["TRAINERS", "any_listens", "await_servers", "await_silence", "ensure"]

tf1 = tf.compat.v1

#: The types of tasks that train.
TRAINERS = ("chief", "master", "worker")

#: Seconds between two looks at a server, for an answer, and between two words about waiting.
_LOOK_EVERY = 0.5
_ANSWER_WITHIN = 2.0
_SAY_EVERY = 30.0

#: The server of this process, with its settings. It runs until the process ends.
_own: list[tuple[Any, Any]] = []


def ensure(config: RunConfig) -> str:
    """Starts this task's server, unless it runs already.

    Returns:
        Where sessions run.

    Raises:
        ConfigError: if the process has the server of another cluster.
        StartError: if the server cannot start.
    """
    place = (config.cluster_spec, config.task_type, config.task_id)
    if not _own:
        _own.append((place, _started(config)))
    if _own[0][0] != place:
        raise ConfigError(
            f"This process has a server for {config.task_type} {config.task_id} of another "
            "cluster. A process is one task: start another for the other cluster."
        )
    return config.master


def _started(config: RunConfig) -> Server:
    settings = tf1.ConfigProto()
    if config.session_config is not None:
        settings.CopyFrom(config.session_config)
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
    """Waits until all tasks of some types listen; a session would wait for them for ever.

    Raises:
        StartError: if one does not before `session_creation_timeout_secs`; it names them.
    """
    cluster = config.training_cluster
    waiting = {name: at for kind in kinds for name, at in _named(kind, cluster.get(kind, []))}
    begun = said = time.monotonic()
    limit = config.session_creation_timeout_secs
    while waiting := {name: at for name, at in waiting.items() if not _listens(at)}:
        now = time.monotonic()
        who = ", ".join(f"{name} at {address}" for name, address in waiting.items())
        if now - begun > limit:
            raise StartError(
                f"{config.task_type} {config.task_id} has waited {limit:g} s for {who}. Look at "
                "their logs, or raise session_creation_timeout_secs of RunConfig."
            )
        if now - said > _SAY_EVERY:
            said = now
            tf1.logging.warning("Waiting for %s", who)
        time.sleep(_LOOK_EVERY)


def await_silence(config: RunConfig, seconds: float) -> None:
    """Waits until no task that trains has listened for some seconds.

    It has no deadline of its own: parameter servers live as long as their workers.
    """
    heard = time.monotonic()
    while time.monotonic() - heard < seconds:
        time.sleep(_ANSWER_WITHIN)
        if any_listens(config.training_cluster, TRAINERS):
            heard = time.monotonic()


def any_listens(cluster: Mapping[str, Any], kinds: tuple[str, ...]) -> bool:
    """Whether some task of some types listens."""
    addresses = [at for kind in kinds for _, at in _named(kind, cluster.get(kind, []))]
    return any(map(_listens, addresses))


def _named(kind: str, addresses: Mapping[str, Any]) -> list[tuple[str, str]]:
    result = addresses.items() if isinstance(addresses, Mapping) else enumerate(addresses)
    return [(f"{kind} {index}", address) for index, address in result]


def _listens(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _ANSWER_WITHIN).close()
    except OSError:
        return False
    return True
