"""Layers that compute with their part of a weight along the model axis (arXiv:1909.08053).

Keras's own `call` computes, to which a weight is its part meanwhile. Then its results are gathered
or summed (`tfdist.sharding.relayout`). A layer of another kind, one that is quantized or
has LoRA weights, and one with a `call` of its own, is given whole weights.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist._keras import BaseConv, tensorflow_numpy
from tfdist.comm.batch_dependence import Kind, is_symbolic, of_kind, rows_of
from tfdist.comm.replica_collectives import Link
from tfdist.config.mesh import MODEL
from tfdist.keras.elementwise import ELEMENTWISE_LAYERS, is_elementwise, is_elementwise_layer
from tfdist.keras.hooks import Hook
from tfdist.keras.layouts import Equation
from tfdist.keras.parts import part_behind
from tfdist.sharding.layout import Cut
from tfdist.sharding.relayout import (
    Part,
    copied,
    part_of,
    remember,
    remembered,
    slice_along,
    summed,
    whole_of,
)
from tfdist.sharding.variables import ShardedVariable, at_hand
from tfdist.types import DenseLayer, Layer, Strategy, Tensor
from tfdist.utils.thread_state import Current

__all__ = ["hooks"]

#: The dimension along which a layer within an attention sees its part; None outside of one.
_within: Current[int | None] = Current(None)


def hooks() -> list[Hook]:
    """The seams at which layers compute."""
    attention = (keras.layers.MultiHeadAttention, keras.layers.GroupQueryAttention)
    return [
        Hook(keras.layers.Dense, "call", _dense),
        Hook(keras.layers.EinsumDense, "call", _dense),
        Hook(keras.layers.Embedding, "call", _embedding),
        Hook(BaseConv, "call", _convolution),
        Hook(keras.layers.Dropout, "call", _dropout),
        *(Hook(each, "call", _elementwise) for each in ELEMENTWISE_LAYERS),
        *(Hook(each, "_compute_attention", _attention) for each in attention),
        Hook(tensorflow_numpy, "matmul", _product),
        Hook(tensorflow_numpy, "repeat", _repeated),
    ]


def _part(layer: Layer, name: str) -> tuple[Any, Tensor, Cut] | None:
    """A weight that its layer computes a part with: the weight, the part and the division."""
    weight = vars(layer).get(name)
    if not isinstance(weight, ShardedVariable) or getattr(layer, "lora_enabled", False):
        return None
    part, cut = weight.part(), weight.kept_layout.along(MODEL)
    return None if part is None or cut is None else (weight, part, cut)


def _in_parts() -> bool:
    """Whether a replica computes that is several processes."""
    parted = getattr(tf.distribute.get_strategy(), "parted", None)
    return parted is not None and not tf.distribute.in_cross_replica_context()


def _link() -> Link:
    strategy: Strategy = tf.distribute.get_strategy()
    link: Link = strategy.link(MODEL)
    return link


@contextlib.contextmanager
def _without(layer: Layer, attributes: Mapping[str, object]) -> Iterator[None]:
    """A block in which a layer has other values of attributes."""
    before = {name: vars(layer)[name] for name in attributes}
    vars(layer).update(attributes)
    try:
        yield
    finally:
        vars(layer).update(before)


def _from_end(tensor: Tensor, dimension: int) -> int:
    """A dimension that is counted from the end, from 0 on."""
    return len(tensor.shape) + dimension


def _dense(original: Callable[..., Any]) -> Callable[..., Any]:
    """A process computes its columns of the outputs, or the sum over its rows of the kernel."""

    @functools.wraps(original)
    def call(self: Any, inputs: Tensor, *args: object, **kwargs: object) -> Tensor:
        found = _part(self, "_kernel")
        dense = isinstance(inputs, tf.Tensor)  # Not of few numbers that are not zero.
        if found is None or not dense or "." in Equation.of(self).outputs.lstrip("."):
            return original(self, inputs, *args, **kwargs)
        kernel, part, cut = found
        equation, bias, activation = Equation.of(self), self.bias, self.activation

        def compute(value: Tensor) -> Tensor:
            bare = _without(self, {"bias": None, "activation": None})
            with bare, at_hand([(kernel, part)]):
                return original(self, value, *args, **kwargs)

        if cut.dimension in equation.contracted:
            rows = _from_end(inputs, equation.of_inputs(cut.dimension))
            own = remembered(inputs)
            if own is None or own.dimension != rows:
                own = Part(part_of(_link(), inputs, rows), rows)
            outputs = summed(_link(), compute(own.value))
        elif cut.dimension in equation.free:
            columns = compute(copied(_link(), inputs))
            place = equation.of_bias(cut.dimension, getattr(self, "bias_axes", None))
            return _columns(
                self, Part(columns, _from_end(columns, equation.of_outputs(cut.dimension))), place
            )
        else:
            return original(self, inputs, *args, **kwargs)
        if bias is not None:
            outputs = keras.ops.add(outputs, bias)
        return outputs if activation is None else activation(outputs)

    return call


def _columns(layer: DenseLayer, columns: Part, place: int | None) -> Tensor:
    """A layer's outputs of its columns: with the bias, and activated.

    Args:
        layer: the layer.
        columns: this process's, without bias and activation.
        place: the dimension of the bias that its columns have.
    """
    value, dimension = columns
    bias, link = _part(layer, "bias"), _link()
    if bias is not None and bias[2].dimension == place:
        value = keras.ops.add(value, bias[1])
    elif layer.bias is not None:
        whole = tf.convert_to_tensor(layer.bias)
        alike = copied(link, whole) if place is None else part_of(link, whole, place)
        value = keras.ops.add(value, alike)
    if layer.activation is None:
        return whole_of(link, Part(value, dimension))
    if is_elementwise(layer.activation):
        return whole_of(link, Part(layer.activation(value), dimension))
    return layer.activation(whole_of(link, Part(value, dimension)))


def _embedding(original: Callable[..., Any]) -> Callable[..., Any]:
    """A process looks up the rows of its part of the vocabulary, or its columns of all rows."""

    @functools.wraps(original)
    def call(self: Any, inputs: Tensor) -> Tensor:
        found = _part(self, "_embeddings")
        if found is None or not isinstance(inputs, tf.Tensor):
            return original(self, inputs)
        table, part, cut = found
        if cut.dimension == 1:
            with at_hand([(table, part)]):
                columns = original(self, inputs)
            return whole_of(_link(), Part(columns, len(columns.shape) - 1))
        rows = _looked_up(part, tf.cast(inputs, tf.int64), cut)
        return keras.ops.cast(summed(_link(), rows), self.compute_dtype)

    return call


def _looked_up(part: Tensor, ids: Tensor, cut: Cut) -> Tensor:
    """The rows of a part of a table; zeros for ids of other parts, whose rows it does not touch."""
    size = cut.shape[0]
    flat = tf.reshape(ids, [-1])
    flat = tf.where(flat < 0, flat + size, flat)
    known = tf.debugging.Assert(
        tf.reduce_all((flat >= 0) & (flat < size)),
        [f"An embedding of {size} rows was asked for another one:", flat],
    )
    with tf.control_dependencies([known] if known is not None else []):
        flat = tf.identity(flat)
    looked_up = [_rows_of_part(part, each, kind, cut) for each, kind in _by_kind(flat)]
    rows = tf.concat(looked_up, 0) if len(looked_up) > 1 else looked_up[0]
    outputs: Tensor = tf.reshape(rows, tf.concat([tf.shape(ids), [part.shape[1]]], 0))
    return tf.ensure_shape(outputs, [*ids.shape, part.shape[1]])


def _by_kind(ids: Tensor) -> list[tuple[Tensor, Kind | None]]:
    """Ids in pieces of one kind each; of eager ones no kind is known."""
    pieces = rows_of(ids) if is_symbolic(ids) else []
    kinds = [each.kind for each in pieces]
    if len(set(kinds)) < 2:
        return [(ids, kinds[0] if kinds else None)]
    sizes = [tf.size(each.like) for each in pieces]
    return list(zip(tf.split(ids, sizes), kinds, strict=True))


def _rows_of_part(part: Tensor, ids: Tensor, kind: Kind | None, cut: Cut) -> Tensor:
    """The rows of a part of a table, and zeros for ids of other parts."""
    places = tf.where((ids >= cut.start) & (ids < cut.stop))
    own = tf.gather(ids, places[:, 0]) - cut.start
    rows = tf.gather(part, own if kind is None else of_kind(own, kind))
    shape = [tf.size(ids, tf.int64), tf.constant(part.shape[1], tf.int64)]
    spread: Tensor = tf.scatter_nd(places, rows, tf.stack(shape))
    return spread


def _convolution(original: Callable[..., Any]) -> Callable[..., Any]:
    """A process computes its filters."""

    @functools.wraps(original)
    def call(self: Any, inputs: Tensor) -> Tensor:
        found = _part(self, "_kernel")
        if found is None or self.groups > 1 or found[2].dimension < len(found[2].shape) - 1:
            return original(self, inputs)
        kernel, part, _ = found
        bare = _without(self, {"use_bias": False, "activation": None})
        with bare, at_hand([(kernel, part)]):
            filters = original(self, copied(_link(), inputs))
        channels = 1 if self.data_format == "channels_first" else len(filters.shape) - 1
        outputs = whole_of(_link(), Part(filters, channels))
        if self.use_bias:
            after = [1] * (len(outputs.shape) - 1 - channels)
            outputs = keras.ops.add(outputs, keras.ops.reshape(self.bias, [-1, *after]))
        return outputs if self.activation is None else self.activation(outputs)

    return call


def _product(original: Callable[..., Any]) -> Callable[..., Any]:
    """A table that is divided by its vocabulary, transposed, has columns of the logits."""

    @functools.wraps(original)
    def matmul(x1: Tensor, x2: Tensor) -> Tensor:
        found = _columns_of_matrix(x2)
        if found is None or not isinstance(x1, tf.Tensor):
            return original(x1, x2)
        columns = original(copied(_link(), x1), found)
        return whole_of(_link(), Part(columns, len(columns.shape) - 1))

    return matmul


def _columns_of_matrix(matrix: Tensor) -> Tensor | None:
    """This process's columns of a matrix; None if it is not divided by columns."""
    if not _in_parts() or len(getattr(matrix, "shape", ())) != 2:
        return None
    part = part_behind(_link(), matrix)
    return part.value if part is not None and part.dimension == 1 else None


