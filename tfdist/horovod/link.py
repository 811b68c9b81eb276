"""The processes of a Horovod job, as a gradient exchange sees them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.horovod.collectives import Ring

__all__ = ["RingLink"]


class RingLink:
    """See `tfdist.updates.link.Link`.

    Args:
        ring: the processes.
    """

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self.count: int = ring.size
        self.index: Any = ring.rank

    def sum(self, tensors: Sequence[Any]) -> list[Any]:
        """See `Link.sum`."""
        return self._ring.sum(tensors) if tensors else []

    def gather(self, tensor: Any) -> Any:
        """See `Link.gather`."""
        rows = tensor.shape[0] * self.count
        return tf.ensure_shape(self._ring.gather(tensor), [rows, *tensor.shape[1:]])

    def all_to_all(self, tensor: Any) -> Any:
        """See `Link.all_to_all`."""
        received = self._ring.all_to_all(tensor, [1] * self.count)
        return tf.ensure_shape(received, tensor.shape)
