"""`fit` that survives a change of the world: its state is kept, and later processes go on from it.

All replicas hold the same weights, so a process that outlives another holds all that is needed. Now
and then, between two steps and on all workers alike, the state of the training is copied to host
memory: weights, optimizer, metrics, random generators, callbacks and history. When a worker is lost
the others write their last copy and end; started again, in another number perhaps, the script runs
up to the same call of `fit`, which reads past the data that was seen and goes on.

A copy is taken about once a second. The steps after the last one are lost with the weights that
they led to, and are run again from the older weights: no example counts twice or never.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import io
import json
import sys
import time
import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist._keras import TensorFlowTrainer, TFEpochIterator, unwrapped
from tfdist.comm import host_collectives
from tfdist.errors import ConfigError, TfdistError
from tfdist.keras import backup
from tfdist.keras.building import build_optimizer
from tfdist.keras.hooks import Hook
from tfdist.keras.model_optimizers import optimizers_in, optimizers_of
from tfdist.launcher.elastic_directory import RESUME_STATUS, ElasticDirectory, Position
from tfdist.types import Callback, History, Json, Logs, Model, Optimizer
from tfdist.utils.messages import logger

__all__ = [
    "PERIOD_SECONDS",
    "State",
    "begin",
    "end",
    "hooks",
    "leave_state",
    "packed",
    "put_back",
    "restore",
    "take",
    "unpacked",
    "values_of",
]


# The state of a training in host memory: taken from a model, and put back.

#: Attributes of callbacks of these types are kept, such as the patience used up and the best value;
#: and dicts and the kinds below of them, such as the best weights.
_PLAIN = (bool, int, float, str, type(None), np.floating, np.integer, np.ndarray)

_NESTS: dict[str, Any] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}

#: Attributes that Keras sets before it begins to train.
_SET_BY_KERAS = ("params",)


#: The places of the weights that an optimizer updates in `model.variables`, and the values of its
#: own variables.
OptimizerValues = tuple[list[int], list[Any]]
#: The values of the variables of a model, of those of its metrics that are built, and of each
#: optimizer in its attributes, or None if that is not built.
Values = tuple[list[Any], list[Any], list[OptimizerValues | None]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class State:
    """A training at one position.

    Attributes:
        position: how far it is.
        arrays: the values of all variables of the model, its optimizers and its metrics; None if
            the present `fit` has not begun to train.
        callbacks: for each callback its class's name and its plain attributes, arrays too.
        history: the history of the present `fit` and its epochs.
        finished: the histories of the calls of `fit` that are over.
        last_end: the values of the variables when the last of those ended, or None.
    """

    position: Position
    arrays: Values | None
    callbacks: list[tuple[str, dict[str, Any]]]
    history: tuple[dict[str, list[Any]], list[int]]
    finished: list[dict[str, Any]]
    last_end: Values | None


def take(model: Model | None, position: Position, callbacks: list[Any], job: Any) -> State:
    """Copies the state of a training.

    Args:
        model: the model that is being trained; None between two calls of `fit`.
        position: how far it is.
        callbacks: the callbacks of its `fit`.
        job: has `finished` and `last_end`, as `State` has them.
    """
    history = getattr(model, "history", None)
    logs = (copy.deepcopy(history.history), list(history.epoch)) if history else ({}, [])
    return State(
        position=position,
        arrays=None if model is None else values_of(model),
        callbacks=[(type(each).__name__, _plain(each)) for each in callbacks],
        history=logs,
        finished=list(job.finished),
        last_end=job.last_end,
    )


#: The errors in which reading another file, or a damaged one, ends.
_DAMAGES = (
    *(EOFError, KeyError, TypeError, RecursionError),
    *(zipfile.BadZipFile, zlib.error, tf.errors.OpError),
)


def packed(state: State) -> bytes:
    """A state as a file: arrays and a description in JSON, in the form of NumPy's archives.

    Anybody who can write to the directory of a job can leave a file there. Nothing in a file
    of this form is executed, unlike a pickled object.
    """
    arrays: list[bytes] = []
    fields = {f.name: getattr(state, f.name) for f in dataclasses.fields(state)}
    fields["position"] = dataclasses.astuple(state.position)
    header = json.dumps(_described(fields, arrays)).encode()
    content = {f"array{k}": np.frombuffer(data, np.uint8) for k, data in enumerate(arrays)}
    file = io.BytesIO()
    np.savez(file, allow_pickle=False, header=np.frombuffer(header, np.uint8), **content)
    return file.getvalue()


def unpacked(data: bytes) -> State:
    """The state that `packed` made a file of.

    Raises:
        ValueError: if it is not such a file.
    """
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as file:
            fields = _undescribed(json.loads(file["header"].tobytes()), file)
        return State(**{**fields, "position": Position(*fields["position"])})
    except _DAMAGES as error:
        raise ValueError(f"it is not the state of a training ({error})") from error


def _described(value: object, arrays: list[bytes]) -> Json:
    """A nest of plain values as JSON has it; arrays stand in `arrays`, anything else as it prints.

    Arrays are kept as bytes, since NumPy's archives do not know all of TensorFlow's types.
    """
    if isinstance(value, dict):
        return {"dict": [[_described(v, arrays) for v in item] for item in value.items()]}
    for form, kind_of_nest in _NESTS.items():
        if isinstance(value, kind_of_nest):
            return {form: [_described(v, arrays) for v in value]}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    try:
        array = np.asarray(value)
        kind = tf.as_dtype(array.dtype)
    except (TypeError, ValueError):
        return repr(value)
    text = kind == tf.string
    arrays.append(tf.io.serialize_tensor(array).numpy() if text else array.tobytes())
    return {"array": [len(arrays) - 1, kind.name, list(array.shape)]}


def _undescribed(value: Json, file: Any) -> Any:
    """The nest that `_described` was given."""
    if not isinstance(value, dict):
        return value
    [(form, content)] = value.items()
    if form == "dict":
        return {_undescribed(k, file): _undescribed(v, file) for k, v in content}
    if form == "array":
        number, kind, shape = content
        data, dtype = file[f"array{number}"].tobytes(), tf.as_dtype(kind)
        if dtype == tf.string:
            return tf.io.parse_tensor(data, tf.string).numpy()
        return np.frombuffer(data, dtype.as_numpy_dtype).reshape(shape)
    return _NESTS[form](_undescribed(v, file) for v in content)


def values_of(model: Model) -> Values | None:
    """The values of all variables that a training changes, or None if the model is not built yet.

    Raises:
        ConfigError: if a process that goes on could not find an optimizer, or make its variables.
    """
    if not model.built:
        return None
    places = {id(variable): place for place, variable in enumerate(model.variables)}
    optimizers = optimizers_in(model)
    hidden = optimizers_of(model)[len(optimizers) :]
    if hidden:
        raise ConfigError(
            f"--min-np and --max-np conflict with the optimizer {hidden[0].name!r}: a step of the "
            "model applies it, but no attribute of the model holds it, so a training that is taken "
            "up could not go on with its state. Assign it to the model, such as "
            "model.second = optimizer."
        )
    states = [_state_of(each, places) for each in optimizers]
    return _copies(model.variables), _copies(model.metrics_variables), states


def _copies(variables: Iterable[Any]) -> list[Any]:
    return [tf.convert_to_tensor(v.value).numpy().copy() for v in variables]


def _state_of(optimizer: Optimizer, places: Mapping[int, int]) -> OptimizerValues | None:
    if not optimizer.built:
        return None
    trained = unwrapped(optimizer)._trainable_variables
    others = [each.path for each in trained if id(each) not in places]
    if others:
        raise ConfigError(
            f"--min-np and --max-np conflict with the optimizer {optimizer.name!r}: it updates "
            f"{others[0]!r}, which the model does not hold, so a training that is taken up could "
            "not go on with it. Assign that variable to an attribute of the model."
        )
    return [places[id(each)] for each in trained], _copies(optimizer.variables)


def restore(state: State, model: Model, callbacks: list[Any]) -> None:
    """Puts a state back.

    Args:
        state: the result of `take`.
        model: the same model, built.
        callbacks: the callbacks of its `fit`, which have begun.

    Raises:
        TfdistError: if the model has other variables now.
    """
    if state.arrays is not None:
        put_back(state.arrays, model)
    for callback, (name, attributes) in zip(callbacks, state.callbacks, strict=False):
        if type(callback).__name__ == name:
            vars(callback).update(copy.deepcopy(attributes))
    if getattr(model, "history", None) is not None:
        model.history.history = copy.deepcopy(state.history[0])
        model.history.epoch = list(state.history[1])


def put_back(values: Values, model: Model) -> None:
    """Gives the variables of a model and of its optimizers their values back.

    Args:
        values: the result of `values_of`.
        model: the same model, built; its optimizers are built here.

    Raises:
        TfdistError: if the model has other variables now.
    """
    own, metrics, states = values
    optimizers, weights = optimizers_in(model), list(model.variables)
    _assign(own, weights)
    # Metrics that a step does not use were not built then, and come last.
    _assign(metrics, model.metrics_variables[: len(metrics)])
    if len(states) != len(optimizers):
        raise _changed(f"{len(states)} optimizers", str(len(optimizers)))
    for optimizer, state in zip(optimizers, states, strict=True):
        if state is not None:
            trained, arrays = state
            build_optimizer(optimizer, [weights[place] for place in trained])
            _assign(arrays, optimizer.variables)


def _assign(arrays: list[Any], variables: Sequence[Any]) -> None:
    if [tuple(v.shape) for v in variables] != [a.shape for a in arrays]:
        raise _changed(f"{len(arrays)} variables", f"{len(variables)}, or of other shapes")
    for variable, value in zip(variables, arrays, strict=True):
        variable.assign(value)


def _changed(before: str, now: str) -> TfdistError:
    return TfdistError(
        f"The training cannot go on: its model had {before}, and the script now makes one with "
        f"{now}. A script that is started again must make the same model."
    )


def _plain(callback: Callback) -> dict[str, Any]:
    kept = {name: v for name, v in vars(callback).items() if name not in _SET_BY_KERAS}
    return {name: copy.deepcopy(v) for name, v in kept.items() if _is_plain(v)}


def _is_plain(value: object) -> bool:
    if isinstance(value, dict):
        return all(map(_is_plain, [*value, *value.values()]))
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN)


#: Seconds between two copies of the state.
PERIOD_SECONDS = 1.0

#: Steps without a copy, at most.
_MOST_STEPS = 1000


class _Job:
    """This process's part in an elastic job."""

    def __init__(self, place: ElasticDirectory) -> None:
        self.place = place
        self.rank = host_collectives.rank(tf.distribute.get_strategy())
        self.resumed = _read(place)
        self.kept: State | None = self.resumed
        self.finished: list[dict[str, Any]] = []
        self.last_end: Values | None = None
        self.fitting = False

    @property
    def number(self) -> int:
        """The number of the next or present call of `fit`."""
        return len(self.finished)

    def is_over(self) -> bool:
        """Whether the next call of `fit` had finished before this process began."""
        return self.resumed is not None and self.number < self.resumed.position.fit

    def is_interrupted(self) -> bool:
        """Whether the next call of `fit` is the one to go on with."""
        resumed = self.resumed
        if resumed is None or resumed.arrays is None:
            return False
        return self.number == resumed.position.fit


