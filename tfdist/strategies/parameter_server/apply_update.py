"""The update of weights on servers: one transaction under the lock of all servers.

The gradients travel first, packed. Then, under the lock, the servers decide by numbers that only
they change: has this update been applied already (by a worker that died before it could report
that), how stale is it, are all parts of a global batch there. The update itself is Keras's own
optimizer, each variable on its server.

A worker that dies in the middle may leave one server updated and another not. Each server notes
what it has applied, so that the step, done again, is applied where it is missing and nowhere twice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist.comm.batch_dependence import are_distinct, common_rows
from tfdist.comm.replica_collectives import with_distinct_rows
from tfdist.keras.hooks import exchanged
from tfdist.keras.learning_rate import learning_rate_times
from tfdist.keras.replica_context import current_step
from tfdist.strategies.parameter_server.payload import (
    Payload,
    applying,
    done,
    effects_of,
    guarded,
    guards,
    if_missing,
    only_if,
    refused_if_forgotten,
    true_after,
)
from tfdist.strategies.parameter_server.remote_step import (
    NotSplittable,
    Results,
    ServedStep,
    Update,
)
from tfdist.strategies.parameter_server.servers import Servers, device_of
from tfdist.strategies.parameter_server.transaction_log import APPLIED, DROPPED, FORGOTTEN, Ledger
from tfdist.types import Gradient, IndexedSlices, Operation, SomeGradient, Tensor, Variable

__all__ = ["UPDATES_A_STEP", "contribute", "discard", "send"]


# Updates that several workers make together: `sync`, each with a part of the global batch.


def contribute(
    step: ServedStep,
    payload: Payload,
    change: Callable[[list[Any]], list[Any]],
    number: Tensor,
    tell: Callable[[], list[Any]],
) -> Operation:
    """Adds one part's gradients to those of the others; the last one that is needed applies them.

    A part whose update has been made without it is discarded (backup workers, Chen et al. 2016).

    Args:
        step: the step.
        payload: its gradients, weighted by the part's share of the examples.
        change: changes the weights, given the sums; returns ops that end when that is done.
        number: the contribution's number.
        tell: adds the step's numbers up.
    """
    servers = step.servers
    first = servers.devices[0]
    part = current_step()
    assert part is not None
    with tf.device(first):
        update, share = tf.identity(step.update), tf.identity(part.share())
    sums = [_Sum(servers, payload, index) for index in range(len(payload.targets))]
    # The lock is asked for only when everything has arrived: nobody waits for a worker's transfers.
    with tf.control_dependencies([*payload.arrived, number, update, share]):
        held = servers.lock.acquire()
    with tf.control_dependencies([held]), tf.device(first):
        fates = {d: servers.contributions.fate(d, number) for d in servers.devices}
        # The first server notes last, so a part that it knows as applied is on every server.
        fresh = tf.equal(fates[first], 0)
        # A number too old to be remembered may belong to another model, trained before this one.
        known = tf.not_equal(fates[first], FORGOTTEN)
        # Rounds are the updates made together: another number means that this one is made already.
        timely = known & tf.equal(servers.rounds[first].read_value(), update)
        added = tf.cond(
            timely & fresh,
            lambda: _add_up(servers, sums, number, fates, share),
            lambda: only_if(fresh, lambda: discard(servers, servers.contributions, number)),
        )
        told = only_if(fresh, lambda: true_after(tell()))
        # This does not ask whether the part is fresh: if a worker has added the last part and died
        # before the update, the part is done again, adds nothing, and applies the sums.
        with tf.control_dependencies([added]):
            full = timely & (servers.count.read_value() >= servers.needed)
        applied = only_if(full, lambda: _apply(servers, sums, change, update))
    released = servers.lock.release(held, [applied, added, told])
    return refused_if_forgotten(first, ~known, number, released)


class _Sum:
    """The accumulator of the parts' gradients for one variable, or part of one."""

    def __init__(self, servers: Servers, payload: Payload, place: int) -> None:
        self._target, self._value = payload.targets[place], payload.values[place]
        self._common = payload.common.get(place)
        self._distinct = place in payload.distinct
        self._parts = servers.needed
        self._device = device_of(self._target)
        self._sum: Any = (
            servers.slices_for(self._target)
            if self._common is not None
            else servers.sum_for(self._target, payload.is_change(place))
        )

    def add(self) -> Tensor:
        """Adds this part's, unless its server has it already."""
        return done(self._device, self._add)

    def total(self) -> Gradient:
        """The sum; takes a sparse one out, unless its server has done so."""
        if self._common is None:
            with tf.device(self._device):
                return self._sum.read_value()
        shape = self._target.shape.as_list()
        taken = if_missing(
            self._device,
            lambda: self._sum.take(self._parts, shape),
            lambda: self._sum.nothing(shape),
        )
        with tf.device(self._device):
            return with_distinct_rows(taken) if self._distinct else taken

    def clear(self) -> Tensor:
        """Sets a dense sum to zero, unless its server has done so."""
        return done(self._device, self._clear)

    def _add(self) -> None:
        if self._common is None:
            self._sum.assign_add(tf.cast(self._value, self._sum.dtype), read_value=False)
        else:
            self._sum.put(self._value, self._common)

    def _clear(self) -> None:
        if self._common is None:
            zeros = tf.zeros(self._sum.shape, self._sum.dtype)
            self._sum.assign(zeros, read_value=False)


