"""`train_and_evaluate`: the same program, alone or as any task of a cluster."""

from __future__ import annotations

import collections
import json
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf

from tfdist.errors import ConfigError
from tfdist.estimator import sessions
from tfdist.estimator.estimator import Estimator
from tfdist.estimator.exporters import Exporter
from tfdist.estimator.run_config import RunConfig
from tfdist.estimator.spec import checked_hooks
from tfdist.types import Session
from tfdist.utils import validation

__all__ = ["EvalSpec", "TrainSpec", "train_and_evaluate"]

tf1 = tf.compat.v1

#: Seconds without a task that trains after which a job counts as over.
_SILENCE = 300.0
#: Seconds between two looks for a new checkpoint.
_POLL_SECONDS = 1.0

_TrainFields = collections.namedtuple("_TrainFields", "input_fn max_steps hooks saving_listeners")
_EvalFields = collections.namedtuple(
    "_EvalFields", "input_fn steps name hooks exporters start_delay_secs throttle_secs"
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
        kept = checked_hooks("TrainSpec(hooks=…)", hooks)
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
        kept = checked_hooks("EvalSpec(hooks=…)", hooks)
        chosen = _checked_exporters(exporters)
        return super().__new__(
            cls, input_fn, steps, name, kept, chosen, start_delay_secs, throttle_secs
        )


def _check_input_fn(owner: str, input_fn: object) -> None:
    if not callable(input_fn):
        raise ConfigError(
            f"{owner}(input_fn={input_fn!r}) is no function. Give one that returns a data set."
        )


def _checked_exporters(value: object) -> tuple[Any, ...]:
    listed = [] if value is None else value
    exporters = tuple(listed) if isinstance(listed, list | tuple) else (listed,)
    for exporter in exporters:
        if not callable(getattr(exporter, "export", None)):
            raise ConfigError(
                f"EvalSpec(exporters=…) holds {exporter!r}, which is not a "
                "tfdist.estimator.Exporter."
            )
    names = [exporter.name for exporter in exporters]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(
            f"EvalSpec(exporters=…) has two exporters of the name {twice[0]!r}. Each has a "
            "directory of its name: give each another."
        )
    return exporters


def train_and_evaluate(estimator: Estimator, train_spec: TrainSpec, eval_spec: EvalSpec) -> Any:
    """Trains and evaluates; in a cluster, this task's part of it.

    Without a cluster the process trains, evaluates after checkpoints and at the end, and exports.
    In a cluster the chief and the workers train, parameter servers hold the weights until the job
    is over, and a task of type evaluator evaluates and exports; a chief of TensorFlow 1's type,
    master, does that itself. If there are neither servers nor an evaluator, the chief evaluates
    and exports after the training.

    Args:
        estimator: the Estimator.
        train_spec: what to train on.
        eval_spec: what to evaluate on, and what to export.

    Returns:
        The last metrics and the exporters' results, if this process has evaluated after its
        training; else None.

    Raises:
        ConfigError: if the arguments are of other kinds.
        SystemExit: on a parameter server, when the job is over.
        StartError: if other tasks do not come in time.
    """
    for what, value, kind in (
        ("estimator", estimator, Estimator),
        ("train_spec", train_spec, TrainSpec),
        ("eval_spec", eval_spec, EvalSpec),
    ):
        if not isinstance(value, kind):
            raise ConfigError(f"{what}={value!r} is no tfdist.estimator.{kind.__name__}.")
    config = estimator.config
    rounds = _Rounds(estimator, eval_spec, train_spec.max_steps)
    if config.task_type == "evaluator":
        return _evaluate_checkpoints(estimator, rounds)
    if config.task_type == "ps":
        return _serve(config)
    clustered = bool(config.cluster_spec.jobs)
    lockstep = clustered and not (config.num_ps_replicas or config.has_evaluator)
    listeners = []
    if not clustered or (config.task_type == "master" and not lockstep):
        listeners.append(_EvaluatingListener(rounds, eval_spec.throttle_secs))
    _train(estimator, train_spec, listeners)
    if lockstep and config.is_chief:
        rounds.run_latest(ended=True)
    return rounds.result if listeners or rounds.complete else None


def _train(estimator: Estimator, spec: TrainSpec, listeners: Sequence[Any]) -> None:
    """Trains, on the chief and on workers. The chief decides when the training has ended."""
    config = estimator.config
    if config.num_ps_replicas:
        sessions.ensure_server(config)  # Also if there is nothing left to train: others look.
    noted = config.is_chief and bool(config.cluster_spec.jobs)
    note = _EndNote(config)
    if noted:
        note.clear()
    estimator.train(
        spec.input_fn,
        hooks=spec.hooks,
        max_steps=spec.max_steps,
        saving_listeners=[*spec.saving_listeners, *listeners],
    )
    if noted:
        note.write()


class _EvaluatingListener(tf.compat.v1.train.CheckpointSaverListener):  # type: ignore[misc]
    """Evaluates saved checkpoints, not more often than is asked for."""

    def __init__(self, rounds: _Rounds, throttle: float) -> None:
        self._rounds, self._throttle = rounds, throttle
        self._saved_before = False
        self._begun: float | None = None

    def after_save(self, session: Session, global_step_value: int) -> bool | None:
        first, self._saved_before = not self._saved_before, True
        now = time.monotonic()
        # The checkpoint that is saved before training is not evaluated.
        if not first and (self._begun is None or now - self._begun >= self._throttle):
            self._begun = now
            self._rounds.run_latest(ended=False)
        return None

    def end(self, session: Session, global_step_value: int) -> None:
        self._rounds.run_latest(ended=True)


def _serve(config: RunConfig) -> None:
    """Holds weights until the job is over; then ends the program.

    `tfdist run` stops parameter servers when the other tasks have ended. If each task was
    started by itself, a server ends when no task that trains has been there for minutes.
    """
    sessions.ensure_server(config)
    first = next(kind for kind in sessions.TRAINERS if kind in config.cluster_spec.jobs)
    sessions.await_servers(config, (first,))
    sessions.await_silence(config, _SILENCE)
    raise SystemExit(0)


def _evaluate_checkpoints(estimator: Estimator, rounds: _Rounds) -> None:
    """Evaluates each new checkpoint until the training has ended and its last one is evaluated."""
    watch = _Watch(estimator.config)
    not_before = time.monotonic() + rounds.spec.start_delay_secs
    while not rounds.complete:
        ended = watch.ended()  # Before the look at the checkpoints, so that none is missed.
        latest = estimator.latest_checkpoint()
        if ended and latest is None:
            raise ConfigError(
                f"The training has ended, but model_dir={estimator.model_dir!r} has no checkpoint. "
                "The evaluator and the chief must share this directory."
            )
        begun = time.monotonic()
        due = ended or begun >= not_before
        if latest is not None and due and _evaluated(rounds, latest, ended):
            not_before = begun + rounds.spec.throttle_secs
        if not rounds.complete:
            time.sleep(_POLL_SECONDS)


def _evaluated(rounds: _Rounds, checkpoint: str, ended: bool) -> bool:
    """Evaluates a checkpoint, unless it is removed meanwhile in favour of a newer one."""
    if not ended and checkpoint == rounds.checkpoint:
        return False
    try:
        rounds.run(checkpoint, ended=ended)
    except (tf.errors.NotFoundError, ValueError):
        if tf1.train.checkpoint_exists(checkpoint):
            raise
        return False
    return True


class _Watch:
    """Whether the training has ended: the chief has noted it, or nobody trains any more."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._note = _EndNote(config)
        self._previous = self._note.read()  # Perhaps of a training before this one.
        self._heard = time.monotonic()

    def ended(self) -> bool:
        note = self._note.read()
        if note is not None and note != self._previous:
            return True
        if note is None:
            self._previous = None
        if sessions.trainers_listen(self._config):
            self._heard = time.monotonic()
        quiet = time.monotonic() - self._heard
        return quiet > (_SILENCE if note is None else _SILENCE / 5)


class _Rounds:
    """Evaluates checkpoints, each once, and asks the exporters."""

    def __init__(self, estimator: Estimator, spec: EvalSpec, max_steps: int | None) -> None:
        self.spec = spec
        self.checkpoint: str | None = None  # That was evaluated last.
        self.complete = False  # Whether the round of the training's end is done.
        self.result: tuple[Any, list[Any]] = (None, [])  # The last metrics, and exports.
        self._estimator, self._max_steps = estimator, max_steps

    def run_latest(self, *, ended: bool) -> None:
        latest = self._estimator.latest_checkpoint()
        if latest is not None:
            self.run(latest, ended=ended)

    def run(self, checkpoint: str, *, ended: bool) -> None:
        """Evaluates a checkpoint and asks the exporters.

        One that has been evaluated is not evaluated again. The training has ended, too, at
        `max_steps`.
        """
        spec, known = self.spec, checkpoint == self.checkpoint
        if known and (self.complete or not ended):
            return
        metrics = self.result[0]
        if not known:
            metrics = self._estimator.evaluate(
                spec.input_fn, spec.steps, spec.hooks, checkpoint, spec.name
            )
        step = int(metrics["global_step"])
        final = ended or (self._max_steps is not None and step >= self._max_steps)
        base = Path(self._estimator.model_dir) / "export"
        exports = [
            each.export(self._estimator, str(base / each.name), checkpoint, metrics, final)
            for each in spec.exporters
        ]
        self.result = (metrics, exports)
        self.checkpoint, self.complete = checkpoint, final


class _EndNote:
    """The note by which the chief lets an evaluator know that the training has ended.

    That may be before `max_steps`. The note is beside the checkpoints, and names the cluster, so
    that it is not mistaken for that of another job, which trained the same model before.
    """

    def __init__(self, config: RunConfig) -> None:
        self._cluster = dict(config.training_cluster)
        self._path = str(Path(str(config.model_dir)) / "training-ended.json")

    def clear(self) -> None:
        if tf.io.gfile.exists(self._path):
            tf.io.gfile.remove(self._path)

    def write(self) -> None:
        tf.io.gfile.makedirs(str(Path(self._path).parent))
        with tf.io.gfile.GFile(self._path, "w") as file:
            file.write(json.dumps({"cluster": self._cluster, "end": uuid.uuid4().hex}))

    def read(self) -> str | None:
        """The note of this job's training, or None as long as it goes on."""
        try:
            with tf.io.gfile.GFile(self._path, "r") as file:
                note: dict[str, Any] = json.loads(file.read())
        except (tf.errors.OpError, ValueError):
            return None
        return str(note.get("end")) if note.get("cluster") == self._cluster else None
