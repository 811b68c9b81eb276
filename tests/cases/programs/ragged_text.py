"""Sequences of different lengths: ragged tensors padded in the pipeline, masks, two directions."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers

rng = np.random.default_rng(11)
lengths = rng.integers(1, 9, 83)
rows = [rng.integers(1, 15, length) for length in lengths]
labels = np.array([float(row[-1] > 7) for row in rows], "float32")

ragged = tf.ragged.constant([row.tolist() for row in rows], dtype=tf.int32)
data = tf.data.Dataset.from_tensor_slices((ragged, labels)).batch(16)
data = data.map(lambda x, y: (x.to_tensor(), y))

model = keras.Sequential(
    [
        layers.Embedding(15, 8, mask_zero=True),
        layers.Bidirectional(layers.GRU(6)),
        layers.Dense(1),
    ]
)
model.compile(
    keras.optimizers.Adam(0.02),
    keras.losses.BinaryCrossentropy(from_logits=True),
    metrics=[keras.metrics.BinaryAccuracy(threshold=0.0)],
)
history = model.fit(data, epochs=3, verbose=0)
bucketed = tf.data.Dataset.from_generator(
    lambda: zip(rows, labels, strict=True),
    output_signature=(tf.TensorSpec([None], tf.int32), tf.TensorSpec([], tf.float32)),
).bucket_by_sequence_length(lambda x, y: tf.shape(x)[0], [5], [8, 8])
score = model.evaluate(bucketed, verbose=0)

RESULT = {**history.history, "score": score}