_jobs: list[_Job] = []


def begin(place: ElasticDirectory) -> None:
    """Makes every `fit` of this process one that can be left and taken up again.

    Args:
        place: where states are left.
    """
    _jobs[:] = [_Job(place)]


def end() -> None:
    """Undoes `begin`: `fit` is Keras's own again."""
    _jobs.clear()


def leave_state() -> str:
    """Writes the last copy of the state, for the processes that come after.

    Returns:
        What was written, in words.
    """
    job = _jobs[0]
    if job.kept is None:
        return "nothing had been trained yet"
    job.place.write(job.kept.position, job.rank, packed(job.kept))
    return f"the training is kept at {job.kept.position}"


def hooks() -> list[Hook]:
    """The seams of elastic training."""
    return [
        Hook(TensorFlowTrainer, "fit", _elastic, priority=1),
        Hook(TensorFlowTrainer, "_get_metrics_result_or_logs", _of_finished_epoch),
    ]


def _of_finished_epoch(original: Callable[..., Any]) -> Callable[..., Any]:
    """The logs of an epoch that was taken up after its last step: no step has given any."""

    @functools.wraps(original)
    def result_or_logs(self: Model, logs: Logs | None) -> Logs:
        return original(self, logs) if logs or not _jobs else self.get_metrics_result()

    return result_or_logs


