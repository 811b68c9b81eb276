"""TensorFlow's constructors of strategies, and what goes with them, inside a scope."""

from __future__ import annotations

import threading

import pytest
import tensorflow as tf

import tfdist
from tfdist.errors import ConfigError

NAMES = (
    "MirroredStrategy",
    "MultiWorkerMirroredStrategy",
    "OneDeviceStrategy",
    "experimental.CentralStorageStrategy",
    "experimental.MultiWorkerMirroredStrategy",
)


@pytest.fixture(params=["single", "mirrored"])
def strategy(request):
    return tfdist.Single("CPU:0") if request.param == "single" else tfdist.Mirrored(["CPU:0"])


def named(name, api=tf.distribute):
    for part in name.split("."):
        api = getattr(api, part)
    return api


def in_apis(*names):
    """Each name in each of TensorFlow's APIs that has it."""
    apis = {
        "tf": (tf.distribute, "tf.distribute"),
        "v2": (tf.compat.v2.distribute, "tf.compat.v2.distribute"),
        "v1": (tf.compat.v1.distribute, "tf.compat.v1.distribute"),
    }
    absent = ("MultiWorkerMirroredStrategy", "ParameterServerStrategy", "TPUStrategy")
    return [
        pytest.param(name, *api, id=f"{key}-{name}")
        for name in names
        for key, api in apis.items()
        if not (key == "v1" and name in absent)
    ]


@pytest.mark.parametrize(("name", "api", "path"), in_apis(*NAMES))
def test_a_strategy_of_the_program_is_the_active_one(strategy, name, api, path, capsys):
    original = named(name, api)
    with strategy.scope():
        assert named(name, api)() is strategy
        assert named(name, api)("CPU:0") is strategy
        with named(name, api)().scope() as entered:
            assert entered is strategy
            assert tf.distribute.get_strategy() is strategy
    said = capsys.readouterr().err
    assert f"{path}.{name} of the program is the active strategy {strategy.name!r}" in said
    assert named(name, api) is original


@pytest.mark.parametrize(("name", "api", "path"), in_apis(*NAMES))
def test_types_are_what_they_were(strategy, name, api, path):
    original = named(name, api)
    expected = isinstance(strategy, original)
    with strategy.scope():
        inside = named(name, api)
        assert isinstance(strategy, inside) is expected
        assert issubclass(type(strategy), inside) is issubclass(type(strategy), original)
        assert issubclass(inside, original)
        assert issubclass(original, inside)
        assert inside.__doc__ == original.__doc__
        assert (inside.__name__, inside.__module__) == (original.__name__, original.__module__)
    assert isinstance(strategy, inside) is expected


def test_a_class_that_the_program_derives_is_refused(strategy):
    with strategy.scope():

        class Own(tf.distribute.MirroredStrategy):
            """Has nothing more."""

        said = r"The class 'Own' of the program conflicts with the active strategy"
        with pytest.raises(ConfigError, match=said):
            Own(["CPU:0"])
        assert issubclass(Own, tf.distribute.MirroredStrategy)
        assert not isinstance(strategy, Own)
        assert not issubclass(type(strategy), Own)
    assert type(Own(["CPU:0"])) is Own


def test_devices_that_are_not_there_are_named():
    with pytest.raises(ConfigError, match=r"names 'CPU:97', and this process has CPU:0"):
        tfdist.Mirrored(["CPU:0", "CPU:97"])
    with pytest.raises(ConfigError, match=r"tfdist.strategy\('mirrored', devices=2\)"):
        tfdist.Mirrored(2)  # type: ignore[arg-type]


def test_outside_of_all_scopes_everything_is_tensorflow_s_own(strategy):
    with strategy.scope():
        kept = tf.distribute.MirroredStrategy
    made = kept(["CPU:0"])
    assert type(made) is tf.distribute.MirroredStrategy
    assert made is not strategy


@pytest.mark.parametrize(
    ("name", "api", "path"),
    in_apis(
        "ParameterServerStrategy",
        "experimental.ParameterServerStrategy",
        "TPUStrategy",
        "experimental.TPUStrategy",
    ),
)
def test_a_strategy_of_another_kind_is_refused(strategy, name, api, path):
    with strategy.scope(), pytest.raises(ConfigError) as caught:
        named(name, api)(None)
    text = str(caught.value)
    assert f"{path}.{name} of the program conflicts" in text
    assert f"the active strategy {strategy.name!r}" in text
    assert ("not on TPUs" if "TPU" in name else "use --strategy parameter_server") in text


@pytest.mark.parametrize("name", ["coordinator", "experimental.coordinator"])
def test_a_coordinator_needs_servers(strategy, name):
    with strategy.scope(), pytest.raises(ConfigError, match="ClusterCoordinator of the program"):
        named(name).ClusterCoordinator(strategy)
    with pytest.raises(AttributeError):
        named(name).ClusterCoordinator(strategy)


@pytest.mark.parametrize("api", [tf.distribute, tf.compat.v1.train], ids=["distribute", "v1"])
def test_a_task_that_trains_is_no_server(strategy, api):
    with strategy.scope(), pytest.raises(ConfigError, match=r"Server of .*parameter_server, whose"):
        api.Server({"worker": ["127.0.0.1:0"]}, job_name="worker", task_index=0)


def test_setting_the_strategy_that_is_set(strategy):
    other = tf.distribute.OneDeviceStrategy("CPU:0")
    with strategy.scope():
        tf.distribute.experimental_set_strategy(strategy)
        tf.distribute.experimental_set_strategy(None)
        assert tf.distribute.get_strategy() is strategy
        with pytest.raises(ConfigError, match="experimental_set_strategy of the program conflicts"):
            tf.distribute.experimental_set_strategy(other)
    tf.distribute.experimental_set_strategy(other)
    try:
        assert tf.distribute.get_strategy() is other
    finally:
        tf.distribute.experimental_set_strategy(None)


def test_another_thread_gets_the_open_strategy(strategy):
    found = []
    with strategy.scope():
        thread = threading.Thread(target=lambda: found.append(tf.distribute.MirroredStrategy()))
        thread.start()
        thread.join()
    assert found == [strategy]


def test_the_task_of_a_program_for_several_workers(strategy, monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    with strategy.scope():
        for place in (
            strategy.cluster_resolver,
            tf.distribute.MultiWorkerMirroredStrategy().cluster_resolver,
            tf.distribute.cluster_resolver.TFConfigClusterResolver(),
        ):
            assert place.task_type is None
            assert place.task_id is None
            assert place.cluster_spec().as_dict() == {}


def test_a_strategy_inside_another_s_scope_is_refused_by_both_names(strategy):
    with strategy.scope():
        with strategy.scope():  # its own scope nests
            pass
        other = tfdist.Mirrored(["CPU:0"])
        with pytest.raises(ConfigError, match=rf"'mirrored' .* inside .* '{strategy.name}'"):
            other.scope().__enter__()
        assert tf.distribute.get_strategy() is strategy
