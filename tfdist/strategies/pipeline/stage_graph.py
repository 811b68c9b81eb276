"""The forward and the backward pass of a chunk as graphs."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from tfdist._tf.graphs import FlatFunction, flat_call
from tfdist.comm.batch_dependence import are_distinct, common_rows
from tfdist.errors import ConfigError
from tfdist.placement.devices import on
from tfdist.strategies.pipeline.gradient_sums import GradientSums
from tfdist.strategies.pipeline.stage import Part, Values
from tfdist.types import DType, Gradient, GradientTape, IndexedSlices, Shape, Structure, Tensor

__all__ = ["Given", "Graphs", "Job", "Kept", "Objective", "Packing", "Passes", "Result", "pack"]


# Many tensors as few: one list of TensorFlow's for each type, which stays on its device.

#: Types of tensors that are in no list.
_BARE = (tf.resource, tf.variant)


@dataclasses.dataclass(frozen=True)
class Packing:
    """The layout of packed tensors.

    Attributes:
        places: for each tensor its list and its place in it; no list for one that is left as it is.
        shapes: for each tensor its static shape.
        dtypes: the types of the lists, in order.
        count: lists and bare tensors together.
    """

    places: tuple[tuple[int | None, int], ...]
    shapes: tuple[Any, ...]
    dtypes: tuple[Any, ...]
    count: int

    def unpack(self, packed: Sequence[Any]) -> list[Any]:
        """The tensors, in a graph.

        Args:
            packed: the result of `pack`.
        """
        lists, bare = packed[: len(self.dtypes)], packed[len(self.dtypes) :]
        result = []
        for (which, index), shape in zip(self.places, self.shapes, strict=True):
            if which is None:
                result.append(bare[index])
                continue
            tensor = tf.raw_ops.TensorListGetItem(
                input_handle=lists[which],
                index=index,
                element_shape=_known(shape),
                element_dtype=self.dtypes[which],
            )
            result.append(tf.ensure_shape(tensor, shape) if shape.rank is not None else tensor)
        return result


def pack(tensors: Sequence[Any]) -> tuple[list[Any], Packing]:
    """Packs tensors of a graph, without copying their memory.

    Returns:
        One variant for each type, then the tensors that cannot be in a list; and how to unpack.
    """
    dtypes = tuple(dict.fromkeys(t.dtype for t in tensors if t.dtype not in _BARE))
    lists = [
        tf.raw_ops.EmptyTensorList(element_shape=-1, max_num_elements=-1, element_dtype=dtype)
        for dtype in dtypes
    ]
    sizes = [0] * len(dtypes)
    bare: list[Any] = []
    places: list[tuple[int | None, int]] = []
    for tensor in tensors:
        if tensor.dtype in _BARE:
            places.append((None, len(bare)))
            bare.append(tensor)
            continue
        which = dtypes.index(tensor.dtype)
        lists[which] = tf.raw_ops.TensorListPushBack(input_handle=lists[which], tensor=tensor)
        places.append((which, sizes[which]))
        sizes[which] += 1
    shapes = tuple(tensor.shape for tensor in tensors)
    return [*lists, *bare], Packing(tuple(places), shapes, dtypes, len(dtypes) + len(bare))


def _known(shape: Shape) -> list[int] | int:
    """A shape as TensorFlow's lists take it, -1 for an unknown dimension."""
    return -1 if shape.rank is None else [-1 if size is None else size for size in shape]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Given:
    """The inputs of a forward pass, on its device or on the chief's.

    Attributes:
        numbers: int64 `(3,)`: the microbatch, its examples, and those of the batch.
        scale: float32 scalar, what losses are multiplied by before gradients are taken.
        weights: values of the part's weights.
        state: values of its other variables.
        values: the inputs of the chunk.
        labels: of the last chunk: labels and sample weights, flat, None if there are none.
        nest: the structure that the labels are flat of.
        form: the same in words.
        totals: of the last chunk: float32, what losses over masks are divided by.
    """

    numbers: Tensor
    scale: Tensor
    weights: Sequence[Any]
    state: Sequence[Any]
    values: Values
    labels: Sequence[Any] = ()
    nest: Structure = None
    form: str = ""
    totals: Tensor | None = None

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
    """The results of a forward pass.

    Attributes:
        values: the outputs of the chunk.
        following: for each variable of the state its new value; None if it stays.
        loss: the losses in the chunk times the microbatch's share of the examples, or None.
        noted: the notes of `Objective` on the microbatch, or None.
    """

    values: Values
    following: list[Any]
    loss: Tensor | None
    noted: Tensor | None

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
    """The computation of a chunk.

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
        """The number of tensors with gradients in the backward pass: weights, then inputs."""
        return len(self.part.weights) + sum(self.wanted)


@dataclasses.dataclass(frozen=True)
class _Taped:
    """A forward pass in a graph, before its gradients are taken.

    Attributes:
        outputs: of those the gradients come from later chunks.
        loss: scaled; None if there is none.
    """

    tape: GradientTape
    sources: list[Any]
    outputs: list[Any]
    loss: Tensor | None
    result: Result

    def gradients(self, grads: Sequence[Any]) -> list[Any]:
        """The gradients of the sources, from those of the outputs; None for none."""
        pairs = [(t, g) for t, g in zip(self.outputs, grads, strict=True) if g is not None]
        if self.loss is not None:
            pairs.append((self.loss, tf.ones([], self.loss.dtype)))
        if not pairs:
            return [None] * len(self.sources)
        targets, seeds = zip(*pairs, strict=True)
        result = self.tape.gradient(list(targets), self.sources, output_gradients=list(seeds))
        return list(result)


class Graphs:
    """The functions of a chunk for tensors of some shapes.

    TensorFlow's own tape over a function gives each tensor that the backward pass needs to Python
    and back. Those are hundreds for a few layers, and costly if they are of another task. Here the
    forward function gives them packed.

    Args:
        job: the computation.
        like: the inputs, for their structure.
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
        """The results of the forward function, and the tensors that the backward pass reads."""
        assert self._result is not None
        each = iter(flat)
        leaves = [None if leaf is None else next(each) for leaf in self._result.leaves]
        return self._result.replaced(leaves), list(each)

    def backward(self, first: bool) -> FlatFunction:
        """The backward pass: makes gradients of the inputs from kept tensors and the outputs'.

        Before those come the gradients of rows: for each weight the tensors of `_rows_of`.

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
        """For each weight, then each input: `"dense"`, `"rows"`, or None if nothing comes."""
        if self._kinds is None:
            self.backward(True)
        assert self._kinds is not None
        return self._kinds

    def reached(self, present: tuple[bool, ...]) -> list[bool]:
        """For each weight, then input: whether it has a gradient if only some outputs have one."""
        kinds = self.kinds
        if all(present):
            return [kind is not None for kind in kinds]
        if present not in self._reached:
            result: list[bool] = []

            def look(*flat: Any) -> None:
                taped = self._taped(flat[: -len(present)])
                pairs = zip(flat[-len(present) :], present, strict=True)
                grads = taped.gradients([grad if there else None for grad, there in pairs])
                result.extend(grad is not None for grad in grads)

            given = [spec for spec in self.specs if spec is not None]
            tf.function(look, autograph=False).get_concrete_function(*given, *self._grads())
            self._reached[present] = result
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
                given.weights, given.state, given.values, given.numbers
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
        """Gradients as tensors: those of an embedding's rows as four (see `_rows_of`)."""
        flat: list[Any] = []
        self._kinds = []
        for number, grad in enumerate(grads):
            rows = number < len(self._job.part.weights) and _comes_in_rows(grad)
            self._kinds.append(None if grad is None else "rows" if rows else "dense")
            if rows:
                flat += _rows_of(grad)
            elif grad is not None:
                flat.append(tf.convert_to_tensor(grad))
        return flat

    def _backward(self, flat: Sequence[Any], first: bool) -> list[Any]:
        count = len(self._kept_specs())
        kept, grads = flat[:count], flat[count:]
        if self._packing is None:
            result = self._flat(self._taped(kept).gradients(grads))
        else:
            result = self._inner.inference_fn.call_flat(*grads, *self._packing.unpack(kept))
        assert self._kinds is not None
        each = iter(result)
        rows: list[Any] = []
        weights = len(self._job.part.weights)
        for number, kind in enumerate(self._kinds[:weights]):
            if kind == "rows":
                rows += itertools.islice(each, _ROWS)
            elif kind == "dense":
                self._job.sums.add(number, next(each), first=first)
        # A function of a device of another task without a result is not waited for.
        return [*rows, *each] or [tf.zeros([])]

    def _kept_specs(self) -> list[Any]:
        return [s for s in self.specs if s is not None] if self._packing is None else self._kept

    def _grads(self) -> list[Any]:
        return self._outputs


