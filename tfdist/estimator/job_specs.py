"""The specifications of `train_and_evaluate`: one for training, one for evaluation."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.errors import ConfigError
from tfdist.estimator.exporters import Exporter
from tfdist.utils import validation

__all__ = ["EvalSpec", "TrainSpec"]

tf1 = tf.compat.v1

_TrainFields = collections.namedtuple(
    "_TrainFields", ["input_fn", "max_steps", "hooks", "saving_listeners"]
)
_EvalFields = collections.namedtuple(
    "_EvalFields",
    ["input_fn", "steps", "name", "hooks", "exporters", "start_delay_secs", "throttle_secs"],
)


class TrainSpec(_TrainFields):
    """The input and the length of a training.

    Args:
        input_fn: the input, as for `Estimator.train`.
        max_steps: until the global step is this; None trains until the input ends.
        hooks: hooks of every worker's session.
        saving_listeners: `tf.compat.v1.train.CheckpointSaverListener`s.

    Raises:
        ConfigError: if an argument is wrong.
    """

    __slots__ = ()

    def __new__(
        cls,
        input_fn: Callable[..., Any],
        max_steps: int | None = None,
        hooks: Sequence[Any] | None = None,
        saving_listeners: Sequence[Any] | None = None,
    ) -> TrainSpec:
        """See the class."""
        _check_input_fn("TrainSpec", input_fn)
        if max_steps is not None:
            validation.check_number("max_steps", max_steps, 1)
        kept = _checked_hooks("TrainSpec", hooks)
        return super().__new__(cls, input_fn, max_steps, kept, tuple(saving_listeners or ()))


class EvalSpec(_EvalFields):
    """The input, the frequency and the exports of an evaluation.

    Args:
        input_fn: the input, as for `Estimator.evaluate`.
        steps: how many batches; None means until the input ends.
        name: of the evaluation, if there are several.
        hooks: hooks of the evaluation's session.
        exporters: one or more `Exporter`s, which are asked after each evaluation.
        start_delay_secs: seconds before the first evaluation, in an evaluator of its own.
        throttle_secs: the least seconds between the beginnings of two evaluations.

    Raises:
        ConfigError: if an argument is wrong.
    """

    __slots__ = ()

    def __new__(
        cls,
        input_fn: Callable[..., Any],
        steps: int | None = 100,
        name: str | None = None,
        hooks: Sequence[Any] | None = None,
        exporters: Exporter | Iterable[Exporter] | None = None,
        start_delay_secs: float = 120,
        throttle_secs: float = 600,
    ) -> EvalSpec:
        """See the class."""
        _check_input_fn("EvalSpec", input_fn)
        if steps is not None:
            validation.check_number("steps", steps, 1)
        validation.check_range("start_delay_secs", start_delay_secs, least=0)
        validation.check_range("throttle_secs", throttle_secs, least=0)
        kept = _checked_hooks("EvalSpec", hooks)
        chosen = _checked_exporters(exporters)
        return super().__new__(
            cls, input_fn, steps, name, kept, chosen, start_delay_secs, throttle_secs
        )


def _check_input_fn(owner: str, input_fn: object) -> None:
    if not callable(input_fn):
        raise ConfigError(
            f"{owner}(input_fn={input_fn!r}) is no function. Give one that returns a data set."
        )


def _checked_hooks(owner: str, hooks: Sequence[Any] | None) -> tuple[Any, ...]:
    for hook in hooks or ():
        if not isinstance(hook, tf1.train.SessionRunHook):
            raise ConfigError(
                f"{owner}(hooks=…) holds {hook!r}, which is no tf.compat.v1.train.SessionRunHook."
            )
    return tuple(hooks or ())


def _checked_exporters(given: object) -> tuple[Any, ...]:
    exporters = (
        () if given is None else tuple(given) if isinstance(given, list | tuple) else (given,)
    )
    for exporter in exporters:
        if not callable(getattr(exporter, "export", None)):
            raise ConfigError(
                f"EvalSpec(exporters=…) holds {exporter!r}, which is no tfdist.estimator.Exporter."
            )
    names = [exporter.name for exporter in exporters]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(
            f"EvalSpec(exporters=…) has two exporters of the name {twice[0]!r}. Each has a "
            "directory of its name: give each another."
        )
    return exporters
