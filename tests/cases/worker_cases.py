"""Workers that are stopped, and steps that come again long after they were made."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.cases import common
from tests.cases.server_cases import BATCH, EXAMPLES, Counter, ruled
from tests.harness import servers as harness_servers
from tfdist.strategies.parameter_server.apply_update import UPDATES_A_STEP
from tfdist.strategies.parameter_server.transaction_log import WINDOW

#: `step_timeout` while graphs are traced, and optimized on a machine that may be busy.
_TRACING_SECONDS = 40.0

#: `step_timeout` afterwards. A worker that is there but slower than this loses its step too, gets
#: others as soon as it answers, and the counts are the same.
_STEP_SECONDS = 6.0


class _Stopping(keras.callbacks.Callback):
    """Stops worker 0 in the second epoch, when all graphs have been traced.

    Args:
        dispatcher: what finds out that the worker is silent.
        batch: before which batch. At 0 the worker still has its iterator of the first epoch, which
            is then deleted.
    """

    def __init__(self, dispatcher: Any, batch: int) -> None:
        super().__init__()
        self.dispatcher = dispatcher
        self.batch, self.epoch, self.is_done = batch, 0, False

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Notes the epoch."""
        self.epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Stops the worker."""
        if self.epoch == 1 and batch >= self.batch and not self.is_done:
            self.is_done = True
            self.dispatcher.step_timeout = _STEP_SECONDS
            os.kill(harness_servers.running("worker", 0).pid, signal.SIGSTOP)


def stopped(strategy: Any, *, rule: dict[str, Any], executions: int, batch: int) -> dict[str, Any]:
    """Trains with a worker that is stopped, and again when it goes on."""
    ids, dispatcher = np.arange(EXAMPLES), strategy.serving.dispatcher
    data = tf.data.Dataset.from_tensor_slices(ids).shuffle(EXAMPLES).batch(BATCH)
    before, counts = dispatcher.step_timeout, []
    dispatcher.step_timeout = _TRACING_SECONDS
    try:
        with ruled(strategy, **rule), strategy.scope():
            model = Counter()
            model.compile(keras.optimizers.SGD(1.0), steps_per_execution=executions)
            model.fit(data, epochs=2, verbose=0, callbacks=[_Stopping(dispatcher, batch)])
            dispatcher.step_timeout = _TRACING_SECONDS
            counts.append(np.asarray(model.counts)[:, 0].copy())
            silent = sorted(dispatcher._silent)
            os.kill(harness_servers.running("worker", 0).pid, signal.SIGCONT)
            _until(lambda: not dispatcher._silent)
            counts.append(np.asarray(model.counts)[:, 0].copy())
            model.fit(data, epochs=1, verbose=0)
            counts.append(np.asarray(model.counts)[:, 0].copy())
    finally:
        dispatcher.step_timeout = before
        os.kill(harness_servers.running("worker", 0).pid, signal.SIGCONT)
    return {"silent": silent, "counts": counts}


class _Failing(_Stopping):
    """Raises when the worker that it has stopped has a step."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Raises if a step of the worker does not end."""
        step = self.dispatcher._running.get(0) if self.is_done else None
        if step is None:
            return
        time.sleep(1)
        if self.dispatcher._running.get(0) is step:
            raise ValueError("of the program")


def abandoned(strategy: Any) -> dict[str, Any]:
    """A stopped worker goes on when the training that it worked for has ended with an error."""
    ids, dispatcher = np.arange(EXAMPLES), strategy.serving.dispatcher
    data = tf.data.Dataset.from_tensor_slices(ids).batch(BATCH)
    before, counts, error = dispatcher.step_timeout, [], ""
    dispatcher.step_timeout = _TRACING_SECONDS
    try:
        with ruled(strategy, mode="async"), strategy.scope():
            model = Counter()
            model.compile(keras.optimizers.SGD(1.0))
            try:
                model.fit(data, epochs=2, verbose=0, callbacks=[_Failing(dispatcher, 4)])
            except ValueError as raised:
                error = str(raised)
            silent = sorted(dispatcher._silent)
            counts.append(np.asarray(model.counts)[:, 0].copy())
            os.kill(harness_servers.running("worker", 0).pid, signal.SIGCONT)
            _until(lambda: not dispatcher._silent)
            counts.append(np.asarray(model.counts)[:, 0].copy())
    finally:
        dispatcher.step_timeout = before
        os.kill(harness_servers.running("worker", 0).pid, signal.SIGCONT)
    return {"error": error, "silent": silent, "counts": counts}


