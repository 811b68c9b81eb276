"""Batches of a static size (`drop_remainder=True`), whose size a step is traced without.

A replica has a part of each batch. Were that part's size a constant of the graph, `tf.shape(x)[0]`
would look like any other number of the program's: a count of examples, which the whole batch has
more of, and a number that belongs to the batch would be the same graph. With an open first
dimension they are not. A program that needs the size when it is traced, such as
`range(x.shape[0])`, is traced with it: what may be either is then named or refused.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable

import tensorflow as tf

from tfdist.errors import ConfigError
from tfdist.keras.stateful import is_stateful
from tfdist.types import Model, Structure
from tfdist.utils.messages import logger

__all__ = [
    "SIZE_ADVICE",
    "SIZE_NEEDED",
    "is_left_static",
    "is_tried",
    "traced_in_vain",
    "with_open_rows",
]

#: The state of a program that is traced with the size of its batches, and its way out.
SIZE_NEEDED = (
    "the program needs the size of its batches when the step is traced, as a number of Python's "
    "(x.shape[0])"
)
SIZE_ADVICE = "Write tf.shape(x)[0] for x.shape[0] in all of the program"

#: Models that need the size of their batches when a step is traced.
_static: weakref.WeakSet[Model] = weakref.WeakSet()
#: The steps of models, by name, that have been traced without it.
_tried: weakref.WeakKeyDictionary[Model, set[str]] = weakref.WeakKeyDictionary()


def is_left_static(model: Model) -> bool:
    """Whether a model's steps are traced with the size of their batches.

    Those of stateful RNNs are: they keep a state for each row.
    """
    return model in _static or is_stateful(model)


def is_tried(model: Model, name: str) -> bool:
    """Whether it is known if a step, by name, can be traced without the size of its batches."""
    return is_left_static(model) or name in _tried.get(model, ())


def traced_in_vain(model: Model, name: str | None, trace: Callable[[], object]) -> None:
    """Traces a step into a graph that is thrown away; with the size of its batches if it needs it.

    Args:
        model: a Keras model.
        name: the step's name; None if its batches have no static size.
        trace: traces the step; with a static size if the model `is_left_static`.

    Raises:
        ConfigError: if tfdist refuses the step.
    """
    if name is not None and not is_left_static(model):
        try:
            with _scratch():
                trace()
        except ConfigError:
            raise
        except Exception as error:  # a program may fail in any way
            logger.debug("%s of %r needs the size of its batches: %s", name, model.name, error)
            _static.add(model)
        else:
            _tried.setdefault(model, set()).add(name)
            return
    with _scratch():
        trace()


def _scratch() -> contextlib.AbstractContextManager[object]:
    graph = tf.__internal__.FuncGraph("tfdist_build")
    return graph.as_default()  # type: ignore[no-any-return]


def with_open_rows(batch: Structure, size: int) -> Structure | None:
    """A batch whose dense tensors have an open first dimension.

    Returns:
        None if a sparse or ragged tensor of the batch has its size in its structure.
    """
    leaves = tf.nest.flatten(batch)
    if any(isinstance(leaf, (tf.RaggedTensor, tf.SparseTensor)) for leaf in leaves):
        return None

    def opened(leaf: object) -> object:
        if not isinstance(leaf, tf.Tensor) or not leaf.shape.rank or leaf.shape[0] != size:
            return leaf
        return tf.compat.v1.placeholder_with_default(leaf, [None, *leaf.shape[1:]])

    return tf.nest.map_structure(opened, batch)