def _repeated(original: Callable[..., Any]) -> Callable[..., Any]:
    """Keys and values of a group of queries stay in parts: a part has the groups of its heads."""

    @functools.wraps(original)
    def repeat(x: Tensor, repeats: int | Tensor, axis: int | None = None) -> Tensor:
        outputs, part = original(x, repeats, axis), remembered(x)
        if part is None or axis is None or not isinstance(repeats, int):
            return outputs
        return remember(outputs, Part(original(part.value, repeats, axis), part.dimension))

    return repeat


def _elementwise(original: Callable[..., Any]) -> Callable[..., Any]:
    """Activations of each number act on a part too."""

    @functools.wraps(original)
    def call(self: Any, inputs: Tensor, *args: object, **kwargs: object) -> Tensor:
        outputs, part = original(self, inputs, *args, **kwargs), remembered(inputs)
        if part is None or not is_elementwise_layer(self):
            return outputs
        return remember(outputs, Part(original(self, part.value, *args, **kwargs), part.dimension))

    return call


def _dropout(original: Callable[..., Any]) -> Callable[..., Any]:
    """A part is dropped where the whole tensor would be."""

    @functools.wraps(original)
    def call(self: Any, inputs: Tensor, training: bool = False) -> Tensor:
        part, dimension = remembered(inputs), _within.value
        if not training or self.rate == 0 or self.noise_shape is not None:
            return original(self, inputs, training=training)
        if dimension is not None:
            return inputs * _own_part(_kept(original, self, inputs, dimension), inputs, dimension)
        if part is None:
            return original(self, inputs, training=training)
        kept = _kept(original, self, part.value, part.dimension)
        own = part.value * _own_part(kept, part.value, part.dimension)
        return remember(inputs * kept, Part(own, part.dimension))

    return call


