"""The layouts of a model's weights: by the rules that the user gave, or by the kind of each layer.

Without rules they are Megatron-LM's (arXiv:1909.08053). A dense layer is divided by columns, and
one that reads the columns of another by rows, so that the two need one sum between them. Attention
is divided by heads, an embedding by its vocabulary, a convolution by its filters.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple, TypedDict

import keras
import tensorflow as tf

from tfdist._keras import BaseConv, BaseOptimizer
from tfdist.config.mesh import DATA, MODEL, Axis, LayoutRule
from tfdist.errors import ConfigError
from tfdist.keras.elementwise import is_elementwise, is_elementwise_layer
from tfdist.keras.hooks import Hook
from tfdist.keras.zero import data_axis, is_divided, stage
from tfdist.sharding.layout import Cut, Layout, cut_for
from tfdist.types import DenseLayer, KerasVariable, Layer, Optimizer, Strategy
from tfdist.utils.messages import logger
from tfdist.utils.thread_state import Current

__all__ = [
    "SMALLEST",
    "SMALLEST_GATHERED",
    "Equation",
    "WeightLayout",
    "hooks",
    "layout_of",
    "weight_layouts",
]

#: Weights of fewer numbers are whole along the model axis, unless a rule names them.
SMALLEST = 1024

#: Weights of fewer numbers are whole along the data axis, unless a rule names them: to gather them
#: takes longer than the exchange of their gradients, which travel together. As DeepSpeed's
#: `stage3_param_persistence_threshold`.
SMALLEST_GATHERED = 16 * 1024

#: Weights that an error names, at most.
_SHOWN = 8

#: The layer that is adding a weight, or None.
_adding: Current[Any] = Current(None)

#: The layer that is being called, and its first input.
_called: Current[tuple[Any, Any]] = Current((None, None))

#: The attributes of a weight and of a layer that hold the layer, the layer's role, and a `_Made`.
_LAYER, _ROLE, _MADE = "_tfdist_layer", "_tfdist_role", "_tfdist_made"


class _Made(NamedTuple):
    """A weight of a layer that has been made.

    Attributes:
        path: its path.
        shape: the whole weight's.
        cuts: its divisions by the rules, or by the kind of the layer.
        layout: all of its divisions, as text.
        kept: the bytes that each process keeps of it.
    """

    path: str
    shape: tuple[int, ...]
    cuts: tuple[Cut, ...]
    layout: str
    kept: int


class WeightLayout(TypedDict):
    """The layout of a weight, as data.

    Attributes:
        path: the weight's.
        shape: that of the whole weight.
        layout: for each dimension the axes that divide it, or a dash.
        bytes: the size of each process's part.
    """

    path: str
    shape: list[int]
    layout: str
    bytes: int


#: The weights that have been made under each strategy and are in use, by `id`.
_made: weakref.WeakKeyDictionary[Any, weakref.WeakValueDictionary[int, Any]] = (
    weakref.WeakKeyDictionary()
)
_said: weakref.WeakSet[Any] = weakref.WeakSet()


class Equation(NamedTuple):
    """The labels of the dimensions of an `EinsumDense`; those of an ellipsis come first.

    Attributes:
        inputs: the labels of the inputs.
        kernel: those of the kernel.
        outputs: those of the outputs.
    """

    inputs: str
    kernel: str
    outputs: str

    @classmethod
    def of(cls, layer: DenseLayer) -> Equation:
        """The labels of a Dense layer, or an EinsumDense."""
        if isinstance(layer, keras.layers.Dense):
            return cls("x", "xy", "y")
        left, outputs = layer.equation.replace(" ", "").split("->")
        inputs, kernel = left.split(",")
        return cls(inputs, kernel, outputs)

    @property
    def contracted(self) -> list[int]:
        """The dimensions of the kernel that are summed over."""
        return [i for i, label in enumerate(self.kernel) if label not in self.outputs]

    @property
    def free(self) -> list[int]:
        """The dimensions of the kernel that only the outputs have."""
        return [i for i, label in enumerate(self.kernel) if label not in self.inputs]

    def of_inputs(self, dimension: int) -> int:
        """The dimension of the inputs, from the end, that meets one of the kernel."""
        return self.inputs.index(self.kernel[dimension]) - len(self.inputs)

    def of_outputs(self, dimension: int) -> int:
        """The dimension of the outputs, from the end, that is one of the kernel's."""
        return self.outputs.index(self.kernel[dimension]) - len(self.outputs)

    def of_bias(self, dimension: int, axes: str | None) -> int | None:
        """The dimension of the bias that is one of the kernel's; None if it has none.

        Args:
            dimension: of the kernel.
            axes: the labels that the bias has; None stands for those of a Dense layer.
        """
        label, axes = self.kernel[dimension], self.outputs if axes is None else axes
        first = min((self.outputs.index(each) for each in axes), default=0)
        return self.outputs.index(label) - first if label in axes else None


