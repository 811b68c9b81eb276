"""The seams of Keras for models whose weights are on parameter servers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import tensorflow as tf

from tfdist import types
from tfdist._keras import (
    Adam,
    BackupAndRestore,
    Embedding,
    KerasVariable,
    SeedGenerator,
    TensorFlowTrainer,
    TFExportArchive,
    Trainer,
    Variable,
    in_stateless_scope,
    legacy_h5_format,
    pythonify_logs,
    saving_lib,
)
from tfdist._tf.graphs import Function
from tfdist._tf.variables import ASSIGNMENTS, ResourceVariable
from tfdist.comm.batch_dependence import is_weight
from tfdist.errors import ConfigError
from tfdist.keras.functions import in_line
from tfdist.keras.hooks import Hook, accounted, of_weights, on_gradients
from tfdist.keras.losses import is_of_examples
from tfdist.keras.optimizers import adam_while
from tfdist.keras.replica_context import current_step
from tfdist.keras.weights import assignable
from tfdist.strategies.parameter_server import optimizers, passes, reporting
from tfdist.strategies.parameter_server.payload import applying, guarded
from tfdist.strategies.parameter_server.remote_step import (
    NotSplittable,
    RemoteStep,
    is_metric,
    remote_step,
)
from tfdist.strategies.parameter_server.serialization import PACKED_BYTES
from tfdist.strategies.parameter_server.servers import CHIEF, Partitioned, device_of, shown_part
from tfdist.strategies.parameter_server.step_function import PredictFunction, Serving, StepFunction
from tfdist.types import EmbeddingLayer, Logs, Model, Operand, Structure, Tensor
from tfdist.utils.messages import warn


def hooks(serving: Serving) -> list[Hook]:
    """The seams, for one strategy."""
    return [
        Hook(KerasVariable, "value", _local_value),
        Hook(KerasVariable, "assign_add", partial(_atomic, "assign_add")),
        Hook(KerasVariable, "assign_sub", partial(_atomic, "assign_sub")),
        Hook(Variable, "_direct_assign", _local_assign),
        Hook(Function, "__call__", partial(in_line, _is_remote)),
        *(Hook(ResourceVariable, name, _of_one_worker) for name in ASSIGNMENTS),
        Hook(SeedGenerator, "next", _seed_of_step),
        Hook(Embedding, "call", _embed),
        *on_gradients(_of_local_values),
        Hook(Adam, "update_step", adam_while(applying)),
        Hook(Trainer, "compile", _without_xla),
        Hook(TensorFlowTrainer, "make_train_function", partial(_on_workers, serving, "train")),
        Hook(TensorFlowTrainer, "make_test_function", partial(_on_workers, serving, "test")),
        Hook(TensorFlowTrainer, "make_predict_function", partial(_on_workers, serving, "predict")),
        Hook(TensorFlowTrainer, "_get_metrics_result_or_logs", _when_done),
        Hook(TensorFlowTrainer, "train_on_batch", partial(_on_one_batch, "train_function")),
        Hook(TensorFlowTrainer, "test_on_batch", partial(_on_one_batch, "test_function")),
        *(Hook(owner, name, partial(_settled, serving)) for owner, name in _WRITERS),
        Hook(TFExportArchive, "write_out", _on_the_chiefs_disk),
        Hook(TensorFlowTrainer, "fit", partial(_nothing_left, serving)),
        *optimizers.hooks(serving.servers),
        *passes.hooks(),
        *reporting.hooks(serving),
    ]


#: The seams that write a model's weights to a file.
_WRITERS = (
    (saving_lib, "save_model"),
    (saving_lib, "save_weights_only"),
    (legacy_h5_format, "save_model_to_hdf5"),
    (BackupAndRestore, "_save_model"),
)


def _settled(serving: Serving, original: Callable[..., Any]) -> Callable[..., Any]:
    """Writes weights when no step is under way, so that a file in mid-epoch is of one moment."""

    @wraps(original)
    def write(*args: object, **kwargs: object) -> object:
        serving.settle()
        return original(*args, **kwargs)

    return write


def _on_the_chiefs_disk(original: Callable[..., None]) -> Callable[..., None]:
    """Exports to the chief's disk; TensorFlow writes each weight on the disk of its server."""

    @wraps(original)
    def write_out(
        self: object, filepath: object, options: object = None, *rest: Any, **more: Any
    ) -> None:
        if options is None:
            options = tf.saved_model.SaveOptions(experimental_io_device=CHIEF)
        original(self, filepath, options, *rest, **more)

    return write_out