def _elastic(original: Callable[..., Any]) -> Callable[..., Any]:
    """A job whose workers come and go runs `fit` again from its last commit."""

    @functools.wraps(original)
    def fit(self: Model, *args: object, **kwargs: object) -> object:
        if not _jobs or _jobs[0].fitting:
            return original(self, *args, **kwargs)
        job = _jobs[0]
        bound = inspect.signature(original).bind(self, *args, **kwargs)
        bound.apply_defaults()
        if job.is_over():
            return _as_before(job, self, bound.arguments)
        keeper = _Keeper(job, int(bound.arguments["initial_epoch"] or 0))
        bound.arguments["callbacks"] = _with(keeper, bound.arguments["callbacks"])
        job.fitting = True
        try:
            history = original(*bound.args, **bound.kwargs)
        finally:
            job.fitting = False
        keeper.finish(history)
        return history

    return fit


class _Keeper(keras.callbacks.Callback):  # type: ignore[misc]
    """Copies the state now and then, and puts it back at the start."""

    def __init__(self, job: _Job, initial_epoch: int) -> None:
        super().__init__()
        self._job = job
        self._initial_epoch = initial_epoch
        self._epoch = initial_epoch
        self._resuming = job.is_interrupted()
        self._next = 1
        self._since = time.monotonic()
        self._steps = 0
        self._callbacks: Any = None

    def set_list(self, callbacks: object) -> None:
        """Names the callbacks whose state is kept too."""
        self._callbacks = callbacks

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Makes `fit` begin at the epoch and step of the state."""
        if not self._resuming or self._job.resumed is None:
            return
        position = self._job.resumed.position
        iterator = backup.current_iterator()
        backup.build(self.model, iterator, with_optimizer=False)
        self.model._initial_epoch = position.epoch
        assert iterator is not None
        iterator._tfdist_replay = position.epoch - self._initial_epoch
        iterator._tfdist_skip = position.step

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Puts the state back, or copies it where the epoch begins."""
        self._epoch = epoch
        if self._resuming and self._job.resumed is not None:
            self._resuming = False
            self.model._initial_epoch = None
            restore(self._job.resumed, self.model, self._listed())
            self._steps = self._job.resumed.position.step
            self._next, self._since = self._steps + 1, time.monotonic()
            return
        self._copy(0)

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Copies the state at the steps that all workers have agreed on."""
        if batch + 1 >= self._next:
            self._copy(batch + 1)

    def finish(self, history: History) -> None:
        """Notes that this call of `fit` is over."""
        job = self._job
        job.last_end = values_of(self.model)
        job.finished.append({"history": history.history, "epoch": history.epoch})
        job.kept = take(None, Position(job.number, 0, 0), [], job)

    def _listed(self) -> list[Any]:
        return [] if self._callbacks is None else list(self._callbacks)

    def _copy(self, step: int) -> None:
        """Copies the state, and agrees on the step of the next copy or on an end."""
        job = self._job
        taken = time.monotonic() - self._since
        job.kept = take(self.model, Position(job.number, self._epoch, step), self._listed(), job)
        steps = max(1, step - self._steps if step else 1)
        apart = max(1, min(_MOST_STEPS, round(steps * PERIOD_SECONDS / max(taken, 1e-3))))
        said = {"stop": job.place.stop_requested(), "apart": apart}
        said = host_collectives.from_chief(tf.distribute.get_strategy(), said, "keeping the state")
        self._steps, self._next, self._since = step, step + int(said["apart"]), time.monotonic()
        if said["stop"]:
            words = leave_state() if job.rank == 0 else ""
            logger.info(f"stopped for another world; {words}")
            sys.exit(RESUME_STATUS)


def _with(keeper: _Keeper, callbacks: object) -> object:
    if isinstance(callbacks, keras.callbacks.CallbackList):
        callbacks.append(keeper)
        keeper.set_list(callbacks.callbacks)
        return callbacks
    listed = [] if callbacks is None else tf.nest.flatten(callbacks)
    keeper.set_list(listed)
    return [*listed, keeper]


def _as_before(job: _Job, model: Model, arguments: Mapping[str, Any]) -> History:
    """The result of a `fit` that was over before this process began.

    Of several, the model has its trained weights after the last.
    """
    assert job.resumed is not None
    done = job.resumed.finished[job.number]
    history = keras.callbacks.History()
    history.set_model(model)
    history.history, history.epoch = done["history"], done["epoch"]
    model.history = history
    job.finished.append(done)
    if job.number == job.resumed.position.fit and job.resumed.last_end is not None:
        names = ("x", "y", "sample_weight", "batch_size", "steps_per_epoch", "class_weight")
        given = {name: arguments[name] for name in names}
        iterator = TFEpochIterator(model.distribute_strategy, **given)
        backup.build(model, iterator, with_optimizer=False)
        put_back(job.resumed.last_end, model)
    return history


def _read(place: ElasticDirectory) -> State | None:
    """The newest state, the same for all workers."""
    strategy = tf.distribute.get_strategy()
    found = place.newest()
    name = None if found is None else found[1].name
    names = host_collectives.all_gather_json(
        strategy, name, "looking for the state of the training"
    )
    if len(set(names)) > 1:
        raise TfdistError(
            f"The workers of this elastic job see different states in {str(place.path)!r}: "
            f"{names}. The directory must be one that all hosts share: name it with --log-dir."
        )
    if found is None:
        return None
    try:
        return unpacked(found[1].read_bytes())
    except (OSError, ValueError) as error:
        raise TfdistError(
            f"The state of the training in {str(found[1])!r} cannot be read: {error}. Remove the "
            "file to go on from the state before it."
        ) from error
