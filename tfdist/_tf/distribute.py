"""Every private TensorFlow symbol that tfdist subclasses or calls, in one place.

Checked on TensorFlow 2.21. `tests/unit/test_seams.py` fails by name when a release moves one.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import tensorflow as tf
from tensorflow.python.checkpoint.checkpoint import TrackableSaver
from tensorflow.python.distribute import (
    cross_device_ops,
    cross_device_utils,
    distribute_utils,
    input_lib,
)
from tensorflow.python.distribute.collective_all_reduce_strategy import CollectiveAllReduceExtended
from tensorflow.python.distribute.coordinator import coordinator_context
from tensorflow.python.distribute.input_lib import DistributedDatasetsFromFunction
from tensorflow.python.distribute.mirrored_strategy import MirroredExtended
from tensorflow.python.distribute.one_device_strategy import OneDeviceExtended
from tensorflow.python.distribute.parameter_server_strategy_v2 import (
    ParameterServerStrategyV2,
    ParameterServerStrategyV2Extended,
)
from tensorflow.python.distribute.sharded_variable import ShardedVariable
from tensorflow.python.eager import context, tape
from tensorflow.python.ops import collective_ops

from tfdist._tf.collectives import SAY_AFTER_SECONDS, met
from tfdist._tf.lines import Line, Lined
from tfdist._tf.variables import readable
from tfdist.config.mesh import Axis
from tfdist.errors import ConfigError, TfdistError
from tfdist.types import (
    CoordinatedWorker,
    Dataset,
    DType,
    Operation,
    Strategy,
    Structure,
    Tensor,
    Variable,
)
from tfdist.utils.thread_state import Flag

__all__ = [
    "CollectiveAllReduceExtended",
    "CollectiveExtended",
    "DistributedDatasetsFromFunction",
    "GraphCollectives",
    "LocalExtended",
    "OnlyReplica",
    "PlainInput",
    "ServerExtended",
    "ServerStrategy",
    "ShardedVariable",
    "SingleExtended",
    "TrackableSaver",
    "collective_ops",
    "complete_on",
    "cross_device_ops",
    "cross_device_utils",
    "eagerly_outside_of_scope",
    "feed_from",
    "global_seed",
    "gradients_of_control_flow",
    "has_started",
    "in_xla",
    "independently",
    "input_lib",
    "is_distributed",
    "local_replica",
    "local_results",
    "on_worker",
    "outside_of_function",
    "redirect",
    "regroup",
    "seeded",
    "unordered",
    "watch_on_all_tapes",
]


class GraphCollectives:
    """Launches collectives where the gradients are, instead of merging the replicas' threads.

    TensorFlow's own classes do this under XLA on GPUs only. Without `merge_call` a replica may
    update variables inside a conditional, which Keras's gradient accumulation and dynamic loss
    scaling do (tensorflow#72686, keras#20763). Eager code still merges: its replicas run one after
    the other, so a blocking collective would wait for ever.
    """

    #: The graph around the function of the replicas that is being traced.
    _replica_graph: Any = None

    def _use_merge_call(self) -> bool:
        return bool(context.executing_eagerly())

    def _create_variable(self, next_creator: Callable[..., Any], **kwargs: object) -> Variable:
        # Keras asks for ONLY_FIRST_REPLICA on counters that every replica computes alike. The
        # broadcast it implies is a merge_call; the replicas' own copies hold the same value.
        if kwargs.get("aggregation") is tf.VariableAggregation.ONLY_FIRST_REPLICA:
            kwargs["aggregation"] = tf.VariableAggregation.NONE
        return readable(super()._create_variable(next_creator, **kwargs))  # type: ignore[misc]

    def _call_for_each_replica(
        self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> object:
        before, self._replica_graph = self._replica_graph, _traced_graph()
        try:
            return super()._call_for_each_replica(fn, args, kwargs)  # type: ignore[misc]
        finally:
            self._replica_graph = before

    def _gather_to_implementation(
        self, value: object, destinations: object, axis: int, options: object
    ) -> object:
        """Gathers in a graph, as collectives must, also where functions are run eagerly."""
        inner = super()._gather_to_implementation  # type: ignore[misc]
        if not (tf.executing_eagerly() and tf.config.functions_run_eagerly()):
            return inner(value, destinations, axis, options)
        tf.config.run_functions_eagerly(False)
        try:
            return inner(value, destinations, axis, options)
        finally:
            tf.config.run_functions_eagerly(True)

    def outside_of_loops(self) -> contextlib.AbstractContextManager[object]:
        """A block outside of the loops and branches of a replica's function that is traced.

        Its operations run once, whichever branch is taken. A `tf.function` that the
        replica's function calls is left as it is: its graph may be called from elsewhere too.
        """
        graph = _traced_graph()
        while graph is not self._replica_graph and getattr(graph, "is_control_flow_graph", False):
            graph = graph.outer_graph
        return contextlib.nullcontext() if graph is None else graph.as_default()


class LocalExtended(GraphCollectives, MirroredExtended):  # type: ignore[misc]
    """Replicas on the devices of one process."""


class PlainInput:
    """Reads data for one CPU device without TensorFlow's iterator over several devices."""

    def _distribute_datasets_from_function(
        self, dataset_fn: Callable[..., Any], options: object
    ) -> Dataset:
        """With one CPU device, an iterator like any other.

        TensorFlow's iterator over several devices is made anew for each epoch, with functions that
        are traced and threads that are joined: half a second an epoch, if nothing is to be sent
        to a device.
        """
        devices = self.worker_devices  # type: ignore[attr-defined]
        if options is not None or len(devices) > 1 or "CPU" not in devices[0]:
            return super()._distribute_datasets_from_function(  # type: ignore[misc]
                dataset_fn, options
            )
        plain = tf.distribute.InputOptions(
            experimental_fetch_to_device=False,
            experimental_replication_mode=tf.distribute.InputReplicationMode.PER_REPLICA,
        )
        return DistributedDatasetsFromFunction(
            self._input_workers_with_options(plain),  # type: ignore[attr-defined]
            self._container_strategy(),  # type: ignore[attr-defined]
            input_contexts=[self._make_input_context()],  # type: ignore[attr-defined]
            dataset_fn=dataset_fn,
            options=plain,
        )


class SingleExtended(PlainInput, OneDeviceExtended):  # type: ignore[misc]
    """The only replica, on one device."""

    def _make_input_context(self) -> tf.distribute.InputContext:
        return tf.distribute.InputContext()


#: For types that no collective broadcasts, types that hold all of their values.
_WIDER = {
    **dict.fromkeys((tf.int8, tf.uint8, tf.int16, tf.uint16), tf.int32),
    tf.uint32: tf.int64,
    tf.bfloat16: tf.float32,
}


#: Group keys that the processes along an axis may take.
_KEYS_OF_A_LINE = 1000


class CollectiveExtended(Lined, PlainInput, GraphCollectives, CollectiveAllReduceExtended):  # type: ignore[misc]
    """Replicas on the devices of several processes.

    Args:
        strategy: the strategy that this belongs to.
        cluster_resolver: the cluster and this task.
        options: `tf.distribute.experimental.CommunicationOptions`.
        cpu_devices: logical CPU devices to train on if there are no GPUs.
    """

    def __init__(
        self, strategy: Strategy, cluster_resolver: object, options: object, cpu_devices: int = 1
    ) -> None:
        self._cpu_devices = cpu_devices
        with context.eager_mode():  # Else, in a program on graphs, no server of collectives starts.
            super().__init__(strategy, cluster_resolver, options)

    def _line(self, axis: Axis) -> Line:
        # Group keys of their own: those of all processes are counted from 1 on.
        keys = cross_device_utils.CollectiveKeys(group_key_start=axis.line * _KEYS_OF_A_LINE)
        devices = self.worker_devices

        def operations(devices: Sequence[str]) -> Any:
            return cross_device_ops.CollectiveAllReduce(
                devices=tuple(devices),
                group_size=len(devices) * axis.size,
                options=self._communication_options,
                collective_keys=keys,
            )

        return Line(operations(devices), operations([self._worker_device]), axis.size, axis.index)

    def _get_variable_creator_initial_value(
        self, replica_id: int, device: str, primary_var: object, **kwargs: Any
    ) -> object:
        dtype = tf.as_dtype(kwargs.get("dtype") or tf.float32)
        wide = _WIDER.get(dtype)
        if wide is not None and replica_id == 0:
            kwargs |= {"initial_value": _cast(kwargs["initial_value"], dtype, wide), "dtype": wide}
        value_of = super()._get_variable_creator_initial_value(
            replica_id, device, primary_var, **kwargs
        )

        def initial_value() -> Tensor:
            # The value is that of the chief of all processes.
            with self.among_all(), _naming(str(kwargs.get("name") or "without a name")):
                value: Tensor = value_of()
                return value if wide is None else tf.cast(value, dtype)

        return initial_value

    def _initialize_local_devices(
        self, cluster_resolver: object, worker_device: str
    ) -> tuple[tuple[str, ...], str]:
        devices, kind = super()._initialize_local_devices(cluster_resolver, worker_device)
        if kind == "CPU":
            devices = tuple(f"{worker_device}/device:CPU:{i}" for i in range(self._cpu_devices))
        return devices, kind


def _naming(variable: str) -> contextlib.AbstractContextManager[None]:
    """Names a variable that a process makes while others do not, if they cannot exchange its value.

    Raises:
        TfdistError: if another process has come to another exchange.
    """
    alike = (
        "Every process of the job must make the same models, layers and seeds, also the one of the "
        "first draw of keras.random: remove a condition such as `if rank == 0` around it."
    )
    late = (
        f"this process has waited for {SAY_AFTER_SECONDS:g} s for the others to make the variable "
        f"{variable!r}. {alike}"
    )
    elsewhere = TfdistError(
        "The workers are at different places of the program: this one makes the variable "
        f"{variable!r}, another one does something else, such as making another. {alike}"
    )
    return met(late, elsewhere)


def _cast(initial: Any, dtype: DType, wide: DType) -> Callable[[], Tensor]:
    """A variable's initial value in a type that a collective broadcasts."""

    def cast() -> Tensor:
        value = initial() if callable(initial) else initial
        value = getattr(value, "wrapped_value", value)  # Of a checkpoint.
        return tf.cast(tf.convert_to_tensor(value, dtype), wide)

    return cast


def _traced_graph() -> Any:
    """The graph that is being made; None if operations run as they are called."""
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


def gradients_of_control_flow() -> list[Any]:
    """The graphs of loops and branches that are being made, from the inside out, in gradients.

    Returns:
        Nothing outside of the gradient of a `tf.while_loop` or a `tf.cond`.
    """
    graph, graphs = _traced_graph(), []
    while getattr(graph, "is_control_flow_graph", False):
        graphs.append(graph)
        graph = graph.outer_graph
    return graphs if any(hasattr(each, "_forward_graph") for each in graphs) else []


class OnlyReplica(tf.distribute.ReplicaContext):  # type: ignore[misc]
    """The context of a replica that has no other to exchange with."""

    def __init__(self, strategy: Strategy) -> None:
        super().__init__(strategy, 0)

    @property
    def devices(self) -> tuple[str, ...]:
        """The worker's device."""
        return tuple(self._strategy.extended.worker_devices)

    def all_reduce(self, reduce_op: object, value: Structure, options: object = None) -> Structure:
        """The value itself."""
        del reduce_op, options
        return value

    def all_gather(self, value: Structure, axis: int, options: object = None) -> Structure:
        """The value itself."""
        del axis, options
        return value


class ServerExtended(ParameterServerStrategyV2Extended):  # type: ignore[misc]
    """Weights on server tasks, one replica on each worker task.

    TensorFlow's own runs a worker's only replica on a thread of its own, on which updates within
    conditionals fail, and places variables in turn, whatever their size.

    Args:
        strategy: the strategy that this belongs to.
        cluster_resolver: the cluster and this task.
        create: makes a variable where it belongs, from TensorFlow's creator and its arguments.
        update: runs a function on a variable's device.
    """

    def __init__(
        self,
        strategy: Strategy,
        cluster_resolver: object,
        create: Callable[..., Any],
        update: Callable[..., Any],
    ) -> None:
        super().__init__(strategy, cluster_resolver, None)
        self._tfdist_create = create
        self._tfdist_update = update

    def _create_variable(self, next_creator: Callable[..., Any], **kwargs: object) -> Variable:
        if kwargs.pop("per_worker_variable", False):
            return self._create_per_worker_variable(next_creator, **kwargs)
        return self._tfdist_create(next_creator, **kwargs)

    def _validate_colocate_with_variable(self, colocate_with_variable: object) -> None:
        del colocate_with_variable

    def _call_for_each_replica(
        self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> object:
        with OnlyReplica(self._container_strategy()):
            return fn(*args, **kwargs)

    def _reduce_to(
        self, reduce_op: object, value: Structure, destinations: object, options: object
    ) -> Structure:
        del reduce_op, destinations, options
        return value

    def _gather_to_implementation(
        self, value: Structure, destinations: object, axis: int, options: object
    ) -> Structure:
        del destinations, axis, options
        return value

    def _update(
        self,
        var: Variable,
        fn: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        group: bool,
    ) -> object:
        result = self._tfdist_update(var, fn, args, kwargs)
        return result if group else tf.nest.map_structure(self._local_results, result)


class ServerStrategy(ParameterServerStrategyV2):  # type: ignore[misc]
    """TensorFlow's strategy, whose extended part a subclass replaces.

    Args:
        cluster_resolver: the cluster; this process is its chief.
        make_extended: makes the extended part when the cluster has been reached.
    """

    def __init__(self, cluster_resolver: object, make_extended: Callable[[], object]) -> None:
        super().__init__(cluster_resolver)
        tf.distribute.Strategy.__init__(self, make_extended())


class _Accessed:
    """The variable that a tape is given: it asks no more than this of it."""

    trainable = True

    def __init__(self, tensor: Tensor) -> None:
        self.handle = tensor

    def ref(self) -> NoReturn:
        """Refuses functions of `tf.custom_gradient` that read variables: it asks for this.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            "A function with a gradient of its own (tf.recompute_grad, tf.custom_gradient) that "
            "reads weights conflicts with strategy='parameter_server', which has these on its "
            "servers. Give it the weights as arguments, or choose another strategy."
        )


def watch_on_all_tapes(tensor: Tensor) -> None:
    """Makes the gradient tapes that are open on this thread watch a tensor, as a variable read."""
    tape.variable_accessed(_Accessed(tensor))


def feed_from(placeholder: Tensor, tensor: Tensor) -> None:
    """Replaces a placeholder of a graph by a tensor of that graph, for all ops that read it."""
    redirect(placeholder.consumers(), placeholder, tensor)


@contextlib.contextmanager
def on_worker(worker: CoordinatedWorker) -> Iterator[None]:
    """Runs the calls in the block on a worker, as TensorFlow's coordinator does.

    The thread keeps the worker's executor. To set it back, as `context.executor_scope` does, waits
    for all that is pending in the default executor, and there TensorFlow deletes what other workers
    hold: one that is stopped would stop this one.

    Args:
        worker: one of the coordinator's workers.
    """
    context.context().executor = worker.executor
    with tf.device(worker.device_name), coordinator_context.with_dispatch_context(worker):
        yield


@contextlib.contextmanager
def eagerly_outside_of_scope() -> Iterator[None]:
    """Runs eagerly under a graph of its own, where no strategy's scope is open."""
    with tf.Graph().as_default(), context.eager_mode():
        yield


def complete_on(device: str) -> None:
    """Waits until another task has done what it was sent; does nothing on this task's own devices.

    TensorFlow sends operations to other tasks and goes on. A function that is sent by another way
    may overtake them.

    Args:
        device: the full name of a device.
    """
    definition = context.context().get_server_def()
    if definition is None:
        return
    own = f"/job:{definition.job_name}/replica:0/task:{definition.task_index}/"
    if not device.startswith(own):
        context.context().sync_executors()


@contextlib.contextmanager
def outside_of_function(strategy: Strategy) -> Iterator[None]:
    """Runs eagerly in `strategy`'s cross-replica context, from within a replica's function.

    `tf.init_scope` alone is not enough: it keeps the function's variable creators and its replica
    context.
    """
    with tf.init_scope(), tf.Graph().as_default(), context.eager_mode(), strategy.scope():
        yield


#: Set where collectives are made that need no order; those of a ring keep none there.
unordered = Flag()


@contextlib.contextmanager
def independently() -> Iterator[None]:
    """Lets the collectives that are made in the block run when their inputs are there.

    Automatic control dependencies run the collectives of a function in the order in which they were
    made. Those of CPUs need none.
    """
    with unordered.up(), _run_independently():
        yield


@contextlib.contextmanager
def _run_independently() -> Iterator[None]:
    graph = _traced_graph()
    manager = getattr(graph, "experimental_acd_manager", None)
    if graph is None or manager is None:
        yield
        return
    before = len(graph.get_operations())
    yield
    for each in graph.get_operations()[before:]:
        if each.type.startswith("Collective"):
            manager.run_independently(each)


def redirect(readers: Sequence[Any], tensor: Tensor, other: Tensor) -> None:
    """Makes operations of a graph that read a tensor read another one.

    Args:
        readers: the operations.
        tensor: the tensor that they read.
        other: the tensor that takes its place; it must not depend on them.
    """
    for reader in readers:
        for index, each in enumerate(reader.inputs):
            if each is tensor:
                reader._update_input(index, other)


def wait_for(operation: Operation, others: Sequence[Operation]) -> None:
    """Makes an operation of a graph run after others, which must not depend on it."""
    operation._add_control_inputs(list(others))


def in_xla() -> bool:
    """Whether a function is being traced that XLA compiles."""
    graph = _traced_graph()
    while graph is not None:
        control_flow = graph._get_control_flow_context()
        if control_flow is not None and control_flow.IsXLAContext():
            return True
        graph = getattr(graph, "outer_graph", None)
    return False


def is_distributed(value: object) -> bool:
    """Whether a value holds one component for each local replica."""
    return isinstance(value, tf.distribute.DistributedValues)


def local_results(strategy: Strategy, value: object) -> tuple[Any, ...]:
    """The components of a value on the replicas of this process, in order."""
    return tuple(strategy.experimental_local_results(value))


def local_replica() -> int:
    """The number of the calling replica among those of this process."""
    return int(tf.distribute.get_replica_context()._replica_id)


def regroup(values: list[Any]) -> Structure:
    """Turns one structure for each local replica into one structure of per-replica values."""
    return distribute_utils.regroup(values)


def has_started() -> bool:
    """Whether TensorFlow has set up its devices, after which they cannot be changed."""
    return bool(context.context()._initialized)


def global_seed() -> int | None:
    """The seed given to `tf.random.set_seed`, or None."""
    seed = context.global_seed()
    return None if seed is None else int(seed)


@contextlib.contextmanager
def seeded(seed: int | None) -> Iterator[None]:
    """Makes everything in the block as if `seed` had been given to `tf.random.set_seed`.

    The program's own seed, and the counter from which ops draw theirs, go on afterwards as if
    nothing had been built.
    """
    own = context.context()
    before = own._seed, own._rng
    own._seed, own._rng = seed, random.Random(seed)
    try:
        yield
    finally:
        own._seed, own._rng = before
