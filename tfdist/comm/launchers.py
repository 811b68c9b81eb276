"""Launchers of a replica's collectives that take the place of TensorFlow's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import tensorflow as tf

from tfdist._tf.collectives import launchers_of
from tfdist._tf.distribute import (
    CollectiveAllReduceExtended,
    GraphCollectives,
    PlainInput,
    collective_ops,
    cross_device_ops,
    cross_device_utils,
    gradients_of_control_flow,
)
from tfdist._tf.lines import Line, Lined
from tfdist.comm.carriers import gather_any
from tfdist.config.mesh import DATA, Axis
from tfdist.types import IndexedSlices, Scalar, Strategy, Tensor
from tfdist.utils.messages import log_without

__all__ = ["RingExtended", "RingLauncher", "replace_launchers"]


#: Bytes of a chunk; see docs/updates.md for the measurements.
_CHUNK_BYTES = 4 << 20


class _Launcher(cross_device_utils.CollectiveReplicaLauncher):  # type: ignore[misc]
    """Launches collectives in the gradients of loops and branches too.

    Automatic control dependencies keep the order of collectives by a resource. TensorFlow keeps no
    order in the gradients of `tf.while_loop` and `tf.cond`, whose graphs cannot capture a resource
    of their own either, so that collectives are launched without it there.
    """

    def _get_ordering_token(self) -> Tensor | None:
        token: Tensor | None = super()._get_ordering_token()
        return None if gradients_of_control_flow() else token

    def _next_instance_key(self) -> Any:
        key = super()._next_instance_key()
        # The key is a placeholder of the function around the control flow. The gradient of a branch
        # takes a tensor of the graph around it only, so each graph hands it on to the next.
        for graph in reversed(gradients_of_control_flow()):
            key = graph.capture(key)
        return key

    def _all_gather(self, input_tensor: Tensor, options: object) -> Tensor:
        gather = super()._all_gather
        return gather_any(
            lambda tensor: _gather_elements(lambda full: gather(full, options), tensor),
            input_tensor,
        )


def _gather_elements(gather: Callable[[Tensor], Tensor], tensor: Tensor) -> Tensor:
    """Gathers a tensor of which every process has one of the same shape, that may have no elements.

    TensorFlow's collectives end in a segmentation fault if there are none.
    """
    if tensor.shape.num_elements():
        return gather(tensor)
    missing = tf.cast(tf.equal(tf.size(tensor), 0), tf.int32)
    flat = tf.pad(tf.reshape(tensor, [1, -1]), [[0, 0], [0, missing]])
    gathered = gather(flat)
    kept = gathered[:, : tf.size(tensor)]
    rest = tf.shape(tensor)[1:]
    rows = tf.shape(gathered)[0] * tf.shape(tensor)[0]
    return tf.reshape(kept, tf.concat([[rows], rest], 0))


class _ChunkedLauncher(_Launcher):
    """All-reduces of a CPU device in chunks side by side.

    TensorFlow's ring cuts a tensor into two parts per process, and each is copied, sent and added
    in turn: of 64 MiB one core copies while the other waits. Several all-reduces of a few MiB
    overlap these steps. The ring needs no order between collectives, which TensorFlow keeps for
    NCCL's sake, so they are launched without it.
    """

    def all_reduce(
        self, input_tensor: Tensor, control_input: Tensor | None = None, options: object = None
    ) -> Tensor:
        """The sum of a dense tensor over the replicas."""
        length = input_tensor.shape.num_elements()
        chunks = _chunk_lengths(length, input_tensor.dtype.size)
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


def _chunk_lengths(length: int | None, size: int) -> list[int]:
    """The number of elements of each chunk of a tensor; none if its length is not known."""
    if length is None:
        return []
    count = max(1, -(-length * size // _CHUNK_BYTES))
    return [length // count + (i < length % count) for i in range(count)]


def replace_launchers(extended: Any) -> None:
    """Gives a strategy launchers of this module; those of CPU processes all-reduce in chunks.

    Args:
        extended: the extended part of a strategy on TensorFlow's collectives.
    """
    lines = getattr(extended, "every_line", ())
    on_cpus = all("CPU" in device for device in extended.worker_devices)
    kind = _ChunkedLauncher if lines and on_cpus else _Launcher
    between = [launcher for line in lines for launcher in line.operations._launchers]
    for launcher in [*launchers_of(extended), *between]:
        launcher.__class__ = kind


class Ring(Protocol):
    """Collectives of a library outside of TensorFlow, on tensors."""

    rank: int
    size: int

    def sum(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The sums over the processes."""

    def gather(self, tensor: Tensor) -> Tensor:
        """The processes' tensors along the first axis, whose length may differ."""

    def broadcast(self, tensor: Tensor) -> Tensor:
        """The tensor of rank 0."""


