"""The reduction of gradients over the replicas: in buckets, or compressed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist._tf.distribute import outside_of_function
from tfdist.comm.replica_collectives import CountedLink, by_group, sent_by_ring, size_of
from tfdist.config.gradient_options import GradientOptions
from tfdist.errors import ConfigError
from tfdist.gradients import compression
from tfdist.gradients.step_profiler import stamp
from tfdist.types import DType, Scalar, Shape, Strategy, Variable

__all__ = ["Reducer", "check_floating", "make_variable"]


def make_variable(
    strategy: Strategy,
    name: str,
    shape: Sequence[int] | Shape,
    dtype: DType,
    *,
    shared: bool,
    initial: Callable[[], Any] | None = None,
) -> Variable:
    """Makes a variable of each replica, from wherever the program is.

    Args:
        strategy: the strategy.
        name: its name, without `tfdist_`, which goes before it.
        shape: a static shape.
        dtype: the type.
        shared: whether all replicas hold the same, of which one is saved. Otherwise the sum of what
            they hold is saved, and each takes an equal part of it when it is loaded.
        initial: makes the first value, the same on all replicas; zeros by default.
    """
    apart: dict[str, Any] = {
        "synchronization": tf.VariableSynchronization.ON_READ,
        "aggregation": tf.VariableAggregation.SUM,
    }
    with outside_of_function(strategy):
        value = tf.zeros(shape, dtype) if initial is None else tf.cast(initial(), dtype)
        return tf.Variable(
            value, trainable=False, dtype=dtype, name=f"tfdist_{name}", **({} if shared else apart)
        )


class Reducer:
    """Sums one list of gradients over the replicas, in every step alike.

    Args:
        strategy: has `sum_gradients(list)` and `link()`.
        rule: has the kind of reduction.
        specs: shapes and types of the gradients, sparse ones as dense.
        names: the weights' names, for messages.
        dense: indices of those that are not sparse.

    Raises:
        ConfigError: if a compression is asked for and a gradient is not of floating point.

    Attributes:
        variables: the state of the compression between steps, by name.
    """

    def __init__(
        self,
        strategy: Strategy,
        rule: GradientOptions,
        specs: Sequence[tf.TensorSpec],
        names: Sequence[str],
        dense: Sequence[int],
    ) -> None:
        self._strategy = strategy
        self._rule = rule
        self._dense = list(dense)
        self._compression: compression.Compression | None = None
        self.variables: dict[str, Any] = {}
        if rule.compression != "none":
            what = f"compression={rule.compression!r}"
            check_floating(what, "leave compression out", specs, names)
            made = compression.make(rule.compression, ratio=rule.ratio, rank=rule.rank)
            self._compression = made
            self.variables = self._make_memory(made, [specs[i] for i in dense])

    def __call__(self, values: Sequence[Any]) -> tuple[list[Any], Any]:
        """The sums of gradients, and their cost.

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
            times = [stamp(self._strategy.first_sent([values[i] for i in first])), stamp(sums)]
        return sums, tf.stack([tf.cast(each, tf.float64) for each in (sent, *times)])

    def _reduced(self, values: Sequence[Any]) -> tuple[list[Any], Any]:
        if self._compression is None:
            groups = buckets(values, self._rule.bucket_bytes)
            return by_group(values, groups, self._sum), self._bytes_of(values)
        sums: dict[int, Any] = {}
        sparse = sorted(set(range(len(values))).difference(self._dense))
        link = CountedLink(self._strategy.link())
        if sparse:
            sums.update(zip(sparse, self._sum([values[i] for i in sparse]), strict=True))
        if self._dense:
            memory = list(self.variables.values())
            dense = [values[i] for i in self._dense]
            result, kept = self._compression(link, dense, [v.read_value() for v in memory])
            for variable, value in zip(memory, kept, strict=True):
                variable.assign(value)
            sums.update(zip(self._dense, result, strict=True))
        extra = self._bytes_of([values[i] for i in sparse])
        return [sums[i] for i in range(len(values))], link.sent + extra

    def _make_memory(
        self, made: compression.Compression, specs: list[tf.TensorSpec]
    ) -> dict[str, Any]:
        if not specs:
            return {}
        return {
            each.name: make_variable(
                self._strategy,
                each.name,
                each.shape,
                each.dtype,
                shared=each.shared,
                initial=each.initial,
            )
            for each in made.memory(specs)
        }

    def _bytes_of(self, values: Sequence[Any]) -> Scalar:
        """The bytes that a ring sends to all-reduce dense tensors and all-gather sparse ones."""
        count = self._strategy.num_replicas_in_sync
        sent: Scalar = 0.0
        for value in values:
            if isinstance(value, tf.IndexedSlices):
                rows = tf.size(value.values) * value.dtype.size
                indices = tf.size(value.indices) * value.indices.dtype.size
                sent += tf.cast(rows + indices, tf.float32) * (count - 1)
            else:
                sent += sent_by_ring(value, count)
        return sent

    def _sum(self, values: list[Any]) -> list[Any]:
        return list(self._strategy.sum_gradients(values))


def buckets(values: Sequence[Any], bound: int | None) -> list[list[int]]:
    """Indices of gradients that are exchanged together, the last layers' first.

    The backward pass computes these first, so a bucket travels while others are computed
    (arXiv:2006.15704).

    Args:
        values: dense tensors and `IndexedSlices`, in the order of the layers.
        bound: bytes of a bucket, which it passes by one gradient at most; None for a single one.
    """
    if bound is None:
        return [list(reversed(range(len(values))))]
    result: list[list[int]] = [[]]
    filled = 0
    for i in reversed(range(len(values))):
        if filled >= bound:
            result.append([])
            filled = 0
        result[-1].append(i)
        if not isinstance(values[i], tf.IndexedSlices):
            filled += size_of(values[i])
    return result


def check_floating(
    what: str, instead: str, specs: Sequence[tf.TensorSpec], names: Sequence[str]
) -> None:
    """Refuses gradients that cannot be kept or rounded.

    Args:
        what: the option that does, with its value.
        instead: what to do about it.
        specs: shapes and types of the gradients.
        names: the weights' names.

    Raises:
        ConfigError: for the first that is not of floating point.
    """
    for spec, name in zip(specs, names, strict=True):
        if not spec.dtype.is_floating:
            raise ConfigError(
                f"{what} cannot take the gradient of {name!r}, whose type is {spec.dtype.name} and "
                f"not a floating-point one. Keep the variable out of training, or {instead}."
            )
