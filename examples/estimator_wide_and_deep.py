"""A wide and deep model of tf.estimator's times: is a tumour malignant?

    cd examples
    python estimator_wide_and_deep.py
    tfdist run --strategy parameter_server -n 2 --ps 1 --evaluator estimator_wide_and_deep.py

The deep part sees thirty measurements and an embedding. The wide part sees ranges of the most
telling measurements, alone and crossed. Of the job that it was written for, only `tf.estimator` has
become `tfdist.estimator`.
"""

import argparse
import pathlib

import numpy as np
import tensorflow as tf

from tfdist import estimator

column = tf.feature_column

parser = argparse.ArgumentParser(description="Classify tumours by a wide and deep model.")
parser.add_argument("--model_dir", default="tumour-model")
parser.add_argument("--batch_size", type=int, default=32)
parser.add_argument("--max_steps", type=int, default=600)
parser.add_argument("--save_steps", type=int, default=200)

TRAINED = 426  # of 569 tumours
TELLING = ("mean_radius", "mean_texture", "worst_concave_points")


def tumours():
    """Measurements by name, in units of their spread over what is trained on, and diagnoses."""
    path = pathlib.Path(__file__).with_name("tumours.csv.gz")
    names, *rows = np.loadtxt(path, str, delimiter=",")
    rows = np.random.default_rng(0).permutation(rows)
    values = rows[:, :-1].astype(np.float32)
    values = (values - values[:TRAINED].mean(0)) / values[:TRAINED].std(0)
    return dict(zip(names[:-1].tolist(), values.T, strict=True)), rows[:, -1]


def columns(features):
    """The columns of the wide and of the deep part."""
    numbers = [column.numeric_column(name) for name in features]
    ranges = []
    for name in TELLING:
        bounds = np.quantile(features[name][:TRAINED], [0.2, 0.4, 0.6, 0.8])
        ranges.append(column.bucketized_column(column.numeric_column(name), bounds.tolist()))
    crossed = column.crossed_column(ranges, hash_bucket_size=200)
    return [*ranges, crossed], [*numbers, column.embedding_column(crossed, 4)]


def main():
    args = parser.parse_args()
    tf.compat.v1.logging.set_verbosity(tf.compat.v1.logging.INFO)
    features, diagnoses = tumours()

    def rows(part):
        return {name: values[part] for name, values in features.items()}, diagnoses[part]

    def train_input():
        data = tf.data.Dataset.from_tensor_slices(rows(slice(TRAINED)))
        return data.shuffle(TRAINED).repeat().batch(args.batch_size)

    def test_input():
        return tf.data.Dataset.from_tensor_slices(rows(slice(TRAINED, None))).batch(64)

    wide, deep = columns(features)
    classifier = estimator.DNNLinearCombinedClassifier(
        linear_feature_columns=wide,
        dnn_feature_columns=deep,
        dnn_hidden_units=[32, 16],
        dnn_optimizer=lambda: tf.compat.v1.train.AdamOptimizer(0.003),
        dnn_dropout=0.2,
        label_vocabulary=["benign", "malignant"],
        config=estimator.RunConfig(
            model_dir=args.model_dir,
            save_checkpoints_steps=args.save_steps,
            log_step_count_steps=100,
        ),
    )
    receiver = estimator.export.build_parsing_serving_input_receiver_fn(
        column.make_parse_example_spec([*wide, *deep])
    )
    result = estimator.train_and_evaluate(
        classifier,
        estimator.TrainSpec(train_input, max_steps=args.max_steps),
        estimator.EvalSpec(
            test_input,
            steps=None,
            exporters=estimator.FinalExporter("tumours", receiver),
            start_delay_secs=0,
            throttle_secs=5,
        ),
    )
    metrics, exports = result or (None, None)
    if metrics is not None:  # Else another task evaluates, or nothing was left to train.
        print(
            f"on unseen tumours: accuracy {metrics['accuracy']:.2%}, AUC {metrics['auc']:.4f}, "
            f"exported: {exports}"
        )


if __name__ == "__main__":
    main()
