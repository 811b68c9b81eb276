"""The Estimator: a model as a function that builds its graph, with training and all other uses."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf

from tfdist.errors import ConfigError
from tfdist.estimator import (
    distribution,
    evaluation,
    modeling,
    prediction,
    saved_models,
    training,
    warm_starting,
)
from tfdist.estimator.run_config import RunConfig
from tfdist.estimator.spec import EstimatorSpec, ModeKeys
from tfdist.estimator.warm_starting import WarmStartSettings
from tfdist.types import Array, Features, Structure
from tfdist.utils import validation

__all__ = ["Estimator"]

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
        modeling.check_model_fn(model_fn)
        if config is not None and not isinstance(config, RunConfig):
            raise ConfigError(f"config={config!r} is no tfdist.estimator.RunConfig.")
        config = config or RunConfig()
        self._config = config.replace(model_dir=_settled(model_dir, config.model_dir))
        distribution.for_training(self._config)  # A strategy must be there before all else.
        self._model_fn = model_fn
        self._params = copy.deepcopy(dict(params or {})) if _plain(params) else params
        self._warm_start = warm_starting.settings_of(warm_start_from)

    @property
    def model_dir(self) -> str:
        """The directory of checkpoints, event files and exports."""
        return str(self._config.model_dir)

    @property
    def config(self) -> RunConfig:
        """The configuration, with the model's directory."""
        return self._config

    @property
    def params(self) -> Any:
        """A copy of the parameters."""
        return copy.deepcopy(self._params)

    @property
    def warm_start_settings(self) -> WarmStartSettings | None:
        """`WarmStartSettings`, or None."""
        return self._warm_start

    @property
    def model_fn(self) -> Callable[..., EstimatorSpec]:
        """The `model_fn` as a function of features, labels, mode and config."""

        def call(
            features: Features, labels: Structure, mode: str, config: RunConfig
        ) -> EstimatorSpec:
            return self.call_model_fn(features, labels, mode, config)

        return call

    def call_model_fn(
        self, features: Features, labels: Structure, mode: str, config: RunConfig | None = None
    ) -> EstimatorSpec:
        """Builds the model in the default graph.

        Raises:
            ConfigError: if `model_fn` takes no labels and there are some, or returns no spec.
        """
        return modeling.call_model_fn(
            self._model_fn,
            features,
            labels,
            mode,
            params=self.params,
            config=config or self._config,
        )

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
        if self._config.task_type in ("ps", "evaluator"):
            raise ConfigError(
                f"This process is {self._config.task_type} {self._config.task_id} of TF_CONFIG, "
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
        training.train(self, input_fn, [*(hooks or ()), *stop], tuple(saving_listeners or ()))
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
        return evaluation.evaluate(
            self,
            input_fn,
            steps=steps,
            hooks=tuple(hooks or ()),
            checkpoint=self._checkpoint(checkpoint_path, "evaluate"),
            place=self.eval_dir(name),
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
        """
        yield from prediction.predict(
            self,
            input_fn,
            keys=predict_keys,
            hooks=tuple(hooks or ()),
            checkpoint=self._checkpoint(checkpoint_path, "predict"),
            singly=yield_single_examples,
        )

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
        return saved_models.export(
            self,
            export_dir_base,
            serving_input_receiver_fn,
            assets_extra=assets_extra,
            as_text=as_text,
            checkpoint=checkpoint_path or self.latest_checkpoint(),
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

    def _checkpoint(self, given: str | None, purpose: str) -> str | None:
        result = given or self.latest_checkpoint()
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


def _plain(params: object) -> bool:
    return params is None or type(params) is dict


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
    place = tempfile.mkdtemp(prefix="tfdist-estimator-")
    tf1.logging.warning("Using temporary folder as model directory: %s", place)
    return place
