"""TensorFlow's variables of several replicas, read as numbers and arrays like those of one."""

from __future__ import annotations

from typing import Any

import numpy as np
from tensorflow.python.distribute.values import MirroredVariable, SyncOnReadVariable
from tensorflow.python.ops.resource_variable_ops import ResourceVariable

from tfdist.types import Array, Variable

__all__ = ["MirroredVariable", "ResourceVariable", "SyncOnReadVariable", "readable"]


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


_BASES = (MirroredVariable, SyncOnReadVariable)
_READABLE = {base: type(base.__name__, (_Readable, base), {}) for base in _BASES}


def readable(variable: Variable) -> Variable:
    """The same variable, of a class that can be read as a number or an array."""
    kind = _READABLE.get(type(variable))
    if kind is not None:
        variable.__class__ = kind
    return variable
