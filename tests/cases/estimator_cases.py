"""What a process does for the tests of Estimators: a linear model that NumPy can follow."""

from __future__ import annotations

import json
import types
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

import tfdist
from tests.cases.estimator_numbers import RATE, data
from tfdist import environment, estimator
from tfdist.estimator.evaluation import eval_metrics
from tfdist.strategies import factory

tf1 = tf.compat.v1


def model_fn(features: Any, labels: Any, mode: str, params: Any) -> Any:
    start = params.get("start", 0.0)
    weight = tf1.get_variable("w", [3, 1], initializer=tf1.constant_initializer(start))
    bias = tf1.get_variable("b", [1], initializer=tf1.zeros_initializer())
    value = features["x"] @ weight + bias
    predictions = {"value": value, "twice": 2 * value}
    if mode == estimator.ModeKeys.PREDICT:
        outputs = {
            "serving_default": estimator.export.PredictOutput(predictions),
            "regression": estimator.export.RegressionOutput(value),
        }
        return estimator.EstimatorSpec(mode, predictions=predictions, export_outputs=outputs)
    loss = tf.reduce_mean((value - labels) ** 2)
    error = tf1.metrics.mean_absolute_error(labels, value)
    if mode == estimator.ModeKeys.EVAL:
        return estimator.EstimatorSpec(
            mode, predictions=predictions, loss=loss, eval_metric_ops={"error": error}
        )
    step = tf1.train.get_global_step()
    train_op = tf1.train.GradientDescentOptimizer(RATE).minimize(loss, global_step=step)
    return estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)


def batches(size: int, repeat: int | None = None) -> Any:
    x, y = data()
    return lambda: tf.data.Dataset.from_tensor_slices(({"x": x}, y)).repeat(repeat).batch(size)


def made(path: str, function: Any = model_fn, *, start: float = 0.0, **more: Any) -> Any:
    warm = more.pop("warm_start_from", None)
    config = estimator.RunConfig(model_dir=path, log_step_count_steps=5, **more)
    return estimator.Estimator(
        function, config=config, params={"start": start}, warm_start_from=warm
    )


def weights(model: Any) -> Any:
    return np.append(model.get_variable_value("w"), model.get_variable_value("b"))


def tags(place: Path) -> list[str]:
    """The tags of all scalars in a directory's event files."""
    found = set()
    for path in place.glob("*.tfevents.*"):
        for record in tf.data.TFRecordDataset(str(path)).as_numpy_iterator():
            event = tf1.Event.FromString(record)
            found |= {v.tag for v in event.summary.value if v.HasField("simple_value")}
    return sorted(found)


def used(strategy: Any, *, path: str) -> dict[str, Any]:
    """Trains in two parts, evaluates and predicts."""
    seen: list[int] = []

    class Listener(estimator.CheckpointSaverListener):
        def after_save(self, session: Any, global_step_value: int) -> None:
            seen.append(int(global_step_value))

    model = made(path, save_checkpoints_steps=10)
    first = model.train(batches(16), steps=12, saving_listeners=[Listener()])
    middle = weights(model)
    model.train(batches(16), max_steps=20).train(batches(16), max_steps=20)
    batch = next(model.predict(batches(16, 1), yield_single_examples=False))
    return {
        "same": first is model,
        "saved": seen,
        "middle": middle,
        "weights": weights(model),
        "names": model.get_variable_names(),
        "metrics": model.evaluate(batches(16, 1)),
        "part": model.evaluate(batches(16), steps=2, name="part"),
        "predicted": list(model.predict(batches(16, 1), predict_keys="value")),
        "batch": {name: value.shape for name, value in batch.items()},
        "latest": model.latest_checkpoint(),
        "train tags": tags(Path(path)),
        "eval tags": tags(Path(path, "eval")),
        "part tags": tags(Path(path, "eval_part")),
    }


