"""A chunk of a model on a device, as a function without side effects."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist._tf.graphs import FlatFunction, flat_call
from tfdist.comm.batch_dependence import Dependence
from tfdist.errors import ConfigError
from tfdist.keras.replica_context import Step
from tfdist.keras.whole_batch import as_average
from tfdist.placement.devices import moved, on
from tfdist.strategies.pipeline.partitioning import Chunk
from tfdist.types import Functional, KerasVariable, StatelessScope, Structure, Tensor

__all__ = ["Part", "Values", "of_any_size"]

#: Keras's name for the state of random numbers.
_SEED = "seed_generator_state"


@dataclasses.dataclass(frozen=True)
class Values:
    """Tensors between chunks, and Keras's masks of them.

    Attributes:
        tensors: of shape `(microbatch, ...)`, in the order of the chunk's reads or writes.
        masks: for each its mask, or None.
    """

    tensors: list[Any]
    masks: list[Any]


class _Microbatch(Step):
    """A microbatch's share of a Keras step, in the layers."""

    def sum(self, values: Structure) -> Any:
        """Refuses: the other microbatches come later.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            "A loss that a layer adds by `add_loss`, such as a root of a mean, needs the whole "
            "batch, which conflicts with strategy='pipeline', whose layers see microbatches. Add a "
            "mean or a sum over the examples, set microbatches=1, or choose another strategy."
        )


class Part:
    """A chunk on a device.

    Args:
        graph: the model that the chunk is of.
        number: which chunk it is.
        chunk: the layers.
        device: the full name of the device that it runs on.
        copies: the part that has the weights, if this one is of another replica of the pipeline.

    Attributes:
        weights: Keras's trainable variables.
        state: its other variables: moving statistics, states of random numbers.
    """

    def __init__(
        self,
        graph: Functional,
        number: int,
        chunk: Chunk,
        device: str,
        copies: Part | None = None,
    ) -> None:
        self._graph = graph
        self.number, self.chunk, self.device = number, chunk, device
        variables = [v for layer in chunk.layers for v in layer.variables]
        unique = list({id(v): v for v in variables}.values())
        trainable = {id(v) for layer in chunk.layers for v in layer.trainable_weights}
        self.weights = [v for v in unique if id(v) in trainable]
        self.state = [v for v in unique if id(v) not in trainable]
        self._is_copy = copies is not None
        self._adds_losses = False
        self._calls: dict[Any, FlatFunction] = {}
        for variable in unique if copies is None else ():
            moved(variable, device)
        self._readers = {
            "weights": tf.function(lambda: _values(self.weights), autograph=False),
            "state": tf.function(lambda: _values(self.state), autograph=False),
        }

    def read(self, which: str) -> list[Any]:
        """The present values of variables, which stay as they are when the variables change.

        Args:
            which: `"weights"` or `"state"`.
        """
        with on(self.device):
            values = list(self._readers[which]())
            return [tf.identity(value) for value in values] if self._is_copy else values

    def write_state(self, values: Sequence[Any]) -> None:
        """Sets Keras's variables to the values of `self.state`, in one call."""
        self._call("write", _assigned(self.state), values)

    def averaged(self, values: Sequence[Any], shares: Sequence[float]) -> list[Any]:
        """New values of some of the state, from those that microbatches have made.

        Statistics are averaged by examples; random numbers go on where the first microbatch ends.

        Args:
            values: for each variable those of all microbatches.
            shares: for each microbatch its part of the examples.
        """
        key = ("average", tuple(shares), len(values))
        return self._call(key, _averages(list(shares)), values)

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
            numbers: see `stage_graph.Given`. Random layers draw other numbers for each microbatch.

        Returns:
            What it writes; for each variable of the state its new value, None if it stays; and
            the sum of the losses that its layers add, with those of regularizers, None for none.
            Its average over the microbatches is the whole batch's.

        Raises:
            ConfigError: if a loss that a layer adds is neither a mean nor a sum over the examples,
                or if a layer assigns a weight that is trained.
        """
        microbatch, count, total = tf.unstack(numbers)
        depends = Dependence([*weights, *state])
        step = _Microbatch(self._graph, count, total, even=False, replicas=1, depends=depends)
        # A sum over a size that is known looks like one times a constant.
        tensors = [of_any_size(t) for t in values.tensors] if self._adds_losses else values.tensors
        drawn = [
            _for_microbatch(v, value, microbatch)
            for v, value in zip(self.state, state, strict=True)
        ]
        pairs = [*zip(self.weights, weights, strict=True), *zip(self.state, drawn, strict=True)]
        known = dict(zip(self.chunk.reads, _masked(tensors, values.masks), strict=True))
        # Names of layers may begin as names at the root must not.
        scopes = tf.name_scope(f"chunk{self.number}")
        with keras.StatelessScope(state_mapping=pairs, collect_losses=True) as scope, scopes:
            written = self._through(known)
            if scope.losses and not self._adds_losses:
                self._adds_losses = True
                return self.run(weights, state, values, numbers)
            loss = self._losses(scope, step)
            following = [scope.get_current_value(v) for v in self.state]
            for weight, given in zip(self.weights, weights, strict=True):
                if scope.get_current_value(weight) is not given:
                    raise ConfigError(_assigned_weight(weight))
        outputs = [written[key] for key in self.chunk.writes]
        changed = [
            None if new is None or new is before else new
            for new, before in zip(following, drawn, strict=True)
        ]
        return Values(outputs, [getattr(o, "_keras_mask", None) for o in outputs]), changed, loss

    def _through(self, known: dict[Any, Any]) -> dict[Any, Any]:
        for call in self.chunk.calls:
            given = {
                id(symbol): known[key]
                for symbol, key in zip(call.node.input_tensors, call.reads, strict=True)
            }
            args, kwargs = call.node.arguments.fill_in(given)
            if "training" in getattr(call.node.operation, "_call_context_args", ()):
                kwargs["training"] = True
            outputs = call.node.operation(*args, **kwargs)
            known.update(zip(call.writes, keras.tree.flatten(outputs), strict=True))
        return known

    def _losses(self, scope: StatelessScope, step: _Microbatch) -> Tensor | None:
        terms = [as_average(step, tf.reduce_sum(term)) for term in scope.losses]
        for layer in self.chunk.layers:
            terms += layer._get_regularization_losses()
        terms = [tf.reduce_sum(tf.cast(term, tf.float32)) for term in terms]
        return tf.add_n(terms) if terms else None


def _assigned_weight(weight: KerasVariable) -> str:
    return (
        f"strategy='pipeline' conflicts with a layer that assigns {weight.path!r}, a weight that "
        "an optimizer trains, as SpectralNormalization does: each microbatch would assign it "
        "again. Use strategy='mirrored'."
    )


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


def _assigned(variables: Sequence[Any]) -> Callable[..., None]:
    def run(*values: Any) -> None:
        for variable, value in zip(variables, values, strict=True):
            variable._value.assign(value, read_value=False)

    return run


def _averages(shares: Sequence[float]) -> Callable[..., list[Any]]:
    def run(*values: Any) -> list[Any]:
        count, result = len(shares), []
        for first in range(0, len(values), count):
            each = values[first : first + count]
            if not each[0].dtype.is_floating:
                result.append(tf.identity(each[0]))
                continue
            weighed = [value * share for value, share in zip(each, shares, strict=True)]
            result.append(tf.add_n(weighed))
        return result

    return run


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
