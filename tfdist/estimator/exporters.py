"""Exporters: which evaluations of a training are followed by an export."""

from __future__ import annotations

import abc
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import tensorflow as tf

from tfdist.errors import ConfigError
from tfdist.estimator.calling import check_parameters
from tfdist.estimator.estimator import Estimator
from tfdist.estimator.evaluation import eval_metrics
from tfdist.utils import validation

__all__ = ["BestExporter", "Exporter", "FinalExporter", "LatestExporter"]


class Exporter(abc.ABC):
    """Decides after each evaluation whether the model is exported."""

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """The name, and that of the directory of its exports."""

    @abc.abstractmethod
    def export(
        self,
        estimator: Estimator,
        export_path: str,
        checkpoint_path: str,
        eval_result: Mapping[str, Any],
        is_the_final_export: bool,
    ) -> bytes | None:
        """Exports the model, or does not.

        Args:
            estimator: the Estimator.
            export_path: the directory for this exporter's exports.
            checkpoint_path: the checkpoint that was evaluated.
            eval_result: its metrics.
            is_the_final_export: whether the training has ended.

        Returns:
            The path of the export, or None.
        """


class WritingExporter(Exporter):
    """The base of the exporters that write a SavedModel.

    Args:
        name: the exporter's.
        serving_input_receiver_fn: see `Estimator.export_saved_model`.
        assets_extra: see `Estimator.export_saved_model`.
        as_text: see `Estimator.export_saved_model`.
        exports_to_keep: how many exports are kept; None keeps all.

    Raises:
        ConfigError: if the receiver is not a function, or fewer than one export are kept.
    """

    def __init__(
        self,
        name: str,
        serving_input_receiver_fn: Callable[[], Any] | None,
        assets_extra: Mapping[str, str] | None = None,
        as_text: bool = False,
        exports_to_keep: int | None = 5,
    ) -> None:
        if not callable(serving_input_receiver_fn):
            raise ConfigError(
                f"serving_input_receiver_fn={serving_input_receiver_fn!r} of exporter {name!r} is "
                "no function. Make one with tfdist.estimator.export."
            )
        if exports_to_keep is not None:
            validation.check_number("exports_to_keep", exports_to_keep, 1)
        self._name = name
        self._receiver_fn = serving_input_receiver_fn
        self._assets_extra = assets_extra
        self._as_text = as_text
        self._keep = exports_to_keep

    @property
    def name(self) -> str:
        """The name; see `Exporter.name`."""
        return self._name

    def export(
        self,
        estimator: Estimator,
        export_path: str,
        checkpoint_path: str,
        eval_result: Mapping[str, Any],
        is_the_final_export: bool,
    ) -> bytes | None:
        """Exports the model and removes old exports, if the exporter wants it."""
        if not self._wants(estimator, eval_result, is_the_final_export):
            return None
        path = estimator.export_saved_model(
            export_path,
            self._receiver_fn,
            assets_extra=self._assets_extra,
            as_text=self._as_text,
            checkpoint_path=checkpoint_path,
        )
        if self._keep is not None:
            _keep_newest(export_path, self._keep)
        return path

    @abc.abstractmethod
    def _wants(self, estimator: Estimator, result: Mapping[str, Any], final: bool) -> bool:
        """Whether the model is exported after an evaluation."""


class FinalExporter(WritingExporter):
    """Exports once, when the training has ended; for the arguments see `WritingExporter`."""

    def __init__(
        self,
        name: str,
        serving_input_receiver_fn: Callable[[], Any] | None,
        assets_extra: Mapping[str, str] | None = None,
        as_text: bool = False,
    ) -> None:
        super().__init__(name, serving_input_receiver_fn, assets_extra, as_text, None)

    def _wants(self, estimator: Estimator, result: Mapping[str, Any], final: bool) -> bool:
        return final


class LatestExporter(WritingExporter):
    """Exports after each evaluation; for the arguments see `WritingExporter`."""

    def _wants(self, estimator: Estimator, result: Mapping[str, Any], final: bool) -> bool:
        return True


def loss_smaller(
    best_eval_result: Mapping[str, Any], current_eval_result: Mapping[str, Any]
) -> bool:
    """Whether the current loss is smaller than the best one.

    Raises:
        ConfigError: if one of both has no loss.
    """
    for result in (best_eval_result, current_eval_result):
        if not result or result.get("loss") is None:
            raise ConfigError(f"The metrics {result!r} have no 'loss' to compare.")
    return bool(best_eval_result["loss"] > current_eval_result["loss"])


class BestExporter(WritingExporter):
    """Exports when an evaluation is better than all before; see `WritingExporter`.

    Args:
        event_file_pattern: event files, relative to the model's directory, such as
            `"eval/*.tfevents.*"`, from which a job that goes on learns the best metrics so far.
            None starts anew.
        compare_fn: of `best_eval_result` and `current_eval_result`, returns whether the current
            one is better.
    """

    def __init__(
        self,
        name: str = "best_exporter",
        serving_input_receiver_fn: Callable[[], Any] | None = None,
        event_file_pattern: str | None = None,
        compare_fn: Callable[..., bool] = loss_smaller,
        assets_extra: Mapping[str, str] | None = None,
        as_text: bool = False,
        exports_to_keep: int | None = 5,
    ) -> None:
        takes = ("best_eval_result", "current_eval_result")
        check_parameters("compare_fn", compare_fn, takes, takes, defaults=True)
        super().__init__(name, serving_input_receiver_fn, assets_extra, as_text, exports_to_keep)
        self._better = compare_fn
        self._pattern = event_file_pattern
        self._best: Mapping[str, Any] | None = None
        self._knows_best = event_file_pattern is None

    def _wants(self, estimator: Estimator, result: Mapping[str, Any], final: bool) -> bool:
        if not self._knows_best:
            self._best = self._best_of_events(estimator.model_dir, result)
            self._knows_best = True
        if self._best is not None and not self._improves(self._best, result):
            return False
        self._best = dict(result)
        return True

    def _improves(self, best: Mapping[str, Any], result: Mapping[str, Any]) -> bool:
        return bool(self._better(best_eval_result=best, current_eval_result=result))

    def _best_of_events(self, model_dir: str, own: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """The best metrics in the event files, except for those of this very evaluation."""
        best: Mapping[str, Any] | None = None
        for step, metrics in eval_metrics(model_dir, str(self._pattern)).items():
            result = {**metrics, "global_step": step}
            if step != own.get("global_step") and (best is None or self._improves(best, result)):
                best = result
        return best


def _keep_newest(directory: str, count: int) -> None:
    """Removes all but the newest exports of a directory."""
    exports = [each for each in Path(directory).iterdir() if each.name.isdecimal()]
    for old in sorted(exports, key=lambda each: int(each.name))[:-count]:
        try:
            shutil.rmtree(old)
        except OSError as error:
            tf.compat.v1.logging.warning("Cannot remove the old export %s: %s", old, error)
