"""Settings that a program makes too late, inside a scope."""

from __future__ import annotations

import pytest
import tensorflow as tf

import tfdist


def _devices():
    return [tf.config.LogicalDeviceConfiguration()] * 3


SETTINGS = {
    "threads between ops": lambda: tf.config.threading.set_inter_op_parallelism_threads(7),
    "threads of an op": lambda: tf.config.threading.set_intra_op_parallelism_threads(7),
    "logical devices": lambda: tf.config.set_logical_device_configuration(_cpu(), _devices()),
    "virtual devices": lambda: tf.config.experimental.set_virtual_device_configuration(
        _cpu(), _devices()
    ),
    "visible devices": lambda: tf.config.set_visible_devices([], "CPU"),
    "visible, as before": lambda: tf.config.experimental.set_visible_devices([], "CPU"),
}


def _cpu():
    return tf.config.list_physical_devices("CPU")[0]


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_setting_that_comes_too_late_is_named_and_passed_over(setting, capsys):
    tf.zeros(())  # TensorFlow has started.
    with tfdist.Single("CPU:0").scope():
        SETTINGS[setting]()
        assert "of the program has no effect" in capsys.readouterr().err
    with pytest.raises(RuntimeError):
        SETTINGS[setting]()


def test_what_can_still_be_set_is_set(capsys):
    with tfdist.Single("CPU:0").scope():
        tf.config.set_visible_devices([_cpu()], "CPU")
    assert capsys.readouterr().err == ""


def test_a_wrong_setting_is_an_error():
    with tfdist.Single("CPU:0").scope(), pytest.raises(ValueError, match="non-GPU"):
        tf.config.experimental.set_memory_growth(_cpu(), True)
