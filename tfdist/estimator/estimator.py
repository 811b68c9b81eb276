"""The Estimator: a model as a function that builds its graph, with training and all other uses."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf

from tfdist.errors import ConfigError
from tfdist.estimator import distribution, evaluation, modeling, sessions, training
from tfdist.estimator.calling import call_with, check_parameters
from tfdist.estimator.export import export_saved_model
from tfdist.estimator.run_config import RunConfig
from tfdist.estimator.spec import EstimatorSpec, ModeKeys
from tfdist.estimator.warm_starting import WarmStartSettings, settings_of
from tfdist.types import Array, Features, Structure
from tfdist.utils import validation

__all__ = ["Estimator", "add_metrics"]

tf1 = tf.compat.v1


class Estimator:
    """Trains, evaluates and exports the model that a `model_fn` builds.

    Args:
        model_fn: takes `features` and any of `labels`, `mode`, `params` and `config`, and returns
            an `EstimatorSpec`.
        model_dir: where checkpoints, event files and exports go; by default the configuration's,
            or a temporary directory.
        config: a `RunConfig`.
        params: passed on to `model_fn` and `input_fn`; copied.
        warm_start_from: a path, or `WarmStartSettings`, of a model to start from.

    Raises:
        ConfigError: if arguments are wrong or contradict each other.
    """

    def __init__(
        self,
        model_fn: Callable[..., Any],
        model_dir: str | Path | None = None,
        config: RunConfig | None = None,
        params: Mapping[str, Any] | None = None,
        warm_start_from: str | WarmStartSettings | None = None,
    ) -> None:
        if config is not None and not isinstance(config, RunConfig):
            raise ConfigError(f"config={config!r} is no tfdist.estimator.RunConfig.")
        config = config or RunConfig()
        config = config.replace(model_dir=_settled(model_dir, config.model_dir))
        copied = params is None or type(params) is dict
        params = copy.deepcopy(dict(params or {})) if copied else params
        self._model = modeling.Model(model_fn, params, config)
        distribution.for_training(config)  # A strategy must be there before all else.
        self._warm_start = settings_of(warm_start_from)

    @property
    def model_dir(self) -> str:
        """The directory of checkpoints, event files and exports."""
        return str(self.config.model_dir)

    @property
    def config(self) -> RunConfig:
        """The configuration, with the model's directory."""
        return self._model.config

    @property
    def params(self) -> Any:
        """A copy of the parameters."""
        return copy.deepcopy(self._model.params)

    @property
    def warm_start_settings(self) -> WarmStartSettings | None:
        """`WarmStartSettings`, or None."""
        return self._warm_start

    @property
    def model_fn(self) -> Callable[..., EstimatorSpec]:
        """The `model_fn` as a function of features, labels, mode and config."""
        return self._model

    def call_model_fn(
        self, features: Features, labels: Structure, mode: str, config: RunConfig | None = None
    ) -> EstimatorSpec:
        """Builds the model in the default graph.

        Raises:
            ConfigError: if `model_fn` takes no labels and there are some, or returns no spec.
        """
        return self._model(features, labels, mode, config)

    def train(
        self,
        input_fn: Callable[..., Any],
        hooks: Sequence[Any] | None = None,
        steps: int | None = None,
        max_steps: int | None = None,
        saving_listeners: Sequence[Any] | None = None,
    ) -> Estimator:
        """Trains, from the latest checkpoint on if there is one.

        Args:
            input_fn: returns a `tf.data.Dataset`, or features and labels. May take `mode`,
                `params`, `config` and `input_context`.
            hooks: hooks of the training session.
            steps: how many steps more; None, without `max_steps`, means until the input ends.
            max_steps: until the global step is this.
            saving_listeners: `tf.compat.v1.train.CheckpointSaverListener`s.

        Returns:
            This Estimator.

        Raises:
            ConfigError: if both numbers of steps are given, or one is not a positive number.
        """
        if steps is not None and max_steps is not None:
            raise ConfigError(f"steps={steps} conflicts with max_steps={max_steps}. Set one.")
        if self.config.task_type in ("ps", "evaluator"):
            raise ConfigError(
                f"This process is {self.config.task_type} {self.config.task_id} of TF_CONFIG, "
                "which does not train. Call tfdist.estimator.train_and_evaluate, which gives each "
                "task its part."
            )
        for name, value in (("steps", steps), ("max_steps", max_steps)):
            if value is not None:
                validation.check_number(name, value, 1)
        if max_steps is not None and self._global_step() >= max_steps:
            tf1.logging.info("Skipping training since max_steps has been reached.")
            return self
        stop = [tf1.train.StopAtStepHook(steps, max_steps)] if steps or max_steps else []
        every, listeners = [*(hooks or ()), *stop], tuple(saving_listeners or ())
        training.train(self._model, input_fn, every, listeners, self._warm_start)
        return self

    def evaluate(
        self,
        input_fn: Callable[..., Any],
        steps: int | None = None,
        hooks: Sequence[Any] | None = None,
        checkpoint_path: str | None = None,
        name: str | None = None,
    ) -> dict[str, Any]:
        """Evaluates a checkpoint.

        Args:
            input_fn: as for `train`.
            steps: how many batches; None means until the input ends.
            hooks: hooks of the session.
            checkpoint_path: the checkpoint; by default the latest.
            name: of the evaluation, if there are several: part of the event files' directory.

        Returns:
            The metrics, with `loss` and `global_step`.
        """
        if steps is not None:
            validation.check_number("steps", steps, 1)
        checkpoint = self._checkpoint(checkpoint_path, "evaluate")
        return evaluation.evaluate(
            self._model, input_fn, steps, tuple(hooks or ()), checkpoint, self.eval_dir(name)
        )

    def predict(
        self,
        input_fn: Callable[..., Any],
        predict_keys: Sequence[str] | str | None = None,
        hooks: Sequence[Any] | None = None,
        checkpoint_path: str | None = None,
        yield_single_examples: bool = True,
    ) -> Iterator[Any]:
        """Yields predictions.

        Args:
            input_fn: as for `train`; labels are ignored.
            predict_keys: which predictions; by default all.
            hooks: hooks of the session.
            checkpoint_path: the checkpoint; by default the latest.
            yield_single_examples: whether each example is yielded by itself, or batches.

        Raises:
            ConfigError: for unknown keys, or predictions of unequal lengths.
        """
        checkpoint = self._checkpoint(checkpoint_path, "predict")
        with modeling.graph_for(self.config):
            spec = self._model.on_input(input_fn, ModeKeys.PREDICT)
            wanted = _chosen(spec.predictions, predict_keys)
            every = [*(hooks or ()), *spec.prediction_hooks]
            made = sessions.of_checkpoint(spec.scaffold, checkpoint, self.config, every)
        # Outside of the graph's context, which would be the caller's between two predictions.
        with made as session:
            while not session.should_stop():
                batch = session.run(wanted)
                if yield_single_examples:
                    yield from _examples(batch)
                else:
                    yield batch

    def export_saved_model(
        self,
        export_dir_base: str | Path,
        serving_input_receiver_fn: Callable[[], Any],
        assets_extra: Mapping[str, str] | None = None,
        as_text: bool = False,
        checkpoint_path: str | None = None,
        experimental_mode: str = ModeKeys.PREDICT,
    ) -> bytes:
        """Writes a SavedModel into a new directory, named after the time in seconds.

        Args:
            export_dir_base: where the directory is made.
            serving_input_receiver_fn: returns a `ServingInputReceiver`.
            assets_extra: files to add, by their paths in `assets.extra`.
            as_text: whether the protocol buffer is written as text.
            checkpoint_path: the checkpoint; by default the latest.
            experimental_mode: only prediction is supported.

        Returns:
            The directory's path, as bytes.

        Raises:
            ConfigError: if there is no checkpoint, or the signatures are wrong.
        """
        if experimental_mode != ModeKeys.PREDICT:
            raise ConfigError(
                f"experimental_mode={experimental_mode!r} is not supported. Export for prediction: "
                "leave it out."
            )
        checkpoint = checkpoint_path or self.latest_checkpoint()
        if checkpoint is None:
            raise ConfigError(
                f"model_dir={self.model_dir!r} has no checkpoint to export. Train first."
            )
        return export_saved_model(
            self._model,
            export_dir_base,
            serving_input_receiver_fn,
            assets_extra or {},
            as_text,
            checkpoint,
        )

    def experimental_export_all_saved_models(
        self,
        export_dir_base: str | Path,
        input_receiver_fn_map: Mapping[str, Callable[[], Any]],
        assets_extra: Mapping[str, str] | None = None,
        as_text: bool = False,
        checkpoint_path: str | None = None,
    ) -> bytes:
        """Writes a SavedModel for some modes, of which only prediction is supported.

        Raises:
            ConfigError: as `export_saved_model`.
        """
        others = [mode for mode in input_receiver_fn_map if mode != ModeKeys.PREDICT]
        if others or not input_receiver_fn_map:
            raise ConfigError(
                f"input_receiver_fn_map has {others or 'no mode'}, but only ModeKeys.PREDICT is "
                "supported, and needed."
            )
        return self.export_saved_model(
            export_dir_base,
            input_receiver_fn_map[ModeKeys.PREDICT],
            assets_extra,
            as_text,
            checkpoint_path,
        )

    def eval_dir(self, name: str | None = None) -> str:
        """The directory of the event files of an evaluation."""
        return str(Path(self.model_dir) / (f"eval_{name}" if name else "eval"))

    def latest_checkpoint(self) -> str | None:
        """The prefix of the latest checkpoint, or None."""
        result = tf.train.latest_checkpoint(self.model_dir)
        return None if result is None else str(result)

    def get_variable_names(self) -> list[str]:
        """The names of the variables of the latest checkpoint.

        Raises:
            ConfigError: if there is none.
        """
        return [name for name, _ in tf.train.list_variables(self._needed_checkpoint())]

    def get_variable_value(self, name: str) -> Array:
        """The value of a variable of the latest checkpoint.

        Raises:
            ConfigError: if there is no checkpoint, or no such variable.
        """
        names = self.get_variable_names()
        validation.check_choice("variable", name, names)
        return tf.train.load_variable(self._needed_checkpoint(), name)

    def _needed_checkpoint(self) -> str:
        result = self.latest_checkpoint()
        if result is None:
            raise ConfigError(f"model_dir={self.model_dir!r} has no checkpoint. Train first.")
        return result

    def _checkpoint(self, path: str | None, purpose: str) -> str | None:
        result = path or self.latest_checkpoint()
        if result is None:
            tf1.logging.info(
                "Could not find trained model in model_dir: %s, running initialization to %s.",
                self.model_dir,
                purpose,
            )
        return result

    def _global_step(self) -> int:
        """The global step of the latest checkpoint, or 0."""
        latest = self.latest_checkpoint()
        if latest is None:
            return 0
        return int(tf.train.load_variable(latest, tf1.GraphKeys.GLOBAL_STEP))