def _add_up(
    servers: Servers, sums: list[_Sum], number: Tensor, fates: dict[str, Any], share: Tensor
) -> Tensor:
    """Adds a part to the sums; the first server comes last, and counts."""
    first, *others = servers.devices
    with guards(servers, {d: tf.not_equal(fate, APPLIED) for d, fate in fates.items()}):
        added = [each.add() for each in sums]
    with tf.control_dependencies(added):
        noted = [op for d in others for op in servers.contributions.note(d, number, APPLIED)]
    with tf.control_dependencies([*added, *noted]):
        noted += servers.contributions.note(first, number, APPLIED)
        noted += servers.counts.note_applied(tf.constant(0, tf.int64))
        noted.append(servers.count.assign_add(1, read_value=False))
        noted.append(servers.share.assign_add(share, read_value=False))
    return true_after(noted)


def discard(servers: Servers, ledger: Ledger, number: Tensor) -> Tensor:
    """Counts a gradient that is not applied, and notes so in a ledger of all servers."""
    noted = [servers.counts.note_dropped()]
    for device in servers.devices:
        noted += ledger.note(device, number, DROPPED)
    return true_after(noted)


def _apply(
    servers: Servers,
    sums: list[_Sum],
    change: Callable[[list[Any]], list[Any]],
    update: Tensor,
) -> Tensor:
    """Applies the sums and starts them anew; the first server comes last."""
    first, *others = servers.devices
    todo = {d: _lacks(made, d, update) for d, made in servers.rounds.items()}
    with guards(servers, todo):
        ops = change([_mean(servers, each.total()) for each in sums])
        with tf.control_dependencies(ops):
            ops = [each.clear() for each in sums]
    with tf.control_dependencies(ops):
        noted = [_note_round(servers, d, update) for d in others]
    # The update counts as made when the first server has noted the round: none is `timely` then.
    with tf.control_dependencies([*ops, *noted]):
        noted.append(servers.count.assign(0, read_value=False))
        noted.append(servers.share.assign(0.0, read_value=False))
        noted.append(servers.updates.version.assign_add(1, read_value=False))
        with tf.control_dependencies(noted):
            noted.append(_note_round(servers, first, update))
    return true_after(noted)


def _lacks(made: Variable, device: str, update: Tensor) -> Tensor:
    """Whether a server lacks an update that workers make together; their numbers have no gaps."""
    with tf.device(device):
        return made.read_value() <= update


def _note_round(servers: Servers, device: str, update: Tensor) -> Operation:
    with tf.device(device):
        return servers.rounds[device].assign(update + 1, read_value=False)


def _mean(servers: Servers, total: Gradient) -> Gradient:
    """The mean over the examples of the parts that were taken, if some may be missing."""
    if not servers.rule.backup_workers or not total.dtype.is_floating:
        return total
    if isinstance(total, tf.IndexedSlices):
        share = tf.cast(servers.share, total.dtype)
        mean = tf.math.divide_no_nan(total.values, share)
        return tf.IndexedSlices(mean, total.indices, total.dense_shape)
    return tf.math.divide_no_nan(total, tf.cast(servers.share, total.dtype))


#: Most updates that one training step may make.
UPDATES_A_STEP = 16


def send(step: ServedStep, update: Update, results: Results | None) -> object:
    """Sends a step's gradients and changes to the servers and has them applied.

    Args:
        step: the step.
        update: the gradients and the optimizer.
        results: numbers that are to be added up in the same transaction.

    Returns:
        An op that ends when the update is made, or is known not to be.

    Raises:
        ValueError: if the step has made `UPDATES_A_STEP` updates already.
    """
    if step.updates >= UPDATES_A_STEP:
        raise ValueError(
            f"The training step makes more than {UPDATES_A_STEP} updates, which the parameter "
            "servers cannot tell apart. Make fewer in one step."
        )
    read = step.close_reads()
    gradients = [(g, v) for g, v in zip(update.grads, update.variables, strict=True)]
    gradients = [(g, v) for g, v in gradients if g is not None]
    changes = step.take_changes()
    common: dict[int, Any] = {}
    distinct: list[int] = []
    if step.parts > 1:
        for index, (grad, _) in enumerate(gradients):
            if isinstance(grad, tf.IndexedSlices):
                common[index] = common_rows(grad.indices)
                distinct += [index] if _are_distinct(grad) else []
        gradients = [(_weighed(g), v) for g, v in gradients]
        changes = [(_weighed_change(c, step), v) for c, v in changes]
    payload = Payload(step.servers, gradients, changes, common, distinct)
    payload.beside += update.beside
    first = step.servers.devices[0]
    # A step that is done again keeps its job's number, and so its updates keep theirs: by these the
    # servers recognise an update that they have applied already.
    number = _at(first, step.job * UPDATES_A_STEP + step.updates)
    tell = _teller(first, results, payload)

    def change(values: list[Any]) -> list[Any]:
        return effects_of(lambda: _change_all(payload, values, update.apply))

    if step.parts > 1:
        return contribute(step, payload, change, number, tell)
    return _apply_alone(step.servers, payload, change, number, _at(first, read), tell)