def _comes_in_rows(grad: Gradient | None) -> bool:
    """Whether a weight's gradient is of rows that one process, too, has as often as looked up."""
    if not isinstance(grad, tf.IndexedSlices):
        return False
    distinct = are_distinct(grad.indices)
    if distinct is None:
        raise ConfigError(
            "microbatches conflicts with a table whose rows are looked up both one by one and by "
            "unique ids, as those of sparse inputs. Use two tables, or strategy='mirrored'."
        )
    return not distinct


#: The tensors that `_rows_of` gives.
_ROWS = 4


def _rows_of(grad: IndexedSlices) -> list[Any]:
    """Values and numbers of the rows that a microbatch looks up, then of those that all do."""
    common = common_rows(grad.indices)
    if isinstance(common, bool):
        every, none = [grad.values, grad.indices], [grad.values[:0], grad.indices[:0]]
        return [*none, *every] if common else [*every, *none]
    masks = (tf.logical_not(common), common)
    return [tf.boolean_mask(x, mask) for mask in masks for x in (grad.values, grad.indices)]


def _those(tensors: Sequence[Any], which: Sequence[bool]) -> list[Any]:
    return [tensor for tensor, there in zip(tensors, which, strict=True) if there]


def _share(numbers: Tensor, dtype: DType) -> Tensor:
    """A microbatch's part of the examples."""
    counts = tf.cast(numbers, tf.float64)
    return tf.cast(counts[1] / counts[2], dtype)