def exported(strategy: Any, *, path: str) -> dict[str, Any]:
    """Exports with both receivers and loads the result."""
    model = made(path)
    model.train(batches(16), steps=5)
    x, _ = data()
    extra = Path(path, "more.txt")
    extra.write_text("more")
    raw = estimator.export.build_raw_serving_input_receiver_fn({"x": tf.constant(x[:2])})
    parsing = estimator.export.build_parsing_serving_input_receiver_fn(
        {"x": tf.io.FixedLenFeature([3], tf.float32)}
    )
    first = model.export_saved_model(f"{path}/raw", raw, assets_extra={"a/b.txt": str(extra)})
    second = model.export_saved_model(Path(path, "parsed"), parsing, as_text=True)
    loaded, parsed = tf.saved_model.load(first.decode()), tf.saved_model.load(second.decode())
    example = tf.train.Example()
    example.features.feature["x"].float_list.value.extend(x[0])
    serialized = tf.constant([example.SerializeToString()])
    return {
        "name": Path(first.decode()).name,
        "extra": Path(first.decode(), "assets.extra", "a", "b.txt").read_text(),
        "files": sorted(each.name for each in Path(second.decode()).iterdir()),
        "signatures": (sorted(loaded.signatures), sorted(parsed.signatures)),
        "raw": loaded.signatures["serving_default"](x=tf.constant(x[:2]))["twice"].numpy(),
        "parsed": parsed.signatures["regression"](inputs=serialized)["outputs"].numpy(),
        "weights": weights(model),
    }


def retired(strategy: Any, *, path: str) -> dict[str, Any]:
    """A checkpoint as the retired Estimator wrote it: global_step, and the model's own names."""
    values = np.array([[1.0], [2.0], [3.0]], "float32")
    with tf.Graph().as_default(), tf1.Session() as session:
        step = tf1.train.create_global_step()
        tf1.get_variable("w", initializer=values, use_resource=False)
        tf1.get_variable("b", initializer=np.ones(1, "float32"), use_resource=False)
        session.run([tf1.global_variables_initializer()])
        session.run(tf1.assign(step, 7))
        tf1.train.Saver(sharded=True).save(session, f"{path}/model.ckpt", global_step=7)
    model = made(path)
    before = model.evaluate(batches(16, 1))
    model.train(batches(16), steps=1)
    return {"before": before, "step": model.get_variable_value("global_step")}


def warmed(strategy: Any, *, path: str) -> dict[str, Any]:
    """Models that start from another."""
    first = made(f"{path}/first")
    first.train(batches(16), steps=5)
    found = {"first": weights(first)}
    settings = estimator.WarmStartSettings(
        f"{path}/first", ["v"], var_name_to_prev_var_name={"v": "w"}
    )

    def other_fn(features: Any, labels: Any, mode: str) -> Any:
        value = features["x"] @ tf1.get_variable("v", [3, 1], initializer=tf1.ones_initializer())
        bias = tf1.get_variable("b", [1], initializer=tf1.zeros_initializer())
        loss = tf.reduce_mean((value + bias - labels) ** 2)
        step = tf1.train.get_global_step()
        train_op = tf1.train.GradientDescentOptimizer(0.0).minimize(loss, global_step=step)
        return estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)

    for name, source in (("all", f"{path}/first"), ("renamed", settings)):
        function = other_fn if name == "renamed" else model_fn
        model = made(f"{path}/{name}", function, warm_start_from=source)
        model.train(batches(16), steps=1)
        at_start = f"{path}/{name}/model.ckpt-0"
        names = ("v" if name == "renamed" else "w", "b")
        found[name] = np.append(*[tf.train.load_variable(at_start, each) for each in names])
    return found


