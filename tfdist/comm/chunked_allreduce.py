"""All-reduces in chunks side by side, where TensorFlow's ring would send one after the other.

TensorFlow's ring cuts a tensor into two parts per process, and each is copied, sent and added in
turn: of 64 MiB one core copies while the other waits. Several all-reduces of a few MiB overlap
these steps. The ring needs no order between collectives, which TensorFlow keeps for NCCL's sake, so
they are launched without it.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist._tf.distribute import collective_ops, cross_device_utils
from tfdist.types import Tensor

__all__ = ["ChunkedLauncher", "launch_in_chunks"]

#: Bytes of a chunk; see docs/updates.md for the measurements.
CHUNK_BYTES = 4 << 20


class ChunkedLauncher(cross_device_utils.CollectiveReplicaLauncher):  # type: ignore[misc]
    """Launches the collectives of a CPU device."""

    def all_reduce(
        self, input_tensor: Tensor, control_input: Tensor | None = None, options: object = None
    ) -> Tensor:
        """The sum of a dense tensor over the replicas."""
        length = input_tensor.shape.num_elements()
        chunks = chunk_lengths(length, input_tensor.dtype.size)
        if tf.executing_eagerly() or len(chunks) < 2:
            return super().all_reduce(input_tensor, control_input, options)
        merged = self._options.merge(options)
        with tf.device(self._device):
            flat = tf.reshape(input_tensor, [-1])
            sums = [
                collective_ops.all_reduce_v2(
                    part,
                    self._group_size,
                    self._group_key,
                    self._next_instance_key(),
                    communication_hint=merged.implementation.value,
                    timeout=merged.timeout_seconds,
                )
                for part in tf.split(flat, chunks)
            ]
            return tf.reshape(tf.concat(sums, 0), input_tensor.shape)


def chunk_lengths(length: int | None, size: int) -> list[int]:
    """The number of elements of each chunk of a tensor.

    Args:
        length: elements of the tensor; None if that is not known.
        size: bytes of an element.
    """
    if length is None:
        return []
    count = max(1, -(-length * size // CHUNK_BYTES))
    return [length // count + (i < length % count) for i in range(count)]


def launch_in_chunks(extended: Any) -> None:
    """Makes the all-reduces of a strategy on CPU devices go in chunks.

    Args:
        extended: the extended part of a strategy of several processes.
    """
    if not all("CPU" in device for device in extended.worker_devices):
        return
    for launcher in extended._cross_device_ops._launchers:
        launcher.__class__ = ChunkedLauncher
