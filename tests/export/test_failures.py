"""What goes wrong: each message, and that nothing is lost or left behind."""

from __future__ import annotations

import os
import re

import keras
import numpy as np
import onnx
import pytest
import tensorflow as tf

import tfdist
from tests.export import models
from tfdist.errors import TfdistError
from tfdist.exporting import ExportError, Input, compare, conversion, onnx_models
from tfdist.exporting.conversion import layer_of
from tfdist.exporting.examples import read
from tfdist.exporting.loading import load


def changed(weights, name):
    """A converter that makes a mistake in one weight."""
    original = conversion.convert

    def convert(subject, opset):
        model = original(subject, opset)
        node = next(n for n in model.graph.node if re.search(name, n.name))
        tensor = next(
            t for t in model.graph.initializer if t.name in node.input and len(t.dims) > 1
        )
        values = onnx.numpy_helper.to_array(tensor) * 3 + 0.5
        tensor.CopyFrom(onnx.numpy_helper.from_array(values.astype("float32"), tensor.name))
        weights.append(tensor.name)
        return model

    return convert


@pytest.mark.parametrize(
    ("factory", "node", "layer"),
    [
        (models.convnet, "second.*separable", "second"),
        (models.convnet, "head.*MatMul", "head"),
        (models.transformer, "words.*Gather", "words"),
        (models.transformer, "^Gemm__", "attention"),
        (models.recurrent, "head.*MatMul", "head"),
        (models.nested, "inside_1/MatMul$", "encoder/inside"),
    ],
    ids=["depthwise", "last", "embedding", "attention", "after_masked_lstm", "nested"],
)
def test_a_failed_check_names_the_layer_and_keeps_the_old_file(
    factory, node, layer, tmp_path, monkeypatch
):
    path, touched = tmp_path / "model.onnx", []
    path.write_bytes(b"the old one")
    monkeypatch.setattr(conversion, "convert", changed(touched, node))
    with pytest.raises(ExportError, match="differs from the model's by") as raised:
        tfdist.export(factory(), path)
    assert touched
    assert raised.value.layer.split("/")[0] == layer.split("/")[0]
    assert f"first layer that differs is '{layer.split('/')[0]}" in str(raised.value)
    assert path.read_bytes() == b"the old one"
    assert os.listdir(tmp_path) == ["model.onnx"]


def test_a_saved_model_that_differs_is_not_written(tmp_path, monkeypatch):
    model, place = models.sequential(), tmp_path / "saved"
    tfdist.export(model, place)
    before = (place / "saved_model.pb").read_bytes()
    export = type(model).export

    def other(self, *args, **options):
        self.layers[-1].set_weights([w + 1 for w in self.layers[-1].get_weights()])
        export(self, *args, **options)

    monkeypatch.setattr(type(model), "export", other)
    with pytest.raises(ExportError, match="differs from the model's"):
        tfdist.export(model, place)
    assert (place / "saved_model.pb").read_bytes() == before
    assert os.listdir(tmp_path) == ["saved"]


@pytest.mark.parametrize(
    ("factory", "layer", "message"),
    [
        (models.with_python, "own", r"EagerPyFunc of the layer 'own'.*runs Python code"),
        (models.with_lookup, "words", r"LookupTableFind\w* of the layer 'words'.*in a table"),
        (
            lambda: keras.Sequential(
                [
                    keras.Input((4, 4)),
                    keras.layers.Lambda(lambda x: tf.linalg.svd(x)[0], name="values"),
                ]
            ),
            "values",
            r"Svd of the layer 'values'.*Replace it",
        ),
    ],
    ids=["python", "lookup", "svd"],
)
def test_operations_without_an_operator_are_named_with_their_layer(
    factory, layer, message, tmp_path
):
    with pytest.raises(ExportError, match=message) as raised:
        tfdist.export(factory(), tmp_path / "m.onnx")
    assert raised.value.layer == layer
    assert os.listdir(tmp_path) == []