def evaluated_alone(strategy: Any, *, path: str) -> dict[str, Any]:
    """`train_and_evaluate` in one process, with all exporters; then once more."""
    receiver = estimator.export.build_raw_serving_input_receiver_fn(
        {"x": tf.TensorSpec([None, 3], tf.float32)}
    )
    calls: list[int] = []

    def better(best_eval_result: Any, current_eval_result: Any) -> bool:
        calls.append(int(current_eval_result["global_step"]))
        return bool(current_eval_result["loss"] < best_eval_result["loss"])

    def specs(most: int) -> tuple[Any, Any]:
        exporters = [
            estimator.FinalExporter("final", receiver),
            estimator.LatestExporter("latest", receiver, exports_to_keep=2),
            estimator.BestExporter("best", receiver, "eval/*.tfevents.*", better),
        ]
        evaluation = estimator.EvalSpec(
            batches(16, 1), steps=None, exporters=exporters, throttle_secs=0
        )
        return estimator.TrainSpec(batches(16), max_steps=most), evaluation

    model = made(path, save_checkpoints_steps=5)
    metrics, exports = estimator.train_and_evaluate(model, *specs(12))
    again, _ = estimator.train_and_evaluate(made(path, save_checkpoints_steps=5), *specs(16))
    return {
        "metrics": metrics,
        "exports": exports,
        "again": again,
        "compared": calls,
        "kept": {each.name: len(list(each.iterdir())) for each in Path(path, "export").iterdir()},
    }


def stopped(strategy: Any, *, path: str) -> dict[str, int]:
    """At which step each early-stopping hook stops a training."""
    hooks = estimator.experimental
    found = {}
    evaluations = Path(path, "evaluations")
    with tf.Graph().as_default():
        writer = tf1.summary.FileWriter(str(evaluations))
    for step, loss in ((1, 3.0), (2, 2.0), (3, 2.5), (6, 2.5), (8, 2.5)):
        summary = tf1.Summary()
        summary.value.add(tag="loss", simple_value=loss)
        writer.add_summary(summary, step)
    writer.close()
    kinds = {
        "no decrease": (hooks.stop_if_no_decrease_hook, 4),
        "still decreasing": (hooks.stop_if_no_decrease_hook, 7),
        "no increase": (hooks.stop_if_no_increase_hook, 5),
        "higher": (hooks.stop_if_higher_hook, 2.9),
        "never higher": (hooks.stop_if_higher_hook, 3.1),
        "lower": (hooks.stop_if_lower_hook, 2.1),
    }
    for name, (kind, value) in kinds.items():
        model = made(f"{path}/{name}")
        hook = kind(model, "loss", value, eval_dir=str(evaluations), run_every_steps=1)
        model.train(batches(16), hooks=[hook], steps=4)
        found[name] = int(model.get_variable_value("global_step"))
    resumed = made(f"{path}/higher")
    resumed.train(batches(16), steps=2)
    found["resumed"] = int(resumed.get_variable_value("global_step"))
    return found


def with_more_metrics(strategy: Any, *, path: str) -> dict[str, Any]:
    def metric_fn(labels: Any, predictions: Any) -> Any:
        return {"squared": tf1.metrics.mean_squared_error(labels, predictions["value"])}

    model = made(path)
    model.train(batches(16), steps=3)
    return estimator.add_metrics(model, metric_fn).evaluate(batches(16, 1))


def hooks_of_the_model(strategy: Any, *, path: str) -> list[str]:
    """The hooks and the scaffold that a model brings are used, in each mode."""
    called: list[str] = []

    class Noting(estimator.SessionRunHook):
        def __init__(self, name: str) -> None:
            self.name = name

        def end(self, session: Any) -> None:
            called.append(self.name)

    def function(features: Any, labels: Any, mode: str) -> Any:
        spec = model_fn(features, labels, mode, {})
        scaffold = estimator.Scaffold(init_fn=lambda scaffold, session: called.append("init"))
        return spec._replace(
            scaffold=scaffold if mode == estimator.ModeKeys.TRAIN else None,
            training_hooks=(Noting("train"),),
            training_chief_hooks=(Noting("chief"),),
            evaluation_hooks=(Noting("eval"),),
            prediction_hooks=(Noting("predict"),),
        )

    model = estimator.Estimator(function, model_dir=path)
    model.train(batches(16), hooks=[Noting("own")], steps=1)
    model.evaluate(batches(16, 1))
    list(model.predict(batches(16, 1)))
    return called


def in_served_job(call: Any) -> None:
    """Calls a function where the strategy of this job is Keras's parameter servers."""
    factory._active[:] = [types.SimpleNamespace(name="parameter_server")]
    try:
        call()
    finally:
        factory._active.clear()


