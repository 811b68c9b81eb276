"""TensorFlow's variables of several replicas, read as numbers and arrays like those of one."""

from __future__ import annotations

from typing import Any

import numpy as np
from tensorflow.python.distribute.values import MirroredVariable, SyncOnReadVariable
from tensorflow.python.ops.resource_variable_ops import ResourceVariable

from tfdist.types import Array, Variable

__all__ = [
    "IN_PLACE",
    "MirroredVariable",
    "ResourceVariable",
    "SyncOnReadVariable",
    "readable",
    "replicated",
]

#: The methods that change some elements of a variable; the last is that of `variable[i].assign`.
IN_PLACE = (
    *("scatter_add", "scatter_sub", "scatter_mul", "scatter_div", "scatter_min", "scatter_max"),
    *("scatter_update", "scatter_nd_add", "scatter_nd_sub", "scatter_nd_update"),
    *("scatter_nd_min", "scatter_nd_max", "batch_scatter_update", "_strided_slice_assign"),
)


class _Readable:
    """Answers NumPy and Python's numbers.

    TensorFlow's variables of one device answer, its variables of several do not.
    """

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
