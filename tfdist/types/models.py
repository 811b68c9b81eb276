"""Types of Keras's models, layers, optimizers and callbacks: the members that tfdist uses."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

from tfdist.types.tensors import (
    AnyStrategy,
    DatasetIterator,
    KerasVariable,
    Strategy,
    Tensor,
    Variable,
)

#: Numbers of a step or an epoch by name, as Keras hands them to callbacks.
Logs: TypeAlias = "dict[str, Any]"


class Layer(Protocol):
    """A `keras.layers.Layer`."""

    built: bool
    name: str

    @property
    def weights(self) -> list[KerasVariable]: ...
    @property
    def variables(self) -> list[KerasVariable]: ...
    @property
    def trainable_weights(self) -> list[KerasVariable]: ...
    @property
    def trainable_variables(self) -> list[KerasVariable]: ...
    @property
    def non_trainable_variables(self) -> list[KerasVariable]: ...
    @property
    def metrics_variables(self) -> list[KerasVariable]: ...

    activity_regularizer: object
    _losses: list[Tensor]
    _trainable_variables: list[KerasVariable]
    _non_trainable_variables: list[KerasVariable]

    def _flatten_layers(self, include_self: bool = ..., recursive: bool = ...) -> list[Layer]: ...
    def __call__(self, *args: object, **kwargs: object) -> Any: ...
    def call(self, *args: object, **kwargs: object) -> Any: ...


class DenseLayer(Layer, Protocol):
    """A `keras.layers.Dense` or an `EinsumDense`; the first has no equation."""

    bias: Any
    activation: Any
    equation: str


class Metric(Protocol):
    """A `keras.metrics.Metric`."""

    @property
    def dtype(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def variables(self) -> list[KerasVariable]: ...
    def update_state(self, *args: object, **kwargs: object) -> Any: ...
    def reset_state(self) -> None: ...
    def result(self) -> Any: ...


class Optimizer(Protocol):
    """A `keras.optimizers.Optimizer`."""

    built: bool
    learning_rate: Any
    _learning_rate: Any
    _iterations: KerasVariable
    _model_variables_moving_average: list[KerasVariable]
    _trainable_variables: list[KerasVariable]

    @property
    def name(self) -> str: ...
    @property
    def iterations(self) -> KerasVariable: ...
    @property
    def variables(self) -> list[KerasVariable]: ...
    @property
    def use_ema(self) -> bool: ...
    @property
    def weight_decay(self) -> float | None: ...
    @property
    def clipnorm(self) -> float | None: ...
    @property
    def global_clipnorm(self) -> float | None: ...
    @property
    def gradient_accumulation_steps(self) -> int | None: ...
    def build(self, variables: Sequence[KerasVariable]) -> None: ...
    def apply(self, grads: object, trainable_variables: object = ...) -> Any: ...
    def apply_gradients(self, grads_and_vars: object) -> Any: ...
    def add_variable_from_reference(
        self, reference_variable: KerasVariable, *args: object, **kwargs: object
    ) -> KerasVariable: ...
    def update_step(
        self, gradient: object, variable: KerasVariable | Variable, learning_rate: object
    ) -> Any: ...
    def set_weights(self, weights: object) -> None: ...
    def _clip_gradients(self, grads: object) -> list[Any]: ...
    def _common_apply(self, grads: object, trainable_variables: object = ...) -> Any: ...
    def _get_variable_index(self, variable: KerasVariable | Variable) -> int: ...
    def exclude_from_weight_decay(
        self, var_list: object = ..., var_names: object = ...
    ) -> None: ...
    def _var_key(self, variable: KerasVariable) -> Any: ...
    def _use_weight_decay(self, variable: KerasVariable) -> bool: ...
    def scale_loss(self, loss: Tensor) -> Tensor: ...
    def get_config(self) -> dict[str, Any]: ...


class Adam(Optimizer, Protocol):
    """A `keras.optimizers.Adam`."""

    amsgrad: bool
    beta_1: float
    beta_2: float
    epsilon: float
    _momentums: list[KerasVariable]
    _velocities: list[KerasVariable]


class Adafactor(Optimizer, Protocol):
    """A `keras.optimizers.Adafactor`."""

    _r: Sequence[Any]
    _c: Sequence[Any]


class LossScaler(Optimizer, Protocol):
    """A `keras.optimizers.LossScaleOptimizer`."""

    initial_scale: float

    @property
    def dynamic_scale(self) -> KerasVariable: ...
    def add_variable(self, shape: Sequence[int], *args: Any, name: str) -> KerasVariable: ...
    @property
    def inner_optimizer(self) -> Optimizer: ...
    @property
    def step_counter(self) -> KerasVariable: ...


class Callback(Protocol):
    """A `keras.callbacks.Callback`."""

    @property
    def model(self) -> Model: ...


class Backup(Callback, Protocol):
    """A `keras.callbacks.BackupAndRestore`."""

    backup_dir: str
    double_checkpoint: bool
    save_freq: Any
    _current_epoch: int
    _last_batch_seen: int
    _weights_path: str
    _training_metadata_path: str
    _prev_weights_path: str
    _prev_training_metadata_path: str
    _tfdist_metrics: Any


class Model(Layer, Protocol):
    """A `keras.Model`."""

    optimizer: Optimizer | None
    train_function: Any
    test_function: Callable[..., Any] | None
    predict_function: Any
    jit_compile: bool
    run_eagerly: bool
    stop_training: bool
    steps_per_execution: int
    history: Any
    _compile_loss: Any
    input_dtype: str | None
    loss: Any
    _compile_metrics: Any
    _initial_epoch: int | None
    _loss_tracker: Metric

    @property
    def input(self) -> Any: ...
    @property
    def layers(self) -> list[Layer]: ...
    @property
    def metrics(self) -> list[Metric]: ...
    @property
    def distribute_strategy(self) -> Strategy: ...
    def compile(self, *args: object, **kwargs: object) -> None: ...
    def compute_metrics(
        self, x: object, y: object, y_pred: object, sample_weight: object = ...
    ) -> Logs: ...
    def get_metrics_result(self) -> Logs: ...
    def reset_metrics(self) -> None: ...
    def make_train_function(self, force: bool = ...) -> Any: ...
    def make_test_function(self, force: bool = ...) -> Any: ...
    def make_predict_function(self, force: bool = ...) -> Any: ...
    def train_step(self, data: object) -> Logs: ...
    def predict_step(self, data: object) -> Any: ...
    def export(self, filepath: object, format: str = ..., **kwargs: object) -> None: ...
    def compute_loss(self, *args: object, **kwargs: object) -> Tensor: ...
    def _compute_loss(self, *args: object, **kwargs: object) -> Tensor: ...
    def save_weights(self, filepath: object, **kwargs: object) -> None: ...
    def load_weights(self, filepath: object, **kwargs: object) -> None: ...
    def _assert_compile_called(self, method_name: str | None = ...) -> None: ...
    def _flatten_metrics_in_order(self, logs: object) -> Any: ...
    def _get_metrics_result_or_logs(self, logs: object) -> Logs: ...
    def _symbolic_build(self, *args: object, **kwargs: object) -> None: ...


class CallbackList(Protocol):
    """Keras's list of callbacks."""

    params: dict[str, Any]

    @property
    def callbacks(self) -> list[Callback]: ...
    @property
    def model(self) -> Model: ...


