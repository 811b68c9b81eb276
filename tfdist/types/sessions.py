"""Types of TensorFlow 1's sessions and of exported graphs: the members that tfdist uses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from tfdist.types.models import Optimizer
from tfdist.types.tensors import Array, Operation, StaticShape, Tensor, Variable

#: Features of examples by name, or one tensor of them.
Features: TypeAlias = "Tensor | Mapping[str, Tensor]"


#: A function that splits a variable: from shape and type to the number of parts by dimension.
Partitioner: TypeAlias = "Callable[..., Sequence[int]]"


#: An optimizer as a user may pass it: itself, its name, or a function that makes it in the graph.
OptimizerChoice: TypeAlias = "Optimizer1 | Optimizer | str | Callable[[], Optimizer1 | Optimizer]"


class Optimizer1(Protocol):
    """A `tf.compat.v1.train.Optimizer`."""

    def minimize(
        self, loss: Tensor, global_step: Variable | None = ..., var_list: object = ...
    ) -> Operation: ...


class FeatureColumn(Protocol):
    """A feature column; each kind has some of the members."""

    @property
    def key(self) -> str: ...
    @property
    def num_buckets(self) -> int: ...
    @property
    def variable_shape(self) -> StaticShape: ...
    def create_state(self, state_manager: object) -> None: ...
    def get_dense_tensor(self, transformation_cache: object, state_manager: object) -> Tensor: ...
    def get_sparse_tensors(self, transformation_cache: object, state_manager: object) -> Any: ...
    @property
    def name(self) -> str: ...


class Session(Protocol):
    """A `tf.compat.v1.Session`."""

    def run(self, fetches: object, feed_dict: object = ...) -> Any: ...


class MonitoredSession(Session, Protocol):
    """A `tf.compat.v1.train.MonitoredSession`."""

    def should_stop(self) -> bool: ...
    def __enter__(self) -> MonitoredSession: ...
    def __exit__(self, *error: object) -> bool | None: ...


class RunContext(Protocol):
    """The context that a hook gets before and after a run of a session."""

    @property
    def original_args(self) -> RunArgs: ...
    @property
    def session(self) -> Session: ...
    def request_stop(self) -> None: ...


class RunArgs(Protocol):
    """The requests of a hook to a run, besides those of the program."""


class RunValues(Protocol):
    """The results of a run for a hook."""

    @property
    def results(self) -> Any: ...


class SavingHook(Protocol):
    """A `tf.compat.v1.train.CheckpointSaverHook`."""

    _listeners: list[Any]


class SessionHook(Protocol):
    """A `tf.compat.v1.train.SessionRunHook`."""

    def begin(self) -> None: ...
    def after_create_session(self, session: Session, coord: object) -> None: ...
    def before_run(self, run_context: RunContext) -> RunArgs | None: ...
    def after_run(self, run_context: RunContext, run_values: RunValues) -> None: ...
    def end(self, session: Session) -> None: ...


class SessionTimer(Protocol):
    """The timer of a hook: `tf.compat.v1.train.SecondOrStepTimer`."""

    def should_trigger_for_step(self, step: int) -> bool: ...
    def update_last_triggered_step(self, step: int) -> Any: ...


class Scaffold(Protocol):
    """A `tf.compat.v1.train.Scaffold`."""

    @property
    def local_init_op(self) -> Operation | None: ...
    @property
    def ready_op(self) -> Operation | None: ...
    @property
    def ready_for_local_init_op(self) -> Operation | None: ...
    def finalize(self) -> Scaffold: ...


class Saver(Protocol):
    """A `tf.compat.v1.train.Saver`."""


class ClusterSpec(Protocol):
    """A `tf.train.ClusterSpec`."""

    @property
    def jobs(self) -> list[str]: ...


class Server(Protocol):
    """A `tf.distribute.Server`."""

    @property
    def target(self) -> str: ...


class ConfigProto(Protocol):
    """A `tf.compat.v1.ConfigProto`."""


class SignatureDef(Protocol):
    """The signature of a SavedModel's function."""


class OnnxGraph(Protocol):
    """The graph of an ONNX model."""

    name: str

    @property
    def node(self) -> Any: ...
    @property
    def input(self) -> Any: ...
    @property
    def output(self) -> Any: ...
    @property
    def initializer(self) -> Any: ...
    @property
    def value_info(self) -> Any: ...


class OnnxModel(Protocol):
    """An ONNX `ModelProto`."""

    @property
    def graph(self) -> OnnxGraph: ...
    def SerializeToString(self) -> bytes: ...  # noqa: N802


class OnnxSession(Protocol):
    """An onnxruntime `InferenceSession`."""

    def run(self, output_names: Sequence[str] | None, feeds: Mapping[str, Array]) -> Any: ...
    def get_inputs(self) -> Any: ...
    def get_outputs(self) -> Any: ...
