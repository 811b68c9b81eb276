"""TensorFlow's variables of several replicas, read as numbers and arrays like those of one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partialmethod
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.distribute.values import MirroredVariable, SyncOnReadVariable
from tensorflow.python.ops.resource_variable_ops import ResourceVariable

from tfdist.types import Array, IndexedSlices, Tensor, Variable

__all__ = [
    "ASSIGNMENTS",
    "CHANGES",
    "ChangedByElements",
    "MirroredVariable",
    "ResourceVariable",
    "SyncOnReadVariable",
    "readable",
    "replicated",
]

#: The methods that change a variable, or some elements; the last is that of `variable[i].assign`.
ASSIGNMENTS = (
    *("assign", "assign_add", "assign_sub"),
    *("scatter_add", "scatter_sub", "scatter_mul", "scatter_div", "scatter_min", "scatter_max"),
    *("scatter_update", "scatter_nd_add", "scatter_nd_sub", "scatter_nd_update"),
    *("scatter_nd_min", "scatter_nd_max", "batch_scatter_update", "_strided_slice_assign"),
)

_Change = Callable[..., Tensor]


def _by_rows(change: _Change) -> _Change:
    def changed(value: Tensor, rows: IndexedSlices, *_: object, **__: object) -> Tensor:
        return change(value, tf.expand_dims(rows.indices, -1), tf.cast(rows.values, value.dtype))

    return changed


def _by_elements(change: _Change) -> _Change:
    def changed(value: Tensor, indices: object, updates: object, name: str | None = None) -> Tensor:
        del name
        return change(value, indices, tf.convert_to_tensor(updates, value.dtype))

    return changed


_ON_TENSORS: dict[str, _Change] = {
    "add": tf.tensor_scatter_nd_add,
    "sub": tf.tensor_scatter_nd_sub,
    "max": tf.tensor_scatter_nd_max,
    "min": tf.tensor_scatter_nd_min,
    "update": tf.tensor_scatter_nd_update,
}
#: Some changes of a tensor, by the names of `ASSIGNMENTS`: from its value and what the variable's
#: method takes to the new value.
CHANGES: dict[str, _Change] = {
    **{f"scatter_{how}": _by_rows(change) for how, change in _ON_TENSORS.items()},
    **{f"scatter_nd_{how}": _by_elements(change) for how, change in _ON_TENSORS.items()},
}


class ChangedByElements:
    """Methods that TensorFlow's variables of one device have, and those of several lack."""

    assign: Callable[..., object]

    def _change(self, how: str, indices: object, updates: object, name: object = None) -> object:
        value = CHANGES[how](tf.convert_to_tensor(self), indices, updates)
        return self.assign(value, name=name)

    scatter_nd_add = partialmethod(_change, "scatter_nd_add")
    scatter_nd_sub = partialmethod(_change, "scatter_nd_sub")
    scatter_nd_max = partialmethod(_change, "scatter_nd_max")
    scatter_nd_min = partialmethod(_change, "scatter_nd_min")
    scatter_nd_update = partialmethod(_change, "scatter_nd_update")


class _Readable(ChangedByElements):
    """Answers NumPy and Python's numbers, as TensorFlow's variables of one device do."""

    numpy: Any

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return np.array(self.numpy(), dtype, copy=copy)

    def __complex__(self) -> complex:
        return complex(self.numpy())

    def __float__(self) -> float:
        return float(self.numpy())

    def __int__(self) -> int:
        return int(self.numpy())


def replicated(variable: Variable) -> Variable | None:
    """The variable of several replicas of which a variable is a copy; None if it is none."""
    container = getattr(variable.handle, "_distributed_container", None)
    found = None if container is None else container()
    return found if isinstance(found, MirroredVariable) else None


_BASES = (MirroredVariable, SyncOnReadVariable)
_READABLE = {base: type(base.__name__, (_Readable, base), {}) for base in _BASES}


def readable(variable: Variable) -> Variable:
    """The same variable, of a class that can be read as a number or an array."""
    kind = _READABLE.get(type(variable))
    if kind is not None:
        variable.__class__ = kind
    return variable