def _nothing_left(serving: Serving, original: Callable[..., Any]) -> Callable[..., Any]:
    """Leaves no step of a training that ends with an error to those that follow."""

    @wraps(original)
    def fit(self: Model, *args: object, **kwargs: object) -> object:
        try:
            return original(self, *args, **kwargs)
        except BaseException:
            serving.abandon()
            raise

    return fit


def _is_on_servers(variable: types.KerasVariable) -> bool:
    value = variable._value
    return value is not None and (is_metric(variable) or "/job:ps" in device_of(value))


def _step_for(variable: types.KerasVariable) -> RemoteStep | None:
    """The step in which a Keras variable has a local value, or None."""
    step = remote_step.value
    if step is None or applying.is_up or in_stateless_scope() or not _is_on_servers(variable):
        return None
    return step


def _local_value(original: property) -> property:
    """A variable's value in the step that runs, or the part that an optimizer updates."""
    stock = original.fget
    assert stock is not None

    def value(self: types.KerasVariable) -> Tensor | types.Variable:
        part = shown_part.value
        if part is not None and isinstance(self._value, Partitioned):
            return self._value.variables[part]
        step = _step_for(self)
        if step is None:
            return stock(self)
        return assignable(self._maybe_autocast(step.read(self)), self)

    return property(value)


def _local_assign(original: Callable[..., None]) -> Callable[..., None]:
    """A worker's step writes to its own copy; the servers get it with the gradients."""

    @wraps(original)
    def direct_assign(self: types.KerasVariable, value: Tensor) -> None:
        step = _step_for(self)
        if step is not None:
            step.write(self, tf.cast(value, self._value.dtype))
        elif applying.is_up:
            guarded(device_of(self._value), lambda: original(self, value))
        else:
            original(self, value)

    return direct_assign


def _of_one_worker(original: Callable[..., Any]) -> Callable[..., Any]:
    """Workers that share a batch out would each assign the program's own `tf.Variable`."""

    @wraps(original)
    def assign(self: types.Variable, *args: object, **kwargs: object) -> object:
        step = remote_step.value
        if step is not None and not accounted.is_up:
            if step.parts > 1:
                raise NotSplittable("assigns a variable of TensorFlow's own (tf.Variable)")
            step.plain_assigned.append(self)
        return original(self, *args, **kwargs)

    return assign


def _is_remote(_: types.Function) -> bool:
    """Whether a worker's step is being traced, which has the weights and updates as its own."""
    return remote_step.value is not None


