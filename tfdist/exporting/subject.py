"""The subject of an export: a Keras model or a signature of a SavedModel, with named inputs."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist._tf.distribute import eagerly_outside_of_scope
from tfdist.errors import ConfigError, TfdistError
from tfdist.types import ConcreteFunction, Function, Model, Shape, Structure

__all__ = [
    "Arrays",
    "ExportError",
    "Input",
    "KerasSubject",
    "Subject",
    "first_line",
    "fitted",
    "subject_of",
]

Arrays = dict[str, np.ndarray[Any, Any]]

#: Makes the positional arguments of a call from inputs and their tensors.
Arrange = Callable[[Sequence["Input"], Sequence[Any]], list[Any]]

#: The names that Keras counts up for inputs without one.
_UNNAMED = re.compile(r"keras_tensor(_\d+)?")

_TEXT = re.compile(r"(?P<name>[^:\[\]]+):(?P<dtype>\w+)\[(?P<shape>[^\[\]]*)\]")
_FLOATS = ("float16", "bfloat16", "float32", "float64")
_INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
_DTYPES = (*_FLOATS, *_INTEGERS, "bool", "string")
_FORM = "NAME:DTYPE[SIZES], such as tokens:int32[?,128], with ? for a size that is left open"


class ExportError(TfdistError):
    """A model could not be converted, or what was written does not compute the same.

    Attributes:
        layer: the path of the layer that is to blame, such as `encoder/dense`; empty if none
            can be named.
    """

    def __init__(self, message: str, layer: str = "") -> None:
        super().__init__(message)
        self.layer = layer


def first_line(error: Exception) -> str:
    """The first line of an error's message, or its kind."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


@dataclasses.dataclass(frozen=True)
class Input:
    """One input of a model.

    Attributes:
        name: its name in the exported model.
        dtype: the type of its elements, as TensorFlow names it.
        shape: its sizes, the batch first; None for one that is left open.
    """

    name: str
    dtype: str
    shape: tuple[int | None, ...]

    @classmethod
    def parse(cls, text: str) -> Input:
        """An input from a text such as `tokens:int32[?,128]`.

        Raises:
            ConfigError: if the text is not of that form.
        """
        match = _TEXT.fullmatch(text.strip())
        if match is None:
            raise ConfigError(f"The input {text!r} is not of the form {_FORM}.")
        if match["dtype"] not in _DTYPES:
            raise ConfigError(
                f"The input {text!r} has an unknown type {match['dtype']!r}. "
                f"There are: {', '.join(_DTYPES)}."
            )
        sizes = [size.strip() for size in match["shape"].split(",") if match["shape"].strip()]
        for size in sizes:
            if size != "?" and not (size.isdecimal() and int(size) > 0):
                raise ConfigError(f"The input {text!r} has the size {size!r}. The form is {_FORM}.")
        shape = tuple(None if size == "?" else int(size) for size in sizes)
        return cls(match["name"].strip(), match["dtype"], shape)

    def __str__(self) -> str:
        sizes = ",".join("?" if size is None else str(size) for size in self.shape)
        return f"{self.name}:{self.dtype}[{sizes}]"


def fitted(own: Sequence[Input], requested: Sequence[Input]) -> tuple[Input, ...]:
    """A model's inputs, with those that were given in their place.

    Args:
        own: the inputs that the model itself names; none if it names none.
        requested: the inputs that the user asked for, by name.

    Raises:
        ConfigError: if one does not fit the model, naming both.
    """
    if not own:
        return tuple(requested)
    names = [each.name for each in own]
    wanted = {each.name: each for each in requested}
    if len(wanted) < len(requested):
        listed = ", ".join(map(str, requested))
        raise ConfigError(f"The inputs {listed} name one twice. Give each once.")
    for name, each in wanted.items():
        if name not in names:
            listed = ", ".join(map(str, own))
            raise ConfigError(
                f"The input {str(each)!r} is none of the model's, which are {listed}."
            )
    return tuple(_fit(each, wanted.get(each.name, each)) for each in own)


def _fit(own: Input, requested: Input) -> Input:
    if len(own.shape) != len(requested.shape):
        raise ConfigError(
            f"The input {str(requested)!r} has {len(requested.shape)} sizes, and the model takes "
            f"{str(own)!r}, with {len(own.shape)}."
        )
    misfit = f"The input {str(requested)!r} does not fit the model, which takes {str(own)!r}: "
    for fixed, size in zip(own.shape, requested.shape, strict=True):
        if fixed not in (None, size):
            raise ConfigError(
                f"{misfit}a size that the model fixes, {fixed}, cannot be changed by an export."
            )
    alike = next((kinds for kinds in (_FLOATS, _INTEGERS) if own.dtype in kinds), (own.dtype,))
    if requested.dtype not in alike:
        raise ConfigError(f"{misfit}{requested.dtype} cannot stand in for {own.dtype}.")
    return requested


