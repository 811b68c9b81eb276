"""The state of a worker while it runs a step on weights that are on servers.

A step first reads all weights that it uses, at one moment and in few transfers. Assigned values
stay with the worker until its update, which carries the gradients and the differences of these
values. Metrics start from zero in each step, and the chief adds up what the steps return.

All this is built while the step's graph is traced: a weight is a placeholder from the moment it
is first used, and the read that feeds it is put in front when it is known what is read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import tensorflow as tf

from tfdist._keras import global_state
from tfdist._tf.distribute import feed_from, watch_on_all_tapes
from tfdist.comm.batch_dependence import WEIGHT
from tfdist.errors import ConfigError
from tfdist.keras.assignments import on_whole_batch
from tfdist.keras.example_pairs import Meeting
from tfdist.keras.metric_updates import STATE, of_replica
from tfdist.keras.replica_context import LOSS, Step, current_step
from tfdist.strategies.parameter_server.serialization import move
from tfdist.strategies.parameter_server.servers import Partitioned, Servers, device_of, parts_of
from tfdist.strategies.parameter_server.transaction_log import Tally
from tfdist.types import Gradient, KerasVariable, Layer, Optimizer, Structure, Tensor, Variable
from tfdist.utils.thread_state import Current

__all__ = [
    "NotSplittable",
    "RemoteStep",
    "TraceAgain",
    "is_metric",
    "remote_step",
]


class NotSplittable(BaseException):
    """A training step that several workers cannot compute in parts, with the reason in words.

    No `Exception`, since Keras adds to the messages of those that pass through a layer.
    """


class TraceAgain(BaseException):
    """A step whose graph is wrong for those that follow, and right if it is traced once more."""


class Update(NamedTuple):
    """Gradients that are to be applied.

    Attributes:
        apply: the optimizer's own `apply`, of gradients and TensorFlow variables; or None.
        grads: a dense tensor, `IndexedSlices` or None for each variable.
        variables: Keras variables.
        beside: other tensors that `apply` uses, on the first server.
        optimizer: whose `apply` that is; or None.
    """

    apply: Callable[[list[Any], list[Any]], Any] | None
    grads: list[Any]
    variables: list[Any]
    beside: tuple[Any, ...] = ()
    optimizer: Optimizer | None = None

    def counts_in(self, variable: KerasVariable) -> bool:
        """Whether a number is changed by the update, as `iterations` or a loss scale is."""
        if self.optimizer is None:
            return False
        rate = getattr(self.optimizer, "_learning_rate", None)
        return variable is not rate and any(variable is each for each in self.optimizer.variables)


class Results(NamedTuple):
    """Numbers that a step adds to the servers' sums.

    Attributes:
        tally: where they are added up.
        packed: the numbers, as the tally packs them.
    """

    tally: Tally
    packed: Tensor


class Part(Step):
    """A part of a global batch whose other parts other workers compute at their own pace."""

    def sum(self, values: Structure) -> Any:
        """Needs the other parts in the middle of the step."""
        raise NotSplittable("adds numbers up over the whole batch before its gradient is known")

    def note_meeting(self, found: Meeting, place: Layer | str = LOSS) -> None:
        """Leaves the whole batch to one worker."""
        if not isinstance(place, str):
            raise NotSplittable(
                f"mixes the examples of a batch in {place.name!r}, at {found.where}"
            )
        raise NotSplittable(f"relates the examples of a batch to each other, at {found.where}")

    def gather(self, rows: list[Any], where: str) -> tuple[list[Any], Tensor]:
        """Leaves the whole batch to one worker."""
        del rows
        raise NotSplittable(f"relates the examples of a batch to each other, at {where}")

    def largest(self, numbers: Tensor, where: str) -> Tensor:
        """Leaves the whole batch to one worker."""
        del numbers
        raise NotSplittable(f"needs the longest row of the whole batch, for {where}")


class RemoteStep:
    """Local values of one step.

    Args:
        servers: where the weights are.
        job: the step's own number, a scalar int64 tensor; the same when it is done again.
        update: how many updates workers had made together when it was scheduled, a scalar int64
            tensor.
        part: which part of the global batch this is, a scalar int64 tensor.
        parts: into how many parts the global batch is split.
        send: sends an update to the servers.

    Attributes:
        plain_assigned: variables of TensorFlow's own that the step assigns on their servers.
    """

    def __init__(
        self,
        servers: Servers,
        job: Tensor,
        update: Tensor,
        part: Tensor,
        parts: int,
        send: Callable[[RemoteStep, Update, Results | None], Any],
    ) -> None:
        self.servers = servers
        self._send = send
        self._pending: Update | None = None
        self.job, self.update, self.part, self.parts = job, update, part, parts
        self.graph = tf.compat.v1.get_default_graph()
        self.metrics: dict[int, Any] = {}
        self.updates = 0
        self.draws: list[Any] = []
        self.plain_assigned: list[Variable] = []
        self.scales: dict[int, Any] = {}
        self._after: list[Any] = []
        self._local: dict[int, Any] = {}
        self._first: dict[int, Any] = {}
        self._changed: dict[int, Any] = {}
        self._slots: list[tuple[Any, Any]] = []
        self._rows: dict[int, list[tuple[Any, Any]]] = {}
        self._used: dict[int, list[Any]] = {}
        self._version: Tensor | None = None
        self._early: list[Any] = []

    def read(self, variable: KerasVariable) -> Tensor:
        """The value of a Keras variable in this step.

        Raises:
            NotSplittable: if it depends on an update that other workers take part in.
        """
        value = self._value(variable)
        watch_on_all_tapes(value)
        used = self._used.setdefault(id(variable), [])
        if not any(value is each for each in used):
            used.append(value)
        return value

    def write(self, variable: KerasVariable, value: Tensor) -> None:
        """Assigns a variable in this step."""
        if self._is_in_branch:
            if self.parts > 1:
                raise NotSplittable("assigns variables within a condition or a loop")
            # Added at once, since the branch may not be taken.
            if variable._value.dtype == tf.bool:
                variable._value.assign(value)
            else:
                variable._value.assign_add(value - self._value(variable))
            return
        before = self._value(variable)
        part, of_metric = current_step(), is_metric(variable)
        if part is not None and self.parts > 1 and not of_metric:
            # Ends a step that needs the other parts.
            on_whole_batch(part, value, f"The weight {variable.path!r}")
        value = tf.identity(value)  # The program goes on with the other, such as a part of a batch.
        value.set_shape(variable.shape)
        if of_metric:
            value = of_replica(part, variable, value, before)
            value = value if part is None else part.keep_if_empty(value, before)
        # A gradient does not pass through an assignment.
        self._local[id(variable)] = tf.stop_gradient(value)
        if not of_metric:
            self._changed[id(variable)] = variable

    def lookup(self, variable: KerasVariable, ids: Tensor) -> Tensor:
        """Rows of a table, of which only these cross the network.

        Args:
            variable: a Keras variable of rank 2 or more.
            ids: integer tensor of row numbers, of any shape.

        Returns:
            A tensor of shape `ids.shape + variable.shape[1:]`.

        Raises:
            NotSplittable: if they depend on an update that other workers take part in.
        """
        self._see_update(variable)
        if id(variable) in self._changed:
            return tf.gather(self.read(variable), ids)
        self._note_version()
        flat = tf.reshape(ids, [-1])
        unique, positions = tf.unique(flat)
        result = tf.gather(self._fetch_rows(variable._value, unique), positions)
        watch_on_all_tapes(result)
        self._rows.setdefault(id(variable), []).append((flat, result))
        shape = tf.concat([tf.shape(ids), tf.constant(list(variable.shape[1:]), tf.int32)], 0)
        result = tf.reshape(result, shape)
        return tf.ensure_shape(result, [*ids.shape, *variable.shape[1:]])

    def sources(self, variable: KerasVariable) -> list[Any]:
        """The tensors through which this step has used a variable, for a gradient tape."""
        rows = [rows for _, rows in self._rows.get(id(variable), [])]
        return [*rows, *self._used.get(id(variable), [])] or [tf.zeros([])]

    def gradient(self, variable: KerasVariable, parts: list[Any]) -> Gradient | None:
        """The gradient of a variable from those of its `sources`."""
        rows, shape = self._rows.get(id(variable), []), tf.constant(list(variable.shape))
        sparse = [
            tf.IndexedSlices(grad, ids, shape)
            for (ids, _), grad in zip(rows, parts, strict=False)
            if grad is not None
        ]
        sparse += [grad for grad in parts[len(rows) :] if isinstance(grad, tf.IndexedSlices)]
        dense = [grad for grad in parts[len(rows) :] if isinstance(grad, tf.Tensor)]
        if len(dense) == 1 and not sparse:
            return dense[0]
        if dense:
            return tf.add_n([tf.convert_to_tensor(each) for each in [*sparse, *dense]])
        if len(sparse) <= 1:
            return sparse[0] if sparse else None
        values = tf.concat([each.values for each in sparse], 0)
        indices = tf.concat([tf.cast(each.indices, tf.int64) for each in sparse], 0)
        return tf.IndexedSlices(values, indices, shape)

    def apply(self, update: Update) -> None:
        """Makes an update, at the latest when something is read that it changes.

        Raises:
            ConfigError: within a conditional or a loop.
        """
        if self._is_in_branch:
            raise ConfigError(
                "The training step applies gradients within a condition or a loop (tf.cond, "
                "tf.while_loop, or an if or a for of AutoGraph), which conflicts with "
                "strategy='parameter_server': servers know the updates of a step by their order. "
                "To accumulate gradients, give the optimizer gradient_accumulation_steps; make a "
                "loop over a fixed number of updates one of Python; or choose another strategy."
            )
        if self._pending:
            self.flush()
        self._pending = update

    def flush(self, results: Results | None = None) -> None:
        """Sends the pending changes, and results that are to be added up with them."""
        update, self._pending = self._pending, None
        if update is None and not self._changed and results is None:
            return
        if self.updates and self.parts > 1:
            raise NotSplittable("makes several updates")
        with _without_autocast():  # a layer in half precision may be what reads the new weights
            sent = self._send(self, update or Update(None, [], []), results)
        self.updates += 1
        # The next read waits for this update, so that a step sees its own changes. Values that were
        # read before are out of date, but for metrics, whose values the servers do not have yet.
        self._after = [sent]
        metrics = {key: value for key, value in self._local.items() if key in self.metrics}
        self._local, self._first = metrics, {key: self._first[key] for key in metrics}
        self._version = None
        self._early = []

    @property
    def assigned(self) -> list[str]:
        """The names of the variables that the step assigns, but for those of metrics."""
        plain = [f"tf.Variable {each.name!r}" for each in self.plain_assigned]
        return [*(repr(each.path) for each in self._changed.values()), *plain]

    @property
    def changes_weights(self) -> bool:
        """Whether the step has sent, or is going to send, something to the servers."""
        return bool(self.updates or self._pending or self._changed)

    def take_changes(self) -> list[tuple[Any, Any]]:
        """The changes to variables assigned since the last update, each with its variable.

        A bool is not added: 1 sets it, -1 takes it back, and 0 leaves it.
        """
        changes = [(_change(self._local[k], self._first[k]), v) for k, v in self._changed.items()]
        self._changed.clear()
        return changes

    def close_reads(self) -> Tensor:
        """Puts the read of all weights in front of their use, if some were used since the last.

        Returns how many updates the weights had seen, a scalar int64 tensor.
        """
        if self._version is not None and not self._slots:
            return self._version
        lock, version = self.servers.lock, self.servers.updates.version
        # Placeholders stood in for the weights while the step was traced: only now is it known
        # which it uses. They are fed by one read under the lock, so all are of one moment.
        with self.graph.as_default(), tf.control_dependencies(None), tf.device(None):
            with tf.control_dependencies(self._after):
                held = lock.acquire()
            with tf.control_dependencies([held]):
                raw = [_read(part) for variable, _ in self._slots for part in parts_of(variable)]
                seen = _read(version)
            # Given back when the values are read on the servers: they travel without it.
            lock.release(held, [*raw, seen])
            everything = [*raw, seen]
            devices = [device_of(p) for v, _ in self._slots for p in parts_of(v)]
            devices.append(device_of(version))
            moved = iter(move(everything, devices, [None] * len(devices), self.servers.wire))
            for variable, placeholder in self._slots:
                pieces = [next(moved) for _ in parts_of(variable)]
                feed_from(placeholder, pieces[0] if len(pieces) == 1 else tf.concat(pieces, 0))
        self._slots = []
        self._version = next(moved)
        # Rows of tables may have been fetched earlier: the older of the two counts as staleness.
        if self._early:
            self._version = tf.minimum(self._version, self._early[0])
        return self._version

    def metric_changes(self) -> list[tuple[Any, Any]]:
        """Metric variables and the values that this step adds to them."""
        return [(variable, self._local[key]) for key, variable in self.metrics.items()]

    def close_pending_reads(self) -> None:
        """Puts the read of weights in front if some were used since the last."""
        if self._slots:
            self.close_reads()

    @property
    def _is_in_branch(self) -> bool:
        """Whether a conditional or a loop within the step is being traced."""
        return tf.compat.v1.get_default_graph() is not self.graph

    def _value(self, variable: KerasVariable) -> Tensor:
        key = id(variable)
        self._see_update(variable)
        if key not in self._local:
            with self.graph.as_default(), tf.control_dependencies(None):
                self._local[key] = self._first[key] = self._begin(variable)
        return self._local[key]

    def _see_update(self, variable: KerasVariable) -> None:
        """Makes a pending update before a variable is read that it may change."""
        counted = self._pending is not None and self._pending.counts_in(variable)
        if is_metric(variable) or (_is_setting(variable) and not counted):
            return
        if self.parts > 1 and (self._pending or self.updates):
            raise NotSplittable(f"uses {variable.path!r} again after it has updated weights")
        if self._pending:
            self.flush()

    def _begin(self, variable: KerasVariable) -> Tensor:
        if is_metric(variable):
            self.metrics[id(variable)] = variable
            return tf.identity(tf.zeros(variable.shape, variable.dtype), STATE)
        shape, dtype = variable._value.shape, variable._value.dtype
        placeholder = tf.raw_ops.Placeholder(dtype=dtype, shape=shape, name=WEIGHT)
        self._slots.append((variable, placeholder))
        return tf.identity(placeholder)

    def _note_version(self) -> None:
        """Notes the number of updates before rows are fetched, which are at least as new."""
        if not self._early:
            with (
                self.graph.as_default(),
                tf.control_dependencies(None),
                tf.control_dependencies(self._after),
            ):
                self._early = [_read(self.servers.updates.version)]

    def _fetch_rows(self, table: KerasVariable, ids: Tensor) -> Tensor:
        ranges = table.ranges if isinstance(table, Partitioned) else [(0, int(table.shape[0]))]
        wire, pieces, positions = self.servers.wire, [], []
        for part, (start, end) in zip(parts_of(table), ranges, strict=True):
            inside = tf.where(tf.logical_and(ids >= start, ids < end))[:, 0]
            wanted = tf.gather(ids, inside) - tf.cast(start, ids.dtype)
            device = device_of(part)
            [there] = move([wanted], [None], [device])
            with tf.control_dependencies(self._early), tf.device(device):
                result = tf.raw_ops.ResourceGather(
                    resource=part.handle, indices=there, dtype=part.dtype
                )
            pieces += move([result], [device], [None], wire)
            positions.append(tf.cast(inside, tf.int32))
        if len(pieces) == 1:
            return pieces[0]
        return tf.dynamic_stitch(positions, pieces)


@contextlib.contextmanager
def _without_autocast() -> Iterator[None]:
    """Takes the scope of a layer away; under `AutocastScope(None)` types are those of `floatx`."""
    before = global_state.get_global_attribute("autocast_scope")
    global_state.set_global_attribute("autocast_scope", None)
    try:
        yield
    finally:
        global_state.set_global_attribute("autocast_scope", before)


def _change(new: Tensor, old: Tensor) -> Tensor:
    if new.dtype == tf.bool:
        return 2 * tf.cast(new, tf.int8) - 1
    return new - old


def _read(variable: Variable) -> Tensor:
    with tf.device(device_of(variable)):
        return tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype)


def _is_setting(variable: KerasVariable) -> bool:
    """Whether a variable is a number that no gradient changes, such as a learning rate."""
    return not variable.trainable and not len(variable.shape)


def is_metric(variable: KerasVariable) -> bool:
    """Whether a Keras variable is a sum over the steps, as those of metrics are."""
    return getattr(variable, "aggregation", None) == "sum"


#: The step that is being traced on this thread, or None.
remote_step: Current[RemoteStep | None] = Current(None)
