"""How gradients are exchanged on Horovod: in groups, or by Adasum."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.horovod import adasum
from tfdist.horovod.collectives import Ring
from tfdist.updates.sums import sum_over_replicas

__all__ = ["GradientSum"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class GradientSum:
    """Sums gradients over the processes.

    Attributes:
        reduction: a key of `horovod_options.REDUCTIONS`.
        groups: the number of groups of dense gradients; each goes as soon as it is complete.
    """

    reduction: str = "mean"
    groups: int = 1

    def __call__(self, ring: Ring, values: Sequence[Any]) -> list[Any]:
        """The sums, on each process.

        Args:
            ring: the processes.
            values: for each weight a dense tensor or `IndexedSlices`, which stay sparse unless they
                go by Adasum.
        """
        if self.reduction == "adasum":
            dense = [tf.convert_to_tensor(value) * ring.size for value in values]
            return adasum.combine(ring, dense)
        sparse = [i for i, value in enumerate(values) if isinstance(value, tf.IndexedSlices)]
        dense_places = [i for i in range(len(values)) if i not in sparse]
        # The last layers' gradients are there first.
        dense_places.reverse()
        sums = dict(zip(sparse, sum_over_replicas([values[i] for i in sparse]), strict=True))
        dense = [values[i] for i in dense_places]
        summed = ring.sum(dense, self.groups) if dense else []
        sums.update(zip(dense_places, summed, strict=True))
        return [sums[i] for i in range(len(values))]
