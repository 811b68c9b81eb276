"""The forward and the backward pass of a chunk on its device, each one call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.pipelines.graphs import Given, Graphs, Job, Result
from tfdist.placement.devices import on

__all__ = ["Kept", "Passes"]

#: Numbers of microbatches that are kept on a device.
_NUMBERS = 1024


class Kept:
    """What a forward pass leaves on its device for the backward pass.

    Args:
        graphs: the functions.
        tensors: what the backward function reads besides gradients.
        outputs: the tensors whose gradients come from later chunks.
    """

    def __init__(self, graphs: Graphs, tensors: list[Any], outputs: Sequence[Any]) -> None:
        self.graphs, self.tensors = graphs, tensors
        self.shapes = [(tensor.shape, tensor.dtype) for tensor in outputs]


class Passes:
    """The passes of a chunk.

    Args:
        job: what is computed, and where.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._traced: dict[Any, Graphs] = {}
        self._latest: dict[str, Graphs] = {}
        self._numbers: dict[tuple[int, ...], Any] = {}
        self._scale: tuple[float, Any] | None = None

    def numbers(self, microbatch: int, sizes: Sequence[int]) -> Any:
        """`Given.numbers` of a microbatch, on the device."""
        key = (microbatch, sizes[microbatch], sum(sizes))
        if key not in self._numbers:
            if len(self._numbers) >= _NUMBERS:
                self._numbers.clear()
            with on(self._job.part.device):
                self._numbers[key] = tf.constant(key, tf.int64)
        return self._numbers[key]

    def scale(self, value: float) -> Any:
        """`Given.scale`, on the device."""
        if self._scale is None or self._scale[0] != value:
            with on(self._job.part.device):
                self._scale = (value, tf.constant(value, tf.float32))
        return self._scale[1]

    def forward(self, given: Given) -> tuple[Kept, Result]:
        """Runs the chunk.

        Args:
            given: what it reads.

        Returns:
            What the backward pass needs, and the results, which have been computed.
        """
        leaves = given.leaves
        tensors = [leaf for leaf in leaves if leaf is not None]
        graphs = self._graphs(given, leaves)
        with on(self._job.part.device):
            flat = graphs.forward(tensors)
        _wait(flat)
        result, kept = graphs.results(flat)
        outputs = [] if self._job.objective else self._floating(result)
        return Kept(graphs, tensors if self._job.recompute else kept, outputs), result

    def backward(self, kept: Kept, grads: Sequence[Any]) -> list[Any]:
        """Adds gradients of weights to the sums.

        Args:
            kept: what the forward pass has left.
            grads: of the floating tensors that it has written, None where there is none; nothing
                for the last chunk.

        Returns:
            For each tensor that an earlier chunk wants a gradient of, that gradient or None.
        """
        graphs, weights, sums = kept.graphs, len(self._job.part.weights), self._job.sums
        reached, kinds = graphs.reached(tuple(grad is not None for grad in grads)), graphs.kinds
        with on(self._job.part.device):
            first = sums.begin([i for i in range(weights) if reached[i] and kinds[i] == "dense"])
            there = [
                tf.zeros(shape, dtype) if grad is None else grad
                for grad, (shape, dtype) in zip(grads, kept.shapes, strict=True)
            ]
            flat = graphs.backward(first)([*kept.tensors, *there])
        _wait(flat)
        each = iter(flat)
        for number in range(weights):
            if kinds[number] == "rows":
                rows = (next(each), next(each))
                if reached[number]:
                    sums.rows[number].append(rows)
        found = [None if kind is None else next(each) for kind in kinds[weights:]]
        return [g if r else None for g, r in zip(found, reached[weights:], strict=True)]

    def _graphs(self, given: Given, leaves: Sequence[Any]) -> Graphs:
        """The functions for some shapes: one for those seen first, and one for all others."""
        fixed = 2 + len(given.weights) + len(given.state)
        shapes = tuple(None if leaf is None else tuple(leaf.shape) for leaf in leaves[fixed:])
        key = (shapes, given.form)
        if key not in self._traced:
            specs = [None if leaf is None else tf.TensorSpec.from_tensor(leaf) for leaf in leaves]
            known = self._latest.get(given.form)
            if known is not None:
                specs = _general(known.specs, specs)
            if known is None or specs != known.specs:
                known = Graphs(self._job, given, specs)
            self._latest[given.form] = self._traced[key] = known
        return self._traced[key]

    def _floating(self, result: Result) -> list[Any]:
        pairs = zip(result.values.tensors, self._job.floating, strict=True)
        return [tensor for tensor, floating in pairs if floating]


def _general(known: Sequence[Any], specs: Sequence[Any]) -> list[Any]:
    """Specs that both are of; the second ones where not the same leaves are there."""
    if [a is None for a in known] != [b is None for b in specs]:
        return list(specs)
    if any(a is not None and a.dtype != b.dtype for a, b in zip(known, specs, strict=True)):
        return list(specs)
    return [
        None
        if a is None
        else tf.TensorSpec(a.shape.most_specific_compatible_shape(b.shape), b.dtype)
        for a, b in zip(known, specs, strict=True)
    ]


def _wait(flat: Sequence[Any]) -> None:
    """Waits for what a device of another task computes: its shape is known when it is there."""
    for tensor in flat[:1]:
        tensor.shape  # noqa: B018
