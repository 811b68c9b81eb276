"""A chunk of a model on a device, as a function without side effects."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import keras
import tensorflow as tf

from tfdist._tf.distribute import eagerly_outside_of_scope
from tfdist._tf.graphs import FlatFunction, flat_call, fresh_zeros
from tfdist.comm.batch_dependence import Dependence
from tfdist.errors import ConfigError
from tfdist.keras.losses import settled
from tfdist.keras.replica_context import settling
from tfdist.keras.stateless import Assigning
from tfdist.keras.whole_batch import as_average, examples_in
from tfdist.placement.devices import moved, on
from tfdist.strategies.pipeline.layer_state import (
    on_whole_batch,
    refuse_outside,
    states_of_program,
)
from tfdist.strategies.pipeline.microbatch import Microbatch
from tfdist.strategies.pipeline.partitioning import Cut
from tfdist.types import Gradient, KerasVariable, Tensor

__all__ = ["GradientSums", "Part", "Values", "of_any_size"]

#: Keras's name for the state of random numbers.
_SEED = "seed_generator_state"


class Values(NamedTuple):
    """Tensors between chunks, and Keras's masks of them.

    Attributes:
        tensors: of shape `(microbatch, ...)`, in the order of the chunk's reads or writes.
        masks: for each its mask, or None.
    """

    tensors: list[Any]
    masks: list[Any]


def _refused_total(value: Tensor) -> Tensor:
    """Refuses: the other microbatches come later."""
    del value
    raise ConfigError(
        "A loss that a layer adds by `add_loss`, such as a root of a mean, needs the whole "
        "batch, which conflicts with strategy='pipeline', whose layers see microbatches. Add a "
        "mean or a sum over the examples, set microbatches=1, or choose another strategy."
    )


class Part:
    """A chunk on a device.

    Args:
        cut: the model.
        number: which chunk it is.
        device: the full name of the device that it runs on.
        is_copy: whether the variables are on another device, that of the first replica of the
            pipeline.
        microbatches: parts of a batch.

    Attributes:
        chunk: the chunk.
        model: the whole model.
        microbatches: parts of a batch.
        weights: Keras's trainable variables.
        state: its other variables: moving statistics, states of random numbers.
    """

    def __init__(
        self, cut: Cut, number: int, device: str, *, is_copy: bool, microbatches: int
    ) -> None:
        self._cut, self._is_copy, self.microbatches = cut, is_copy, microbatches
        self.number, self.chunk, self.device = number, cut.chunks[number], device
        self.model = cut.graph
        layers = self.chunk.layers
        unique = {
            id(v): v for layer in layers for v in (*layer.variables, *layer.metrics_variables)
        }
        # The model's, as Keras trains them: a layer that is frozen may have some, such as LoRA's.
        trainable = {id(v) for v in self.model.trainable_weights}
        self.weights = [v for key, v in unique.items() if key in trainable]
        self.state = [v for key, v in unique.items() if key not in trainable]
        self._of_program = states_of_program(layers)
        self._is_open = False
        self._calls: dict[Any, FlatFunction] = {}
        for variable in () if is_copy else unique.values():
            moved(variable, device)

    def read(self, which: Literal["weights", "state"]) -> list[Any]:
        """The present values of variables, which stay as they are when the variables change."""
        variables = self.weights if which == "weights" else self.state
        values = self._call(which, lambda: _values(variables), ())
        if not self._is_copy:
            return values
        with on(self.device):
            return [tf.identity(value) for value in values]

    def write_state(self, values: Sequence[Any]) -> None:
        """Sets Keras's variables to the values of `self.state`, in one call."""
        self._call("write", self._assign_state, values)

    def _assign_state(self, *values: Tensor) -> None:
        for variable, value in zip(self.state, values, strict=True):
            variable._value.assign(value, read_value=False)

    def averaged(self, values: Sequence[Any], shares: Sequence[float]) -> list[Any]:
        """New values of some of the state, from those that microbatches have made.

        Statistics are averaged by examples; random numbers go on where the first microbatch ends.

        Args:
            values: for each variable those of all microbatches.
            shares: for each microbatch its part of the examples.
        """
        key = ("average", tuple(shares), len(values))
        return self._call(key, lambda *values: _averages(values, shares), values)

    def _call(self, key: Any, run: Callable[..., Any], values: Sequence[Any]) -> list[Any]:
        if key not in self._calls:
            specs = [tf.TensorSpec(value.shape, value.dtype) for value in values]
            function = tf.function(run, autograph=False)
            self._calls[key] = flat_call(function.get_concrete_function(*specs))
        with on(self.device):
            return self._calls[key](values)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all its variables."""
        values = [variable._value for variable in (*self.weights, *self.state)]
        return sum(int(v.shape.num_elements()) * int(v.dtype.size) for v in values)

    def run(
        self, weights: Sequence[Any], state: Sequence[Any], values: Values, numbers: Tensor
    ) -> tuple[Values, list[Any], Any]:
        """The chunk as a function without side effects, in a graph.

        Args:
            weights: values for `self.weights`.
            state: values for `self.state`.
            values: the inputs of the chunk.
            numbers: see `stage_graph.ForwardInputs`. Random layers draw other numbers for each
                microbatch.

        Returns:
            What it writes; for each variable of the state its new value, None if it stays; and
            the sum of the losses that its layers add, with those of regularizers, None for none.
            Its average over the microbatches is the whole batch's.

        Raises:
            ConfigError: if a loss that a layer adds, or what it assigns, is neither a mean nor a
                sum over the examples, if a layer mixes these, or if it assigns a weight that is
                trained or a variable of no layer.
        """
        microbatch, count, total = tf.unstack(numbers)
        known = self._known(values)
        borrowed = [(variable, known[key]) for key, variable in self.chunk.borrowed.items()]
        step = Microbatch(
            *(self._cut.graph, count, total),
            depends=Dependence([*weights, *state, *(value for _, value in borrowed)]),
            total_of=_refused_total,
            microbatches=self.microbatches,
        )
        drawn = [_for_microbatch(*pair, microbatch) for pair in zip(self.state, state, strict=True)]
        pairs = [*zip(self.weights, weights, strict=True), *zip(self.state, drawn, strict=True)]
        of_variable = {id(variable): value for variable, value in pairs}
        known |= {key: tf.identity(of_variable[id(v)]) for key, v in self.chunk.lent.items()}
        # Names of layers may begin as names at the root must not.
        scopes = tf.name_scope(f"chunk{self.number}")
        with Assigning([*pairs, *borrowed]) as scope, scopes:
            written = self._through(known, step)
            if not self._is_open and (scope.losses or self._of_program & {*scope.assigned}):
                self._is_open = True
                return self.run(weights, state, values, numbers)
            loss = self._losses(scope, step)
            self._check_assigned(scope)
            changed = [self._following(scope, step, variable) for variable in self.state]
        outputs = [written[key] for key in self.chunk.writes]
        return Values(outputs, [getattr(o, "_keras_mask", None) for o in outputs]), changed, loss

    def _known(self, values: Values) -> dict[Any, Any]:
        """The tensors that the chunk reads, by their keys."""
        keys, tensors = self.chunk.reads, values.tensors
        if self._is_open:  # A sum over a size that is known looks like one times a constant.
            pairs = zip(keys, tensors, strict=True)
            tensors = [t if k in self.chunk.borrowed else of_any_size(t) for k, t in pairs]
        return dict(zip(keys, _masked(tensors, values.masks), strict=True))

    def _through(self, known: dict[Any, Any], step: Microbatch) -> dict[Any, Any]:
        held = ((x, self._cut.held.get(key)) for key, x in known.items() if x is not None)
        step.settled.update((id(x), (x, examples)) for x, examples in held if examples is not None)
        for call in self.chunk.calls:
            values = {
                id(symbol): known[key]
                for symbol, key in zip(call.node.input_tensors, call.reads, strict=True)
            }
            args, kwargs = call.node.arguments.fill_in(values)
            if "training" in getattr(call.node.operation, "_call_context_args", ()):
                kwargs["training"] = True
            with settling.set(step):
                outputs = keras.tree.flatten(call.node.operation(*args, **kwargs))
            if not isinstance(call.node.operation, keras.layers.Layer):
                settled(step, call.node.operation, (args, kwargs), outputs)
            known.update(zip(call.writes, outputs, strict=True))
        written = {key: known[key] for key in self.chunk.writes}
        self._cut.held.update((key, examples_in(step, x)) for key, x in written.items())
        return written

    def _following(self, scope: Assigning, step: Microbatch, variable: KerasVariable) -> Any:
        """The value that a variable of the state is given; None if it stays."""
        if id(variable) not in scope.assigned:
            return None
        value = scope.get_current_value(variable)
        if id(variable) not in self._of_program:
            return value
        return on_whole_batch(step, variable, value)

    def _check_assigned(self, scope: Assigning) -> None:
        for weight in self.weights:
            if id(weight) in scope.assigned:
                raise ConfigError(
                    f"strategy='pipeline' conflicts with a layer that assigns {weight.path!r}, a "
                    "weight that an optimizer trains, as SpectralNormalization does: each "
                    "microbatch would assign it again. Use strategy='mirrored'."
                )
        names = ", ".join(repr(layer.name) for layer in self.chunk.layers)
        refuse_outside(f"one of the layers {names}", scope, self.state)

    def _losses(self, scope: Assigning, step: Microbatch) -> Tensor | None:
        terms = [as_average(step, tf.reduce_sum(term)) for term in scope.losses]
        for layer in self.chunk.layers:
            terms += layer._get_regularization_losses()
        terms = [tf.reduce_sum(tf.cast(term, tf.float32)) for term in terms]
        return tf.add_n(terms) if terms else None


def of_any_size(tensor: Tensor | None) -> Tensor | None:
    """A tensor whose number of rows is not known when its graph is made."""
    if tensor is None or not tensor.shape.rank:
        return tensor
    return tf.compat.v1.placeholder_with_default(tensor, [None, *tensor.shape[1:]])


def _values(variables: Sequence[Any]) -> list[Any]:
    result = []
    for variable in variables:
        with on(variable._value.device):
            result.append(variable._value.read_value())
    return result


def _averages(values: Sequence[Tensor], shares: Sequence[float]) -> list[Any]:
    count, result = len(shares), []
    for first in range(0, len(values), count):
        each = values[first : first + count]
        if not each[0].dtype.is_floating:
            result.append(tf.identity(each[0]))
            continue
        weighed = [value * share for value, share in zip(each, shares, strict=True)]
        result.append(tf.add_n(weighed))
    return result


def _for_microbatch(variable: KerasVariable, value: Tensor, microbatch: Tensor) -> Tensor:
    """The state of random numbers for a microbatch: a stream of its own, the first one Keras's."""
    if _SEED not in variable.name:
        return value
    offset = tf.stack([tf.cast(microbatch, value.dtype), tf.zeros([], value.dtype)])
    return value + offset


