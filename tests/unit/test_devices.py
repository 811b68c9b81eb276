"""The choice between GPUs and CPUs, with a TensorFlow that says it has GPUs."""

from __future__ import annotations

import pytest
import tensorflow as tf

from tfdist.errors import ConfigError
from tfdist.strategies import devices


class Machine:
    """What TensorFlow says it has, and what it was told."""

    def __init__(self, gpus: int, started: bool = False) -> None:
        self.gpus = [f"gpu {i}" for i in range(gpus)]
        self.started = started
        self.cpus = 1
        self.grown: list[object] = []

    def install(self, monkeypatch: pytest.MonkeyPatch) -> Machine:
        monkeypatch.setattr(tf.config, "list_physical_devices", self.physical)
        monkeypatch.setattr(tf.config, "list_logical_devices", lambda kind: [kind] * self.cpus)
        monkeypatch.setattr(tf.config, "set_logical_device_configuration", self.split)
        monkeypatch.setattr(tf.config.experimental, "set_memory_growth", self.grow)
        monkeypatch.setattr(devices, "has_started", lambda: self.started)
        return self

    def physical(self, kind: str) -> list[str]:
        return self.gpus if kind == "GPU" else ["cpu"]

    def split(self, cpu: object, parts: list[object]) -> None:
        if self.started:
            raise RuntimeError("Virtual devices cannot be modified after being initialized")
        self.cpus = len(parts)

    def grow(self, gpu: object, enable: bool) -> None:
        if self.started:
            raise RuntimeError("Physical devices cannot be modified after being initialized")
        self.grown.append(gpu)


def test_all_gpus_with_memory_growth(monkeypatch):
    machine = Machine(gpus=3).install(monkeypatch)
    assert devices.prepare_devices(None) == ["GPU:0", "GPU:1", "GPU:2"]
    assert machine.grown == machine.gpus


def test_some_gpus(monkeypatch):
    Machine(gpus=3).install(monkeypatch)
    assert devices.prepare_devices(2) == ["GPU:0", "GPU:1"]


def test_too_many_gpus(monkeypatch):
    Machine(gpus=3).install(monkeypatch)
    with pytest.raises(ConfigError, match=r"devices=4 is more than the 3 GPUs"):
        devices.prepare_devices(4)


def test_gpus_of_a_tensorflow_that_has_started(monkeypatch):
    Machine(gpus=2, started=True).install(monkeypatch)
    assert devices.prepare_devices(None) == ["GPU:0", "GPU:1"]


@pytest.mark.parametrize("count", [None, 1, 4])
def test_cpus_are_split_where_there_is_no_gpu(monkeypatch, count):
    machine = Machine(gpus=0).install(monkeypatch)
    assert devices.prepare_devices(count) == [f"CPU:{i}" for i in range(count or 1)]
    assert machine.cpus == (count or 1)


def test_cpus_cannot_be_split_after_the_start(monkeypatch):
    Machine(gpus=0, started=True).install(monkeypatch)
    assert devices.prepare_devices(1) == ["CPU:0"]
    with pytest.raises(ConfigError, match=r"devices=2 .*first.*`tfdist run --devices 2`"):
        devices.prepare_devices(2)


@pytest.mark.parametrize(
    ("gpus", "choice", "taken"),
    [(0, "auto", "RING"), (2, "auto", "NCCL"), (2, "ring", "RING"), (1, "nccl", "NCCL")],
)
def test_communication(gpus, choice, taken):
    assert devices.communication_for(gpus, choice) == taken


def test_nccl_without_gpus():
    with pytest.raises(ConfigError, match="'nccl' needs GPUs"):
        devices.communication_for(0, "nccl")