def _are_distinct(grad: IndexedSlices) -> bool:
    distinct = are_distinct(grad.indices)
    if distinct is None:
        raise NotSplittable("looks up rows of one table both one by one and by unique ids")
    return distinct


def _at(device: str, tensor: Tensor) -> Tensor:
    with tf.device(device):
        return tf.identity(tensor)


def _teller(device: str, results: Results | None, payload: Payload) -> Callable[[], list[Any]]:
    """A function that adds a step's numbers up; they travel with the payload."""
    if results is None:
        return lambda: []
    there = _at(device, results.packed)
    payload.beside.append(there)
    return lambda: effects_of(lambda: results.tally.add(there))


def _weighed(grad: SomeGradient) -> SomeGradient:
    part = current_step()
    assert part is not None
    return part.weigh(grad)


def _weighed_change(change: Tensor, step: ServedStep) -> Tensor:
    if change.dtype.is_floating:
        return _weighed(change)
    # An integer, such as a counter of steps, has no fractions: one part's change stands for all.
    return change * tf.cast(tf.equal(step.part, 0), change.dtype)


def _apply_alone(
    servers: Servers,
    payload: Payload,
    change: Callable[[list[Any]], list[Any]],
    number: Tensor,
    read: Tensor,
    tell: Callable[[], list[Any]],
) -> Operation:
    """Applies one worker's gradients: `async` and `stale`, and `sync` with a single part."""
    first = servers.devices[0]
    with tf.control_dependencies([*payload.arrived, number, read]):
        held = servers.lock.acquire()
    with tf.control_dependencies([held]), tf.device(first):
        fates = {d: servers.updates.fate(d, number) for d in servers.devices}
        fresh = tf.equal(fates[first], 0)
        forgotten = tf.equal(fates[first], FORGOTTEN)
        # The lock is held until the update is applied, so no other update changes this number.
        staleness = servers.updates.version.read_value() - read
        # The first server notes last: if it has not, others may have been updated, by a worker
        # that then died. An update is made as a whole, so that one is not too late.
        begun = [tf.equal(fates[d], APPLIED) for d in servers.devices]
        wanted = fresh & (tf.reduce_any(tf.stack(begun)) | ~_too_late(servers, staleness))
        told = only_if(fresh, lambda: true_after(tell()))

        def apply() -> Tensor:
            todo = {d: tf.not_equal(fate, APPLIED) for d, fate in fates.items()}
            with guards(servers, todo), learning_rate_times(_damping(servers, staleness)):
                ops = change(payload.values)
            return _finish(servers, number, staleness, ops)

        def skip() -> Tensor:
            return only_if(fresh, lambda: discard(servers, servers.updates, number))

        became = tf.cond(wanted, apply, skip)
    released = servers.lock.release(held, [became, told])
    return refused_if_forgotten(first, forgotten, number, released)


def _too_late(servers: Servers, staleness: Tensor) -> Tensor:
    bound = servers.rule.staleness
    if servers.rule.mode != "stale" or bound is None:
        return tf.constant(False)
    return staleness > bound


def _damping(servers: Servers, staleness: Tensor) -> Tensor | None:
    if servers.rule.mode != "stale" or servers.rule.on_stale != "damp":
        return None
    return 1.0 / tf.cast(tf.maximum(staleness, 1), tf.float32)


def _finish(servers: Servers, number: Tensor, staleness: Tensor, ops: list[Any]) -> Tensor:
    """Notes that an update was applied; the first server comes last."""
    first, *others = servers.devices
    with tf.control_dependencies(ops):
        noted = [op for d in others for op in servers.updates.note(d, number, APPLIED)]
    with tf.control_dependencies([*ops, *noted]):
        noted += servers.updates.note(first, number, APPLIED)
        noted.append(servers.updates.version.assign_add(1, read_value=False))
        noted += servers.counts.note_applied(staleness)
    return true_after(noted)


def _change_all(payload: Payload, values: list[Any], apply: Callable[..., Any] | None) -> None:
    """Adds the values that the step has assigned, then runs the optimizer, which may read them."""
    grads, variables, changes = payload.divide(values)
    with applying.up(), exchanged.up():
        for variable, change in changes:  # TensorFlow keeps the order of changes of a variable.
            _add(variable, change)
        if grads and apply is not None:
            apply(grads, variables)


def _add(variable: Variable, change: Tensor) -> None:
    def add() -> None:
        if variable.dtype == tf.bool:
            variable.assign(tf.where(tf.equal(change, 0), variable, change > 0), read_value=False)
            return
        variable.assign_add(tf.cast(change, variable.dtype), read_value=False)

    with tf.device(device_of(variable)):
        guarded(device_of(variable), add)
