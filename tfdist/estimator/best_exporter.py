"""The exporter that exports when the model has become better."""

from __future__ import annotations

import glob
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tfdist.errors import ConfigError
from tfdist.estimator import events
from tfdist.estimator.calling import parameters_of
from tfdist.estimator.exporters import WritingExporter
from tfdist.estimator.types import Estimator

__all__ = ["BestExporter", "loss_smaller"]


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
    """Exports when an evaluation is better than all before; see `exporters.WritingExporter`.

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
        needed = ("best_eval_result", "current_eval_result")
        if not callable(compare_fn) or not set(needed) <= set(parameters_of(compare_fn)):
            raise ConfigError(
                f"compare_fn={compare_fn!r} is no function of {' and '.join(needed)}."
            )
        super().__init__(name, serving_input_receiver_fn, assets_extra, as_text, exports_to_keep)
        self._better = compare_fn
        self._pattern = event_file_pattern
        self._best: Mapping[str, Any] | None = None
        self._told = event_file_pattern is None

    def export(
        self,
        estimator: Estimator,
        export_path: str,
        checkpoint_path: str,
        eval_result: Mapping[str, Any],
        is_the_final_export: bool,
    ) -> bytes | None:
        """Exports a model that has become better; see `Exporter.export`."""
        del is_the_final_export
        if not self._told:
            self._best = self._best_of_events(estimator.model_dir, eval_result)
            self._told = True
        if self._best is not None and not self._improves(self._best, eval_result):
            return None
        self._best = dict(eval_result)
        return self._write(estimator, export_path, checkpoint_path)

    def _improves(self, best: Mapping[str, Any], result: Mapping[str, Any]) -> bool:
        return bool(self._better(best_eval_result=best, current_eval_result=result))

    def _best_of_events(self, model_dir: str, own: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """The best metrics in the event files, except for those of this very evaluation."""
        paths = sorted(glob.glob(str(Path(model_dir) / str(self._pattern))))
        best: Mapping[str, Any] | None = None
        for step, metrics in events.eval_metrics_of(paths).items():
            result = {**metrics, "global_step": step}
            if step != own.get("global_step") and (best is None or self._improves(best, result)):
                best = result
        return best
