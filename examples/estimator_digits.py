"""A `model_fn` of tf.estimator's times: a convolutional network on digits.

    python examples/estimator_digits.py
    tfdist run --strategy parameter_server -n 2 --ps 1 --evaluator examples/estimator_digits.py
    tfdist run --strategy parameter_server -n 2 --ps 1 examples/estimator_digits.py --sync
    tfdist run --strategy mirrored --devices 2 examples/estimator_digits.py --batch_size 32
    tfdist run --strategy multi_worker -n 2 examples/estimator_digits.py --batch_size 32

Of the job that it was written for, only `import tensorflow as tf` has got a second line:
`from tfdist import estimator`. `--batch_size` is that of one worker.
"""

import argparse
import pathlib

import numpy as np
import tensorflow as tf

from tfdist import estimator

tf1 = tf.compat.v1

parser = argparse.ArgumentParser(description="Classify digits with an Estimator.")
parser.add_argument("--model_dir", default="digits-model")
parser.add_argument("--batch_size", type=int, default=64)
parser.add_argument("--max_steps", type=int, default=400)
parser.add_argument("--save_steps", type=int, default=100)
parser.add_argument("--learning_rate", type=float, default=0.003)
parser.add_argument("--sync", action="store_true", help="average the workers' gradients")

TRAINED = 1408  # of 1797 digits


def conv(images, filters, name):
    """A layer of 3x3 kernels; tf.layers needs Keras 2."""
    with tf1.variable_scope(name):
        shape = [3, 3, images.shape[-1], filters]
        kernel = tf1.get_variable("kernel", shape, initializer=tf1.glorot_uniform_initializer())
        bias = tf1.get_variable("bias", [filters], initializer=tf1.zeros_initializer())
        return tf.nn.relu(tf.nn.conv2d(images, kernel, strides=1, padding="SAME") + bias)


def dense(values, units, name):
    with tf1.variable_scope(name):
        shape = [values.shape[-1], units]
        kernel = tf1.get_variable("kernel", shape, initializer=tf1.glorot_uniform_initializer())
        bias = tf1.get_variable("bias", [units], initializer=tf1.zeros_initializer())
        return values @ kernel + bias


def model_fn(features, labels, mode, params, config):
    images = tf.reshape(features["image"], [-1, 8, 8, 1])
    hidden = tf.nn.max_pool2d(conv(images, 16, "conv1"), 2, 2, "SAME")
    hidden = tf.nn.max_pool2d(conv(hidden, 32, "conv2"), 2, 2, "SAME")
    logits = dense(tf.reshape(hidden, [-1, 2 * 2 * 32]), 10, "logits")
    digit = tf.argmax(logits, 1)
    predictions = {"digit": digit, "probabilities": tf.nn.softmax(logits)}
    if mode == estimator.ModeKeys.PREDICT:
        return estimator.EstimatorSpec(mode, predictions=predictions)

    loss = tf1.losses.sparse_softmax_cross_entropy(labels, logits)
    if mode == estimator.ModeKeys.EVAL:
        metrics = {"accuracy": tf1.metrics.accuracy(labels, digit)}
        return estimator.EstimatorSpec(mode, loss=loss, eval_metric_ops=metrics)

    optimizer, hooks = tf1.train.AdamOptimizer(params["learning_rate"]), []
    if params["sync"] and config.num_ps_replicas:
        workers = config.num_worker_replicas
        optimizer = tf1.train.SyncReplicasOptimizer(optimizer, workers, workers)
        hooks = [optimizer.make_session_run_hook(config.is_chief, num_tokens=0)]
    train_op = optimizer.minimize(loss, global_step=tf1.train.get_global_step())
    return estimator.EstimatorSpec(mode, loss=loss, train_op=train_op, training_hooks=hooks)


def main():
    args = parser.parse_args()
    tf1.logging.set_verbosity(tf1.logging.INFO)
    digits = np.loadtxt(pathlib.Path(__file__).with_name("digits.csv.gz"), delimiter=",")
    images, labels = digits[:, :64].astype(np.float32) / 16, digits[:, 64].astype(np.int32)

    def train_input(input_context=None):
        data = tf.data.Dataset.from_tensor_slices(({"image": images[:TRAINED]}, labels[:TRAINED]))
        if input_context is not None:  # Under multi_worker each process reads its own part.
            pipelines = input_context.num_input_pipelines
            data = data.shard(pipelines, input_context.input_pipeline_id)
        return data.shuffle(TRAINED).repeat().batch(args.batch_size)

    def test_input():
        data = tf.data.Dataset.from_tensor_slices(({"image": images[TRAINED:]}, labels[TRAINED:]))
        return data.batch(64)

    classifier = estimator.Estimator(
        model_fn,
        config=estimator.RunConfig(
            model_dir=args.model_dir,
            save_checkpoints_steps=args.save_steps,
            log_step_count_steps=100,
        ),
        params={"learning_rate": args.learning_rate, "sync": args.sync},
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
