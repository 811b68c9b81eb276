"""The update of weights on servers: one transaction under the lock of all servers.

The gradients travel first, packed. Then, under the lock, the servers decide by numbers that only
they change: has this update been applied already (by a worker that died before it could report
that), how stale is it, are all parts of a global batch there. The update itself is Keras's own
optimizer, each variable on its server.

A worker that dies in the middle may leave one server updated and another not. Each server notes
what it has applied, so that the step, done again, is applied where it is missing and nowhere twice.
A change and its note are two ops. A note waits for its own server's changes and not for those of
others, so that a worker that dies while servers wait for each other leaves no change without its
note. A server that waits for another in the middle of its own changes, such as to count the steps
after all have read their number, can still be left between two of them: done again, these are made
twice. That takes a worker that dies within these few transfers.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist._tf.graphs import fresh_zeros
from tfdist.comm.batch_dependence import are_distinct, common_rows
from tfdist.comm.halves import as_of_halves, is_of_halves
from tfdist.comm.replica_collectives import with_distinct_rows
from tfdist.keras.hooks import accounted, exchanged
from tfdist.keras.learning_rate import learning_rate_times
from tfdist.keras.replica_context import Step, current_step
from tfdist.strategies.parameter_server.payload import (
    Change,
    Payload,
    applying,
    done,
    effects_of,
    guarded,
    guards,
    if_missing,
    of_server,
    only_if,
    scaled,
    true_after,
)
from tfdist.strategies.parameter_server.remote_step import (
    NotSplittable,
    RemoteStep,
    Results,
    Update,
)
from tfdist.strategies.parameter_server.servers import Servers, device_of
from tfdist.strategies.parameter_server.transaction_log import (
    APPLIED,
    DROPPED,
    FORGOTTEN,
    MADE,
    WINDOW,
    Ledger,
)
from tfdist.types import Gradient, Operation, Optimizer, Tensor, Variable

__all__ = ["UPDATES_A_STEP", "send"]

#: Most updates that one training step may make.
UPDATES_A_STEP = 16


def send(step: RemoteStep, update: Update, results: Results | None) -> object:
    """Sends a step's gradients and changes to the servers and has them applied, with its results.

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
    with accounted.set(True):
        return _sent(step, update, results)


def _sent(step: RemoteStep, update: Update, results: Results | None) -> object:
    read = step.close_reads()
    changes = [
        Change(variable, grad)
        for grad, variable in zip(update.grads, update.variables, strict=True)
        if grad is not None
    ]
    changes += [Change(variable, change, True) for change, variable in step.take_changes()]
    if step.parts == 1:
        ledger, operands = step.servers.updates, [read]
        return _Alone(step, update, changes, results, ledger, operands).send()
    part = current_step()
    assert part is not None
    changes = [_of_part(change, step, part, update.optimizer) for change in changes]
    ledger, operands = step.servers.contributions, [step.update, part.share()]
    return _Together(step, update, changes, results, ledger, operands).send()


def _of_part(change: Change, step: RemoteStep, part: Step, optimizer: Optimizer | None) -> Change:
    """A change that a part of a global batch makes, weighed by the part's share of it."""
    value = change.value
    of_halves = not change.assigned and is_of_halves(value)
    if isinstance(value, tf.IndexedSlices):
        distinct = are_distinct(value.indices)
        if distinct is None:
            raise NotSplittable("looks up rows of one table both one by one and by unique ids")
        common = common_rows(value.indices)
        value = part.weigh_gradient(value, optimizer)
        return dataclasses.replace(change, value=value, common=common, distinct=distinct)
    if change.assigned and not value.dtype.is_floating:
        # An integer, such as a counter of steps, has no fractions: one part's stands for all.
        value = value * tf.cast(tf.equal(step.part, 0), value.dtype)
    else:
        value = part.weigh(value) if change.assigned else part.weigh_gradient(value, optimizer)
    return dataclasses.replace(change, value=value, of_halves=of_halves)


