"""The reduction of gradients over the replicas: in buckets, or compressed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.errors import ConfigError
from tfdist.updates import compression
from tfdist.updates.link import CountedLink, size_of
from tfdist.updates.meter import stamp
from tfdist.updates.rule import GradientRule
from tfdist.updates.variables import make_variable

__all__ = ["Reducer"]


class Reducer:
    """Sums one list of gradients over the replicas, in every step alike.

    Args:
        strategy: has `sum_gradients(list)` and `link()`.
        rule: says how.
        specs: shapes and types of the gradients, sparse ones as dense.
        names: the weights' names, for messages.
        dense: places of those that are not sparse.

    Raises:
        ConfigError: if a compression is asked for and a gradient is not of floating point.

    Attributes:
        variables: what the compression keeps from step to step, by name.
    """

    def __init__(
        self,
        strategy: Any,
        rule: GradientRule,
        specs: Sequence[tf.TensorSpec],
        names: Sequence[str],
        dense: Sequence[int],
    ) -> None:
        self._strategy = strategy
        self._rule = rule
        self._dense = list(dense)
        self._compression = compression.make(rule.compression, ratio=rule.ratio, rank=rule.rank)
        if rule.compression != "none":
            _check_floating(rule.compression, specs, names)
        self.variables = self._make_memory([specs[i] for i in dense])

    def __call__(self, values: Sequence[Any]) -> tuple[list[Any], Any]:
        """The sums of gradients, and what they cost.

        Args:
            values: dense tensors and `IndexedSlices`, weighted, in the order of the specs.

        Returns:
            The sums; and a float64 vector of the bytes that this replica sends, and of the times in
            seconds at which the exchange begins and ends, which are 0 unless the rule reports.
        """
        sums, sent = self._reduced(values)
        times: list[Any] = [0.0, 0.0]
        if self._rule.report:
            first = buckets(values, self._rule.bucket_bytes)[0]
            times = [stamp([values[i] for i in first]), stamp(sums)]
        return sums, tf.stack([tf.cast(each, tf.float64) for each in (sent, *times)])

    def _reduced(self, values: Sequence[Any]) -> tuple[list[Any], Any]:
        if self._rule.compression == "none":
            return self._in_buckets(values)
        sums: dict[int, Any] = {}
        sparse = [i for i in range(len(values)) if i not in self._dense]
        link = CountedLink(self._strategy.link())
        if sparse:
            sums.update(zip(sparse, self._sum([values[i] for i in sparse]), strict=True))
        if self._dense:
            memory = list(self.variables.values())
            dense = [values[i] for i in self._dense]
            found, kept = self._compression(link, dense, [v.read_value() for v in memory])
            for variable, value in zip(memory, kept, strict=True):
                variable.assign(value)
            sums.update(zip(self._dense, found, strict=True))
        extra = self._bytes_of([values[i] for i in sparse])
        return [sums[i] for i in range(len(values))], link.sent + extra

    def _make_memory(self, specs: list[tf.TensorSpec]) -> dict[str, Any]:
        if not specs:
            return {}
        replicas = self._strategy.num_replicas_in_sync
        return {
            each.name: make_variable(
                self._strategy,
                f"tfdist_{each.name}",
                each.initial,
                each.shape,
                each.dtype,
                shared=each.shared,
            )
            for each in self._compression.memory(specs, replicas)
        }

    def _in_buckets(self, values: Sequence[Any]) -> tuple[list[Any], Any]:
        sums: list[Any] = [None] * len(values)
        for places in buckets(values, self._rule.bucket_bytes):
            for i, value in zip(places, self._sum([values[i] for i in places]), strict=True):
                sums[i] = value
        return sums, self._bytes_of(values)

    def _bytes_of(self, values: Sequence[Any]) -> Any:
        """What a ring sends for an all-reduce of dense tensors and an all-gather of sparse ones."""
        others = self._strategy.num_replicas_in_sync - 1
        sent: Any = 0.0
        for value in values:
            if isinstance(value, tf.IndexedSlices):
                rows = tf.size(value.values) * value.dtype.size
                indices = tf.size(value.indices) * value.indices.dtype.size
                sent += tf.cast(rows + indices, tf.float32) * others
            else:
                sent += size_of(value) * 2 * others / (others + 1)
        return sent

    def _sum(self, values: list[Any]) -> list[Any]:
        return list(self._strategy.sum_gradients(values))


def buckets(values: Sequence[Any], bound: int | None) -> list[list[int]]:
    """Places of gradients that are exchanged together, the last layers' first.

    The backward pass computes these first, so a bucket travels while others are computed
    (arXiv:2006.15704).

    Args:
        values: dense tensors and `IndexedSlices`, in the order of the layers.
        bound: bytes of a bucket, which it passes by one gradient at most; None for a single one.
    """
    if bound is None:
        return [list(range(len(values)))]
    found: list[list[int]] = [[]]
    filled = 0
    for i in reversed(range(len(values))):
        if filled >= bound:
            found.append([])
            filled = 0
        found[-1].append(i)
        if not isinstance(values[i], tf.IndexedSlices):
            filled += size_of(values[i])
    return found


def _check_floating(kind: str, specs: Sequence[tf.TensorSpec], names: Sequence[str]) -> None:
    for spec, name in zip(specs, names, strict=True):
        if not spec.dtype.is_floating:
            raise ConfigError(
                f"compression={kind!r} cannot compress the gradient of {name!r}, whose type is "
                f"{spec.dtype.name}. Keep the variable out of training, or leave compression out."
            )