def _kept(call: Callable[..., Any], layer: Layer, part: Tensor, dimension: int) -> Tensor:
    """The result of a dropout of a whole tensor of ones, of which a process has a part."""
    times = [1] * len(part.shape)
    times[dimension] = _link().count
    return call(layer, tf.ones(tf.shape(part) * tf.constant(times), part.dtype), training=True)


def _own_part(whole: Tensor, part: Tensor, dimension: int) -> Tensor:
    size = part.shape[dimension]
    return slice_along(whole, dimension, _link().index * size, size)


def _attention(original: Callable[..., Any]) -> Callable[..., Any]:
    """A process computes its heads."""

    @functools.wraps(original)
    def compute_attention(
        self: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        given = (query, key, value)
        if not _heads_are_parted(given):
            return original(self, *given, *args, **kwargs)
        link, heads = _link(), query.shape[2]
        parts = [_heads_of(link, each) for each in given]
        args = tuple(_mask_of_heads(link, each, heads) for each in args)
        if "attention_mask" in kwargs:
            kwargs["attention_mask"] = _mask_of_heads(link, kwargs["attention_mask"], heads)
        with _within.set(1):
            outputs, scores = original(self, *parts, *args, **kwargs)
        outputs = whole_of(link, Part(outputs, 2))
        return outputs, None if scores is None else whole_of(link, Part(scores, 1))

    return compute_attention


def _heads_are_parted(tensors: tuple[Tensor, ...]) -> bool:
    """Whether queries, keys or values of shape `(batch, length, heads, size)` came in parts."""
    parts = [remembered(each) for each in tensors]
    if not any(part is not None and part.dimension == 2 for part in parts):
        return False
    count = _link().count
    return all(len(each.shape) == 4 and each.shape[2] % count == 0 for each in tensors)


def _heads_of(link: Link, tensor: Tensor) -> Tensor:
    part = remembered(tensor)
    if part is not None and part.dimension == 2:
        return part.value
    return part_of(link, tensor, 2)


def _mask_of_heads(link: Link, mask: object, heads: int) -> object:
    """This process's part of a mask that has a dimension of heads."""
    shape: Sequence[int] = getattr(mask, "shape", ())
    if len(shape) != 4 or shape[1] != heads:
        return mask
    size = heads // link.count
    return slice_along(tf.convert_to_tensor(mask), 1, link.index * size, size)