def hooks() -> list[Hook]:
    """The seams at which layers add weights, are called, and optimizers learn of the weights."""
    return [
        Hook(keras.layers.Layer, "add_weight", _noting_layer),
        Hook(keras.layers.Layer, "__call__", _noting_input, priority=2),
        Hook(BaseOptimizer, "build", _checked_first, priority=2),
    ]


def layout_of(weight: Any, strategy: Strategy) -> Layout | None:
    """The layout of a weight that has just been created; None if each process keeps it whole.

    Raises:
        ConfigError: if two rules match it, or the axis does not divide the dimension.
    """
    layer = getattr(weight, _LAYER, _adding.value)
    if layer is None or not is_divided(strategy):
        return None
    shape = tuple(weight._shape)
    cuts = _cuts_of(weight, layer, shape, strategy)
    of_rules = tuple(cuts)
    in_rules = any(cut.axis.name == DATA for cut in cuts)
    large = weight.trainable and math.prod(shape) >= SMALLEST_GATHERED
    if stage(strategy) > 2 and large and not in_rules:
        divided = cut_for(cuts[-1].shard_shape if cuts else shape, data_axis(strategy))
        cuts.extend([divided] if divided is not None else [])
    numbers = math.prod(cuts[-1].shard_shape if cuts else shape)
    kept = numbers * int(tf.as_dtype(weight._dtype).size)
    layout = Layout(tuple(cuts)) if cuts else None
    shown = str(layout or " ".join("-" for _ in shape))
    setattr(weight, _MADE, _Made(weight.path, shape, of_rules, shown, kept))
    _made.setdefault(strategy, weakref.WeakValueDictionary())[id(weight)] = weight
    return layout


def weight_layouts(strategy: Strategy) -> list[WeightLayout]:
    """The layouts of all weights that have been made and are in use, in that order."""
    return [
        {"path": each.path, "shape": list(each.shape), "layout": each.layout, "bytes": each.kept}
        for each in _all_made(strategy)
    ]


def _all_made(strategy: Strategy) -> list[_Made]:
    """The weights that are in use; those of two models may have one path."""
    return [getattr(weight, _MADE) for weight in _made.get(strategy, {}).values()]


def _cuts_of(
    weight: KerasVariable, layer: Layer, shape: tuple[int, ...], strategy: Strategy
) -> list[Cut]:
    """The divisions of a layer's weight by the rules, or by its kind.

    Whole numbers, such as those of a quantized kernel, are not divided.
    """
    axis: Axis | None = strategy.parted
    is_floating = tf.as_dtype(weight.dtype).is_floating
    if strategy.layouts is None:
        size = 1 if axis is None or not is_floating else axis.size
        dimension = None if size == 1 else _by_kind(layer, weight.name, shape, size)
        return [] if dimension is None or axis is None else [Cut(shape, dimension, axis)]
    rule = _rule_for(weight.path, shape, strategy.layouts)
    cuts: list[Cut] = []
    for each in (axis, data_axis(strategy)):
        dimension = None if rule is None or each is None else rule.dimension(each.name)
        if rule is None or each is None or dimension is None or each.size == 1:
            continue
        if not is_floating:
            raise ConfigError(
                f"The layout '{rule}' divides the weight {weight.path!r} of type {weight.dtype}, "
                "and only weights of a floating type can be divided. Leave it out of the rules."
            )
        _check_size(rule, dimension, weight.path, shape, each.size)
        cuts.append(Cut(cuts[-1].shard_shape if cuts else shape, dimension, each))
    return cuts


