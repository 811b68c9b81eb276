"""The optimizers of canned estimators: by name, of TensorFlow 1, of Keras, or a function."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from tfdist._tf.distribute import eagerly_outside_of_scope
from tfdist.errors import ConfigError
from tfdist.estimator.keras_optimizers import GraphOptimizer
from tfdist.types import Operation, Optimizer, Optimizer1, OptimizerChoice, Tensor, Variable
from tfdist.utils.validation import check_choice

if TYPE_CHECKING:
    from typing_extensions import TypeIs

__all__ = ["check_optimizer", "minimize", "optimizer_of", "refuse_sync_replicas"]

tf1 = tf.compat.v1

_BY_NAME = {
    "Adagrad": tf1.train.AdagradOptimizer,
    "Adam": tf1.train.AdamOptimizer,
    "Ftrl": tf1.train.FtrlOptimizer,
    "RMSProp": tf1.train.RMSPropOptimizer,
    "SGD": tf1.train.GradientDescentOptimizer,
}


def check_optimizer(what: str, optimizer: object) -> None:
    """Rejects the value of an argument that cannot be an optimizer, before any graph is made."""
    if isinstance(optimizer, str):
        check_choice(what, optimizer, _BY_NAME)
    elif inspect.isclass(optimizer) or not (callable(optimizer) or _is_optimizer(optimizer)):
        raise ConfigError(
            f"{what}={optimizer!r} is no optimizer. Give a name ({', '.join(_BY_NAME)}), an "
            "optimizer of tf.compat.v1.train or of Keras, or a function that returns one."
        )


def optimizer_of(
    what: str, optimizer: OptimizerChoice, learning_rate: float
) -> Optimizer1 | Optimizer:
    """The optimizer that the value of an argument stands for, made in the default graph."""
    if isinstance(optimizer, str):
        return _BY_NAME[optimizer](learning_rate=learning_rate)
    if _is_optimizer(optimizer):
        return optimizer
    if _makes_keras(optimizer):
        with eagerly_outside_of_scope():
            return optimizer()
    made = optimizer()
    if _is_optimizer(made):
        return made
    raise ConfigError(
        f"The function {what} returned {made!r}, which is not an optimizer. Let it return one of "
        "tf.compat.v1.train or of Keras."
    )


def minimize(
    optimizer: Any,
    loss: Tensor,
    variables: Sequence[Any],
    global_step: Variable | None = None,
    prefix: str = "",
) -> Operation:
    """The op of one step, which may add one to the global step.

    An optimizer of Keras is left as it is. The names of its variables begin with the prefix.
    """
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        return optimizer.minimize(loss, global_step=global_step, var_list=list(variables))
    with eagerly_outside_of_scope():
        references = [
            keras.Variable(
                "zeros", tuple(each.shape), each.dtype.name, name=each.op.name.replace("/", "_")
            )
            for each in variables
        ]
    graph = GraphOptimizer(optimizer, references, variables, prefix=prefix)
    return graph.minimize(loss, variables, global_step)


def refuse_sync_replicas(what: str, optimizer: object) -> None:
    """Refuses a `SyncReplicasOptimizer`, which cannot be one of two."""
    if isinstance(optimizer, tf1.train.SyncReplicasOptimizer):
        raise ConfigError(
            f"{what} is a SyncReplicasOptimizer, which counts the steps of one optimizer, but a "
            "DNNLinearCombined estimator has two. Use a DNN or a Linear estimator, or train with "
            "RunConfig(train_distribute='multi_worker')."
        )


def _is_optimizer(value: object) -> TypeIs[Optimizer1 | Optimizer]:
    return isinstance(value, tf1.train.Optimizer | keras.optimizers.Optimizer)


def _makes_keras(function: Callable[[], object]) -> bool:
    """Whether a function returns an optimizer of Keras, which must be made outside of the graph.

    It is called in a graph of its own, since it may use the global step.
    """
    with tf.Graph().as_default():
        tf1.train.create_global_step()
        return isinstance(function(), keras.optimizers.Optimizer)
