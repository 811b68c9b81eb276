"""Collectives of one replica that TensorFlow's strategies do not offer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.ops import collective_ops

from tfdist.errors import TfdistError
from tfdist.types import Launcher, Strategy, Tensor
from tfdist.utils.messages import logger
from tfdist.utils.watchdog import calling_after

__all__ = ["SAY_AFTER_SECONDS", "all_to_all", "gather_alike", "gather_by", "launchers_of", "met"]

#: Seconds after which a process that waits for the others reports that.
SAY_AFTER_SECONDS = 60.0

#: The words of TensorFlow's errors if another process has come to another collective: its tensor
#: has another shape, or it is of another type.
_OF_ANOTHER = ("Shape mismatch in the collective", "Collective instance")


@contextlib.contextmanager
def met(late: str, elsewhere: TfdistError) -> Iterator[None]:
    """A block in which processes meet at an exchange.

    Args:
        late: the warning if this one waits for the others.
        elsewhere: the error if another one has come to another exchange.

    Raises:
        TfdistError: `elsewhere`.
    """
    try:
        with calling_after(SAY_AFTER_SECONDS, lambda: logger.warning(late)):
            yield
    except tf.errors.OpError as error:
        text = str(error)
        if not any(words in text for words in _OF_ANOTHER):
            raise
        raise elsewhere from error


def _launcher(strategy: Strategy, tensor: Tensor) -> Launcher | None:
    """The launcher of the calling replica's collectives; None if it runs eagerly."""
    if tf.executing_eagerly():
        return None
    extended = strategy.extended
    find = getattr(extended, "_get_cross_device_ops", None)
    operations = find(tensor) if find else extended._cross_device_ops
    return operations._launchers[tf.distribute.get_replica_context()._replica_id]


def launchers_of(extended: object) -> list[Any]:
    """The launchers of a strategy's collectives, one for each device."""
    names = ("_cross_device_ops", "_host_cross_device_ops", "_collective_ops")
    ops = [getattr(extended, name, None) for name in names]
    result = [launcher for each in ops for launcher in getattr(each, "_launchers", ())]
    return list({id(launcher): launcher for launcher in result}.values())


def gather_alike(strategy: Strategy, tensor: Tensor) -> Tensor:
    """Concatenates the replicas' tensors of one shape, without an exchange of their lengths.

    Must be called in a replica context.
    """
    launcher = _launcher(strategy, tensor)
    if launcher is None:
        return tf.distribute.get_replica_context().all_gather(tensor, axis=0)
    return gather_by(launcher, tensor)


def gather_by(launcher: Launcher, tensor: Tensor) -> Tensor:
    """Concatenates the tensors of one shape of the processes of a launcher, by their first axis."""
    gathered = launcher._all_gather(tensor, launcher._options)
    rows = tensor.shape[0] and tensor.shape[0] * launcher._group_size
    return tf.ensure_shape(gathered, [rows, *tensor.shape[1:]])


def all_to_all(strategy: Strategy, tensor: Tensor) -> Tensor:
    """Sends row `i` of a tensor to replica `i`. Must be called in a replica context.

    Args:
        strategy: a strategy on TensorFlow's collectives.
        tensor: of shape `(replicas, n)`.

    Returns:
        The rows that were sent here, in the order of the replicas.
    """
    launcher = _launcher(strategy, tensor)
    if launcher is None:
        gathered = tf.distribute.get_replica_context().all_gather(tensor[None], axis=0)
        index = tf.distribute.get_replica_context().replica_id_in_sync_group
        return gathered[:, index]
    key, token = launcher._next_instance_key(), launcher._get_ordering_token()
    with tf.device(launcher._device):
        received = collective_ops.all_to_all_v2(
            tensor,
            launcher._group_size,
            launcher._group_key,
            key,
            communication_hint=launcher._options.implementation.value,
            timeout=launcher._options.timeout_seconds,
            ordering_token=token,
        )
    return tf.ensure_shape(received, tensor.shape)