def in_cluster(call: Any) -> None:
    """Calls a function in the first of two workers without a parameter server."""
    cluster = {"worker": ["127.0.0.1:1", "127.0.0.1:2"]}
    place = json.dumps({"cluster": cluster, "task": {"type": "worker", "index": 0}})
    with environment.patched({"TF_CONFIG": place}):
        call()


def mistakes(strategy: Any, *, path: str) -> dict[str, str]:
    """What each mistake is told."""
    spec = estimator.EstimatorSpec
    loss = tf.constant(0.0)
    receiver = estimator.export.build_raw_serving_input_receiver_fn(
        {"x": tf.TensorSpec([None, 3], tf.float32)}
    )
    model = made(path)
    wrong = {
        "no train_op": lambda: spec("train", loss=loss),
        "mode": lambda: spec("training", loss=loss),
        "vector loss": lambda: spec("eval", loss=tf.zeros([2])),
        "keras metric": lambda: spec("eval", loss=loss, eval_metric_ops={"m": object()}),
        "hook": lambda: spec("eval", loss=loss, evaluation_hooks=[1]),
        "model_fn": lambda: estimator.Estimator(lambda features, label: None),
        "both steps": lambda: model.train(batches(16), steps=1, max_steps=1),
        "no steps": lambda: model.train(batches(16), steps=0),
        "both saves": lambda: estimator.RunConfig(
            save_checkpoints_steps=1, save_checkpoints_secs=1
        ),
        "both dirs": lambda: estimator.Estimator(model_fn, "a", estimator.RunConfig("b")),
        "replace": lambda: estimator.RunConfig().replace(model_dri="x"),
        "no checkpoint": lambda: model.export_saved_model(path, receiver),
        "no variable": lambda: model.get_variable_value("w"),
        "strategy": lambda: made(path, train_distribute="mirored"),
        "servers": lambda: made(path, train_distribute="parameter_server"),
        "input_fn": lambda: model.train(lambda feature: None, steps=1),
        "three": lambda: model.train(lambda: (1, 2, 3), steps=1),
        "export mode": lambda: model.export_saved_model(path, receiver, experimental_mode="train"),
        "warm start": lambda: made(path, warm_start_from=f"{path}/none").train(
            batches(16), steps=1
        ),
        "served chief": lambda: in_served_job(lambda: made(path)),
        "gone": lambda: estimator.BoostedTreesClassifier,
        "empty dir": lambda: estimator.RunConfig(""),
        "each alone": lambda: in_cluster(lambda: made(path).train(batches(16), steps=1)),
        "no saving": lambda: estimator.train_and_evaluate(
            made(path, save_checkpoints_secs=None, save_checkpoints_steps=None),
            estimator.TrainSpec(batches(16), max_steps=2),
            estimator.EvalSpec(batches(16)),
        ),
    }
    found = {}
    for name, call in wrong.items():
        try:
            call()
        except (tfdist.ConfigError, AttributeError) as error:
            found[name] = str(error)
    return found


