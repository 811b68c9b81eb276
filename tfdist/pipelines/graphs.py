"""The forward and the backward pass of a chunk as graphs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from tfdist._tensorflow_graphs import FlatFunction, flat_call
from tfdist.pipelines.packing import Packing, pack
from tfdist.pipelines.parts import Part, Values
from tfdist.pipelines.sums import GradientSums

__all__ = ["Given", "Graphs", "Job", "Objective", "Result"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Given:
    """What a forward pass reads, on its device or on the chief's.

    Attributes:
        numbers: int64 `(3,)`: the microbatch, its examples, and those of the batch.
        scale: float32 scalar, what losses are multiplied by before gradients are taken.
        weights: values of the part's weights.
        state: values of its other variables.
        values: what the chunk reads.
        labels: of the last chunk: labels and sample weights, flat, None where there are none.
        nest: the structure that the labels are flat of.
        form: the same in words.
        totals: of the last chunk: float32, what losses over masks are divided by.
    """

    numbers: Any
    scale: Any
    weights: Sequence[Any]
    state: Sequence[Any]
    values: Values
    labels: Sequence[Any] = ()
    nest: Any = None
    form: str = ""
    totals: Any = None

    @property
    def leaves(self) -> list[Any]:
        """All of it, flat, with Nones."""
        values = self.values
        first = [self.numbers, self.scale, *self.weights, *self.state]
        return [*first, *values.tensors, *values.masks, *self.labels, self.totals]

    def replaced(self, leaves: Sequence[Any]) -> Given:
        """The same structure with other leaves."""
        each = iter(leaves)

        def following(like: Sequence[Any]) -> list[Any]:
            return [next(each) for _ in like]

        return dataclasses.replace(
            self,
            numbers=next(each),
            scale=next(each),
            weights=following(self.weights),
            state=following(self.state),
            values=Values(following(self.values.tensors), following(self.values.masks)),
            labels=following(self.labels),
            totals=next(each),
        )


@dataclasses.dataclass(frozen=True)
class Result:
    """What a forward pass makes.

    Attributes:
        values: what the chunk writes.
        following: for each variable of the state its new value; None where it stays.
        loss: the losses in the chunk times the microbatch's share of the examples, or None.
        noted: what `Objective` notes of the microbatch, or None.
    """

    values: Values
    following: list[Any]
    loss: Any
    noted: Any

    @property
    def leaves(self) -> list[Any]:
        """All of it, flat, with Nones."""
        return [*self.values.tensors, *self.values.masks, *self.following, self.loss, self.noted]

    def replaced(self, leaves: Sequence[Any]) -> Result:
        """The same structure with other leaves."""
        count = len(self.values.tensors)
        values = Values(list(leaves[:count]), list(leaves[count : 2 * count]))
        return Result(values, list(leaves[2 * count : -2]), *leaves[-2:])


#: The loss of the last chunk's outputs for a microbatch, a scalar; and what is noted of it.
Objective: TypeAlias = Callable[[Given, Values], tuple[Any, Any]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """What is computed.

    Attributes:
        part: the chunk.
        sums: where gradients of weights are added up.
        floating: for each tensor that the chunk writes whether later ones give gradients of it.
        wanted: for each tensor that it reads whether an earlier chunk wants gradients of it.
        objective: the loss, of the last chunk.
        recompute: whether the backward pass begins with the forward pass once more.
    """

    part: Part
    sums: GradientSums
    floating: Sequence[bool]
    wanted: Sequence[bool]
    objective: Objective | None
    recompute: bool

    @property
    def sources(self) -> int:
        """How many tensors the backward pass computes gradients of: weights, then inputs."""
        return len(self.part.weights) + sum(self.wanted)


@dataclasses.dataclass(frozen=True)
class _Taped:
    """A forward pass in a graph, before its gradients are taken.

    Attributes:
        outputs: of those the gradients come from later chunks.
        loss: scaled; None where there is none.
    """

    tape: Any
    sources: list[Any]
    outputs: list[Any]
    loss: Any
    result: Result

    def gradients(self, grads: Sequence[Any]) -> list[Any]:
        """The gradients of the sources, from those of the outputs; None for none."""
        pairs = [(t, g) for t, g in zip(self.outputs, grads, strict=True) if g is not None]
        if self.loss is not None:
            pairs.append((self.loss, tf.ones([], self.loss.dtype)))
        if not pairs:
            return [None] * len(self.sources)
        targets, seeds = zip(*pairs, strict=True)
        found = self.tape.gradient(list(targets), self.sources, output_gradients=list(seeds))
        return list(found)


class Graphs:
    """The functions of a chunk for tensors of some shapes.

    TensorFlow's own tape over a function gives each tensor that the backward pass needs to Python
    and back. Those are hundreds for a few layers, and costly if they are of another task. Here the
    forward function gives them packed.

    Args:
        job: what is computed.
        like: what is given, for its structure.
        specs: its leaves as specs, and Nones.
    """

    def __init__(self, job: Job, like: Given, specs: Sequence[Any]) -> None:
        self._job, self._like, self.specs = job, like, list(specs)
        self._present = [spec is not None for spec in specs]
        self._result: Result | None = None
        self._packing: Packing | None = None
        self._inner: Any = None
        self._kinds: list[str | None] | None = None
        self._backwards: dict[bool, FlatFunction] = {}
        self._reached: dict[tuple[bool, ...], list[bool]] = {}
        self.forward = self._function(self._forward, [spec for spec in specs if spec is not None])

    def results(self, flat: Sequence[Any]) -> tuple[Result, list[Any]]:
        """What the forward function has returned, and what the backward pass reads."""
        assert self._result is not None
        each = iter(flat)
        leaves = [None if leaf is None else next(each) for leaf in self._result.leaves]
        return self._result.replaced(leaves), list(each)

    def backward(self, first: bool) -> FlatFunction:
        """The backward pass: from what is kept, and gradients of the outputs, those of the inputs.

        Before those come the gradients of rows: for each weight values, then numbers.

        Args:
            first: whether gradients of weights replace the sums, or come on top of them.
        """
        if first not in self._backwards:

            def run(*flat: Any) -> list[Any]:
                return self._backward(flat, first)

            self._backwards[first] = self._function(run, [*self._kept_specs(), *self._grads()])
        return self._backwards[first]

    @property
    def kinds(self) -> list[str | None]:
        """For each weight, then each input: `"dense"`, `"rows"`, or None where nothing comes."""
        if self._kinds is None:
            self.backward(True)
        assert self._kinds is not None
        return self._kinds

    def reached(self, present: tuple[bool, ...]) -> list[bool]:
        """Which weights, then inputs, have gradients where those of only some outputs are there."""
        kinds = self.kinds
        if all(present):
            return [kind is not None for kind in kinds]
        if present not in self._reached:
            found: list[bool] = []

            def look(*flat: Any) -> None:
                taped = self._taped(flat[: -len(present)])
                pairs = zip(flat[-len(present) :], present, strict=True)
                grads = taped.gradients([grad if there else None for grad, there in pairs])
                found.extend(grad is not None for grad in grads)

            given = [spec for spec in self.specs if spec is not None]
            tf.function(look, autograph=False).get_concrete_function(*given, *self._grads())
            self._reached[present] = found
        return self._reached[present]

    def _function(self, run: Callable[..., Any], specs: Sequence[Any]) -> FlatFunction:
        return flat_call(tf.function(run, autograph=False).get_concrete_function(*specs))

    def _forward(self, *flat: Any) -> list[Any]:
        taped = self._taped(flat)
        leaves = taped.result.leaves
        self._result = taped.result.replaced([None if leaf is None else True for leaf in leaves])
        self._outputs = [tf.TensorSpec(t.shape, t.dtype) for t in taped.outputs]
        made = [leaf for leaf in leaves if leaf is not None]
        if self._job.recompute:
            return made

        def backward(*grads: Any) -> list[Any]:
            return self._flat(taped.gradients(grads))

        # A graph of its own: what it reads of this one is what has to be kept.
        self._inner = tf.function(backward, autograph=False).get_concrete_function(*self._outputs)
        kept, self._packing = pack(self._inner.captured_inputs)
        self._kept = [tf.TensorSpec(t.shape, t.dtype) for t in kept]
        return [*made, *kept]

    def _taped(self, flat: Sequence[Any]) -> _Taped:
        job, each = self._job, iter(flat)
        given = self._like.replaced([next(each) if there else None for there in self._present])
        wanted = _those(given.values.tensors, job.wanted)
        sources = [*given.weights, *wanted]
        with tf.GradientTape() as tape:
            tape.watch(sources)
            written, following, loss = job.part.run(
                given.weights, given.state, given.values, given.numbers[0]
            )
            noted = None
            if job.objective is not None:
                own, noted = job.objective(given, written)
                loss = own if loss is None else own + loss
            weighed = None if loss is None else loss * _share(given.numbers, loss.dtype)
            target = None if weighed is None else weighed * tf.cast(given.scale, weighed.dtype)
        outputs = [] if job.objective else _those(written.tensors, job.floating)
        return _Taped(tape, sources, outputs, target, Result(written, following, weighed, noted))

    def _flat(self, grads: Sequence[Any]) -> list[Any]:
        """Gradients as tensors: those of an embedding's rows as values and indices."""
        flat: list[Any] = []
        self._kinds = []
        for number, grad in enumerate(grads):
            rows = isinstance(grad, tf.IndexedSlices) and number < len(self._job.part.weights)
            self._kinds.append(None if grad is None else "rows" if rows else "dense")
            if rows:
                flat += [grad.values, grad.indices]
            elif grad is not None:
                flat.append(tf.convert_to_tensor(grad))
        return flat

    def _backward(self, flat: Sequence[Any], first: bool) -> list[Any]:
        count = len(self._kept_specs())
        kept, grads = flat[:count], flat[count:]
        if self._packing is None:
            found = self._flat(self._taped(kept).gradients(grads))
        else:
            found = self._inner.inference_fn.call_flat(*grads, *self._packing.unpack(kept))
        assert self._kinds is not None
        each = iter(found)
        rows: list[Any] = []
        weights = len(self._job.part.weights)
        for number, kind in enumerate(self._kinds[:weights]):
            if kind == "rows":
                rows += [next(each), next(each)]
            elif kind == "dense":
                self._job.sums.add(number, next(each), first=first)
        # A function of a device of another task without a result is not waited for.
        return [*rows, *each] or [tf.zeros([])]

    def _kept_specs(self) -> list[Any]:
        return [s for s in self.specs if s is not None] if self._packing is None else self._kept

    def _grads(self) -> list[Any]:
        return self._outputs


def _those(tensors: Sequence[Any], which: Sequence[bool]) -> list[Any]:
    return [tensor for tensor, there in zip(tensors, which, strict=True) if there]


def _share(numbers: Any, dtype: Any) -> Any:
    """A microbatch's part of the examples."""
    counts = tf.cast(numbers, tf.float64)
    return tf.cast(counts[1] / counts[2], dtype)
