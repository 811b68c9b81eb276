"""The servers as one thing: variables on them, sums beside these, the lock, the ledgers."""

from __future__ import annotations

import atexit
import dataclasses
import math
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist._tf.distribute import ShardedVariable, eagerly_outside_of_scope
from tfdist._tf.variables import ChangedByElements
from tfdist.comm.batch_sharding import slice_bounds
from tfdist.comm.replica_collectives import is_sparse
from tfdist.config.server_options import ServerOptions
from tfdist.errors import TfdistError
from tfdist.strategies.parameter_server.transaction_log import Counts, Ledger, Lock
from tfdist.types import (
    Array,
    DType,
    Gradient,
    IndexedSlices,
    KerasVariable,
    Operation,
    Tensor,
    Variable,
)
from tfdist.utils.messages import logger
from tfdist.utils.thread_state import Current
from tfdist.utils.watchdog import calling_after, hard_deadline

__all__ = [
    "CHIEF",
    "Held",
    "Partitioned",
    "Servers",
    "Shelves",
    "Slices",
    "device_of",
    "parts_of",
    "row_ranges",
    "shown_part",
    "watch",
]


class Partitioned(ChangedByElements, ShardedVariable):  # type: ignore[misc]
    """A variable whose rows are on several servers.

    Args:
        parts: one variable for each range of rows, in order.
        ranges: first and last + 1 row of each part.
        name: the whole variable's name.
    """

    def __init__(self, parts: list[Any], ranges: list[tuple[int, int]], name: str) -> None:
        super().__init__(parts, name)
        self.ranges = ranges
        for number, part in enumerate(parts):
            part._tfdist_part = number
            part._distributed_container = lambda: self

    @property
    def device(self) -> str:
        """The device of the first part, where small companions of the variable go."""
        return str(self.variables[0].device)

    @property
    def trainable(self) -> bool:
        """Whether the parts are trainable."""
        return bool(self.variables[0].trainable)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return np.asarray(self.numpy(), dtype=dtype)

    def join(self, grads: list[Any]) -> Gradient | None:
        """The gradient of the whole variable from those of its parts; None if there is none."""
        if all(grad is None for grad in grads):
            return None
        dense = [
            tf.zeros_like(part) if grad is None else tf.convert_to_tensor(grad)
            for grad, part in zip(grads, self.variables, strict=True)
        ]
        return tf.concat(dense, 0)

    def split(self, value: Gradient) -> list[Any]:
        """The rows of a tensor, or of `IndexedSlices`, that belong to each part."""
        if not is_sparse(value):
            return list(tf.split(value, [end - start for start, end in self.ranges]))
        return [self._rows(value, start, end) for start, end in self.ranges]

    def _rows(self, value: IndexedSlices, start: int, end: int) -> IndexedSlices:
        inside = tf.logical_and(value.indices >= start, value.indices < end)
        indices = tf.boolean_mask(value.indices, inside) - tf.cast(start, value.indices.dtype)
        shape = [end - start, *self.shape[1:]]
        return tf.IndexedSlices(tf.boolean_mask(value.values, inside), indices, tf.constant(shape))


#: The part that partitioned variables show, for optimizers that update it; None means the whole.
shown_part: Current[int | None] = Current(None)


def parts_of(variable: KerasVariable | Variable) -> list[Any]:
    """The TensorFlow variables that a Keras or TensorFlow variable consists of."""
    value = getattr(variable, "_value", variable)
    return list(value.variables) if isinstance(value, Partitioned) else [value]


# The placement of variables on servers. Pure arithmetic.
#
# Each variable goes to the server that holds the fewest bytes. Big ones are split by rows into
# parts that differ by one row at most (the "div" rule of TensorFlow's partitioners).


@dataclasses.dataclass(frozen=True)
class Held:
    """A variable, or a part of one, on a server.

    Attributes:
        name: the variable's name.
        shape: the shape of the variable, or of the part.
        bytes: its size.
    """

    name: str
    shape: tuple[int, ...]
    bytes: int


