"""Models of all kinds as ONNX and SavedModel: the outputs, names and shapes of what is written."""

from __future__ import annotations

import keras
import numpy as np
import onnxruntime
import pytest
import tensorflow as tf

import tfdist
from tests.export import models
from tfdist.exporting import Input, compare
from tfdist.exporting.conversion import joined


def session(path):
    return onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])


def described(values):
    return {each.name: each.shape for each in values}


KINDS = {
    "convnet": models.convnet,
    "transformer": models.transformer,
    "several": models.several,
    "listed": models.listed,
    "lstm": models.recurrent,
    "gru": lambda: models.recurrent("GRU", masked=False),
    "nested": models.nested,
    "sequential": models.sequential,
}


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=[pytest.mark.core] * (k == "sequential")) for k in KINDS]
)
def test_onnx_computes_what_the_model_computes(kind, tmp_path):
    model, path = KINDS[kind](), tmp_path / "model.onnx"
    report = tfdist.export(model, path)
    assert report.comparison.ok
    assert report.comparison.worst.relative < 1e-5
    assert len({each.case for each in report.comparison.differences}) == 3
    assert report.size == path.stat().st_size
    # Beside the checks of the export itself, on other inputs, of a size that it did not try.
    random = np.random.default_rng(1)
    values = {}
    for each in report.inputs:
        shape = [size or 5 for size in each.shape]
        whole = "int" in each.dtype
        drawn = random.integers(1, 30, shape) if whole else random.standard_normal(shape)
        values[each.name] = drawn.astype(each.dtype)
    arguments = [tf.constant(values[each.name]) for each in report.inputs]
    if kind == "several":
        expected = model(dict(zip(values, arguments, strict=True)))
    else:
        expected = model(arguments if len(arguments) > 1 else arguments[0])
    actual = session(path).run(None, values)
    for want, got in zip(
        keras.tree.flatten(expected), in_order(expected, report, actual), strict=True
    ):
        np.testing.assert_allclose(got, want, atol=1e-5)


def in_order(expected, report, actual):
    """The outputs by their names where the model names them: Keras sorts a dict's keys."""
    names = list(dict.fromkeys(each.output for each in report.comparison.differences))
    by_name = dict(zip(names, actual, strict=True))
    return [by_name[n] for n in sorted(by_name)] if isinstance(expected, dict) else actual


def test_names_and_open_sizes(tmp_path):
    tfdist.export(models.transformer(), tmp_path / "t.onnx")
    tokens = session(tmp_path / "t.onnx")
    assert described(tokens.get_inputs()) == {"tokens": ["batch", "tokens_1"]}
    assert list(described(tokens.get_outputs())) == ["output"]
    tfdist.export(models.listed(), tmp_path / "l.onnx")
    listed = session(tmp_path / "l.onnx")
    assert list(described(listed.get_inputs())) == ["b", "a"]
    assert list(described(listed.get_outputs())) == ["z", "y"]


def test_given_inputs_narrow_the_signature(tmp_path):
    path = tmp_path / "t.onnx"
    report = tfdist.export(models.transformer(), path, inputs=["tokens:int64[2,9]"], opset=15)
    assert described(session(path).get_inputs()) == {"tokens": [2, 9]}
    assert [str(each) for each in report.inputs] == ["tokens:int64[2,9]"]
    assert {each.case for each in report.comparison.differences} == {"batch 2"}


def test_subclasses(tmp_path):
    two, path = models.TwoArguments(), tmp_path / "m.onnx"
    with pytest.raises(tfdist.ConfigError, match="does not say what inputs it takes"):
        tfdist.export(two, path)
    with pytest.raises(tfdist.ConfigError, match=r"called with left, right.*Name them after"):
        tfdist.export(two, path, inputs=["a:float32[?,4]", "b:float32[?,5]"])
    report = tfdist.export(
        two, path, inputs=["left:float32[?,4]", Input("right", "float32", (None, 5))]
    )
    assert report.comparison.ok
    of_dict = models.OfDict()
    of_dict({"p": np.ones((2, 3)), "q": np.ones((2, 4))})
    assert tfdist.export(of_dict, path).comparison.ok
    assert list(described(session(path).get_inputs())) == ["p", "q"]


def test_saved_models_there_and_back(tmp_path):
    model, place = models.transformer(), str(tmp_path / "saved")
    report = tfdist.export(model, place, inputs=["tokens:int32[?,11]"])
    assert report.options.format == "saved_model"
    assert report.comparison.worst.relative < 1e-5
    served = tf.saved_model.load(place)
    tokens = np.arange(22, dtype="int32").reshape(2, 11)
    np.testing.assert_allclose(served.serve(tokens), model(tokens), atol=1e-6)
    assert tfdist.export(place, tmp_path / "s.onnx").comparison.worst.relative < 1e-5
    again = tfdist.export(models.several(), place)  # replaces the one that is there
    assert again.comparison.ok
    with pytest.raises(tfdist.ConfigError, match="is a SavedModel already"):
        tfdist.export(place, tmp_path / "other")


