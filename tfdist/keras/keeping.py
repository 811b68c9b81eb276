"""The state of a training in host memory: taken from a model, and put back."""

from __future__ import annotations

import copy
import dataclasses
import io
import json
import zipfile
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.cluster.elastic import Position
from tfdist.errors import TfdistError
from tfdist.keras.model_optimizers import optimizers_of

__all__ = ["State", "packed", "put_back", "restore", "take", "unpacked", "values_of"]

#: Attributes of callbacks of these types are kept, such as the patience used up and the best value;
#: and lists, tuples and dicts of them, such as the best weights.
_PLAIN = (bool, int, float, str, type(None), np.floating, np.integer, np.ndarray)

#: Attributes that Keras sets before it begins to train.
_SET_BY_KERAS = ("params",)


@dataclasses.dataclass(frozen=True, kw_only=True)
class State:
    """A training at one position.

    Attributes:
        position: how far it is.
        arrays: the values of all variables of the model, its optimizers and its metrics; None where
            the present `fit` has not begun to train.
        callbacks: for each callback its class's name and its plain attributes, arrays too.
        history: the history of the present `fit` and its epochs.
        finished: the histories of the calls of `fit` that are over.
        last_end: the values of the variables when the last of those ended, or None.
    """

    position: Position
    arrays: list[Any] | None
    callbacks: list[tuple[str, dict[str, Any]]]
    history: tuple[dict[str, list[Any]], list[int]]
    finished: list[dict[str, Any]]
    last_end: list[Any] | None


def take(model: Any, position: Position, callbacks: list[Any], job: Any) -> State:
    """Copies the state of a training.

    Args:
        model: the model that is being trained; None between two calls of `fit`.
        position: how far it is.
        callbacks: the callbacks of its `fit`.
        job: has `finished` and `last_end`, as `State` has them.
    """
    history = getattr(model, "history", None)
    logs = (copy.deepcopy(history.history), list(history.epoch)) if history else ({}, [])
    return State(
        position=position,
        arrays=None if model is None else values_of(model),
        callbacks=[(type(each).__name__, _plain(each)) for each in callbacks],
        history=logs,
        finished=list(job.finished),
        last_end=job.last_end,
    )


def packed(state: State) -> bytes:
    """A state as a file: arrays and a description in JSON, in the form of NumPy's archives.

    Whoever can write to the directory of a job can leave a file there. Nothing in a file of this
    form is executed, other than of a pickled object.
    """
    arrays: list[bytes] = []
    fields = {f.name: getattr(state, f.name) for f in dataclasses.fields(state)}
    fields["position"] = dataclasses.astuple(state.position)
    header = json.dumps(_described(fields, arrays)).encode()
    content = {f"array{k}": np.frombuffer(data, np.uint8) for k, data in enumerate(arrays)}
    file = io.BytesIO()
    np.savez(file, allow_pickle=False, header=np.frombuffer(header, np.uint8), **content)
    return file.getvalue()


def unpacked(data: bytes) -> State:
    """The state that `packed` made a file of.

    Raises:
        ValueError: if it is no such file.
    """
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as file:
            fields = _undescribed(json.loads(file["header"].tobytes()), file)
        return State(**{**fields, "position": Position(*fields["position"])})
    except (EOFError, KeyError, TypeError, zipfile.BadZipFile) as error:
        raise ValueError(f"it is not the state of a training ({error})") from error


def _described(value: Any, arrays: list[bytes]) -> Any:
    """A nest of plain values as JSON has it; arrays stand in `arrays`, anything else as it prints.

    Arrays are kept as bytes, since NumPy's archives do not know all of TensorFlow's types.
    """
    if isinstance(value, dict):
        return {"dict": [[_described(v, arrays) for v in item] for item in value.items()]}
    if isinstance(value, (list, tuple)):
        form = "list" if isinstance(value, list) else "tuple"
        return {form: [_described(v, arrays) for v in value]}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    try:
        array = np.asarray(value)
        kind = tf.as_dtype(array.dtype)
    except (TypeError, ValueError):
        return repr(value)
    text = kind == tf.string
    arrays.append(tf.io.serialize_tensor(array).numpy() if text else array.tobytes())
    return {"array": [len(arrays) - 1, kind.name, list(array.shape)]}


def _undescribed(value: Any, file: Any) -> Any:
    """The nest that `_described` was given."""
    if not isinstance(value, dict):
        return value
    [(form, content)] = value.items()
    if form == "dict":
        return {_undescribed(k, file): _undescribed(v, file) for k, v in content}
    if form == "array":
        number, kind, shape = content
        data, dtype = file[f"array{number}"].tobytes(), tf.as_dtype(kind)
        if dtype == tf.string:
            return tf.io.parse_tensor(data, tf.string).numpy()
        return np.frombuffer(data, dtype.as_numpy_dtype).reshape(shape)
    nest = [_undescribed(v, file) for v in content]
    return tuple(nest) if form == "tuple" else nest


def values_of(model: Any) -> list[Any] | None:
    """The values of all variables that a training changes, or None where not all are made yet."""
    if not _is_built(model):
        return None
    return [tf.convert_to_tensor(v.value).numpy().copy() for v in _variables(model)]


def restore(state: State, model: Any, callbacks: list[Any]) -> None:
    """Puts a state back.

    Args:
        state: what `take` gave.
        model: the same model, built.
        callbacks: the callbacks of its `fit`, which have begun.

    Raises:
        TfdistError: if the model has other variables now.
    """
    if state.arrays is not None:
        put_back(state.arrays, model)
    for callback, (name, attributes) in zip(callbacks, state.callbacks, strict=False):
        if type(callback).__name__ == name:
            vars(callback).update(copy.deepcopy(attributes))
    if getattr(model, "history", None) is not None:
        model.history.history = copy.deepcopy(state.history[0])
        model.history.epoch = list(state.history[1])


def put_back(arrays: list[Any], model: Any) -> None:
    """Gives a model's variables their values back.

    Raises:
        TfdistError: if the model has other variables now.
    """
    variables = _variables(model)
    shapes = [tuple(v.shape) for v in variables]
    if shapes != [a.shape for a in arrays]:
        raise TfdistError(
            f"The training cannot go on: it had {len(arrays)} variables, and the script now makes "
            f"a model with {len(variables)}, or of other shapes. A script that is started again "
            "must make the same model."
        )
    for variable, value in zip(variables, arrays, strict=True):
        variable.assign(value)


def _is_built(model: Any) -> bool:
    return bool(model.built) and all(optimizer.built for optimizer in optimizers_of(model))


def _variables(model: Any) -> list[Any]:
    """All variables that a training changes, each once."""
    found = [*model.variables, *model.metrics_variables]
    for optimizer in optimizers_of(model):
        found += optimizer.variables
    return list({id(v): v for v in found}.values())


def _plain(callback: Any) -> dict[str, Any]:
    kept = {name: v for name, v in vars(callback).items() if name not in _SET_BY_KERAS}
    return {name: copy.deepcopy(v) for name, v in kept.items() if _is_plain(v)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_is_plain, [*value, *value.values()]))
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN)