def test_a_saved_model_keeps_lookups(tmp_path):
    tfdist.export(models.with_lookup(), tmp_path / "saved", data={"x": [["a"], ["?"]]})
    loaded = tf.saved_model.load(str(tmp_path / "saved"))
    assert loaded.serve(tf.constant([["b"]])).shape == (1, 1, 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "tflite"}, "Unknown format 'tflite'"),
        ({"precision": "float61"}, "Did you mean 'float16'"),
        ({"opsets": 17}, "Unknown option 'opsets'. Did you mean 'opset'"),
        ({"opset": 99}, "opset=99 .* 13 to 18"),
        ({"format": "saved_model"}, "conflicts with '.*m.onnx', the name of an ONNX model"),
        ({"path": "missing/m.onnx"}, "the directory '.*missing' does not exist"),
        ({"path": "m.bin"}, "cannot be told from its name"),
        ({"path": "folder", "format": "onnx"}, "is a directory"),
        ({"path": "full"}, "holds other things than a SavedModel"),
        ({"path": "file", "format": "saved_model"}, "is a file"),
        ({"path": "s", "precision": "int8"}, "conflicts with format='saved_model'"),
        ({"precision": "int8_static"}, "first 128 examples of the data, and there is none"),
        ({"accuracy_loss": 0.1}, "precision='float32'"),
        ({"accuracy_loss": 0.1, "precision": "int8"}, "needs data with labels"),
        ({"tolerance": 0}, "tolerance=0 is not a number above 0"),
        ({"calibration": 0}, "calibration=0 is not a whole number"),
        ({"signature": "serve"}, "names a signature of a SavedModel"),
        ({"inputs": ["other:float32[?,5]"]}, "is none of the model's, which are input:float32"),
        ({"inputs": ["input:float32[?,7]"]}, "the model fixes, 5, cannot be changed"),
        ({"inputs": ["input:float32[?,5,1]"]}, "has 3 sizes"),
        ({"inputs": ["input:int32[?,5]"]}, "int32 cannot stand in for float32"),
        ({"inputs": ["input:float32[?,5]"] * 2}, "name one twice"),
        ({"inputs": ["input"]}, "not of the form NAME:DTYPE"),
        ({"inputs": ["input:float31[?]"]}, "unknown type 'float31'"),
        ({"inputs": ["input:float32[0]"]}, "has the size '0'"),
        ({"model": 5}, "A int is not a Keras model"),
        ({"data": {"z": np.ones((3, 5))}}, "The data has z, and the model takes x or input"),
        ({"data": {"x": np.ones((3, 4))}}, r"has the shape \[3, 4\], which does not fit"),
        ({"data": {"x": np.ones((3, 5)), "y": np.ones(4)}}, "different numbers of examples"),
        ({"data": {"x": np.ones((3, 5)), "y": np.ones((3, 7))}}, "The labels for 'output' have"),
        ({"data": {"x": np.ones((3, 5)), "q": np.ones(3)}}, "Labels are named y or output"),
        ({"data": {"x": np.ones((0, 5))}}, "holds no examples"),
        ({"data": "missing.npz"}, "'missing.npz' does not exist"),
        ({"weights": "missing.weights.h5"}, "'missing.weights.h5' do not exist"),
        ({"weights": "missing"}, "'missing' do not exist"),
    ],
    ids=lambda value: "" if isinstance(value, str) else "-".join(value),
)
def test_mistakes_in_the_call(change, message, tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter.txt").write_text("dear")
    (tmp_path / "file").write_text("text")
    (tmp_path / "m.onnx").write_bytes(b"the old one")
    call = {"model": models.sequential(), "path": "m.onnx", **change}
    path = tmp_path / call.pop("path")
    with pytest.raises(tfdist.ConfigError, match=message):
        tfdist.export(call.pop("model"), path, **call)
    assert (tmp_path / "m.onnx").read_bytes() == b"the old one"
    assert sorted(os.listdir(tmp_path)) == ["file", "folder", "full", "m.onnx"]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("missing.keras", "'missing.keras' does not exist"),
        ("folder", "no SavedModel"),
        ("text.keras", "damaged, or no model"),
        ("text.txt", "not a model that can be read"),
        ("m.weights.h5", "holds weights and not the model"),
        ("tests.export.models:nothing", "has no function 'nothing'"),
        ("tests.export.models:no_model", "returned a int"),
        ("tests.export.models:broken", "RuntimeError: no weights today"),
        ("tests.export.nowhere:f", "ModuleNotFoundError"),
        ("nowhere.py:f", "'nowhere.py', which .* does not exist"),
        ("own.keras", "uses 'Own', which Keras does not know.*--import"),
        ("lambda.keras", "Python code of a Lambda layer"),
    ],
)
def test_models_that_cannot_be_loaded(source, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "folder").mkdir()
    for name in ("text.keras", "text.txt", "m.weights.h5"):
        (tmp_path / name).write_text("no model")

    class Own(keras.layers.Layer):
        def call(self, x):
            return x

    if source == "own.keras":
        keras.Sequential([keras.Input((2,)), Own()]).save(source)
    if source == "lambda.keras":
        keras.Sequential([keras.Input((2,)), keras.layers.Lambda(lambda x: x + 1)]).save(source)
    with pytest.raises(tfdist.ConfigError, match=message):
        load(source)


