"""A graph network: node numbers in, neighbours gathered and summed inside the model."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

rng = np.random.default_rng(14)
NODES, EDGES = 70, 300
features = rng.normal(size=(NODES, 6)).astype("float32")
edges = rng.integers(0, NODES, (2, EDGES)).astype("int32")
labels = (features[:, 0] > 0).astype("int32")


class GraphConvolution(layers.Layer):
    def __init__(self, units):
        super().__init__()
        self.message, self.update = layers.Dense(units, "relu"), layers.Dense(units, "relu")

    def call(self, inputs):
        nodes, edges = inputs
        messages = self.message(ops.take(nodes, edges[1], axis=0))
        gathered = tf.math.unsorted_segment_mean(messages, edges[0], num_segments=NODES)
        return self.update(ops.concatenate([nodes, gathered], axis=1))


class NodeClassifier(keras.Model):
    def __init__(self):
        super().__init__()
        self.nodes = tf.constant(features)
        self.edges = tf.constant(edges)
        self.first, self.second = GraphConvolution(8), GraphConvolution(8)
        self.head = layers.Dense(2)

    def call(self, numbers):
        h = self.first((self.nodes, self.edges))
        h = self.second((h, self.edges))
        return self.head(ops.take(h, numbers, axis=0))


model = NodeClassifier()
model.compile(
    keras.optimizers.Adam(0.01),
    keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)
train = np.arange(45)
history = model.fit(train, labels[train], batch_size=16, epochs=3, verbose=0)
score = model.evaluate(np.arange(45, 70), labels[45:], verbose=0)

RESULT = {**history.history, "score": score}