class History(Callback, Protocol):
    """The result of `fit`."""

    @property
    def history(self) -> dict[str, list[Any]]: ...
    @property
    def epoch(self) -> list[int]: ...


class DataAdapter(Protocol):
    """The object that hands data to Keras's loops."""

    _inputs: Any
    _shuffle: Any
    shuffle: Any

    @property
    def batch_size(self) -> int | None: ...

    @property
    def num_batches(self) -> int | None: ...

    @property
    def partial_batch_size(self) -> int | None: ...


class EpochIterator(Protocol):
    """Keras's loop over the batches of an epoch.

    Attributes:
        _tfdist_epochs: for how many epochs it is read on.
    """

    _tfdist_epochs: int

    @property
    def data_adapter(self) -> DataAdapter: ...

    _current_iterator: DatasetIterator | None
    _distribute_strategy: AnyStrategy | None
    _distributed_dataset: Any
    _tfdist_replay: int
    _tfdist_skip: int

    def catch_stop_iteration(self) -> contextlib.AbstractContextManager[None]: ...
    @property
    def steps_per_execution(self) -> int: ...


class SeedGenerator(Protocol):
    """A `keras.random.SeedGenerator`."""

    @property
    def state(self) -> KerasVariable: ...


class EmbeddingLayer(Layer, Protocol):
    """A `keras.layers.Embedding`."""

    _embeddings: Any

    @property
    def compute_dtype(self) -> str: ...
    @property
    def lora_enabled(self) -> bool: ...
    @property
    def quantization_mode(self) -> str | None: ...


class StatefulLayer(Layer, Protocol):
    """A layer that may go on from the states of the batch before."""

    stateful: bool
    states: object
    _expected_batch_size: int | None


class Functional(Model, Protocol):
    """A Functional model, whose graph of calls is known."""

    _inputs: list[Any]
    _outputs: list[Any]
    _outputs_struct: Any
    _nodes_by_depth: dict[int, list[Any]]

    def _standardize_inputs(self, inputs: object) -> list[Tensor]: ...


class StatelessScope(Protocol):
    """A `keras.StatelessScope`: assignments within it change nothing outside."""

    @property
    def losses(self) -> list[Tensor]: ...
    def get_current_value(self, variable: KerasVariable) -> Tensor | None: ...
