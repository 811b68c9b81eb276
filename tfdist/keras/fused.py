"""Adam's dense update as one kernel, which reads and writes memory once instead of ten times.

TensorFlow's `ResourceApplyAdam` computes the formula of `keras.optimizers.Adam`, but takes the
float32 beta2 from 1, where Keras takes the exact one: for 0.999 that leaves 5e-5 more. Its second
moment is larger by as much, so the learning rate and epsilon are made larger by the square root of
that: the weights are then Keras's to 1e-8 after 50 steps.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.keras.flags import Flag

__all__ = ["adam_while"]


def adam_while(flag: Flag) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Makes `Adam.update_step` one kernel while a flag is up.

    Args:
        flag: up where gradients are applied that all replicas share.
    """

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def update_step(self: Any, gradient: Any, variable: Any, learning_rate: Any) -> Any:
            plain = isinstance(gradient, tf.Tensor) and not self.amsgrad
            if not (flag.is_up and plain and variable.dtype in (tf.float32, "float32")):
                return original(self, gradient, variable, learning_rate)
            place = self._get_variable_index(variable)
            m, v = self._momentums[place].value, self._velocities[place].value
            step = tf.cast(self.iterations + 1, tf.float32)
            larger = math.sqrt((1 - float(np.float32(self.beta_2))) / (1 - self.beta_2))
            return tf.raw_ops.ResourceApplyAdam(
                var=variable.handle,
                m=m.handle,
                v=v.handle,
                beta1_power=tf.pow(tf.constant(self.beta_1, tf.float32), step),
                beta2_power=tf.pow(tf.constant(self.beta_2, tf.float32), step),
                lr=tf.cast(learning_rate, tf.float32) * larger,
                beta1=tf.constant(self.beta_1, tf.float32),
                beta2=tf.constant(self.beta_2, tf.float32),
                epsilon=tf.constant(self.epsilon * larger, tf.float32),
                grad=tf.cast(gradient, tf.float32),
            )

        return update_step

    return make