class _Transaction:
    """An update, or a part of one, that is decided on and made under the lock of all servers.

    Args:
        step: the step.
        update: its optimizer.
        changes: its gradients and the values that it has assigned.
        results: numbers that are to be added up with it.
        ledger: the servers' record of such updates.
        operands: other numbers that the decision needs.
    """

    def __init__(
        self,
        step: RemoteStep,
        update: Update,
        changes: Sequence[Change],
        results: Results | None,
        ledger: Ledger,
        operands: Sequence[Tensor],
    ) -> None:
        self.servers, self.ledger = step.servers, ledger
        self._update, self._results = update, results
        # A step that is done again keeps its job's number, and so its updates keep theirs: by these
        # the servers recognise an update that they have applied already.
        number = step.job * UPDATES_A_STEP + step.updates
        numbers = [number, *operands, *([] if results is None else [results.packed])]
        with tf.device(self.servers.devices[0]):
            self.number, *self.operands = [tf.identity(each) for each in numbers]
        self.payload = Payload(self.servers, changes, [*update.beside, self.number, *self.operands])

    def send(self) -> Operation:
        """The whole transaction; an op that ends when it is over.

        The lock is asked for only when everything has arrived: nobody waits for a worker's
        transfers.
        """
        first = self.servers.devices[0]
        with tf.control_dependencies(self.payload.arrived):
            held = self.servers.lock.acquire()
        with tf.control_dependencies([held]), tf.device(first):
            fates = {d: self.ledger.fate(d, self.number) for d in self.servers.devices}
            self.applied = {
                d: tf.equal(fate, APPLIED) | tf.equal(fate, MADE) for d, fate in fates.items()
            }
            # The first server notes `APPLIED` last, so what it knows as such is on every server.
            self.fresh = tf.equal(fates[first], 0) | tf.equal(fates[first], MADE)
            # A number too old to be remembered may belong to another model, trained before.
            self.forgotten = tf.equal(fates[first], FORGOTTEN)
            ended = [*self.decide(), only_if(self.fresh, self._add_numbers)]
        released = self.servers.lock.release(held, ended)
        with tf.control_dependencies([released]), tf.device(first):
            return tf.debugging.Assert(
                ~self.forgotten,
                [
                    "The servers refuse an update that may have been applied already: they "
                    f"remember the last {WINDOW} updates and those of the training that runs, and "
                    "this one is older. Its worker was cut off or stopped for a long time. Number:",
                    self.number,
                ],
            )

    def decide(self) -> list[Tensor]:
        """Makes the changes that are due; returns tensors that are there when they are made."""
        raise NotImplementedError

    def change(self, values: Sequence[Gradient]) -> list[Any]:
        """Adds the values that the step has assigned, then runs the optimizer, which may read them.

        Takes `values` for those of the payload's pieces; returns ops that end when that is done.
        """
        pairs = list(zip(self.payload.pieces, values, strict=True))

        def run() -> None:
            for piece, value in pairs:  # TensorFlow keeps the order of changes of a variable.
                if piece.assigned:
                    _add(piece.variable, value)
            grads = [value for piece, value in pairs if not piece.assigned]
            if grads and self._update.apply is not None:
                trained = [piece.variable for piece, _ in pairs if not piece.assigned]
                self._update.apply(grads, trained)

        with applying.up(), exchanged.up():
            return effects_of(run)

    def note_applied(self, ops: list[Any], staleness: Tensor, count: Callable[[], Any]) -> Tensor:
        """Notes on each server that it has made its changes, then on the first that all have."""
        noted = []
        for device in self.servers.devices:
            with tf.control_dependencies(of_server(ops, device)):
                noted += self.ledger.note(device, self.number, MADE)
        with tf.control_dependencies([*ops, *noted]):
            noted += self.ledger.note(self.servers.devices[0], self.number, APPLIED)
            noted.append(self.servers.counts.note_applied(staleness))
            noted += count()
        return true_after(noted)

    def discard(self) -> Tensor:
        """Counts a gradient that is not applied, and notes so on all servers."""
        noted = [self.servers.counts.note_dropped()]
        for device in self.servers.devices:
            noted += self.ledger.note(device, self.number, DROPPED)
        return true_after(noted)

    def _add_numbers(self) -> Tensor:
        """Adds the step's numbers up."""
        if self._results is None:
            return tf.constant(True)
        tally = self._results.tally
        return true_after(effects_of(lambda: tally.add(self.operands[-1])))


class _Alone(_Transaction):
    """One worker's gradients as an update: `async`, `stale`, and `sync` with a single part.

    It is given the number of updates that the weights had seen when they were read.
    """

    def decide(self) -> list[Tensor]:
        """Applies the gradients unless they come too late."""
        # The lock is held until the update is applied, so no other update changes this number.
        staleness = self.servers.updates.version.read_value() - self.operands[0]
        # If the first server has not noted it, others may have been updated, by a worker that then
        # died. An update is made as a whole, so that one is not too late.
        begun = tf.reduce_any(tf.stack(list(self.applied.values())))
        wanted = self.fresh & (begun | ~self._is_too_late(staleness))
        apply = functools.partial(self._apply, staleness)
        return [tf.cond(wanted, apply, lambda: only_if(self.fresh, self.discard))]

    def _apply(self, staleness: Tensor) -> Tensor:
        rule, version = self.servers.rule, self.servers.updates.version
        damping = None
        if rule.mode == "stale" and rule.on_stale == "damp":
            damping = 1.0 / tf.cast(tf.maximum(staleness, 1), tf.float32)
        todo = {d: ~applied for d, applied in self.applied.items()}
        with guards(self.servers, todo), learning_rate_times(damping):
            ops = self.change([piece.value for piece in self.payload.pieces])
        return self.note_applied(ops, staleness, lambda: [version.assign_add(1, read_value=False)])

    def _is_too_late(self, staleness: Tensor) -> Tensor:
        rule = self.servers.rule
        if rule.mode != "stale" or rule.staleness is None:
            return tf.constant(False)
        return staleness > rule.staleness


