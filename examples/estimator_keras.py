"""A Keras model as an Estimator: digits, with the jobs, checkpoints and exports of tf.estimator.

    python examples/estimator_keras.py
    tfdist run --strategy parameter_server -n 2 --ps 1 --evaluator examples/estimator_keras.py

On parameter servers each worker trains on batches of its own, and updates the weights whenever it
has a gradient.
"""

import argparse
import pathlib

import keras
import numpy as np
import tensorflow as tf

from tfdist import estimator

parser = argparse.ArgumentParser(description="Classify digits by a Keras model.")
parser.add_argument("--model_dir", default="digits-keras-model")
parser.add_argument("--batch_size", type=int, default=64)
parser.add_argument("--max_steps", type=int, default=400)
parser.add_argument("--save_steps", type=int, default=100)

TRAINED = 1408  # of 1797 digits


def compiled():
    model = keras.Sequential(
        [
            keras.Input((64,), name="image"),
            keras.layers.Reshape((8, 8, 1)),
            keras.layers.Conv2D(16, 3, padding="same", use_bias=False),
            keras.layers.BatchNormalization(),
            keras.layers.Activation("relu"),
            keras.layers.MaxPooling2D(2),
            keras.layers.Flatten(),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(10, name="digit"),
        ]
    )
    model.compile(
        keras.optimizers.Adam(0.003),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def main():
    args = parser.parse_args()
    tf.compat.v1.logging.set_verbosity(tf.compat.v1.logging.INFO)
    keras.utils.set_random_seed(1)
    digits = np.loadtxt(pathlib.Path(__file__).with_name("digits.csv.gz"), delimiter=",")
    images, labels = digits[:, :64].astype(np.float32) / 16, digits[:, 64].astype(np.int32)

    def train_input():
        data = tf.data.Dataset.from_tensor_slices(({"image": images[:TRAINED]}, labels[:TRAINED]))
        return data.shuffle(TRAINED).repeat().batch(args.batch_size)

    def test_input():
        data = tf.data.Dataset.from_tensor_slices(({"image": images[TRAINED:]}, labels[TRAINED:]))
        return data.batch(64)

    classifier = estimator.model_to_estimator(
        compiled(),
        config=estimator.RunConfig(
            model_dir=args.model_dir,
            save_checkpoints_steps=args.save_steps,
            log_step_count_steps=100,
        ),
    )
    receiver = estimator.export.build_raw_serving_input_receiver_fn(
        {"image": tf.TensorSpec([None, 64], tf.float32)}
    )
    result = estimator.train_and_evaluate(
        classifier,
        estimator.TrainSpec(train_input, max_steps=args.max_steps),
        estimator.EvalSpec(
            test_input,
            steps=None,
            exporters=estimator.FinalExporter("digits", receiver),
            start_delay_secs=0,
            throttle_secs=5,
        ),
    )
    metrics, exports = result or (None, None)
    if metrics is not None:  # Else another task evaluates, or nothing was left to train.
        print(f"accuracy on unseen digits {metrics['accuracy']:.2%}, exported: {exports}")


if __name__ == "__main__":
    main()