def _rule_for(
    path: str, shape: tuple[int, ...], rules: Collection[LayoutRule]
) -> LayoutRule | None:
    exact = [rule for rule in rules if rule.key == path]
    matching = exact or [rule for rule in rules if rule.matches(path)]
    if not matching:
        return None
    if len(matching) > 1:
        raise ConfigError(
            f"layouts has two rules for the weight {path!r}: '{matching[0]}' and '{matching[1]}'. "
            "Make the patterns match different weights."
        )
    rule = matching[0]
    if len(rule.axes) != len(shape):
        raise ConfigError(
            f"The layout '{rule}' has {len(rule.axes)} dimensions, and the weight {path!r} of "
            f"shape {shape} has {len(shape)}. Give an axis or - for each, as in "
            f"'{rule.key or rule.pattern}={' '.join(['-'] * (len(shape) - 1) + [MODEL])}'."
        )
    return rule


def _check_size(
    rule: LayoutRule, dimension: int, path: str, shape: tuple[int, ...], processes: int
) -> None:
    if shape[dimension] % processes:
        works = [str(i) for i, size in enumerate(shape) if size % processes == 0]
        instead = f"divide dimension {' or '.join(works)}, " if works else ""
        raise ConfigError(
            f"The layout '{rule}' divides dimension {dimension} of the weight {path!r} of shape "
            f"{shape}, {shape[dimension]}, over {processes} processes, which do not divide it. "
            f"Instead {instead}give the layer a size that {processes} divides, or leave the weight "
            "out of the rules."
        )


def _by_kind(layer: Layer, name: str, shape: tuple[int, ...], size: int) -> int | None:
    """The dimension of a layer's weight that Megatron's rules divide."""
    if isinstance(layer, keras.layers.Embedding) and name == "embeddings":
        return _first_of((0, 1), shape, size)
    if isinstance(layer, BaseConv) and name == "kernel" and layer.groups == 1:
        return _first_of((len(shape) - 1,), shape, size)
    if not isinstance(layer, (keras.layers.Dense, keras.layers.EinsumDense)):
        return None
    equation = Equation.of(layer)
    if name == "kernel":
        role = _first_of(_candidates(layer, equation, shape), shape, size)
        vars(layer)[_ROLE] = role
        return role
    role = vars(layer).get(_ROLE)
    if name != "bias" or role not in equation.free:
        return None
    return equation.of_bias(role, getattr(layer, "bias_axes", None))


def _candidates(layer: DenseLayer, equation: Equation, shape: tuple[int, ...]) -> list[int]:
    """The dimensions of a kernel that may be divided, the best one first.

    A kernel that sums over several dimensions ends an attention: the first are the heads. One that
    has more outputs than inputs, such as that of a vocabulary's logits, is divided by columns also
    after columns: the sum of its outputs would be sent twice, the inputs are sent once.
    """
    contracted, free = equation.contracted, equation.free
    by_rows = len(contracted) > 1
    if len(contracted) == 1 and _called.value[0] is layer:
        columns = _columns_of(_called.value[1]) == equation.of_inputs(contracted[0])
        by_rows = columns and math.prod(shape[i] for i in free) <= shape[contracted[0]]
    return contracted[:1] + free[:1] if by_rows else free[:1] + contracted[:1]


