"""`fit` on a MultiWorkerMirroredStrategy of the program's own, and its files."""

import json
import os
import sys

import keras
import numpy as np
import tensorflow as tf

tf_config = json.loads(os.environ.get("TF_CONFIG", '{"cluster": {"worker": ["one"]}}'))
num_workers = sum(len(tf_config["cluster"].get(kind, ())) for kind in ("chief", "worker"))

strategy = tf.distribute.MultiWorkerMirroredStrategy()

per_worker_batch_size = int(sys.argv[1])
global_batch_size = per_worker_batch_size * strategy.num_replicas_in_sync
if "TF_CONFIG" in os.environ:
    assert strategy.num_replicas_in_sync == num_workers


def mnist_like_dataset(batch_size):
    rng = np.random.default_rng(7)
    x = rng.random((128, 8, 8), dtype="float32")
    y = (x.mean(axis=(1, 2)) * 1000).astype("int64") % 4
    return (
        tf.data.Dataset.from_tensor_slices((x, y)).shuffle(128, seed=5).repeat().batch(batch_size)
    )


with strategy.scope():
    keras.utils.set_random_seed(7)
    model = keras.Sequential(
        [
            keras.layers.InputLayer(shape=(8, 8)),
            keras.layers.Reshape(target_shape=(8, 8, 1)),
            keras.layers.Conv2D(4, 3, activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(16, activation="relu"),
            keras.layers.Dense(4),
        ]
    )
    model.compile(
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        optimizer=keras.optimizers.SGD(learning_rate=0.05),
        metrics=["accuracy"],
    )


def _is_chief(task_type, task_id, cluster_spec):
    return (
        task_type is None
        or task_type == "chief"
        or (task_type == "worker" and task_id == 0 and "chief" not in cluster_spec.as_dict())
    )


task_type, task_id = strategy.cluster_resolver.task_type, strategy.cluster_resolver.task_id
cluster_spec = strategy.cluster_resolver.cluster_spec()
chief = _is_chief(task_type, task_id, cluster_spec)

dataset = mnist_like_dataset(global_batch_size)
callbacks = [keras.callbacks.BackupAndRestore(backup_dir="backup")]
history = model.fit(dataset, epochs=2, steps_per_epoch=6, callbacks=callbacks, verbose=0)

path = "model.keras" if chief else f"workertemp_{task_id}.keras"
model.save(path)
loaded = keras.models.load_model("model.keras")
again = loaded.fit(dataset, epochs=1, steps_per_epoch=3, verbose=0)
print("CHIEF", chief, isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy))
print("RESULT", json.dumps([*history.history["loss"], *again.history["loss"]]))