def test_weights_of_every_kind(tmp_path):
    model = models.sequential()
    model.compile("adam", "mse")
    model.save_weights(tmp_path / "m.weights.h5")
    tf.train.Checkpoint(model=model, optimizer=model.optimizer).save(str(tmp_path / "all" / "ckpt"))
    tf.train.Checkpoint(net=model).save(str(tmp_path / "net"))
    tf.train.Checkpoint(model).write(str(tmp_path / "root"))
    x = np.ones((2, 5), "float32")
    for name in ("m.weights.h5", "all", "all/ckpt-1", "net-1", "root", "root.index"):
        loaded = load("tests.export.models:sequential", str(tmp_path / name))
        np.testing.assert_array_equal(loaded(x), model(x), err_msg=name)
    for name in ("m.weights.h5", "all", "root"):
        with pytest.raises(tfdist.ConfigError, match=r"do not fit|does not hold the weights"):
            load("tests.export.models:nested", str(tmp_path / name))


def test_missing_packages_are_named_with_the_command(monkeypatch, tmp_path):
    def nothing(name):
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    export = tfdist.export
    missing = pytest.raises(tfdist.ConfigError, match=r"'tf2onnx'.*pip install 'tfdist\[export\]'")
    with monkeypatch.context() as patch, missing:
        patch.setattr(onnx_models.importlib, "import_module", nothing)
        export(models.sequential(), tmp_path / "m.onnx")
    export(models.sequential(), tmp_path / "saved")


def test_what_is_no_onnx_model_or_of_another_one(tmp_path):
    path = tmp_path / "m.onnx"
    with pytest.raises(tfdist.ConfigError, match="does not exist"):
        compare(models.sequential(), path)
    path.write_bytes(b"no model")
    with pytest.raises(tfdist.ConfigError, match="not a valid ONNX model"):
        compare(models.sequential(), path)
    tfdist.export(models.nested(), path)
    with pytest.raises(tfdist.ConfigError, match="It is of another model"):
        compare(models.sequential(), path)
    (tmp_path / "x.npz").write_bytes(b"no data")
    with pytest.raises(tfdist.ConfigError, match=r"no \.npz file"):
        read(str(tmp_path / "x.npz"))


def test_a_full_disk_is_told_and_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "m.onnx"
    path.write_bytes(b"the old one")

    def full(model, place):
        del model, place
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(conversion, "write", full)
    with pytest.raises(TfdistError, match=r"No space left on device\. What was there"):
        tfdist.export(models.sequential(), path)
    assert path.read_bytes() == b"the old one"
    assert os.listdir(tmp_path) == ["m.onnx"]


def test_layers_are_found_by_the_names_of_operations():
    names = frozenset({"dense", "dense_1", "encoder"})
    assert layer_of("functional_1/dense_1/MatMul", names) == "dense"
    assert layer_of("functional_1/dense_1_1/MatMul", names) == "dense_1"
    assert layer_of("functional_1/encoder_1/dense_1_3/MatMul", names) == "encoder/dense_1"
    assert layer_of("functional_1/add", names) == ""
    assert layer_of("a/b/MatMul", frozenset()) == "a/b"


def test_inputs_are_written_as_they_are_read():
    for text in ("x:float32[?,128]", "y:string[]", "z:int64[2]"):
        assert str(Input.parse(text)) == text