def _until(condition: Any) -> None:
    end = time.monotonic() + 60
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError("The worker does not answer.")
        time.sleep(0.1)


def replayed(strategy: Any, *, mode: str) -> dict[str, Any]:
    """A step that is run again, at once and when the servers cannot remember it."""
    dispatcher, jobs = strategy.serving.dispatcher, []
    submit = dispatcher.submit

    def noted(job: Any) -> None:
        jobs.append(job)
        submit(job)

    dispatcher.submit = noted
    with ruled(strategy, mode=mode), strategy.scope():
        model, ids = Counter(), np.arange(BATCH)
        model.compile(keras.optimizers.SGD(1.0))
        model.fit(ids, batch_size=BATCH, epochs=1, verbose=0)
        counts = [_sum(model)]
        counts.append(_again(dispatcher, jobs[0]) or _sum(model))
        dispatcher._number = jobs[0].number + WINDOW // UPDATES_A_STEP - 1
        model.fit(ids, batch_size=BATCH, epochs=1, verbose=0)
        counts.append(_sum(model))
        error = _again(dispatcher, jobs[0])
        counts.append(_sum(model))
        del dispatcher.submit
    return {"error": error, "counts": counts}


def _again(dispatcher: Any, job: Any) -> str:
    try:
        dispatcher.submit(job)
        dispatcher.join()
    except tf.errors.OpError as raised:
        return str(raised)
    return ""


def _sum(model: Any) -> float:
    return float(np.asarray(model.counts).sum())


def under_the_lock(strategy: Any, *, mode: str) -> dict[str, list[str]]:
    """What is not done by servers while a step holds their lock, for some models."""
    makes = {"embedding": common.embedding_model, "position": common.position_model}
    found = {}
    for name, make in makes.items():
        x, y = common.tokens(2 * BATCH)
        with ruled(strategy, mode=mode), strategy.scope():
            model = make()
            model.compile(
                keras.optimizers.Adam(), common.sparse_crossentropy(), metrics=["accuracy"]
            )
            model.fit(x, y, BATCH, 1, verbose=0)
            [traced] = model.train_function._traced.values()
            found[name] = [op.name for op in _late(traced.function.graph)]
    return found


def _late(graph: Any) -> Iterator[Any]:
    """Operations that the release of a lock waits for, and its acquisition does not.

    A read of a variable is done where the variable is.
    """
    for lock in [op for op in graph.get_operations() if op.type == "MutexLock"]:
        [release] = lock.outputs[0].consumers()
        for op in _before(release) - _before(lock):
            given = op.type == "Placeholder" and op.outputs[0].dtype == tf.resource
            alone = op.type in ("Const", "ReadVariableOp") or given
            if "/job:ps" not in op.device and not alone:
                yield op


def _before(op: Any) -> set[Any]:
    found, waiting = set(), [op]
    while waiting:
        current = waiting.pop()
        if current not in found:
            found.add(current)
            waiting += [*(tensor.op for tensor in current.inputs), *current.control_inputs]
    return found


def notes(strategy: Any, *, mode: str) -> list[tuple[str, list[str]]]:
    """The notes of an update: for each its server, and the devices of the ops that it waits for."""
    x, y = common.tokens(2 * BATCH)
    with ruled(strategy, mode=mode), strategy.scope():
        model = common.embedding_model()
        model.compile(keras.optimizers.Adam(), common.sparse_crossentropy())
        model.fit(x, y, BATCH, 1, verbose=0)
        [traced] = model.train_function._traced.values()
    found = []
    for op in _with_branches(traced.function.graph):
        if op.type == "ResourceScatterNdUpdate":
            # Its inputs wait, such as constants: TensorFlow leaves out what it waits for by them.
            waits = {each.device for one in _inputs_of(op) for each in one.control_inputs}
            found.append((op.device, sorted(waits - {""})))
    return found


def _inputs_of(op: Any) -> set[Any]:
    """An op and all that it is computed from, but for what it only waits for."""
    found, waiting = set(), [op]
    while waiting:
        current = waiting.pop()
        if current not in found:
            found.add(current)
            waiting += [tensor.op for tensor in current.inputs]
    return found


def _with_branches(graph: Any) -> Iterator[Any]:
    for op in graph.get_operations():
        yield op
        if op.type in ("If", "StatelessIf"):
            for name in ("then_branch", "else_branch"):
                yield from _with_branches(graph._get_function(op.get_attr(name).name).graph)
