"""The replicas as one of them sees them: what a gradient exchange sends and receives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import tensorflow as tf

from tfdist._tensorflow import all_to_all, gather_alike
from tfdist.updates.sums import sum_over_replicas

__all__ = ["CountedLink", "Link", "ReplicaLink", "sent_by_ring", "size_of"]


class Link(Protocol):
    """The replicas, in the context of one of them.

    All replicas make the same calls in the same order, on tensors of the same static shapes.

    Attributes:
        count: number of replicas.
        index: this replica's number, an int or a scalar int32 tensor.
    """

    count: int
    index: Any

    def sum(self, tensors: Sequence[Any]) -> list[Any]:
        """The sums of dense tensors over the replicas, in the order of `tensors`."""

    def gather(self, tensor: Any) -> Any:
        """The replicas' tensors of shape `(n, ...)` one after the other: `(count * n, ...)`."""

    def all_to_all(self, tensor: Any) -> Any:
        """Sends row `i` of a tensor of shape `(count, n)` to replica `i`; what came, by sender."""


class ReplicaLink:
    """The replicas of a strategy of TensorFlow's collectives.

    Args:
        strategy: the strategy, in a replica context of which this is made.
    """

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy
        self.count: int = strategy.num_replicas_in_sync
        self.index: Any = tf.distribute.get_replica_context().replica_id_in_sync_group

    def sum(self, tensors: Sequence[Any]) -> list[Any]:
        """See `Link.sum`."""
        return sum_over_replicas(list(tensors)) if tensors else []

    def gather(self, tensor: Any) -> Any:
        """See `Link.gather`."""
        return tensor if self.count == 1 else gather_alike(self._strategy, tensor)

    def all_to_all(self, tensor: Any) -> Any:
        """See `Link.all_to_all`."""
        return tensor if self.count == 1 else all_to_all(self._strategy, tensor)


class CountedLink:
    """A link that counts what this replica sends.

    An all-reduce counts as a ring's; see `sent_by_ring`.

    Args:
        link: what sends.

    Attributes:
        sent: bytes that one run of what has been traced so far sends.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self.count = link.count
        self.index = link.index
        self.sent = 0.0

    def sum(self, tensors: Sequence[Any]) -> list[Any]:
        """See `Link.sum`."""
        self.sent += sum(sent_by_ring(tensor, self.count) for tensor in tensors)
        return self._link.sum(tensors)

    def gather(self, tensor: Any) -> Any:
        """See `Link.gather`."""
        self.sent += size_of(tensor) * (self.count - 1)
        return self._link.gather(tensor)

    def all_to_all(self, tensor: Any) -> Any:
        """See `Link.all_to_all`."""
        self.sent += size_of(tensor) * (self.count - 1) / self.count
        return self._link.all_to_all(tensor)


def sent_by_ring(tensor: Any, count: int) -> float:
    """Bytes that a replica of a ring sends for an all-reduce: 2 n (p - 1) / p of n over p.

    Args:
        tensor: a dense tensor of static shape.
        count: the replicas.
    """
    return size_of(tensor) * 2 * (count - 1) / count


def size_of(tensor: Any) -> int:
    """The bytes of a dense tensor of static shape; 0 where the shape is not known."""
    return int(tensor.shape.num_elements() or 0) * int(tensor.dtype.size)
