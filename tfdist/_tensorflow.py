"""Every private TensorFlow symbol that tfdist subclasses or calls, in one place.

Checked on TensorFlow 2.21. `tests/test_seams.py` fails by name when a release moves one of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import distribute_utils
from tensorflow.python.distribute.collective_all_reduce_strategy import CollectiveAllReduceExtended
from tensorflow.python.distribute.mirrored_strategy import MirroredExtended
from tensorflow.python.distribute.values import SyncOnReadVariable
from tensorflow.python.eager import context

__all__ = [
    "CollectiveExtended",
    "LocalExtended",
    "SyncOnReadVariable",
    "eager_seed_state",
    "eagerly_outside_of_scope",
    "global_seed",
    "has_started",
    "is_distributed",
    "local_results",
    "outside_of_function",
    "regroup",
    "unordered_steps",
]


class _GraphCollectives:
    """Launches collectives where the gradients are, instead of merging the replicas' threads.

    TensorFlow's own classes do this under XLA on GPUs only. Without `merge_call` a replica may
    update variables inside a conditional, which Keras's gradient accumulation and dynamic loss
    scaling do (tensorflow#72686, keras#20763). Eager code still merges: its replicas run one after
    the other, so a blocking collective would wait for ever.
    """

    def _use_merge_call(self) -> bool:
        return bool(context.executing_eagerly())

    def _create_variable(self, next_creator: Any, **kwargs: Any) -> Any:
        # Keras asks for ONLY_FIRST_REPLICA on counters that every replica computes alike. The
        # broadcast it implies is a merge_call; the replicas' own copies hold the same value.
        if kwargs.get("aggregation") is tf.VariableAggregation.ONLY_FIRST_REPLICA:
            kwargs["aggregation"] = tf.VariableAggregation.NONE
        return super()._create_variable(next_creator, **kwargs)  # type: ignore[misc]


class LocalExtended(_GraphCollectives, MirroredExtended):  # type: ignore[misc]
    """Replicas on the devices of one process."""


class CollectiveExtended(_GraphCollectives, CollectiveAllReduceExtended):  # type: ignore[misc]
    """Replicas on the devices of several processes.

    Args:
        strategy: the strategy that this belongs to.
        cluster_resolver: the cluster and this task.
        options: `tf.distribute.experimental.CommunicationOptions`.
        cpu_devices: logical CPU devices to train on where there are no GPUs.
    """

    def __init__(
        self, strategy: Any, cluster_resolver: Any, options: Any, cpu_devices: int = 1
    ) -> None:
        self._cpu_devices = cpu_devices
        super().__init__(strategy, cluster_resolver, options)

    def _initialize_local_devices(
        self, cluster_resolver: Any, worker_device: str
    ) -> tuple[tuple[str, ...], str]:
        devices, kind = super()._initialize_local_devices(cluster_resolver, worker_device)
        if kind == "CPU":
            devices = tuple(f"{worker_device}/device:CPU:{i}" for i in range(self._cpu_devices))
        return devices, kind


@contextlib.contextmanager
def eagerly_outside_of_scope() -> Iterator[None]:
    """Runs eagerly under a graph of its own, where no strategy's scope is open."""
    with tf.Graph().as_default(), context.eager_mode():
        yield


@contextlib.contextmanager
def outside_of_function(strategy: Any) -> Iterator[None]:
    """Runs eagerly in `strategy`'s cross-replica context, from within a replica's function.

    `tf.init_scope` alone is not enough: it keeps the function's variable creators and its replica
    context.
    """
    with tf.init_scope(), tf.Graph().as_default(), context.eager_mode(), strategy.scope():
        yield


def is_distributed(value: Any) -> bool:
    """Whether a value holds one component for each local replica."""
    return isinstance(value, tf.distribute.DistributedValues)


def local_results(strategy: Any, value: Any) -> tuple[Any, ...]:
    """The components of a value on the replicas of this process, in order."""
    return tuple(strategy.experimental_local_results(value))


def regroup(values: list[Any]) -> Any:
    """Turns one structure for each local replica into one structure of per-replica values."""
    return distribute_utils.regroup(values)


def unordered_steps(dataset: Any) -> list[str]:
    """Steps of a data set's pipeline whose order differs from run to run.

    They were made with `deterministic=False`, which the data set's options do not override.
    """
    found, waiting = [], [dataset]
    while waiting:
        current = waiting.pop()
        if getattr(current, "_deterministic", None) == "false":
            found.append(type(current).__name__.lstrip("_").removesuffix("Dataset"))
        waiting.extend(current._inputs())
    return found


def has_started() -> bool:
    """Whether TensorFlow has set up its devices, after which they cannot be changed."""
    return bool(context.context()._initialized)


def global_seed() -> int | None:
    """The seed given to `tf.random.set_seed`, or None."""
    seed = context.global_seed()
    return None if seed is None else int(seed)


def eager_seed_state() -> Any:
    """State of the counter from which TensorFlow draws the seeds of ops that were given none."""
    rng = context.context()._rng
    return None if rng is None else rng.getstate()