class RingLauncher(cross_device_utils.CollectiveReplicaLauncher):  # type: ignore[misc]
    """Hands a replica's collectives to a ring (see `RingExtended`)."""

    ring: Ring

    def all_reduce(
        self, input_tensor: Tensor, control_input: Tensor | None = None, options: object = None
    ) -> Tensor:
        """The sum of a dense tensor over the ring."""
        del control_input, options
        with tf.device(self._device):
            return self.ring.sum([input_tensor])[0]

    def batch_all_reduce(
        self, input_tensor_packs: Sequence[Sequence[Tensor]], options: object = None
    ) -> list[Tensor]:
        """The sums of a list of lists of dense tensors, as one list."""
        del options
        with tf.device(self._device):
            return self.ring.sum([tensor for pack in input_tensor_packs for tensor in pack])

    def _all_gather(self, input_tensor: Tensor, options: object) -> Tensor:
        del options
        with tf.device(self._device):
            return self.ring.gather(input_tensor)

    def all_gather(self, input_tensor: Tensor, axis: Scalar, options: object = None) -> Tensor:
        """The processes' tensors, one after the other along an axis."""
        del options
        rank = tf.rank(input_tensor)
        order = tf.concat([[axis], tf.range(axis), tf.range(axis + 1, rank)], 0)
        with tf.device(self._device):
            gathered = self.ring.gather(tf.transpose(input_tensor, order))
            return tf.transpose(gathered, tf.argsort(order))

    def all_reduce_indexed_slices(
        self, input_slices: IndexedSlices, options: object = None
    ) -> IndexedSlices:
        """The slices of all processes, one after the other."""
        del options
        with tf.device(self._device):
            values = self.ring.gather(input_slices.values)
            indices = self.ring.gather(input_slices.indices)
        return tf.IndexedSlices(values, indices, input_slices.dense_shape)


class RingExtended(Lined, PlainInput, GraphCollectives, CollectiveAllReduceExtended):  # type: ignore[misc]
    """One replica in each of several processes, which exchange tensors by a ring of tfdist's.

    Args:
        strategy: the strategy that this belongs to.
        device: this process's device.
        ring: exchanges tensors.
        along: makes the ring of the processes along an axis of a mesh.

    Attributes:
        rings: the ring along each axis.
    """

    def __init__(
        self, strategy: Strategy, device: str, ring: Ring, along: Callable[[Axis], Ring]
    ) -> None:
        self._ring, self._along = ring, along
        self.rings = {DATA: ring}
        self._ring_device = device
        nobody = tf.distribute.cluster_resolver.SimpleClusterResolver(tf.train.ClusterSpec({}))
        options = tf.distribute.experimental.CommunicationOptions()
        super().__init__(strategy, nobody, options)

    def _initialize_local(self, cluster_resolver: object, devices: object = None) -> None:
        with log_without(lambda _: True):  # It warns that its own collectives are not set up.
            super()._initialize_local(cluster_resolver, devices=(self._ring_device,))
        self._is_chief = self._ring.rank == 0
        self._take(self._line_of(self._ring))

    def _line(self, axis: Axis) -> Line:
        self.rings[axis.name] = self._along(axis)
        return self._line_of(self.rings[axis.name])

    def _line_of(self, ring: Ring) -> Line:
        operations, on_hosts = (
            self._ring_ops(device, ring) for device in (self.worker_devices[0], self._worker_device)
        )
        return Line(operations, on_hosts, ring.size, ring.rank)

    def _ring_ops(self, device: str, ring: Ring) -> Any:
        ops = cross_device_ops.CollectiveAllReduce(
            devices=(device,),
            group_size=ring.size,
            options=self._communication_options,
            collective_keys=self._collective_keys,
        )
        for launcher in ops._launchers:
            launcher.__class__ = RingLauncher
            launcher.ring = ring
        return ops

    def _get_variable_creator_initial_value(
        self, replica_id: int, device: str, primary_var: object, **kwargs: object
    ) -> object:
        inherited = super()._get_variable_creator_initial_value

        def initial_value() -> Tensor:
            alone, self._num_workers = self._num_workers, 1
            try:
                value = inherited(replica_id, device, primary_var, **kwargs)()
            finally:
                self._num_workers = alone
            with tf.device(device):
                return self._ring.broadcast(value)

        return initial_value
