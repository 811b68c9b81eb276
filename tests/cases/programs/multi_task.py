"""Two inputs, two outputs, two losses, sample weights for one output."""

import keras
import numpy as np
from keras import layers

rng = np.random.default_rng(9)
titles = rng.integers(1, 20, (85, 4))
tags = rng.integers(0, 2, (85, 6)).astype("float32")
priority = (titles[:, :1] > 10).astype("float32")
department = tags[:, :3].argmax(1)

title_input = keras.Input((None,), name="title")
tags_input = keras.Input((6,), name="tags")
h = layers.LSTM(6)(layers.Embedding(20, 6)(title_input))
h = layers.concatenate([h, tags_input])
model = keras.Model(
    inputs=[title_input, tags_input],
    outputs={
        "priority": layers.Dense(1, name="priority")(h),
        "department": layers.Dense(3, name="department")(h),
    },
)
model.compile(
    optimizer=keras.optimizers.RMSprop(1e-2),
    loss={
        "priority": keras.losses.BinaryCrossentropy(from_logits=True),
        "department": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    },
    loss_weights={"priority": 1.0, "department": 0.2},
    metrics={"department": ["accuracy"], "priority": [keras.metrics.BinaryAccuracy(threshold=0)]},
)
history = model.fit(
    {"title": titles, "tags": tags},
    {"priority": priority, "department": department},
    epochs=2,
    batch_size=16,
    verbose=0,
)
outputs = model.predict({"title": titles, "tags": tags}, verbose=0)

RESULT = {
    **history.history,
    "outputs": {name: [len(v), float(v.sum())] for name, v in sorted(outputs.items())},
}