class Shelves:
    """The variables on each server, and their sizes.

    Args:
        servers: how many servers there are.
        min_shard_bytes: least size of a part, in bytes.
        max_shards: most parts of a variable; None means one for each server.
    """

    def __init__(self, servers: int, min_shard_bytes: int, max_shards: int | None = None) -> None:
        self.held: list[list[Held]] = [[] for _ in range(servers)]
        self._min_shard_bytes = min_shard_bytes
        self._max_shards = servers if max_shards is None else max_shards

    def bytes_on(self, server: int) -> int:
        """Bytes that a server holds."""
        return sum(held.bytes for held in self.held[server])

    def emptiest(self, without: Sequence[int] = ()) -> int:
        """The server that holds the fewest bytes, the first of equals.

        Those in `without` are passed over, unless there is no other.
        """
        servers = range(len(self.held))
        choices = [server for server in servers if server not in without] or list(servers)
        return min(choices, key=self.bytes_on)

    def parts(self, shape: Sequence[int], item_bytes: int) -> int:
        """Into how many parts a variable of this shape is split; 1 leaves it whole."""
        if not shape or not shape[0]:
            return 1
        size = item_bytes * math.prod(shape)
        return max(1, min(self._max_shards, size // self._min_shard_bytes, shape[0]))


def row_ranges(rows: int, parts: int) -> list[tuple[int, int]]:
    """First and last + 1 row of each of `parts` parts, whose sizes differ by one at most."""
    return [slice_bounds(rows, part, parts) for part in range(parts)]


# Sparse gradients of the parts of a batch, collected until all are there.
#
# They stay sparse and keep their repeated indices, as one process's gradient of the whole batch
# has them: optimizers such as Adam treat rows without a gradient, and repeated ones, in a way of
# their own. Rows that all parts have in common, as those of a position embedding, one process has
# once: the parts' are added up. They come first in each part.


class Slices:
    """A queue of sparse gradients of a type on a server."""

    def __init__(self, device: str, dtype: DType) -> None:
        self._device, self._dtype = device, dtype
        with tf.device(device):
            self._queue = tf.queue.FIFOQueue(1 << 20, [dtype, tf.int64, tf.int32])

    def put(self, value: IndexedSlices, common: Tensor) -> Operation | None:
        """An op that adds a part's gradient, whose first `common` rows all parts have."""
        with tf.device(self._device):
            return self._queue.enqueue([value.values, tf.cast(value.indices, tf.int64), common])

    def take(self, parts: int, shape: list[int]) -> IndexedSlices:
        """Takes the gradients of that many parts of a variable of this shape out, as one."""
        with tf.device(self._device):
            taken = [self._queue.dequeue() for _ in range(parts)]
            values = [tf.ensure_shape(each[0], [None, *shape[1:]]) for each in taken]
            indices = [tf.ensure_shape(each[1], [None]) for each in taken]
            # The same graph made all parts: they have the same rows in common, in the same order.
            common = tf.ensure_shape(taken[0][2], [])
            rows = [tf.add_n([value[:common] for value in values])]
            rows += [value[common:] for value in values]
            row_ids = [indices[0][:common], *(each[common:] for each in indices)]
            return tf.IndexedSlices(tf.concat(rows, 0), tf.concat(row_ids, 0), tf.constant(shape))

    def clear(self) -> None:
        """Takes everything out, eagerly."""
        with tf.device(self._device):
            for _ in range(int(self._queue.size().numpy())):
                self._queue.dequeue()

    def nothing(self, shape: list[int]) -> IndexedSlices:
        """`IndexedSlices` without rows, for a variable of this shape."""
        with tf.device(self._device):
            rows, row_ids = tf.zeros([0, *shape[1:]], self._dtype), tf.zeros([0], tf.int64)
            return tf.IndexedSlices(rows, row_ids, tf.constant(shape))


#: The device of the chief's memory.
CHIEF = "/job:chief/replica:0/task:0/device:CPU:0"


def server_device(index: int) -> str:
    """The device of a server's memory."""
    return f"/job:ps/replica:0/task:{index}/device:CPU:0"


def device_of(variable: Variable) -> str:
    """The device that holds a variable, or its first part."""
    return str(variable.device)


class Servers:
    """The servers, as the chief knows them.

    Args:
        count: how many servers there are.
        workers: how many workers there are.
        rule: when a gradient becomes an update, and how weights lie and travel.

    Attributes:
        wire: type in which floating-point tensors travel, or None for their own.
        updates: the record of every update, and their number.
        round: how many of them workers have made together. Only that changes it, so that the chief
            knows it without asking.
        rounds: on each server, of how many it has made its own changes.
        contributions: the record of the parts of these.
        count: parts that the next one has already.
        share: the sum of their weights.
    """

    def __init__(self, count: int, workers: int, rule: ServerOptions) -> None:
        self.devices = [server_device(index) for index in range(count)]
        self.rule = rule
        self.wire = None if rule.wire_dtype == "float32" else tf.as_dtype(rule.wire_dtype)
        self._workers = workers
        self.shelves = Shelves(count, rule.min_shard_bytes, rule.max_shards)
        self.lock = Lock(self.devices[0])
        self.updates = Ledger(self.devices)
        self.contributions = Ledger(self.devices)
        self.counts = Counts(self.devices[0])
        self.round = _counter(self.devices[0])
        self.rounds = {device: _counter(device) for device in self.devices}
        with tf.device(self.devices[0]):
            self.count = tf.Variable(0, dtype=tf.int64, trainable=False)
            self.share = tf.Variable(0.0, trainable=False)
        self._sums: dict[tuple[int, str], Any] = {}

    @property
    def parts(self) -> int:
        """Into how many parts a global batch is split."""
        return self.rule.parts(self._workers)

    @property
    def needed(self) -> int:
        """Parts whose gradients make an update."""
        return self.rule.needed(self._workers)

    def create(self, next_creator: Callable[..., Any], **kwargs: Any) -> Variable:
        """Makes a variable on a server, in parts if it is big, or on the chief if it is a metric's.

        Metrics are added up on the chief, from the results of each step.
        """
        with tf.device(None):
            if kwargs.get("aggregation") == tf.VariableAggregation.SUM:
                with tf.device(CHIEF):
                    return next_creator(**kwargs)
            beside = kwargs.pop("colocate_with", None)
            if beside is not None and not isinstance(beside, Partitioned):
                return self._create_on(self._server_of(beside), next_creator, kwargs)
            shape, dtype, kwargs["initial_value"] = _whole(kwargs)
            servers, ranges = self._partition(shape, dtype, beside)
            if not ranges:
                return self._create_on(servers[0], next_creator, kwargs)
            return self._create_parts(servers, ranges, next_creator, kwargs)

    def update(self, variable: Variable, fn: Callable[..., Any], args: Any, kwargs: Any) -> object:
        """Runs a function on a variable's server."""
        number = getattr(variable, "_tfdist_part", None)
        with tf.device(device_of(variable)), shown_part.set(number):
            return fn(variable, *args, **kwargs)

    def sum_for(self, variable: Variable, assigned: bool) -> Variable:
        """The sum of the workers' gradients for a variable, or of what they assigned, beside it."""

        def make() -> Variable:
            dtype = tf.int8 if variable.dtype == tf.bool else variable.dtype
            return tf.Variable(tf.zeros(variable.shape, dtype), trainable=False, name="sum")

        return self._beside(variable, "assigned" if assigned else "gradients", make)

    def slices_for(self, variable: Variable) -> Slices:
        """The collection of the workers' sparse gradients for a variable, beside it."""
        device = device_of(variable)
        return self._beside(variable, "slices", lambda: Slices(device, variable.dtype))

    def _beside(self, variable: Variable, kind: str, make: Callable[[], Any]) -> Any:
        key = id(variable), kind
        if key not in self._sums:
            with tf.init_scope(), eagerly_outside_of_scope(), tf.device(device_of(variable)):
                self._sums[key] = make()
            _when_gone(variable, self._sums.pop, key)  # another may get its id
        return self._sums[key]

    def refuse_before(self, number: int) -> None:
        """Refuses updates and parts of them that have smaller numbers, eagerly."""
        self.updates.refuse_before(number)
        self.contributions.refuse_before(number)

    def forget_parts(self) -> None:
        """Forgets the parts of an update that will not be made, eagerly; no step may run."""
        made = self.round.read_value()
        for rounds in self.rounds.values():
            rounds.assign(made)
        for total in list(self._sums.values()):
            if isinstance(total, Slices):
                total.clear()
            else:
                total.assign(tf.zeros(total.shape, total.dtype))
        self.count.assign(0)
        self.share.assign(0.0)

    def _partition(
        self, shape: tuple[int, ...] | None, dtype: DType | None, beside: Partitioned | None
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """The server of a new variable; or those of its parts, and the rows of each."""
        if beside is not None:
            servers = [self._server_of(part) for part in beside.variables]
            alike = shape is not None and list(shape) == beside.shape.as_list()
            return servers, beside.ranges if alike else []
        parts = 1
        if shape is not None and dtype is not None and dtype.is_floating:
            parts = self.shelves.parts(shape, dtype.size)
        if shape is None or parts == 1:
            return [self.shelves.emptiest()], []
        servers = []
        for _ in range(parts):
            servers.append(self.shelves.emptiest(without=servers[-(len(self.devices) - 1) :]))
        return servers, row_ranges(shape[0], parts)

    def _create_parts(
        self,
        servers: Sequence[int],
        ranges: list[tuple[int, int]],
        next_creator: Callable[..., Any],
        kwargs: dict[str, Any],
    ) -> Partitioned:
        whole, name = kwargs["initial_value"], kwargs.get("name") or "variable"
        made = []
        for number, ((start, end), server) in enumerate(zip(ranges, servers, strict=True)):
            label = f"{name}/part_{number}"
            own = {"initial_value": whole[start:end], "name": label, "shape": None}
            made.append(self._create_on(server, next_creator, {**kwargs, **own}))
        return Partitioned(made, ranges, name)

    def _create_on(
        self, server: int, next_creator: Callable[..., Any], kwargs: dict[str, Any]
    ) -> Variable:
        with tf.device(self.devices[server]):
            variable = next_creator(**kwargs)
        shape = tuple(variable.shape)
        held = Held(variable.name, shape, variable.dtype.size * math.prod(n or 0 for n in shape))
        self.shelves.held[server].append(held)
        _when_gone(variable, self.shelves.held[server].remove, held)
        return variable

    def _server_of(self, variable: Variable) -> int:
        device = device_of(variable)
        return self.devices.index(device) if device in self.devices else self.shelves.emptiest()


def _when_gone(variable: object, call: Callable[..., Any], *arguments: object) -> None:
    """Calls a function when a variable is freed, but not at the end of the process."""
    weakref.finalize(variable, call, *arguments).atexit = False


def _counter(device: str) -> Variable:
    with tf.device(device):
        return tf.Variable(0, dtype=tf.int64, trainable=False)


def _whole(kwargs: dict[str, Any]) -> tuple[tuple[int, ...] | None, Any, Any]:
    """Shape, type and initial value of a variable that is to be made."""
    initial, dtype = kwargs.get("initial_value"), kwargs.get("dtype")
    if initial is None:
        return None, None, None
    value = initial() if callable(initial) else initial
    value = tf.convert_to_tensor(value, dtype=dtype)
    shape = None if value.shape.rank is None else tuple(value.shape.as_list())
    return shape, value.dtype, value


# A deadline for what the chief itself asks of the servers, such as the weights of a model.
#
# A step that a server does not answer ends by `step_timeout`. The chief's own reads and writes wait
# in C++ code that neither a signal nor an exception ends, for as long as a connection is open: also
# to a server that is stopped.

#: Seconds between two questions to a server, those after which a missing answer is reported, and
#: those that the end of the process waits for one.
_PERIOD, _LATE, _LAST = 10.0, 30.0, 2.0


def watch(devices: Sequence[str], seconds: float) -> None:
    """Asks each server now and then; ends the process if one does not answer for `seconds`."""
    ended = threading.Event()
    threads = [
        threading.Thread(target=_ask, args=(index, device, seconds, ended), daemon=True)
        for index, device in enumerate(devices)
    ]

    def end() -> None:
        # TensorFlow must not come back to a thread of an interpreter that has ended.
        ended.set()
        for thread in threads:
            thread.join(_LAST)

    atexit.register(end)
    for thread in threads:
        thread.start()


def _ask(index: int, device: str, seconds: float, ended: threading.Event) -> None:
    message = (
        f"ps {index} has not answered for step_timeout={seconds:g} s. It is stopped, or cut off: "
        "look at its log. Start the job again, which goes on from its last checkpoint, or give a "
        "larger step_timeout."
    )
    late = (
        f"ps {index} has not answered for {_LATE:g} s: it is stopped, cut off or very busy. After "
        f"step_timeout={seconds:g} s the job ends."
    )
    while not ended.wait(min(_PERIOD, seconds)):
        with (
            calling_after(_LATE, lambda: logger.warning(late)),
            hard_deadline(seconds, message, TfdistError.exit_status),
            tf.device(device),
        ):
            try:
                tf.raw_ops.NoOp()
            except tf.errors.OpError:
                return  # lost; the next step ends with an error
