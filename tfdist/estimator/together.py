"""Workers in lockstep stop together.

If one stops by itself, the others wait for its gradients for ever. So each step informs all
workers whether one of them wants to stop: because a hook has asked for it, or because its input has
no further batch. They stop after that step. The word travels with the loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.types import RunArgs, RunContext, RunValues, Session, SessionHook, Tensor

__all__ = ["Together", "wrapped"]

tf1 = tf.compat.v1


class Together(tf.compat.v1.train.SessionRunHook):  # type: ignore[misc]
    """Asks the other workers to stop, and stops when one of them asks.

    Attributes:
        asked: whether a hook of this process wants to stop.
    """

    def __init__(self) -> None:
        self.asked = False
        self._flag = tf1.placeholder_with_default(0.0, [], name="wants_to_stop")
        self._votes: Tensor | None = None

    def with_loss(self, loss: Tensor, more: Tensor | None) -> Tensor:
        """The loss and this replica's wish, as one tensor that is to be averaged.

        Args:
            loss: the replica's loss.
            more: whether its input has a further batch: a scalar tensor.
        """
        wish = tf.maximum(self._flag, 1.0 - tf.cast(more, tf.float32))
        return tf.stack([loss, tf.cast(wish, loss.dtype)])

    def loss_of(self, mean: Tensor) -> Tensor:
        """The mean loss, out of the average of `with_loss`."""
        self._votes = mean[1]
        return mean[0]

    def before_run(self, run_context: RunContext) -> RunArgs:
        """Asks the session for this process's wish, as a value of the step."""
        return tf1.train.SessionRunArgs(self._votes, feed_dict={self._flag: float(self.asked)})

    def after_run(self, run_context: RunContext, run_values: RunValues) -> None:
        """Stops if somebody has asked for it."""
        if run_values.results > 0:
            run_context.request_stop()


def wrapped(hooks: Sequence[Any]) -> list[Any]:
    """The hooks of a session, whose requests to stop reach all workers first.

    `StopAtStepHook` stops by itself: the global step is the same on all workers.
    """
    together = next((hook for hook in hooks if isinstance(hook, Together)), None)
    if together is None:
        return list(hooks)
    alike = (Together, tf1.train.StopAtStepHook)
    return [hook if isinstance(hook, alike) else _Asking(hook, together) for hook in hooks]


class _Asking(tf.compat.v1.train.SessionRunHook):  # type: ignore[misc]
    """A hook that asks to stop rather than stops."""

    def __init__(self, hook: SessionHook, together: Together) -> None:
        self._hook = hook
        self._together = together

    def begin(self) -> None:
        """Passed on."""
        self._hook.begin()

    def after_create_session(self, session: Session, coord: object) -> None:
        """Passed on."""
        self._hook.after_create_session(session, coord)

    def before_run(self, run_context: RunContext) -> RunArgs:
        """Passed on."""
        return self._hook.before_run(_Context(run_context, self._together))

    def after_run(self, run_context: RunContext, run_values: RunValues) -> None:
        """Passed on."""
        self._hook.after_run(_Context(run_context, self._together), run_values)

    def end(self, session: Session) -> None:
        """Passed on."""
        self._hook.end(session)


class _Context(tf.compat.v1.train.SessionRunContext):  # type: ignore[misc]
    """The context that a hook gets of a step."""

    def __init__(self, context: RunContext, together: Together) -> None:
        super().__init__(context.original_args, context.session)
        self._together = together

    def request_stop(self) -> None:
        """Asks all workers to stop after the next step."""
        self._together.asked = True
