"""The servers as one thing: where variables go, the lock, the ledgers, the sums of `sync`."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist._tf.distribute import eagerly_outside_of_scope
from tfdist.config.server_options import ServerOptions
from tfdist.strategies.parameter_server.sharded_variable import Partitioned, part_of, showing_part
from tfdist.strategies.parameter_server.transaction_log import Counts, Ledger, Lock
from tfdist.types import DType, IndexedSlices, Operation, Tensor, Variable

__all__ = ["CHIEF", "Held", "Servers", "Shelves", "Slices", "device_of", "row_ranges"]


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
        part: number of this part and of all parts; None if the variable is whole.
    """

    name: str
    shape: tuple[int, ...]
    bytes: int
    part: tuple[int, int] | None = None


class Shelves:
    """The variables on each server, and their sizes.

    Args:
        servers: how many servers there are.
        min_shard_bytes: least size of a part.
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

        Args:
            without: servers to pass over, unless there is no other.
        """
        servers = range(len(self.held))
        choices = [server for server in servers if server not in without] or list(servers)
        return min(choices, key=self.bytes_on)

    def put(self, server: int, held: Held) -> None:
        """Notes the variables of a server."""
        self.held[server].append(held)

    def remove(self, server: int, held: Held) -> None:
        """Notes that a server does not hold a variable any more."""
        self.held[server].remove(held)

    def parts(self, shape: Sequence[int], item_bytes: int) -> int:
        """Into how many parts a variable of this shape is split; 1 leaves it whole."""
        if not shape or not shape[0]:
            return 1
        size = item_bytes
        for length in shape:
            size *= length
        return max(1, min(self._max_shards, size // self._min_shard_bytes, shape[0]))


def row_ranges(rows: int, parts: int) -> list[tuple[int, int]]:
    """First and last + 1 row of each of `parts` parts, whose sizes differ by one at most."""
    small, more = divmod(rows, parts)
    ends = [(part + 1) * small + min(part + 1, more) for part in range(parts)]
    return list(zip([0, *ends[:-1]], ends, strict=True))


# Sparse gradients of the parts of a batch, collected until all are there.
#
# They stay sparse and keep their repeated indices, as one process's gradient of the whole batch
# has them: optimizers such as Adam treat rows without a gradient, and repeated ones, in a way of
# their own. Rows that all parts have in common, as those of a position embedding, one process has
# once: the parts' are added up. They come first in each part.


class Slices:
    """A queue of sparse gradients on a server.

    Args:
        device: the server's device.
        dtype: the gradients' type.
    """

    def __init__(self, device: str, dtype: DType) -> None:
        self._device, self._dtype = device, dtype
        with tf.device(device):
            self._queue = tf.queue.FIFOQueue(1 << 20, [dtype, tf.int64, tf.int32])

    def put(self, value: IndexedSlices, common: Tensor) -> Operation | None:
        """An op that adds a part's gradient.

        Args:
            value: `IndexedSlices`.
            common: how many of its first rows all parts have, int32.
        """
        with tf.device(self._device):
            return self._queue.enqueue([value.values, tf.cast(value.indices, tf.int64), common])

    def take(self, parts: int, shape: list[int]) -> IndexedSlices:
        """Takes the gradients of that many parts out, as one `IndexedSlices`.

        Args:
            parts: how many are there.
            shape: the variable's shape.
        """
        with tf.device(self._device):
            taken = [self._queue.dequeue() for _ in range(parts)]
            values = [tf.ensure_shape(each[0], [None, *shape[1:]]) for each in taken]
            indices = [tf.ensure_shape(each[1], [None]) for each in taken]
            # The same graph made all parts: they have the same rows in common, in the same order.
            common = tf.ensure_shape(taken[0][2], [])
            rows = [tf.add_n([value[:common] for value in values])]
            rows += [value[common:] for value in values]
            places = [indices[0][:common], *(each[common:] for each in indices)]
            return tf.IndexedSlices(tf.concat(rows, 0), tf.concat(places, 0), tf.constant(shape))

    def clear(self) -> None:
        """Takes everything out, eagerly."""
        with tf.device(self._device):
            for _ in range(int(self._queue.size().numpy())):
                self._queue.dequeue()

    def nothing(self, shape: list[int]) -> IndexedSlices:
        """`IndexedSlices` without rows.

        Args:
            shape: the variable's shape.
        """
        with tf.device(self._device):
            rows, places = tf.zeros([0, *shape[1:]], self._dtype), tf.zeros([0], tf.int64)
            return tf.IndexedSlices(rows, places, tf.constant(shape))


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
        rounds: on each server, how many of them workers have made together. Only that changes it,
            so that the chief knows it without asking. The first server's comes last, and counts.
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
        self.rounds = {device: _counter(device) for device in self.devices}
        with tf.device(self.devices[0]):
            self.count = tf.Variable(0, dtype=tf.int64, trainable=False)
            self.share = tf.Variable(0.0, trainable=False)
        self._sums: dict[tuple[int, bool], Any] = {}
        self._slices: dict[int, Slices] = {}

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
            if isinstance(beside, Partitioned):
                return self._create_beside(beside, next_creator, kwargs)
            if beside is not None:
                return self._create_on(self._server_of(beside), next_creator, kwargs)
            return self._create_anywhere(next_creator, kwargs)

    def update(self, variable: Variable, fn: Callable[..., Any], args: Any, kwargs: Any) -> object:
        """Runs a function on a variable's server."""
        part = part_of(variable)
        with tf.device(device_of(variable)):
            if part is None:
                return fn(variable, *args, **kwargs)
            with showing_part(part[1]):
                return fn(variable, *args, **kwargs)

    def sum_for(self, variable: Variable, assigned: bool) -> Variable:
        """The sum of the workers' gradients for a variable, or of what they assigned, beside it."""
        key = id(variable), assigned
        if key not in self._sums:
            with tf.init_scope(), eagerly_outside_of_scope(), tf.device(device_of(variable)):
                dtype = tf.int8 if variable.dtype == tf.bool else variable.dtype
                zeros = tf.zeros(variable.shape, dtype)
                made = tf.Variable(zeros, trainable=False, name="sum")
            self._sums[key] = made
            _when_gone(variable, self._sums.pop, key)  # another may get its id
        return self._sums[key]

    def refuse_before(self, number: int) -> None:
        """Refuses updates and parts of them that have smaller numbers, eagerly."""
        self.updates.refuse_before(number)
        self.contributions.refuse_before(number)

    def forget_parts(self) -> None:
        """Forgets the parts of an update that will not be made, eagerly; no step may run."""
        made = self.rounds[self.devices[0]].read_value()
        for rounds in self.rounds.values():
            rounds.assign(made)
        for total in list(self._sums.values()):
            total.assign(tf.zeros(total.shape, total.dtype))
        for slices in list(self._slices.values()):
            slices.clear()
        self.count.assign(0)
        self.share.assign(0.0)

    def slices_for(self, variable: Variable) -> Slices:
        """The collection of the workers' sparse gradients for a variable, beside it."""
        key = id(variable)
        if key not in self._slices:
            with tf.init_scope(), eagerly_outside_of_scope():
                self._slices[key] = Slices(device_of(variable), variable.dtype)
            _when_gone(variable, self._slices.pop, key)
        return self._slices[key]

    def _create_anywhere(
        self, next_creator: Callable[..., Any], kwargs: dict[str, Any]
    ) -> Variable:
        shape, dtype, initial = _whole(kwargs)
        parts = 1
        if shape is not None and dtype.is_floating:
            parts = self.shelves.parts(shape, dtype.size)
        if shape is None or parts == 1:
            kwargs["initial_value"] = initial
            return self._create_on(self.shelves.emptiest(), next_creator, kwargs)
        ranges = row_ranges(shape[0], parts)
        servers: list[int] = []
        for _ in ranges:
            servers.append(self.shelves.emptiest(without=servers[-(len(self.devices) - 1) :]))
        return self._create_parts(ranges, servers, initial, next_creator, kwargs)

    def _create_beside(
        self, beside: Partitioned, next_creator: Callable[..., Any], kwargs: dict[str, Any]
    ) -> Variable:
        shape, _, initial = _whole(kwargs)
        servers = [self._server_of(part) for part in beside.variables]
        if shape is None or list(shape) != beside.shape.as_list():
            kwargs["initial_value"] = initial
            return self._create_on(servers[0], next_creator, kwargs)
        return self._create_parts(beside.ranges, servers, initial, next_creator, kwargs)

    def _create_parts(
        self,
        ranges: Sequence[tuple[int, int]],
        servers: Sequence[int],
        initial: object,
        next_creator: Callable[..., Any],
        kwargs: dict[str, Any],
    ) -> Partitioned:
        whole = initial() if callable(initial) else tf.convert_to_tensor(initial)
        name = kwargs.get("name") or "variable"
        made = []
        for number, ((start, end), server) in enumerate(zip(ranges, servers, strict=True)):
            given = {**kwargs, "initial_value": whole[start:end], "name": f"{name}/part_{number}"}
            given["shape"] = None
            place = (number, len(ranges))
            made.append(self._create_on(server, next_creator, given, place))
        return Partitioned(made, list(ranges), name)

    def _create_on(
        self,
        server: int,
        next_creator: Callable[..., Any],
        kwargs: dict[str, Any],
        part: tuple[int, int] | None = None,
    ) -> Variable:
        with tf.device(self.devices[server]):
            variable = next_creator(**kwargs)
        shape = tuple(variable.shape)
        size = variable.dtype.size
        for length in shape:
            size *= length or 0
        held = Held(variable.name, shape, size, part)
        self.shelves.put(server, held)
        _when_gone(variable, self.shelves.remove, server, held)
        return variable

    def _server_of(self, variable: Variable) -> int:
        device = device_of(variable)
        return self.devices.index(device) if device in self.devices else self.shelves.emptiest()


def _when_gone(variable: object, call: Callable[..., Any], *given: Any) -> None:
    """Calls a function when a variable is freed, but not at the end of the process."""
    weakref.finalize(variable, call, *given).atexit = False


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