def add_metrics(estimator: Estimator, metric_fn: Callable[..., Any]) -> Estimator:
    """An Estimator that evaluates more metrics.

    Args:
        estimator: the Estimator to add to; it stays as it is.
        metric_fn: takes any of `features`, `labels`, `predictions` and `config`, and returns for
            each metric `(value, update_op)`, as `tf.compat.v1.metrics` makes them.

    Raises:
        ConfigError: if `metric_fn` takes something else.
    """
    takes = ("features", "labels", "predictions", "config")
    check_parameters("metric_fn", metric_fn, takes)

    def model_fn(
        features: Features, labels: Structure, mode: str, config: RunConfig
    ) -> EstimatorSpec:
        spec = estimator.call_model_fn(features, labels, mode, config)
        if mode != ModeKeys.EVAL:
            return spec
        values = (features, labels, spec.predictions, config)
        more = call_with(metric_fn, dict(zip(takes, values, strict=True))) or {}
        return spec._replace(eval_metric_ops={**spec.eval_metric_ops, **more})

    return Estimator(
        model_fn,
        model_dir=estimator.model_dir,
        config=estimator.config,
        params=estimator.params,
        warm_start_from=estimator.warm_start_settings,
    )


def _settled(model_dir: str | Path | None, configured: str | None) -> str:
    """The model's directory, from the argument and the configuration."""
    if model_dir is not None and configured is not None and str(model_dir) != configured:
        raise ConfigError(
            f"model_dir={str(model_dir)!r} conflicts with the configuration, whose model_dir is "
            f"{configured!r}. Remove one of them."
        )
    if model_dir is not None:
        return str(model_dir)
    if configured is not None:
        return configured
    directory = tempfile.mkdtemp(prefix="tfdist-estimator-")
    tf1.logging.warning("Using temporary folder as model directory: %s", directory)
    return directory


def _chosen(predictions: Structure, keys: Sequence[str] | str | None) -> Structure:
    if not keys:
        return predictions
    if not isinstance(predictions, Mapping):
        raise ConfigError(
            f"predict_keys={keys!r} conflicts with predictions that are a single tensor. Leave "
            "predict_keys out."
        )
    names = [keys] if isinstance(keys, str) else list(keys)
    chosen = {name: value for name, value in predictions.items() if name in names}
    if not chosen:
        raise ConfigError(
            f"predict_keys={keys!r} names none of the predictions: {', '.join(predictions)}."
        )
    return chosen


def _examples(batch: Array | Mapping[str, Array]) -> Iterator[Any]:
    if not isinstance(batch, Mapping):
        yield from batch
        return
    lengths = {
        name: len(value) if getattr(value, "ndim", 0) else -1 for name, value in batch.items()
    }
    if len(set(lengths.values())) > 1 or -1 in lengths.values():
        raise ConfigError(
            f"The predictions have different batch sizes: {lengths}. Give yield_single_examples="
            "False to get batches as they are."
        )
    for index in range(next(iter(lengths.values()))):
        yield {name: value[index] for name, value in batch.items()}
