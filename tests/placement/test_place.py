"""A model on several devices trains what it trains on one, and each layer is where it should be."""

from __future__ import annotations

import pytest

from tests.harness.tiers import seldom

CASES = "tests.cases.placement_cases"
MODELS = ("branched", "convolutional", "subclassed")


@pytest.mark.parametrize(
    "name",
    [pytest.param("subclassed", marks=pytest.mark.core), *seldom("branched"), "convolutional"],
)
def test_placed_equals_unplaced(cluster, name):
    (found,) = cluster("devices").call(f"{CASES}:equals_unplaced", name=name)
    assert found["outputs"] < 1e-6
    assert found["gradients"] < 1e-6
    assert found["weights"] < 1e-5
    assert found["predicted"] < 1e-5
    assert found["steps"] == 50
    assert found["losses"][0] == pytest.approx(found["losses"][1], abs=1e-5)
    assert found["evaluated"][0] == pytest.approx(found["evaluated"][1], abs=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_every_operation_of_a_layer_runs_on_its_device(cluster, name):
    (found,) = cluster("devices").call(f"{CASES}:places_of_operations", name=name)
    for path, device in found["wanted"].items():
        # TensorFlow may fuse an addition with the layer before, wherever that is.
        if not path.startswith("add"):
            assert set(found["ran"][path]) <= {device}, path
    # Layers that compute something, forward and backward.
    computing = [path for path in found["wanted"] if found["ran"][path]]
    assert {p for p in computing if "add" not in p and "equal" not in p} <= set(found["backward"])
    assert len(set(found["wanted"].values())) > 1
    for path, device in found["weights"].items():
        layer = next(p for p in sorted(found["wanted"], key=len, reverse=True) if p in path)
        assert device == found["wanted"][layer], path
        own = [d for p, d in found["state"].items() if path.replace("/", "_") in p]
        assert set(own) <= {device}, path


def test_an_ordinary_file_and_other_devices(cluster, tmp_path):
    (found,) = cluster("devices").call(f"{CASES}:saved_and_moved", directory=str(tmp_path))
    assert found["moved"] < 1e-6
    assert found["loaded"] < 1e-6
    assert found["devices"] == 1


def test_under_the_strategy_of_one_device(cluster):
    (found,) = cluster("devices").call(f"{CASES}:under_single")
    assert found < 1e-6


@pytest.mark.parametrize(
    ("name", "device_map", "words"),
    [
        ("convolutional", {"conv": "cpu:0"}, ["no rule for: 'pool', 'flat', 'head'", "'*'"]),
        ("convolutional", {"*": "cpu:0", "c*": "cpu:1"}, ["'conv'", "'c*': 'cpu:1'", "narrower"]),
        ("convolutional", {"*": "cpu:0", "haed": "cpu:1"}, ["'haed'", "Did you mean 'head'?"]),
        ("convolutional", {"re:[": "cpu:0"}, ["'re:['", "no regular expression"]),
        ("convolutional", {"*": "cpu:9"}, ["no device 'cpu:9'", "CPU:3"]),
        ("convolutional", {"*": "gpu"}, ["no device 'gpu'"]),
        ("convolutional", {"*": "xpu:what"}, ["is no device"]),
        ("convolutional", {"*": "/job:worker/task:1"}, ["/job:worker/task:1"]),
        ("convolutional", "no/such.toml", ["Cannot read the file"]),
    ],
    ids=str,
)
def test_mistakes_are_named(cluster, name, device_map, words):
    (found,) = cluster("devices").call(f"{CASES}:refused", name=name, device_map=device_map)
    for word in words:
        assert word in found


def test_a_model_without_weights_is_refused(cluster):
    (found,) = cluster("devices").call(f"{CASES}:refused_unbuilt")
    assert "keras.Input" in found


@pytest.mark.parametrize("devices", [[], {}])
def test_a_plan_for_no_device_is_refused(cluster, devices):
    (found,) = cluster("devices").call(f"{CASES}:refused_without_devices", devices=devices)
    assert f"devices={devices} leaves no device to plan for" in found


def test_a_plan_by_measurement(cluster, tmp_path):
    (found,) = cluster("devices").call(f"{CASES}:planned", directory=str(tmp_path))
    devices = found["devices"]
    assert devices == sorted(devices), "contiguous"
    assert 1 <= devices.count("cpu:0") <= 4
    assert found["read"] == devices
    assert found["positive"]
    kernel = 4 * (512 * 512 + 512)
    assert found["costs"][0] == ("wide0", 512 * 512 + 512, 4 * kernel, 4 * 64 * 512)
    assert "= 5 layers" not in found["table"]
    assert "wide3" in found["table"]
    # 4 MiB each: two, one, and the rest on the host.
    assert found["tight"].count("cpu:0") >= 1
    assert "'wide0' needs 4." in found["errors"][0]
    assert "no contiguous split of its 5 layers" in found["errors"][1]
    assert found["places_auto"] == [f"CPU:{i}" for i in range(4)]
