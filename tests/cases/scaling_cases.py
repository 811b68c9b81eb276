"""Loss scales that grow, and that overflow."""

from __future__ import annotations

import contextlib
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.cases import common
from tests.cases.server_cases import ruled


def slope(
    strategy: Any,
    *,
    rule: dict[str, Any] | None = None,
    scale: float = 2.0**15,
    growth: int = 5,
    lazy: bool = False,
) -> dict[str, Any]:
    """Trains one weight, whose gradient is 4 whatever its value is, for 60 steps."""
    x, y = np.ones((240, 1), "float32"), np.zeros((240, 1), "float32")
    ruling = contextlib.nullcontext() if strategy is None else ruled(strategy, **(rule or {}))
    with ruling, common.scope(strategy):
        dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
        model = keras.Sequential([dense] if lazy else [keras.Input((1,)), dense])
        optimizer = keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(0.25), initial_scale=scale, dynamic_growth_steps=growth
        )
        model.compile(optimizer, lambda true, predicted: 4.0 * predicted[:, 0])
        model.fit(x, y, 4, 1, shuffle=False, verbose=0)
        return {
            "weight": float(np.asarray(dense.kernel)[0, 0]),
            "iterations": int(optimizer.iterations),
            "scale": float(np.log2(float(optimizer.dynamic_scale))),
        }


class Doubling(keras.Model):
    """Doubles the scale between a loss and its update, as an overlapping step may."""

    def train_step(self, data: Any) -> dict[str, Any]:
        """Trains on a loss whose gradient is 4 whatever the weight is."""
        x, _ = data
        with tf.GradientTape() as tape:
            loss = 4.0 * tf.reduce_mean(self(x, training=True))
            scaled = self.optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, self.trainable_variables)
        with tf.control_dependencies(gradients):
            self.optimizer.dynamic_scale.assign(2.0 * self.optimizer.dynamic_scale)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss}


def overtaken(strategy: Any) -> dict[str, float]:
    """Trains asynchronously for ten steps, in each of which the scale grows before the update."""
    with ruled(strategy, mode="async"), common.scope(strategy):
        inputs = keras.Input((1,))
        dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
        model = Doubling(inputs, dense(inputs))
        optimizer = keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(0.25), initial_scale=4.0, dynamic_growth_steps=1000
        )
        model.compile(optimizer)
        optimizer.build(model.trainable_variables)
        model.fit(np.ones((40, 1), "float32"), np.zeros((40, 1), "float32"), 4, verbose=0)
        return {
            "weight": float(np.asarray(dense.kernel)[0, 0]),
            "scale": float(optimizer.dynamic_scale),
        }


def half(
    strategy: Any, *, large: float = 1.0, alike: bool = True, rule: dict[str, Any] | None = None
) -> Any:
    """Trains in mixed_float16, on equal examples or on such as differ.

    Of equal ones the sum over a batch overflows first, of others the gradient of an example may.
    """
    x, y = np.ones((128, 4), "float32"), np.full((128, 1), large, "float32")
    if not alike:
        rng = np.random.default_rng(0)
        x, y = rng.normal(size=x.shape), y * (1 + 0.1 * rng.normal(size=y.shape))
    ruling = contextlib.nullcontext() if rule is None else ruled(strategy, **rule)
    with ruling, common.scope(strategy):
        keras.utils.set_random_seed(5)
        keras.mixed_precision.set_global_policy("mixed_float16")
        try:
            layers = [keras.layers.Dense(4, "tanh"), keras.layers.Dense(1, dtype="float32")]
            model = keras.Sequential([keras.Input((4,)), *layers])
            model.compile(keras.optimizers.SGD(1e-3 / large), "mse")
            done = model.fit(x, y, 4, 2, shuffle=False, verbose=0)
        finally:
            keras.mixed_precision.set_global_policy("float32")
        assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
        return {
            "history": common.history(done),
            "weights": common.weights(model),
            "iterations": int(model.optimizer.iterations),
            "scale": float(tf.convert_to_tensor(model.optimizer.dynamic_scale)),
        }