class Subject(ABC):
    """A computation with named inputs and outputs.

    Attributes:
        inputs: its inputs, the batch first in each shape.
        layers: the names of its layers; empty if they are not known.
        rows: integers to try it on are below this, as far as is known.
    """

    inputs: tuple[Input, ...]
    layers: frozenset[str] = frozenset()
    rows: int = 1000

    @abstractmethod
    def call(self, tensors: Sequence[Any]) -> dict[str, Any]:
        """The outputs by name, in the model's order; tensors come in the order of `inputs`."""

    def trace(self) -> Function:
        """A `tf.function` of the inputs under inference, whose trace holds the weights."""

        def infer(*tensors: Any) -> dict[str, Any]:
            return {name: tf.identity(out) for name, out in self.call(tensors).items()}

        function = tf.function(infer, input_signature=self.specs())
        function.get_concrete_function()
        return function

    def compute(self, values: Mapping[str, Any]) -> Arrays:
        """The outputs for arrays by input name, of the shapes of `inputs`."""
        tensors = [tf.constant(values[each.name], each.dtype) for each in self.inputs]
        return {name: np.asarray(value) for name, value in self.call(tensors).items()}

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        """The scope that the model was made in, to compute with it and to write it in."""
        return contextlib.nullcontext()

    def specs(self) -> list[Any]:
        """The inputs as TensorFlow describes them."""
        return [tf.TensorSpec(each.shape, each.dtype, name=each.name) for each in self.inputs]


class KerasSubject(Subject):
    """A Keras model under inference (`training=False`)."""

    def __init__(self, model: Model, requested: Sequence[Input]) -> None:
        """Finds out the model's inputs.

        Raises:
            ConfigError: if the inputs are not known, or do not fit those that were given.
        """
        self.model = model
        own, self._arrange = _inputs_of(model)
        if not own and not requested:
            raise ConfigError(
                f"The model {model.name!r} does not say what inputs it takes, as it was never "
                "called. Describe each: --input NAME:DTYPE[SIZES], or inputs=[…] in Python."
            )
        self.inputs = fitted(own, requested)
        layers = list(model._flatten_layers(include_self=False))
        self.layers = frozenset(layer.name for layer in layers)
        tables = [e.input_dim for e in layers if isinstance(e, keras.layers.Embedding)]
        self.rows = min([self.rows, *tables])

    def call(self, tensors: Sequence[Any]) -> dict[str, Any]:
        """The outputs by name; see `Subject`."""
        return self.named(self.model(*self.arranged(tensors), training=False))

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        """See `Subject`."""
        strategy = getattr(self.model, "_distribute_strategy", None)
        return contextlib.nullcontext() if strategy is None else strategy.scope()

    def arranged(self, tensors: Sequence[Any]) -> list[Any]:
        """Tensors in the order of `inputs` as the positional arguments of a call."""
        return list(self._arrange(self.inputs, tensors))

    def named(self, outputs: Structure) -> dict[str, Any]:
        """The outputs of a call by name: own keys, else the last layers' names, else `output`."""
        if isinstance(outputs, dict):
            paths = keras.tree.flatten_with_path(outputs)
            return {"_".join(map(str, path)): value for path, value in paths}
        flat = keras.tree.flatten(outputs)
        if len(flat) == 1:
            return {"output": flat[0]}
        symbols = getattr(self.model, "outputs", None) or ()
        names = [each._keras_history.operation.name for each in symbols]
        if len(set(names)) != len(flat):
            names = [f"output_{number + 1}" for number in range(len(flat))]
        return dict(zip(names, flat, strict=True))

    def trace(self) -> Function:
        """See `Subject`.

        Weights are read once, eagerly, and stand in the graph as constants, so that it holds no
        variable of a strategy, of another device or of another machine.
        """
        if not self.model.built:
            self.call([tf.zeros([size or 2 for size in e.shape], e.dtype) for e in self.inputs])
        values = [(v, keras.ops.convert_to_numpy(v)) for v in self.model.variables]

        def infer(*tensors: Any) -> dict[str, Any]:
            state = [(variable, tf.constant(value)) for variable, value in values]
            with keras.StatelessScope(state_mapping=state):
                return {name: tf.identity(out) for name, out in self.call(tensors).items()}

        with eagerly_outside_of_scope():
            function = tf.function(infer, input_signature=self.specs())
            function.get_concrete_function()
        return function