def test_signatures_of_a_graph_of_tensorflow_1(tmp_path):
    place = str(tmp_path / "v1")
    v1 = tf.compat.v1
    with tf.Graph().as_default(), v1.Session() as run:
        x = v1.placeholder(tf.float32, (None, 3), "x")
        logits = tf.matmul(x, v1.get_variable("w", (3, 2)))
        run.run(v1.global_variables_initializer())
        builder = v1.saved_model.Builder(place)
        predict = v1.saved_model.predict_signature_def
        builder.add_meta_graph_and_variables(
            run,
            ["serve"],
            {
                "classes": predict({"x": x}, {"class": tf.argmax(logits, -1)}),
                "predict": predict({"x": x}, {"logits": logits, "p": tf.nn.softmax(logits)}),
            },
        )
        builder.save()
    path = tmp_path / "m.onnx"
    with pytest.raises(tfdist.ConfigError, match=r"several signatures.*'classes', 'predict'"):
        tfdist.export(place, path)
    assert tfdist.export(place, path, signature="predict").comparison.ok
    assert list(described(session(path).get_outputs())) == ["logits", "p"]
    assert tfdist.export(place, path, signature="classes").comparison.worst.relative == 0


def test_layers_on_a_machine_that_is_not_there_are_joined(tmp_path):
    # The first call builds it here; a trace names the device and does not look for it.
    model = models.placed("/cpu:0")
    model.layers[2].device = "/job:worker/replica:0/task:7/device:GPU:3"

    def infer(x):
        return {"output": model(x)}

    function = tf.function(infer, input_signature=[tf.TensorSpec((None, None, 6), name="x")])
    traced = function.get_concrete_function().graph
    assert any("task:7" in each.device for each in traced.get_operations())
    graph = joined(function).get_concrete_function().graph
    nodes = [*graph.as_graph_def().node]
    nodes += [n for body in graph.as_graph_def().library.function for n in body.node_def]
    assert len(nodes) > 30
    assert not any(node.device for node in nodes)


def test_saved_models_ask_for_no_device_that_was_placed_on(tmp_path):
    place = str(tmp_path / "placed")
    model = models.placed("/device:CPU:0")
    model.layers[2].device = "/device:GPU:5"  # softly placed here, for want of one
    tfdist.export(model, place)
    content = (tmp_path / "placed" / "saved_model.pb").read_bytes()
    assert b"GPU:5" not in content
    assert b"CPU:0" in content
    path = tmp_path / "placed.onnx"
    assert tfdist.export(model, path).comparison.ok


def test_compare_reads_a_model_back(tmp_path):
    model, path = models.several(), tmp_path / "m.onnx"
    tfdist.export(model, path, inputs=["first:float32[3,4]"])
    found = compare(model, path)
    assert found.ok
    assert {each.output for each in found.differences} == {"value", "classes"}
    model.layers[-1].set_weights([w + 0.5 for w in model.layers[-1].get_weights()])
    found = compare(model, path)
    assert not found.ok
    assert found.layer == model.layers[-1].name


@pytest.mark.parametrize("name", ["multi_worker", "parameter_server"])
def test_models_of_a_job(name, cluster, tmp_path):
    workers = cluster(name).call("tests.export.cases:exported", path=str(tmp_path))
    assert workers[0]["written"][:1] == ["m.onnx"]
    assert all("m.onnx" not in worker["written"] for worker in workers[1:])
    assert all(max(worker["relative"]) < 1e-5 for worker in workers)
    x, expected = workers[0]["x"], workers[0]["expected"]
    (actual,) = session(tmp_path / "m.onnx").run(None, {"input": x})
    np.testing.assert_allclose(actual, expected, atol=1e-5)
    served = tf.saved_model.load(str(tmp_path / "saved"))
    np.testing.assert_allclose(served.serve(x), expected, atol=1e-5)
    assert not [entry for entry in tmp_path.iterdir() if entry.name.endswith(".partial")]


def test_what_an_estimator_exports(cluster, tmp_path):
    place = tmp_path / "model"
    written = cluster("plain").call("tests.export.cases:exported_estimator", path=str(place))[0]
    path = tmp_path / "m.onnx"
    tfdist.export(written["raw"], path)
    values = dict(
        zip(
            ["twice", "value"],
            session(path).run(["twice", "value"], {"x": written["x"]}),
            strict=True,
        )
    )
    np.testing.assert_allclose(values["value"], written["value"], atol=1e-6)
    np.testing.assert_allclose(values["twice"], 2 * written["value"], atol=1e-6)
    with pytest.raises(
        tfdist.TfdistError, match=r"ParseExample.*Export a signature that takes plain"
    ):
        tfdist.export(written["parsing"], path)