def _first_of(dimensions: Sequence[int], shape: tuple[int, ...], size: int) -> int | None:
    if math.prod(shape) < SMALLEST:
        return None
    return next((i for i in dimensions if shape[i] and shape[i] % size == 0), None)


def _columns_of(tensor: object) -> int | None:
    """The dimension, from the end, of a symbolic tensor that a layer before it divides."""
    while True:
        history = getattr(tensor, "_keras_history", None)
        if history is None or not hasattr(history.operation, "_inbound_nodes"):
            return None
        layer, nodes = history.operation, history.operation._inbound_nodes
        if not (is_elementwise_layer(layer) or isinstance(layer, keras.layers.Dropout)):
            break
        tensor = nodes[history.node_index].input_tensors[0]
    role = vars(layer).get(_ROLE)
    if role is None or not is_elementwise(layer.activation):
        return None
    equation = Equation.of(layer)
    return equation.of_outputs(role) if role in equation.free else None


def _noting_layer(original: Callable[..., Any]) -> Callable[..., Any]:
    """A weight does not know its layer, on whose kind its layout depends."""

    @functools.wraps(original)
    def add_weight(self: Any, *args: Any, **kwargs: Any) -> KerasVariable:
        with _adding.set(self):
            weight: KerasVariable = original(self, *args, **kwargs)
        # In a stateless scope its value is made later.
        setattr(weight, _LAYER, self)
        return weight

    return add_weight


def _noting_input(original: Callable[..., Any]) -> Callable[..., Any]:
    """A layer that is built when it is called does not know what it reads."""

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = [*args, *kwargs.values()]
        with _called.set((self, given[0] if given else None)):
            return original(self, *args, **kwargs)

    return call


def _checked_first(original: Callable[..., None]) -> Callable[..., None]:
    """Rules that match nothing are mistakes; the layouts are shown once."""

    @functools.wraps(original)
    def build(self: Optimizer, variables: Sequence[KerasVariable]) -> None:
        strategy = tf.distribute.get_strategy()
        if getattr(strategy, "parted", None) or getattr(strategy, "layouts", None):
            _check(strategy)
        original(self, variables)

    return build


def _check(strategy: Strategy) -> None:
    made = _all_made(strategy)
    for rule in strategy.layouts or ():
        if rule.required and not any(rule.matches(each.path) for each in made):
            paths = [each.path for each in made]
            raise ConfigError(
                f"The layout '{rule}' matches none of the weights: {_some(paths)}. Change the "
                "pattern, or leave the rule out."
            )
    if strategy in _said:
        return
    _said.add(strategy)
    if not any(each.cuts for each in made):
        _warn_of_whole_weights(strategy)
    elif strategy.is_chief:
        logger.info(_table(made))


def _warn_of_whole_weights(strategy: Strategy) -> None:
    if strategy.parted is not None:
        logger.warning(
            f"mesh='{strategy.mesh}' divides none of the weights, so that the processes along its "
            f"model axis compute the same. Layers are divided whose kernel has {SMALLEST} numbers "
            "or more and a size that the axis divides; or give --layouts."
        )


def _some(paths: list[str]) -> str:
    """The first paths of weights, and the number of the others."""
    more = f" and {len(paths) - _SHOWN} more" if len(paths) > _SHOWN else ""
    return ", ".join(paths[:_SHOWN]) + more


def _table(made: Sequence[_Made]) -> str:
    """The divided weights with their layouts, as lines of text."""
    divided = [each for each in made if each.cuts]
    width = max(len(each.path) for each in divided)
    total = sum(each.kept for each in made)
    lines = [
        f"layouts of {len(divided)} of {len(made)} weights, the others are whole; "
        f"each process keeps {total:,} bytes of weights:"
    ]
    for each in divided:
        lines.append(f"  {each.path:<{width}}  {each.shape!s:<16} {each.layout:<12} {each.kept:,}")
    return "\n".join(lines)