class _SavedModelSubject(Subject):
    """One signature of a SavedModel. Its variables are frozen by the converter."""

    def __init__(self, path: str, signature: str | None, requested: Sequence[Input]) -> None:
        """Loads the SavedModel; the signature is `serving_default` or the only one by default.

        Raises:
            ConfigError: if it cannot be loaded, has no such signature, or inputs do not fit.
        """
        try:
            self._loaded = tf.saved_model.load(path)
        except Exception as error:
            raise ConfigError(
                f"The SavedModel {path!r} cannot be loaded: {first_line(error)}"
            ) from error
        self._function = _signature(self._loaded, path, signature)
        _, keywords = self._function.structured_input_signature
        own = [Input(n, s.dtype.name, _sizes(s.shape)) for n, s in sorted(keywords.items())]
        self.inputs = fitted(own, requested)

    def call(self, tensors: Sequence[Any]) -> dict[str, Any]:
        """The outputs by name; see `Subject`."""
        named = {each.name: value for each, value in zip(self.inputs, tensors, strict=True)}
        return dict(sorted(self._function(**named).items()))  # a loaded one has no order


def subject_of(model: Model | str, requested: Sequence[Input], signature: str | None) -> Subject:
    """The subject of a Keras model or of the path of a SavedModel.

    Raises:
        ConfigError: if it is neither, or a signature is named for a Keras model.
    """
    if isinstance(model, str):
        return _SavedModelSubject(model, signature, requested)
    if signature is not None:
        raise ConfigError(
            f"signature={signature!r} names a signature of a SavedModel, and this is a Keras "
            "model, which has none. Leave it out."
        )
    if not isinstance(model, keras.Model):
        raise ConfigError(
            f"A {type(model).__name__} is not a Keras model. Give a keras.Model, or the path of a "
            "model file or of a SavedModel."
        )
    return KerasSubject(model, requested)


def _signature(loaded: Any, path: str, wanted: str | None) -> ConcreteFunction:
    there = {n: f for n, f in loaded.signatures.items() if not n.startswith("__")}
    if wanted is None and ("serving_default" in there or len(there) == 1):
        wanted = "serving_default" if "serving_default" in there else next(iter(there))
    if wanted not in there:
        what = "has no signature" if wanted else "has several signatures and no"
        raise ConfigError(
            f"The SavedModel {path!r} {what} {wanted or 'serving_default'!r}. There are: "
            f"{', '.join(map(repr, sorted(there))) or 'none'}. Name one: --signature NAME."
        )
    return there[wanted]


def _sizes(shape: Shape) -> tuple[int | None, ...]:
    if shape.rank is None:
        raise ConfigError("A signature with an input of unknown rank cannot be exported.")
    return tuple(shape.as_list())


def _inputs_of(model: Model) -> tuple[list[Input], Arrange]:
    """The inputs that a model names, and the way to call it with them."""
    symbols = getattr(model, "inputs", None)
    if not symbols:
        return _inputs_of_subclass(model)
    names = [_input_name(symbol.name, n, len(symbols)) for n, symbol in enumerate(symbols)]
    own = [
        Input(name, symbol.dtype, (None, *symbol.shape[1:]))
        for name, symbol in zip(names, symbols, strict=True)
    ]
    structure = None if isinstance(model, keras.Sequential) else model.input

    def arrange(_: object, tensors: Sequence[Any]) -> list[Any]:
        if structure is None:
            return [tensors[0]]
        return [keras.tree.pack_sequence_as(structure, list(tensors))]

    return own, arrange


def _input_name(name: str, number: int, count: int) -> str:
    if not _UNNAMED.fullmatch(name):
        return re.sub(r"[^\w.-]", "_", name)
    return "input" if count == 1 else f"input_{number + 1}"


def _inputs_of_subclass(model: Model) -> tuple[list[Input], Arrange]:
    """The same for a subclass of `keras.Model`, from the shapes it was built with.

    Keras records the shapes of the first argument only.
    """
    parameters = _required_parameters(model)
    built = getattr(model, "_build_shapes_dict", None) or {}
    shape = next(iter(built.values()), None) if len(parameters) == 1 else None
    shapes = shape if isinstance(shape, dict) else {parameters[0]: shape}
    own = [
        Input(name, model.input_dtype or "float32", (None, *sizes[1:]))
        for name, sizes in shapes.items()
        if isinstance(sizes, list | tuple) and all(isinstance(s, int | None) for s in sizes)
    ]

    def arrange(inputs: Sequence[Input], tensors: Sequence[Any]) -> list[Any]:
        named = {each.name: value for each, value in zip(inputs, tensors, strict=True)}
        if len(parameters) == 1:
            return [named if isinstance(shape, dict) or len(named) > 1 else tensors[0]]
        if set(parameters) != set(named):
            raise ConfigError(
                f"The model {model.name!r} is called with {', '.join(parameters)}, and the inputs "
                f"are {', '.join(named)}. Name them after the arguments of its call."
            )
        return [named[name] for name in parameters]

    return (own if len(own) == len(shapes) else []), arrange


def _required_parameters(model: Model) -> list[str]:
    """The names of the arguments that a model's `call` needs."""
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    result = [
        name
        for name, each in inspect.signature(model.call).parameters.items()
        if each.default is inspect.Parameter.empty
        and each.kind in positional
        and name not in ("training", "mask")
    ]
    return result or ["inputs"]
