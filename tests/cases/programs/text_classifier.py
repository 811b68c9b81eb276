"""Strings in, classes out: TextVectorization inside the model."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers

rng = np.random.default_rng(0)
good, bad = ["good", "great", "fine"], ["bad", "awful", "poor"]
other = ["a", "film", "the", "plot", "was", "actor"]


def sentence(label: int) -> str:
    words = [*list(rng.choice(other, rng.integers(2, 8))), rng.choice(good if label else bad)]
    return " ".join(rng.permutation(words))


labels = rng.integers(0, 2, 91)
texts = np.array([sentence(label) for label in labels])

vectorize = layers.TextVectorization(max_tokens=30, output_sequence_length=8)
vectorize.adapt(texts)

model = keras.Sequential(
    [
        keras.Input((1,), dtype="string"),
        vectorize,
        layers.Embedding(30, 8, mask_zero=True),
        layers.GlobalAveragePooling1D(),
        layers.Dense(1, activation="sigmoid"),
    ]
)
model.compile(keras.optimizers.Adam(0.05), "binary_crossentropy", metrics=["accuracy", "auc"])
train = tf.data.Dataset.from_tensor_slices((texts[:, None], labels)).batch(16)
history = model.fit(train, epochs=4, verbose=0)
scores = model.predict(tf.constant([["a good film"], ["the plot was awful"]]), verbose=0)

RESULT = {
    "loss": history.history["loss"],
    "auc": history.history["auc"],
    "scores": scores.ravel().tolist(),
    "vocabulary": vectorize.get_vocabulary()[:4],
}
