"""Own layers, an own loss, an own stateful metric, an own callback, a learning rate schedule."""

import keras
import numpy as np
from keras import layers, ops

rng = np.random.default_rng(8)
x = rng.normal(size=(109, 6)).astype("float32")
y = (np.abs(x).sum(1) > 4.5).astype("int32")


class Linear(layers.Layer):
    def __init__(self, units):
        super().__init__()
        self.units = units

    def build(self, input_shape):
        self.w = self.add_weight(shape=(input_shape[-1], self.units), initializer="glorot_uniform")
        self.b = self.add_weight(shape=(self.units,), initializer="zeros")

    def call(self, inputs):
        return ops.matmul(inputs, self.w) + self.b


class Sparsity(layers.Layer):
    def __init__(self, rate):
        super().__init__()
        self.rate = rate
        self.level = keras.metrics.Mean(name="level")

    def call(self, inputs):
        self.add_loss(self.rate * ops.mean(ops.abs(inputs)))
        self.level.update_state(ops.mean(inputs, axis=-1))
        return inputs


class TruePositives(keras.metrics.Metric):
    def __init__(self, name="tp", **kwargs):
        super().__init__(name=name, **kwargs)
        self.count = self.add_variable(shape=(), initializer="zeros", name="count")

    def update_state(self, y_true, y_pred, sample_weight=None):
        hit = ops.logical_and(ops.equal(ops.argmax(y_pred, 1), 1), ops.equal(ops.ravel(y_true), 1))
        self.count.assign(self.count + ops.sum(ops.cast(hit, "float32")))

    def result(self):
        return self.count.value

    def reset_state(self):
        self.count.assign(0.0)


def own_loss(y_true, y_pred):
    each = keras.losses.sparse_categorical_crossentropy(y_true, y_pred, from_logits=True)
    return each * 1.5


class Log(keras.callbacks.Callback):
    def on_train_begin(self, logs=None):
        self.batches, self.rates = 0, []

    def on_train_batch_end(self, batch, logs=None):
        self.batches += 1
        assert np.isfinite(logs["loss"])

    def on_epoch_end(self, epoch, logs=None):
        self.rates.append(float(self.model.optimizer.learning_rate))


log = Log()
model = keras.Sequential([keras.Input((6,)), Linear(12), layers.ReLU(), Sparsity(0.01), Linear(2)])
schedule = keras.optimizers.schedules.ExponentialDecay(0.05, 5, 0.9)
model.compile(keras.optimizers.SGD(schedule, momentum=0.9), own_loss, metrics=[TruePositives()])
history = model.fit(x, y, batch_size=16, epochs=3, callbacks=[log], verbose=0)

RESULT = {**history.history, "batches": log.batches, "rates": log.rates}
