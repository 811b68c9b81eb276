"""Goes on from checkpoints of the retired canned Estimators, with their optimizers' state.

Weights have the same names there. State of optimizers is named differently: TensorFlow 1's canned
estimators made each variable as one part of a split one, which left a remnant in the names, as in
`dnn/hiddenlayer_0/kernel/t_0/Adagrad` and `linear/linear_model/age/weights/part_0/Ftrl`.
"""

from __future__ import annotations

from collections.abc import Collection

import tensorflow as tf

from tfdist.estimator.run_config import RunConfig
from tfdist.types import Saver

__all__ = ["saver_for"]

tf1 = tf.compat.v1

_REMNANTS = ("t_0", "part_0")


def saver_for(config: RunConfig) -> Saver | None:
    """A saver that keeps to the names of the checkpoints which are there already.

    Args:
        config: has the model's directory, and the number of checkpoints that are kept.

    Returns:
        A `tf.compat.v1.train.Saver`, or None if the names are those of the variables.
    """
    latest = tf.train.latest_checkpoint(config.model_dir) if config.model_dir else None
    if latest is None or config.num_ps_replicas > 1:  # Several servers hold parts of variables.
        return None
    saved = {name for name, _ in tf.train.list_variables(latest)}
    variables = tf1.global_variables()
    renamed = {variable.op.name: _name_in(saved, variable.op.name) for variable in variables}
    if all(name == other for name, other in renamed.items()):
        return None
    return tf1.train.Saver(
        {renamed[variable.op.name]: variable for variable in variables},
        sharded=True,
        max_to_keep=config.keep_checkpoint_max,
        keep_checkpoint_every_n_hours=config.keep_checkpoint_every_n_hours,
        save_relative_paths=True,
    )


def _name_in(saved: Collection[str], name: str) -> str:
    """The name of a variable in a checkpoint."""
    weight, _, slot = name.rpartition("/")
    others = [f"{weight}/{remnant}/{slot}" for remnant in _REMNANTS]
    return next((each for each in (name, *others) if each in saved), name)
