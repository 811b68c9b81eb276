"""The servers as one thing: where variables go, the lock, the ledgers, the sums of `sync`."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist._tensorflow import eagerly_outside_of_scope
from tfdist.servers.ledger import Ledger
from tfdist.servers.lock import Lock
from tfdist.servers.partitioned import Partitioned, part_of, showing_part
from tfdist.servers.placement import Held, Shelves, row_ranges
from tfdist.servers.slices import Slices
from tfdist.servers.tally import Counts

__all__ = ["CHIEF", "Servers", "UpdateRule", "device_of"]


#: The device of the chief's memory.
CHIEF = "/job:chief/replica:0/task:0/device:CPU:0"


@dataclasses.dataclass(frozen=True, kw_only=True)
class UpdateRule:
    """When a gradient becomes an update.

    Attributes:
        mode: `"sync"`, `"async"` or `"stale"`.
        staleness: the bound of `"stale"`; None where there is none.
        on_stale: `"wait"`, `"drop"` or `"damp"`.
        workers: how many workers there are.
        backup_workers: gradients of an update that are not waited for.
    """

    mode: str = "sync"
    staleness: int | None = None
    on_stale: str = "wait"
    workers: int = 1
    backup_workers: int = 0

    @property
    def parts(self) -> int:
        """Into how many parts a global batch is split."""
        return self.workers if self.mode == "sync" else 1

    @property
    def needed(self) -> int:
        """Parts whose gradients make an update."""
        return self.parts - self.backup_workers


def server_device(index: int) -> str:
    """The device of a server's memory."""
    return f"/job:ps/replica:0/task:{index}/device:CPU:0"


def device_of(variable: Any) -> str:
    """The device that holds a variable, or its first part."""
    return str(variable.device)


class Servers:
    """What the chief knows of the servers.

    Args:
        count: how many servers there are.
        rule: when a gradient becomes an update.
        wire: type in which floating-point tensors travel, or None for their own.
        min_shard_bytes: least size of a part of a variable.
        max_shards: most parts of a variable; None means one for each server.

    Attributes:
        updates: what became of every update, and how many there were.
        rounds: on each server, how many of them workers have made together. Only that changes it,
            so that the chief knows it without asking. The first server's comes last, and counts.
        contributions: what became of the parts of these.
        count: parts that the next one has already.
        share: what they weigh.
    """

    def __init__(
        self,
        count: int,
        rule: UpdateRule,
        wire: Any = None,
        min_shard_bytes: int = 1 << 20,
        max_shards: int | None = None,
    ) -> None:
        self.devices = [server_device(index) for index in range(count)]
        self.rule = rule
        self.wire = wire
        self.shelves = Shelves(count, min_shard_bytes, max_shards)
        self.lock = Lock(self.devices[0])
        self.updates = Ledger(self.devices)
        self.contributions = Ledger(self.devices)
        self.counts = Counts(self.devices[0])
        self.rounds = {device: _counter(device) for device in self.devices}
        with tf.device(self.devices[0]):
            self.count = tf.Variable(0, dtype=tf.int64, trainable=False)
            self.share = tf.Variable(0.0, trainable=False)
        self._sums: dict[int, Any] = {}
        self._slices: dict[int, Slices] = {}

    def create(self, next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        """Makes a variable on a server, in parts if it is big, or on the chief if it is a metric's.

        Metrics are added up on the chief, from what each step returns.
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

    def update(self, variable: Any, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Runs a function on a variable's server."""
        part = part_of(variable)
        with tf.device(device_of(variable)):
            if part is None:
                return fn(variable, *args, **kwargs)
            with showing_part(part[1]):
                return fn(variable, *args, **kwargs)

    def sum_for(self, variable: Any) -> Any:
        """Where the workers' gradients for a variable are added up, beside it."""
        key = id(variable)
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

    def slices_for(self, variable: Any) -> Slices:
        """Where the workers' sparse gradients for a variable are collected, beside it."""
        key = id(variable)
        if key not in self._slices:
            with tf.init_scope(), eagerly_outside_of_scope():
                self._slices[key] = Slices(device_of(variable), variable.dtype)
            _when_gone(variable, self._slices.pop, key)
        return self._slices[key]

    def _create_anywhere(self, next_creator: Callable[..., Any], kwargs: dict[str, Any]) -> Any:
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
    ) -> Any:
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
        initial: Any,
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
    ) -> Any:
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

    def _server_of(self, variable: Any) -> int:
        device = device_of(variable)
        return self.devices.index(device) if device in self.devices else self.shelves.emptiest()


def _when_gone(variable: Any, call: Callable[..., Any], *given: Any) -> None:
    """Calls a function when a variable is freed, but not at the end of the process."""
    weakref.finalize(variable, call, *given).atexit = False


def _counter(device: str) -> Any:
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
