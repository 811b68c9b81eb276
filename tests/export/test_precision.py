"""float16 and int8: how far off, what it costs on data, and when that is too much."""

from __future__ import annotations

import os

import keras
import numpy as np
import onnx
import pytest

import tfdist
from tests.cases.digits import load_digits
from tests.export import models
from tfdist.exporting import ExportError, compare
from tfdist.exporting.examples import Examples
from tfdist.exporting.onnx_models import precision_of
from tfdist.exporting.precision import scores


@pytest.fixture(scope="module")
def digits():
    """A small convolutional network that knows the digits, and data that it has not seen."""
    keras.utils.set_random_seed(3)
    data = load_digits()
    x, y = (data.images[..., None] / 16).astype("float32"), data.target
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1), name="image"),
            keras.layers.Conv2D(16, 3, activation="relu", name="convolution"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss)
    model.fit(x[:1200], y[:1200], epochs=12, batch_size=32, verbose=0)
    return model, x[1200:], y[1200:]


def accuracy(model, x, y):
    return float((np.asarray(model(x)).argmax(-1) == y).mean())


@pytest.mark.parametrize("kind", [models.convnet, models.transformer, models.recurrent])
def test_float16_is_close_and_keeps_its_inputs_and_outputs(kind, tmp_path):
    path = tmp_path / "half.onnx"
    report = tfdist.export(kind(), path, precision="float16")
    assert 0 < report.comparison.worst.relative < 5e-3
    model = onnx.load(path)
    halves = [t for t in model.graph.initializer if t.data_type == onnx.TensorProto.FLOAT16]
    assert halves
    types = {v.type.tensor_type.elem_type for v in (*model.graph.input, *model.graph.output)}
    assert onnx.TensorProto.FLOAT16 not in types
    assert precision_of(model) == "float16"


def test_float16_that_overflows_names_its_layer(tmp_path):
    model = models.sequential()
    model.layers[0].set_weights([w * 7e4 for w in model.layers[0].get_weights()])
    with pytest.raises(ExportError, match=r"float16 can hold") as raised:
        tfdist.export(model, tmp_path / "m.onnx", precision="float16")
    assert raised.value.layer == model.layers[0].name
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("precision", ["int8", "int8_static"])
def test_int8_is_scored_on_the_data(precision, digits, tmp_path):
    model, x, y = digits
    path = tmp_path / "small.onnx"
    report = tfdist.export(
        model, path, precision=precision, data={"x": x, "y": y}, calibration=100, accuracy_loss=0.02
    )
    unseen = 100 if precision == "int8_static" else 0  # those that set scales are not scored
    (score,) = report.scores
    assert score.examples == len(x) - unseen
    assert score.metric == "accuracy"
    assert score.model == pytest.approx(accuracy(model, x[unseen:], y[unseen:]), abs=1e-6)
    assert score.model > 0.85
    assert 0 < report.comparison.worst.relative < 0.5
    written = onnx.load(path)
    assert precision_of(written) == precision
    assert ("MatMulInteger" in {node.op_type for node in written.graph.node}) == (not unseen)
    kernels = [t for t in written.graph.initializer if len(t.dims) == 4]
    eighth = onnx.TensorProto.INT8 if unseen else onnx.TensorProto.FLOAT
    assert {t.data_type for t in kernels} == {eighth}
    eights = [t for t in written.graph.initializer if t.data_type == onnx.TensorProto.INT8]
    matrices = [onnx.numpy_helper.to_array(t).astype(int) for t in eights if len(t.dims) > 1]
    assert matrices
    for matrix in matrices:
        # Two products with a uint8 stay within an int16: without VNNI they are added up in one.
        assert 2 * 255 * np.abs(matrix).max() < 2**15
    assert compare(model, path, data={"x": x[:5]}).ok


def test_int8_that_costs_too_much_writes_nothing(digits, tmp_path):
    model, x, y = digits
    path = tmp_path / "small.onnx"
    path.write_bytes(b"the old one")
    wrong = np.where(np.asarray(model(x)).argmax(-1) == y, y, -1)
    rough = keras.models.clone_model(model)
    weights = model.get_weights()
    weights[2][0, 0] = 60.0  # one large weight takes the steps of its column's scale
    weights[4][0, 0] = 60.0
    rough.set_weights(weights)
    cost = tfdist.export(
        rough, tmp_path / "look.onnx", precision="int8", data={"x": x, "y": wrong}, tolerance=9
    ).scores[0]
    assert cost.loss != 0
    with pytest.raises(ExportError, match=r"int8 changes the accuracy of 'output' from .* to "):
        _no_loss_at_all(rough, x, path)
    assert path.read_bytes() == b"the old one"


def _no_loss_at_all(model, x, path):
    """Labels that are what the model says: any change is a loss."""
    said = np.asarray(model(x)).argmax(-1)
    data = {"x": x, "y": said}
    tfdist.export(model, path, precision="int8", data=data, accuracy_loss=0, tolerance=9)


def test_nothing_to_quantise(tmp_path):
    model = keras.Sequential([keras.Input((4,)), keras.layers.ReLU()])
    with pytest.raises(ExportError, match="Nothing of the model could be quantised"):
        tfdist.export(model, tmp_path / "m.onnx", precision="int8")


def test_int8_of_loops(tmp_path):
    path = tmp_path / "m.onnx"
    report = tfdist.export(models.recurrent(), path, precision="int8")
    assert report.comparison.worst.relative < 0.1
    assert "Loop" in {node.op_type for node in onnx.load(path).graph.node}


@pytest.mark.parametrize(
    ("labels", "outputs", "metric", "value"),
    [
        ([1, 0], [[0.1, 0.9], [0.2, 0.8]], "accuracy", 0.5),
        ([[1], [0]], [[0.1, 0.9], [0.8, 0.2]], "accuracy", 1.0),
        ([[0, 1], [1, 0]], [[0.1, 0.9], [0.2, 0.8]], "accuracy", 0.5),
        ([1, 0], [[0.7], [0.6]], "accuracy", 0.5),
        ([1, 0], [[3.0], [-2.0]], "accuracy", 1.0),
        ([0.5, 1.5], [[0.5], [2.5]], "mean squared error", 0.5),
        ([[0.5, 1.0]], [[0.5, 3.0]], "mean squared error", 2.0),
    ],
)
def test_scores(labels, outputs, metric, value):
    examples = Examples({"x": np.zeros((len(labels), 1))}, {"output": np.array(labels)})
    written = [[0.0] * len(row) for row in outputs]
    (score,) = scores(
        lambda _: {"output": np.array(outputs)}, lambda _: {"output": np.array(written)}, examples
    )
    assert (score.metric, score.model) == (metric, pytest.approx(value))


def test_scores_of_unlabelled_data_are_none():
    assert scores(dict, dict, Examples({"x": np.zeros((2, 1))}, {})) == ()
