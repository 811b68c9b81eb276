"""Private TensorFlow symbols around graphs that sessions run, checked on TensorFlow 2.21."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import distribute_utils
from tensorflow.python.ops import resource_variable_ops
from tensorflow.python.training import training_util

from tfdist.errors import ConfigError

__all__ = ["graph_scope", "listen_to", "on_replicas", "read_step_alone", "session_config_for"]


def listen_to(hook: Any, listeners: Sequence[Any]) -> None:
    """Adds listeners to a `tf.compat.v1.train.CheckpointSaverHook` that somebody else has made."""
    hook._listeners = [*hook._listeners, *listeners]


def session_config_for(strategy: Any, config: Any) -> Any:
    """A session's configuration with what a strategy's collectives need."""
    return strategy.extended._update_config_proto(config) or config


def on_replicas(
    strategy: Any, function: Callable[..., Any], values: Sequence[tuple[Any, ...]]
) -> Any:
    """Builds a function on each replica of this process, in the default graph.

    The losses of `tf.compat.v1.train` optimizers are scaled so that the replicas' gradients, which
    are summed, come to their mean.

    Args:
        strategy: the strategy, whose scope is open.
        function: what each replica builds.
        values: for each replica its arguments.

    Returns:
        What the function returns, as per-replica values.
    """
    arguments = [
        distribute_utils.regroup(tuple(each), always_wrap=True)
        for each in zip(*values, strict=True)
    ]
    with strategy._scale_loss_for_estimator_enabled():
        return strategy.extended.call_for_each_replica(function, args=tuple(arguments))


def read_step_alone(strategy: Any, step: Any) -> None:
    """Lets TensorFlow's hooks read a replicated global step without the other workers.

    The read that they make by themselves has the variable's initial value in its graph, and with it
    the broadcast of that: a hook that only the chief has would wait for the others for ever.
    """
    own = strategy.experimental_local_results(step)[0]
    tf.compat.v1.add_to_collection(training_util.GLOBAL_STEP_READ_KEY, own.read_value() + 0)


@contextlib.contextmanager
def graph_scope(strategy: Any) -> Iterator[None]:
    """TensorFlow's own scope of a strategy, in which Keras is not hooked.

    In it sparse gradients may have other numbers of rows in each run of a session.
    """
    launchers = _launchers_of(strategy.extended)
    classes = [type(launcher) for launcher in launchers]
    for launcher, kind in zip(launchers, classes, strict=True):
        launcher.__class__ = type("GatherByRun", (_GatherByRun, kind), {})
    try:
        with tf.distribute.Strategy.scope(strategy):
            yield
    finally:
        for launcher, kind in zip(launchers, classes, strict=True):
            launcher.__class__ = kind


def _launchers_of(extended: Any) -> list[Any]:
    """What launches the collectives of a strategy, one for each device."""
    names = ("_cross_device_ops", "_host_cross_device_ops", "_collective_ops")
    ops = [getattr(extended, name, None) for name in names]
    found = [launcher for each in ops for launcher in getattr(each, "_launchers", ())]
    return list({id(launcher): launcher for launcher in found}.values())


class _GatherByRun:
    """A launcher whose gathers may have other sizes in each run of a session.

    TensorFlow remembers a collective's shape under its key. In a function each call has a new key;
    in a session's graph it is a constant, and other sizes are refused ("Shape mismatch in the
    collective instance"). Here a key is made of the gather's number and that of the run.
    """

    #: Keys of a run; and those that TensorFlow gives to other collectives of a graph.
    RUN_KEYS, OTHER_KEYS = 512, 1 << 20
    _graph: Any = None
    _gathers = 0

    def _all_gather(self, input_tensor: Any, options: Any) -> Any:
        graph = tf.compat.v1.get_default_graph()
        while getattr(graph, "is_control_flow_graph", False):
            graph = graph.outer_graph
        if tf.executing_eagerly() or graph.building_function:
            return super()._all_gather(input_tensor, options)  # type: ignore[misc]
        if graph is not self._graph:
            self._graph, self._gathers = graph, 0
        self._gathers += 1
        if self._gathers >= self.RUN_KEYS:
            raise ConfigError(
                f"The model has more than {self.RUN_KEYS // 5} sparse gradients on several "
                "replicas. Make some of them dense: tf.convert_to_tensor(gradient)."
            )
        with graph.as_default(), tf.control_dependencies(None), tf.device("CPU:0"):
            key = self.OTHER_KEYS + self._gathers + self.RUN_KEYS * _number_of_run(graph)
        self._next_instance_key = lambda: key
        try:
            return super()._all_gather(input_tensor, options)  # type: ignore[misc]
        finally:
            del self._next_instance_key


def _number_of_run(graph: Any) -> Any:
    """How many runs of a session have gathered, this one included: the same on all workers."""
    (*made,) = graph.get_collection(_RUN_NUMBERS)
    if not made:
        count = resource_variable_ops.ResourceVariable(
            0,
            trainable=False,
            collections=[tf.compat.v1.GraphKeys.LOCAL_VARIABLES],
            name="tfdist/run_number",
        )
        made = [count.assign_add(1, read_value=True).value()]
        graph.add_to_collection(_RUN_NUMBERS, made[0])
    return made[0]


_RUN_NUMBERS = "tfdist_run_numbers"