# The forward and the backward pass of a chunk on its device, each one call.

#: Numbers of microbatches that are kept on a device.
_NUMBERS = 1024


class Kept:
    """The tensors that a forward pass leaves on its device for the backward pass.

    Args:
        graphs: the functions.
        tensors: the inputs of the backward function besides gradients.
        outputs: the tensors whose gradients come from later chunks.
    """

    def __init__(self, graphs: Graphs, tensors: list[Any], outputs: Sequence[Any]) -> None:
        self.graphs, self.tensors = graphs, tensors
        self.shapes = [(tensor.shape, tensor.dtype) for tensor in outputs]


class Passes:
    """The passes of a chunk.

    Args:
        job: the computation and its chunk.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._traced: dict[Any, Graphs] = {}
        self._latest: dict[str, Graphs] = {}
        self._numbers: dict[tuple[int, ...], Any] = {}
        self._scale: tuple[float, Any] | None = None

    def numbers(self, microbatch: int, sizes: Sequence[int]) -> Tensor:
        """`Given.numbers` of a microbatch, on the device."""
        key = (microbatch, sizes[microbatch], sum(sizes))
        if key not in self._numbers:
            if len(self._numbers) >= _NUMBERS:
                self._numbers.clear()
            with on(self._job.part.device):
                self._numbers[key] = tf.constant(key, tf.int64)
        return self._numbers[key]

    def scale(self, value: float) -> Tensor:
        """`Given.scale`, on the device."""
        if self._scale is None or self._scale[0] != value:
            with on(self._job.part.device):
                self._scale = (value, tf.constant(value, tf.float32))
        return self._scale[1]

    def forward(self, given: Given) -> tuple[Kept, Result]:
        """Runs the chunk.

        Args:
            given: its inputs.

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
            kept: the tensors that the forward pass has left.
            grads: of the floating tensors that it has written, None if there is none; nothing
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
                rows = tuple(itertools.islice(each, _ROWS))
                if reached[number]:
                    sums.rows[number].append(rows)
        result = [None if kind is None else next(each) for kind in kinds[weights:]]
        return [g if r else None for g, r in zip(result, reached[weights:], strict=True)]

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
    """Specs that both are of; the second ones if not the same leaves are there."""
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
    """Waits for a result of another task's device: its shape is known when it is there."""
    for tensor in flat[:1]:
        tensor.shape  # noqa: B018