def _atomic(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """Adds on the server: Keras reads and assigns, and loses what came between (keras#18668)."""

    @wraps(original)
    def add(self: types.KerasVariable, value: Operand) -> Operand:
        if applying.is_up or _step_for(self) is not None or not _is_on_servers(self):
            return original(self, value)
        getattr(self._value, name)(tf.cast(value, self._value.dtype))
        return value

    return add


def _seed_of_step(original: Callable[..., Any]) -> Callable[..., Any]:
    """Seeds that differ from step to step without a state that all workers would have to share.

    The chief advances the state by what steps have drawn, as `Numbers` does.
    """

    @wraps(original)
    def next_seed(self: types.SeedGenerator, ordered: bool = True) -> Tensor:
        step = remote_step.value
        if step is None:
            return original(self, ordered)
        with tf.init_scope():
            start = self.state._value.numpy()
        step.draws.append(self.state)
        offset = tf.stack([0, step.job * 1009 + len(step.draws)])
        return tf.constant(start) + tf.cast(offset, self.state._value.dtype)

    return next_seed


def _embed(original: Callable[..., Any]) -> Callable[..., Any]:
    """Fetches the rows of a big table, not the table."""

    @wraps(original)
    def call(self: EmbeddingLayer, inputs: Tensor) -> object:
        table = self._embeddings
        step = _step_for(table) if isinstance(table, KerasVariable) else None
        if step is None or self.lora_enabled or self.quantization_mode is not None:
            return original(self, inputs)
        value = table._value
        big = isinstance(value, Partitioned) or (
            value.shape.num_elements() * value.dtype.size > PACKED_BYTES
        )
        if not big or not isinstance(inputs, tf.Tensor):
            return original(self, inputs)
        ids = inputs if inputs.dtype in (tf.int32, tf.int64) else tf.cast(inputs, tf.int32)
        return tf.cast(step.lookup(table, ids), self.compute_dtype)

    return call


def _of_local_values(original: Callable[..., Any]) -> Callable[..., Any]:
    """Gradients of variables are those of their values in the step, or of their parts."""

    @wraps(original)
    def gradient(
        self: object, target: Structure, sources: Structure, *args: object, **kwargs: object
    ) -> Structure:
        flat = tf.nest.flatten(sources)
        stand_ins = [_stand_ins(variable) for variable in flat]
        if not any(stand_ins) and not any(map(is_weight, flat)):
            return original(self, target, sources, *args, **kwargs)
        used = [[v] if each is None else each[0] for v, each in zip(flat, stand_ins, strict=True)]
        standing = frozenset(id(x) for each in stand_ins if each is not None for x in each[0])
        with of_weights.set(standing if remote_step.value is not None else frozenset()):
            grads = original(self, target, used, *args, **kwargs)
        result = [
            of_used[0] if each is None else each[1](of_used)
            for each, of_used in zip(stand_ins, grads, strict=True)
        ]
        part = current_step()
        if part is not None:
            shared = [g for x, g in zip(flat, result, strict=True) if not is_of_examples(part, x)]
            part.gradients.update((id(each), each) for each in shared if each is not None)
        return tf.nest.pack_sequence_as(sources, result)

    return gradient


def _stand_ins(
    variable: Any,
) -> tuple[list[Any], Callable[[list[Any]], types.Gradient | None]] | None:
    """The tensors by which a tape knows a variable, and the way from their gradients to its own."""
    step = _step_for(variable) if isinstance(variable, KerasVariable) else None
    if step is not None:
        return step.sources(variable), partial(step.gradient, variable)
    whole = getattr(variable, "_value", variable)
    if isinstance(whole, Partitioned):
        return list(whole.variables), whole.join
    return None


def _without_xla(original: Callable[..., None]) -> Callable[..., None]:
    """XLA cannot compile a step that spans several tasks."""

    @wraps(original)
    def compile_model(self: Model, *args: object, **kwargs: object) -> None:
        if kwargs.get("jit_compile") is True:
            warn(
                "jit_compile=True does not go with parameter servers: XLA cannot compile a step "
                "that spans several tasks. The model is compiled with jit_compile=False."
            )
            kwargs["jit_compile"] = False
        original(self, *args, **kwargs)

    return compile_model


def _on_workers(serving: Serving, kind: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """Runs a model's steps on the workers; Keras runs them in the chief's process."""
    name = f"{kind}_function"

    @wraps(original)
    def make_function(self: Model, force: bool = False) -> Callable[..., Any]:
        if getattr(self, name) is not None and not force:
            return getattr(self, name)
        if self.run_eagerly:
            raise ConfigError(
                "run_eagerly=True conflicts with strategy='parameter_server', whose workers "
                "run graphs. Compile with run_eagerly=False, or debug with "
                "--strategy single."
            )
        if kind == "predict":
            self.predict_function = PredictFunction(serving, self)
        else:
            setattr(self, name, StepFunction(serving, self, f"{kind}_step"))
        return getattr(self, name)

    return make_function


def _when_done(original: Callable[..., Any]) -> Callable[..., Any]:
    """Waits for the steps under way before an epoch's or an evaluation's results are read."""

    @wraps(original)
    def results(self: Model, logs: Logs | None) -> Logs:
        for function in (self.train_function, self.test_function):
            if isinstance(function, StepFunction) and function.owns(logs):
                logs = function.finish()
        return original(self, logs)

    return results


def _on_one_batch(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """Reads the metrics of a single step when it has ended: all workers have answered."""

    @wraps(original)
    def on_batch(self: Model, *args: object, return_dict: bool = False, **kwargs: object) -> object:
        original(self, *args, return_dict=True, **kwargs)
        logs = pythonify_logs(getattr(self, name).finish())
        return logs if return_dict else self._flatten_metrics_in_order(logs)

    return on_batch
