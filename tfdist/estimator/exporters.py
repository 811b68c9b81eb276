"""Exporters: which evaluations of a training are followed by an export."""

from __future__ import annotations

import abc
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import tensorflow as tf

from tfdist.errors import ConfigError
from tfdist.estimator.types import Estimator
from tfdist.utils import validation

__all__ = ["Exporter", "FinalExporter", "LatestExporter", "WritingExporter"]


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
        serving_input_receiver_fn: returns the model's inputs.
        assets_extra: files to add, by their paths in `assets.extra`.
        as_text: whether the protocol buffer is written as text.
        exports_to_keep: how many exports are kept; None keeps all.

    Raises:
        ConfigError: if the receiver is not a function, or fewer than one export are kept.
    """

    def __init__(
        self,
        name: str,
        serving_input_receiver_fn: Callable[[], Any] | None,
        assets_extra: Mapping[str, str] | None,
        as_text: bool,
        exports_to_keep: int | None = None,
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

    def _write(self, estimator: Estimator, export_path: str, checkpoint_path: str) -> bytes:
        """Exports the model of a checkpoint, removes old exports and returns the directory."""
        path: bytes = estimator.export_saved_model(
            export_path,
            self._receiver_fn,
            assets_extra=self._assets_extra,
            as_text=self._as_text,
            checkpoint_path=checkpoint_path,
        )
        _keep_newest(export_path, self._keep)
        return path


class FinalExporter(WritingExporter):
    """Exports once, when the training has ended; for the arguments see `WritingExporter`."""

    def __init__(
        self,
        name: str,
        serving_input_receiver_fn: Callable[[], Any] | None,
        assets_extra: Mapping[str, str] | None = None,
        as_text: bool = False,
    ) -> None:
        super().__init__(name, serving_input_receiver_fn, assets_extra, as_text)

    def export(
        self,
        estimator: Estimator,
        export_path: str,
        checkpoint_path: str,
        eval_result: Mapping[str, Any],
        is_the_final_export: bool,
    ) -> bytes | None:
        """Exports at the end; see `Exporter.export`."""
        del eval_result
        if not is_the_final_export:
            return None
        return self._write(estimator, export_path, checkpoint_path)


class LatestExporter(WritingExporter):
    """Exports after each evaluation, and removes old exports; see `WritingExporter`."""

    def __init__(
        self,
        name: str,
        serving_input_receiver_fn: Callable[[], Any] | None,
        assets_extra: Mapping[str, str] | None = None,
        as_text: bool = False,
        exports_to_keep: int | None = 5,
    ) -> None:
        super().__init__(name, serving_input_receiver_fn, assets_extra, as_text, exports_to_keep)

    def export(
        self,
        estimator: Estimator,
        export_path: str,
        checkpoint_path: str,
        eval_result: Mapping[str, Any],
        is_the_final_export: bool,
    ) -> bytes | None:
        """Exports; see `Exporter.export`."""
        del eval_result, is_the_final_export
        return self._write(estimator, export_path, checkpoint_path)


def _keep_newest(place: str, count: int | None) -> None:
    """Removes all but the newest exports of a directory; None keeps all."""
    if count is None:
        return
    result = sorted((each for each in Path(place).iterdir() if each.name.isdecimal()), key=_age)
    for old in result[:-count]:
        try:
            shutil.rmtree(old)
        except OSError as error:
            tf.compat.v1.logging.warning("Cannot remove the old export %s: %s", old, error)


def _age(place: Path) -> int:
    return int(place.name)