def _masked(tensors: Sequence[Any], masks: Sequence[Any]) -> list[Any]:
    result = []
    for tensor, mask in zip(tensors, masks, strict=True):
        if mask is not None:
            tensor = tf.identity(tensor)
            tensor._keras_mask = mask
        result.append(tensor)
    return result


class GradientSums:
    """One sum for each weight of a chunk, in place.

    The first gradient after `clear` takes the place of what was there before, so that nothing is
    set to zero. Gradients of some rows of a weight, an embedding's, are put one after the other:
    some of Keras's optimizers, such as Adam, and its clipping by the global norm do something else
    with rows that come several times than with their sum.

    Args:
        part: the chunk.

    Attributes:
        part: the chunk.
        touched: for each weight whether there has ever been a dense gradient.
        of_halves: the numbers of the weights whose dense gradients are computed in float16.
        rows: for each weight, the values and numbers of a microbatch's own rows, and of those that
            all microbatches look up, since `clear`.
    """

    def __init__(self, part: Part) -> None:
        with eagerly_outside_of_scope(), on(part.device):
            self.variables = [
                tf.Variable(tf.zeros(weight.shape, weight.dtype), trainable=False)
                for weight in part.weights
            ]
        self.part = part
        self.touched = [False] * len(self.variables)
        self.of_halves: set[int] = set()
        self.clear()

    def begin(self, numbers: Sequence[int]) -> bool:
        """Notes that dense gradients of some weights are going to be added.

        Returns:
            Whether they replace what is there: none has been added since `clear`, of any weight.
        """
        first = not any(self._written)
        for number in numbers:
            if not first and not self._written[number]:
                self._set_to_zero(number)
            self._written[number] = self.touched[number] = True
        return first

    def add(self, number: int, grad: Gradient, *, first: bool) -> None:
        """Adds a gradient, in a graph.

        Args:
            number: of the weight.
            grad: a dense tensor.
            first: whether it replaces the sum of before.
        """
        variable = self.variables[number]
        (variable.assign if first else variable.assign_add)(grad, read_value=False)

    def clear(self) -> None:
        """Begins anew."""
        self._written = [False] * len(self.variables)
        self.rows: list[list[tuple[Any, ...]]] = [[] for _ in self.variables]

    def settle(self) -> None:
        """Sets to zero what has had no gradient since `clear`, so that all sums can be read."""
        for number, touched in enumerate(self.touched):
            if touched and not self._written[number]:
                self._set_to_zero(number)

    def _set_to_zero(self, number: int) -> None:
        with on(self.part.device):
            variable = self.variables[number]
            variable.assign(fresh_zeros(variable))
