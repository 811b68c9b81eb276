"""Updates that several workers make together: `sync`, each with a part of the global batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist.keras.served.guards import (
    done,
    guards,
    if_missing,
    only_if,
    refused_if_forgotten,
    true_after,
)
from tfdist.keras.served.payload import Payload
from tfdist.keras.served.step import ServedStep
from tfdist.keras.step import current_step
from tfdist.servers.cluster import Servers, device_of
from tfdist.servers.ledger import APPLIED, DROPPED, FORGOTTEN, Ledger

__all__ = ["contribute", "discard"]


def contribute(
    step: ServedStep,
    payload: Payload,
    change: Callable[[list[Any]], list[Any]],
    number: Any,
    tell: Callable[[], list[Any]],
) -> Any:
    """Adds one part's gradients to those of the others; the last one that is needed applies them.

    A part whose update has been made without it is discarded (backup workers, Chen et al. 2016).

    Args:
        step: the step.
        payload: its gradients, weighted by the part's share of the examples.
        change: changes the weights, given the sums; returns what ends when that is done.
        number: the contribution's number.
        tell: adds the step's numbers up.
    """
    servers = step.servers
    first = servers.devices[0]
    part = current_step()
    assert part is not None
    with tf.device(first):
        update, share = tf.identity(step.update), tf.identity(part.share())
    sums = [_Sum(servers, payload, place) for place in range(len(payload.targets))]
    with tf.control_dependencies([*payload.arrived, number, update, share]):
        held = servers.lock.acquire()
    with tf.control_dependencies([held]), tf.device(first):
        fates = {d: servers.contributions.fate(d, number) for d in servers.devices}
        fresh = tf.equal(fates[first], 0)
        # A number too old to be remembered may belong to another model, trained before this one.
        known = tf.not_equal(fates[first], FORGOTTEN)
        timely = known & tf.equal(servers.rounds[first].read_value(), update)
        added = tf.cond(
            timely & fresh,
            lambda: _add_up(servers, sums, number, fates, share),
            lambda: only_if(fresh, lambda: discard(servers, servers.contributions, number)),
        )
        told = only_if(fresh, lambda: true_after(tell()))
        with tf.control_dependencies([added]):
            full = timely & (servers.count.read_value() >= servers.rule.needed)
        applied = only_if(full, lambda: _apply(servers, sums, change, update))
    released = servers.lock.release(held, [applied, added, told])
    return refused_if_forgotten(first, ~known, number, released)


class _Sum:
    """What the parts' gradients for one variable, or part of one, are collected in."""

    def __init__(self, servers: Servers, payload: Payload, place: int) -> None:
        self._target, self._value = payload.targets[place], payload.values[place]
        self._common = payload.common.get(place)
        self._parts = servers.rule.needed
        self._device = device_of(self._target)
        find = servers.sum_for if self._common is None else servers.slices_for
        self._sum: Any = find(self._target)

    def add(self) -> Any:
        """Adds this part's, unless its server has it already."""
        return done(self._device, self._add)

    def total(self) -> Any:
        """The sum; takes a sparse one out, unless its server has done so."""
        if self._common is None:
            with tf.device(self._device):
                return self._sum.read_value()
        shape = self._target.shape.as_list()
        return if_missing(
            self._device,
            lambda: self._sum.take(self._parts, shape),
            lambda: self._sum.nothing(shape),
        )

    def clear(self) -> Any:
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
    servers: Servers, sums: list[_Sum], number: Any, fates: dict[str, Any], share: Any
) -> Any:
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


def discard(servers: Servers, ledger: Ledger, number: Any) -> Any:
    """Counts a gradient that is not applied, and notes so in a ledger of all servers."""
    noted = [servers.counts.note_dropped()]
    for device in servers.devices:
        noted += ledger.note(device, number, DROPPED)
    return true_after(noted)


def _apply(
    servers: Servers,
    sums: list[_Sum],
    change: Callable[[list[Any]], list[Any]],
    update: Any,
) -> Any:
    """Applies the sums and starts them anew; the first server comes last."""
    first, *others = servers.devices
    todo = {d: _lacks(made, d, update) for d, made in servers.rounds.items()}
    with guards(servers, todo):
        ops = change([_mean(servers, each.total()) for each in sums])
        with tf.control_dependencies(ops):
            ops = [each.clear() for each in sums]
    with tf.control_dependencies(ops):
        noted = [_note_round(servers, d, update) for d in others]
    with tf.control_dependencies([*ops, *noted]):
        noted.append(servers.count.assign(0, read_value=False))
        noted.append(servers.share.assign(0.0, read_value=False))
        noted.append(servers.updates.version.assign_add(1, read_value=False))
        with tf.control_dependencies(noted):
            noted.append(_note_round(servers, first, update))
    return true_after(noted)


def _lacks(made: Any, device: str, update: Any) -> Any:
    """Whether a server lacks an update that workers make together; their numbers have no gaps."""
    with tf.device(device):
        return made.read_value() <= update


def _note_round(servers: Servers, device: str, update: Any) -> Any:
    with tf.device(device):
        return servers.rounds[device].assign(update + 1, read_value=False)


def _mean(servers: Servers, total: Any) -> Any:
    """The mean over the examples of the parts that were taken, where some may be missing."""
    if not servers.rule.backup_workers or not total.dtype.is_floating:
        return total
    if isinstance(total, tf.IndexedSlices):
        share = tf.cast(servers.share, total.dtype)
        mean = tf.math.divide_no_nan(total.values, share)
        return tf.IndexedSlices(mean, total.indices, total.dense_shape)
    return tf.math.divide_no_nan(total, tf.cast(servers.share, total.dtype))