class _Together(_Transaction):
    """A part of an update that workers make together: `sync`, each with a part of the batch.

    Adds the part's gradients to those of the others; the last one that is needed applies them. A
    part whose update has been made without it is discarded (backup workers, Chen et al. 2016). It
    is given the number of such updates when the step was scheduled, and its share of the examples.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._round, self._share = self.operands[:2]
        self._sums = [_Sum(self.servers, piece) for piece in self.payload.pieces]

    def decide(self) -> list[Tensor]:
        """Adds the part up if its update has not been made; makes it if no other part is needed."""
        servers = self.servers
        # Rounds are the updates made together: another number means that this one is made already.
        timely = ~self.forgotten & tf.equal(servers.round.read_value(), self._round)
        added = tf.cond(
            timely & self.fresh, self._add_up, lambda: only_if(self.fresh, self.discard)
        )
        # This does not ask whether the part is fresh: if a worker has added the last part and died
        # before the update, the part is done again, adds nothing, and applies the sums.
        with tf.control_dependencies([added]):
            full = timely & (servers.count.read_value() >= servers.needed)
        return [only_if(full, self._apply), added]

    def _add_up(self) -> Tensor:
        servers = self.servers
        with guards(servers, {d: ~applied for d, applied in self.applied.items()}):
            added = [each.add() for each in self._sums]
        return self.note_applied(
            added,
            tf.constant(0, tf.int64),
            lambda: [
                servers.count.assign_add(1, read_value=False),
                servers.share.assign_add(self._share, read_value=False),
            ],
        )

    def _apply(self) -> Tensor:
        """Applies the sums and starts them anew; the round is counted last."""
        servers = self.servers
        with guards(servers, {d: self._is_missing(d) for d in servers.devices}):
            ops = self.change([self._mean(each.total()) for each in self._sums])
            for each in self._sums:
                with tf.control_dependencies(of_server(ops, each.device)):
                    ops = [*ops, each.clear()]
        noted = []
        for device in servers.devices:
            with tf.control_dependencies(of_server(ops, device)):
                noted.append(self._note_round(device))
        # The update is made when the round is counted: none is `timely` then.
        with tf.control_dependencies([*ops, *noted]):
            noted.append(servers.count.assign(0, read_value=False))
            noted.append(servers.share.assign(0.0, read_value=False))
            noted.append(servers.updates.version.assign_add(1, read_value=False))
            with tf.control_dependencies(noted):
                noted.append(servers.round.assign(self._round + 1, read_value=False))
        return true_after(noted)

    def _is_missing(self, device: str) -> Tensor:
        """Whether a server lacks the update; the numbers of rounds have no gaps."""
        with tf.device(device):
            return self.servers.rounds[device].read_value() <= self._round

    def _note_round(self, device: str) -> Operation:
        with tf.device(device):
            return self.servers.rounds[device].assign(self._round + 1, read_value=False)

    def _mean(self, total: Gradient) -> Gradient:
        """The mean over the examples of the parts that were taken, if some may be missing."""
        if not self.servers.rule.backup_workers or not total.dtype.is_floating:
            return total
        share = tf.cast(self.servers.share, total.dtype)
        return scaled(total, lambda numbers: tf.math.divide_no_nan(numbers, share))


class _Sum:
    """The accumulator of the parts' gradients for one variable, or part of one.

    A server that has made a change to it before does not make it again.
    """

    def __init__(self, servers: Servers, piece: Change) -> None:
        self._piece, self._parts = piece, servers.needed
        self.device = device_of(piece.variable)
        self._is_sparse = piece.common is not None
        self._sum: Any = (
            servers.slices_for(piece.variable)
            if self._is_sparse
            else servers.sum_for(piece.variable, piece.assigned)
        )

    def add(self) -> Tensor:
        """Adds this part's."""
        return done(self.device, self._add)

    def total(self) -> Gradient:
        """The sum; takes a sparse one out."""
        shape = self._piece.variable.shape.as_list()
        with tf.device(self.device):
            if not self._is_sparse:
                total = self._sum.read_value()
                return as_of_halves(total) if self._piece.of_halves else total
            taken = if_missing(
                self.device,
                lambda: self._sum.take(self._parts, shape),
                lambda: self._sum.nothing(shape),
            )
            return with_distinct_rows(taken) if self._piece.distinct else taken

    def clear(self) -> Tensor:
        """Sets a dense sum to zero."""
        return done(self.device, self._clear)

    def _add(self) -> None:
        value = self._piece.value
        if self._is_sparse:
            self._sum.put(value, self._piece.common)
        else:
            self._sum.assign_add(tf.cast(value, self._sum.dtype), read_value=False)

    def _clear(self) -> None:
        if not self._is_sparse:
            self._sum.assign(fresh_zeros(self._sum), read_value=False)


def _add(variable: Variable, change: Any) -> None:
    def add() -> None:
        if variable.dtype == tf.bool:
            variable.assign(tf.where(tf.equal(change, 0), variable, change > 0), read_value=False)
            return
        variable.assign_add(tf.cast(change, variable.dtype), read_value=False)

    with tf.device(device_of(variable)):
        guarded(device_of(variable), add)
