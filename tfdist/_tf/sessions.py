"""Private TensorFlow symbols around graphs that sessions run, checked on TensorFlow 2.21.

Those of feature columns: `tf.compat.v1.feature_column.input_layer` and `linear_model` go through
the columns' deprecated methods, with a warning for each, and know no
`tf.feature_column.shared_embeddings`. The methods that took their place are public, but ask for
these.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import distribute_utils
from tensorflow.python.eager import context
from tensorflow.python.feature_column.feature_column_v2 import (
    CategoricalColumn,
    DenseColumn,
    FeatureTransformationCache,
    SharedEmbeddingColumn,
    StateManager,
)
from tensorflow.python.ops import resource_variable_ops
from tensorflow.python.training import training_util

from tfdist._tf.collectives import launchers_of
from tfdist.errors import ConfigError
from tfdist.types import (
    ConfigProto,
    Graph,
    Launcher,
    SavingHook,
    Strategy,
    Structure,
    Tensor,
    Variable,
)

__all__ = [
    "CategoricalColumn",
    "DenseColumn",
    "FeatureTransformationCache",
    "SharedEmbeddingColumn",
    "StateManager",
    "eagerly",
    "graph_scope",
    "listen_to",
    "on_replicas",
    "read_step_alone",
    "session_config_for",
]


def listen_to(hook: SavingHook, listeners: Sequence[Any]) -> None:
    """Adds listeners to a `tf.compat.v1.train.CheckpointSaverHook` that somebody else has made."""
    hook._listeners = [*hook._listeners, *listeners]


def session_config_for(strategy: Strategy, config: ConfigProto | None) -> ConfigProto | None:
    """A session's configuration with the settings that a strategy's collectives need."""
    return strategy.extended._update_config_proto(config) or config


def on_replicas(
    strategy: Strategy, function: Callable[..., Any], values: Sequence[tuple[Any, ...]]
) -> Structure:
    """Builds a function on each replica of this process, in the default graph.

    The losses of `tf.compat.v1.train` optimizers are scaled so that the replicas' gradients, which
    are summed, come to their mean.

    Args:
        strategy: the strategy, whose scope is open.
        function: builds the graph of each replica.
        values: for each replica its arguments.

    Returns:
        The results of the function, as per-replica values.
    """
    arguments = [
        distribute_utils.regroup(tuple(each), always_wrap=True)
        for each in zip(*values, strict=True)
    ]
    with strategy._scale_loss_for_estimator_enabled():
        return strategy.extended.call_for_each_replica(function, args=tuple(arguments))


def read_step_alone(strategy: Strategy, step: Variable) -> None:
    """Lets TensorFlow's hooks read a replicated global step without the other workers.

    The read that they make by themselves has the variable's initial value in its graph, and with it
    the broadcast of that: a hook that only the chief has would wait for the others for ever.
    """
    own = strategy.experimental_local_results(step)[0]
    tf.compat.v1.add_to_collection(training_util.GLOBAL_STEP_READ_KEY, own.read_value() + 0)


@contextlib.contextmanager
def eagerly(strategy: Strategy) -> Iterator[None]:
    """Runs eagerly in `strategy`'s cross-replica context, also if a graph is the default.

    A program may have called `tf.compat.v1.disable_eager_execution()`. Then `tf.init_scope` ends in
    a graph too, and the graph that is the default keeps the stack of open scopes; so both are
    replaced.
    """
    if tf.executing_eagerly():
        yield
        return
    with tf.Graph().as_default(), context.eager_mode(), tf.distribute.Strategy.scope(strategy):
        yield


@contextlib.contextmanager
def graph_scope(strategy: Strategy) -> Iterator[None]:
    """TensorFlow's own scope of a strategy, in which Keras is not hooked.

    In the default graph sparse gradients may then have other numbers of rows in each run of a
    session. Scopes of one strategy may be open in several graphs at once, as when a checkpoint is
    evaluated while the training's graph waits.
    """
    graph = tf.compat.v1.get_default_graph()
    for launcher in launchers_of(strategy.extended):
        if not isinstance(launcher._all_gather, _GatherByRun):
            launcher._all_gather = _GatherByRun(launcher)
        launcher._all_gather.serve(graph)
    with tf.distribute.Strategy.scope(strategy):
        yield


class _GatherByRun:
    """A launcher's gathers, which may have other sizes in each run of a session.

    TensorFlow remembers a collective's shape under its key. In a function each call has a new key;
    in a session's graph it is a constant, and other sizes are refused ("Shape mismatch in the
    collective instance"). Here a key is made of the gather's number and that of the run, and each
    graph has a group of its own: the runs of a second training begin at 1 again.

    A launcher keeps this for good. It acts in the graphs that it serves alone, so nothing has to be
    put back, and in which order scopes open and close does not matter.

    Args:
        launcher: the launcher, whose own `_all_gather` this calls.
    """

    #: Keys of a run; and those that TensorFlow gives to other collectives of a graph and to groups.
    RUN_KEYS, OTHER_KEYS, OTHER_GROUPS = 512, 1 << 20, 1 << 16

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._gather = launcher._all_gather
        self._graph_count = 0
        self._groups: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._gathers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def serve(self, graph: Graph) -> None:
        """Gathers by run in a graph from now on. All workers serve theirs in one order."""
        if graph not in self._groups:
            self._groups[graph] = self._launcher._group_key + self.OTHER_GROUPS * self._graph_count
            self._gathers[graph] = 0
            self._graph_count += 1

    def __call__(self, input_tensor: Tensor, options: object) -> Tensor:
        """Concatenates the tensors of all launchers of the group."""
        graph = tf.compat.v1.get_default_graph()
        while getattr(graph, "is_control_flow_graph", False):
            graph = graph.outer_graph
        if tf.executing_eagerly() or graph not in self._gathers:
            return self._gather(input_tensor, options)
        self._gathers[graph] = number = self._gathers[graph] + 1
        if number >= self.RUN_KEYS:
            raise ConfigError(
                f"The model has more than {self.RUN_KEYS // 5} sparse gradients on several "
                "replicas. Make some of them dense: tf.convert_to_tensor(gradient)."
            )
        with graph.as_default(), tf.control_dependencies(None), tf.device("CPU:0"):
            key = self.OTHER_KEYS + number + self.RUN_KEYS * _number_of_run(graph)
        launcher, group = self._launcher, self._launcher._group_key
        launcher._next_instance_key, launcher._group_key = lambda: key, self._groups[graph]
        try:
            return self._gather(input_tensor, options)
        finally:
            del launcher._next_instance_key
            launcher._group_key = group


def _number_of_run(graph: Graph) -> Tensor:
    """The number of runs of a session that have gathered, with this one: equal on all workers."""
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
