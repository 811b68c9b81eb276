"""Gradient accumulation, moving average of the weights, global clipping, cosine schedule."""

import keras
import numpy as np
from keras import layers

rng = np.random.default_rng(16)
x = rng.normal(size=(139, 8)).astype("float32")
y = np.tanh(x @ rng.normal(size=(8, 1))).astype("float32")

model = keras.Sequential([layers.Dense(12, "gelu"), layers.Dense(1)])
schedule = keras.optimizers.schedules.CosineDecay(0.02, 20, warmup_target=0.03, warmup_steps=4)
model.compile(
    keras.optimizers.AdamW(
        schedule,
        weight_decay=0.01,
        global_clipnorm=1.0,
        gradient_accumulation_steps=3,
        use_ema=True,
        ema_momentum=0.8,
    ),
    "mse",
)
history = model.fit(x, y, batch_size=16, epochs=3, verbose=0)
before = float(sum(np.abs(w).sum() for w in model.get_weights()))
model.optimizer.finalize_variable_values(model.trainable_variables)
after = float(sum(np.abs(w).sum() for w in model.get_weights()))

RESULT = {
    "loss": history.history["loss"],
    "before": before,
    "after": after,
    "steps": int(model.optimizer.iterations),
}
