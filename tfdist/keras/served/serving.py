"""What the steps of all models of a strategy share: servers, workers, and what is under way."""

from __future__ import annotations

import collections
import contextlib
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfdist.deadline import outside_deadline
from tfdist.keras.served.update import UPDATES_A_STEP
from tfdist.servers.cluster import CHIEF, Servers, UpdateRule
from tfdist.servers.dispatch import Dispatcher
from tfdist.servers.gate import gate_of

__all__ = ["Serving", "on_chief"]


class Serving:
    """What the training functions of all models of a strategy share.

    Args:
        servers: where the weights are.
        dispatcher: makes what runs jobs on workers, when it is first needed.

    Attributes:
        steps: for each worker how many training steps it has finished.
        cancelled: parts of global batches that were not needed before they had started.
        functions: the training and test functions of all models.
        epochs: what happened in each epoch of the `fit` that runs, or ran last.
        verbose: whether tables are shown.
        tell_placement: tells the user which server holds what, where that is news.
    """

    def __init__(self, servers: Servers, dispatcher: Callable[[], Dispatcher]) -> None:
        self.servers = servers
        self.steps: collections.Counter[int] = collections.Counter()
        self.cancelled = 0
        self.functions: weakref.WeakSet[Any] = weakref.WeakSet()
        self.epochs: list[Any] = []
        self.verbose = True
        self.tell_placement: Callable[[], None] = lambda: None
        self._make_dispatcher = dispatcher
        self._dispatcher: Dispatcher | None = None
        self._said: set[str] = set()
        self._rounds: int | None = None

    @property
    def dispatcher(self) -> Dispatcher:
        """Runs jobs on workers."""
        if self._dispatcher is None:
            self._dispatcher = self._make_dispatcher()
        return self._dispatcher

    @contextlib.contextmanager
    def tracing(self) -> Iterator[None]:
        """A block that traces graphs, which TensorFlow sends to all tasks and waits for them."""
        dispatcher = self.dispatcher
        dispatcher.wait_for_silent()
        message = (
            f"Tracing a step has taken longer than step_timeout={dispatcher.step_timeout:g} s. Its "
            f"graph goes to {dispatcher.workers} workers and {len(self.servers.devices)} ps, one "
            "of which is stopped or cut off. Look for the one whose log has ended, or give a "
            "larger step_timeout if tracing takes that long."
        )
        with outside_deadline(dispatcher.step_timeout, message):
            yield

    def join(self) -> None:
        """Waits for all steps under way."""
        for function in list(self.functions):
            function.submit_waiting()
        if self._dispatcher is not None:
            self._dispatcher.join()

    def settle(self) -> None:
        """Waits for all steps under way, and brings all metrics up to date."""
        for function in list(self.functions):
            function.finish()

    def abandon(self) -> None:
        """Leaves no step of a training that has ended with an error to those that follow."""
        for function in list(self.functions):
            function.forget_waiting()
        if self._dispatcher is not None:
            self._dispatcher.drain()
            self._refuse_what_is_left()

    def abandon_parts(self) -> None:
        """Forgets the parts of an update of which some may have been added up, and others not."""
        self.dispatcher.drain()
        self._refuse_what_is_left()
        with contextlib.suppress(tf.errors.OpError):  # a server may be what has failed
            self.servers.forget_parts()
        self._rounds = None

    def _refuse_what_is_left(self) -> None:
        """Refuses the updates of steps that still run: a worker may be stopped, and go on later."""
        with contextlib.suppress(tf.errors.OpError):
            self.servers.refuse_before(self.dispatcher.next_number() * UPDATES_A_STEP)

    def known_rounds(self) -> int:
        """How many updates the workers have made together; asked only where it is not known."""
        if self._rounds is None:
            self._rounds = int(self.servers.rounds[self.servers.devices[0]].numpy())
        return self._rounds

    def note_round(self, made: bool) -> None:
        """Keeps count of the updates that workers make together.

        Args:
            made: whether one was made; else the servers are asked when it matters.
        """
        self._rounds = self._rounds + 1 if made and self._rounds is not None else None

    def use(self, rule: UpdateRule) -> None:
        """Changes when a gradient becomes an update, for the trainings that follow.

        Args:
            rule: the rule; models that have been trained must be compiled anew.
        """
        self.join()
        self.servers.rule = rule
        self.dispatcher.gate = gate_of(rule)

    def say_once(self, text: str) -> None:
        """Tells the user something, the first time."""
        if text not in self._said:
            self._said.add(text)
            print(f"tfdist: {text}", file=sys.stderr, flush=True)


def on_chief(box: Any) -> Any:
    """A tensor on the chief: one made on a worker would keep Python waiting for the network."""
    with tf.device(CHIEF):
        return tf.constant(box)