def mirrored(strategy: Any, *, path: str, replicas: int) -> dict[str, Any]:
    """Trains and evaluates on some devices: batches of 8 each, 16 in all."""
    more: dict[str, Any] = {}
    if replicas > 1:
        chosen = tfdist.Mirrored([f"CPU:{i}" for i in range(replicas)])
        more = {"train_distribute": chosen, "eval_distribute": chosen}
    model = made(path, save_checkpoints_steps=10, save_summary_steps=1, **more)
    model.train(batches(16 // replicas, 5), max_steps=12)
    middle = weights(model)
    model.train(batches(16 // replicas), steps=4)
    x, y = data(60)
    uneven = tf.data.Dataset.from_tensor_slices
    return {
        "middle": middle,
        "weights": weights(model),
        "names": model.get_variable_names(),
        "metrics": model.evaluate(lambda: uneven(({"x": x}, y)).batch(4)),
    }


def trained_in_turns(strategy: Any, *, path: str) -> dict[str, Any]:
    """Trains one model on one device, on two, and on two of another strategy: 4 steps each.

    As it is, and with losses that are scaled for float16 while gradients are computed.
    """
    scaled = tf1.mixed_precision.MixedPrecisionLossScaleOptimizer
    wrappers: dict[str, Any] = {
        "as they are": lambda inner: inner,
        "dynamic": lambda inner: scaled(inner, "dynamic"),
        "fixed": lambda inner: scaled(inner, 128.0),
    }

    def function(features: Any, labels: Any, mode: str, params: Any) -> Any:
        spec = model_fn(features, labels, "eval", params)
        optimizer = params["wrapper"](tf1.train.GradientDescentOptimizer(RATE))
        train_op = optimizer.minimize(spec.loss, global_step=tf1.train.get_global_step())
        return estimator.EstimatorSpec(mode, loss=spec.loss, train_op=train_op)

    devices = ["CPU:0", "CPU:1"]
    found = {}
    for name, wrapper in wrappers.items():
        for chosen in (None, tfdist.Mirrored(devices), tf.distribute.MirroredStrategy(devices)):
            config = estimator.RunConfig(f"{path}/{name}", train_distribute=chosen)
            model = estimator.Estimator(function, config=config, params={"wrapper": wrapper})
            model.train(batches(16 if chosen is None else 8), steps=4)
        found[name] = weights(model)
    return found


def mirrored_alone(strategy: Any, *, path: str, replicas: int, same: bool) -> dict[str, Any]:
    """`train_and_evaluate` on some devices: each evaluation opens a scope within the training's."""
    devices = [f"CPU:{i}" for i in range(replicas)]
    training = tfdist.Mirrored(devices)
    more = {
        "train_distribute": training,
        "eval_distribute": training if same else tfdist.Mirrored(devices),
    }
    model = made(path, save_checkpoints_steps=5, **(more if replicas > 1 else {}))
    metrics, _ = estimator.train_and_evaluate(
        model,
        estimator.TrainSpec(batches(16 // replicas), max_steps=12),
        estimator.EvalSpec(batches(8, 1), steps=None, throttle_secs=0),
    )
    evaluations = dict(eval_metrics(model.eval_dir()))
    return {"metrics": metrics, "weights": weights(model), "evaluations": evaluations}


def _shard(input_context: Any, sizes: tuple[int, int]) -> Any:
    x, y = data()
    own, count = input_context.input_pipeline_id, input_context.num_input_pipelines
    all_batches = tf.data.Dataset.from_tensor_slices(({"x": x}, y)).repeat(5).batch(8)
    return all_batches.shard(count, own).take(sizes[own])


def multi_worker(strategy: Any, *, path: str) -> dict[str, Any]:
    """Trains on two processes: to a number of steps, to the end of one's input, to one's wish."""
    model = made(path, save_checkpoints_steps=10, train_distribute=strategy)
    place = json.loads(environment.read("TF_CONFIG"))["task"]["index"]
    model.train(lambda input_context: _shard(input_context, (50, 50)), max_steps=12)
    found = {"weights": weights(model), "chief": model.config.is_chief, "index": place}
    model.train(lambda input_context: _shard(input_context, (9, 3)))
    found["after uneven"] = int(model.get_variable_value("global_step"))

    class Once(estimator.SessionRunHook):
        def after_run(self, run_context: Any, run_values: Any) -> None:
            if place == 1:
                run_context.request_stop()

    model.train(lambda input_context: _shard(input_context, (20, 20)), hooks=[Once()])
    found["after wish"] = int(model.get_variable_value("global_step"))
    found["metrics"] = model.evaluate(batches(16, 1))
    return found


def written(strategy: Any, *, path: str, export: str | None) -> dict[str, Any]:
    """What a job has left in its directory."""
    model = made(path)
    found = {
        "step": int(model.get_variable_value("global_step")),
        "weights": weights(model),
        "evaluations": dict(eval_metrics(model.eval_dir())),
    }
    if export is not None:
        (place,) = Path(path, "export", export).iterdir()
        x, _ = data()
        served = tf.saved_model.load(str(place)).signatures["serving_default"]
        found["exported"] = served(x=tf.constant(x))["value"].numpy()
    return found
