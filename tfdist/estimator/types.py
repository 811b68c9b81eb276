"""Protocols of an Estimator, for its parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from tfdist.estimator.run_config import RunConfig
from tfdist.estimator.spec import EstimatorSpec
from tfdist.estimator.warm_starting import WarmStartSettings
from tfdist.types import Features, Structure

__all__ = ["Estimator"]


class Estimator(Protocol):
    """A `tfdist.estimator.Estimator`, in the modules that it is made of."""

    @property
    def config(self) -> RunConfig: ...
    @property
    def model_dir(self) -> str: ...
    @property
    def params(self) -> Mapping[str, Any]: ...
    @property
    def warm_start_settings(self) -> WarmStartSettings | None: ...
    def latest_checkpoint(self) -> str | None: ...
    def eval_dir(self, name: str | None = None) -> str: ...
    def call_model_fn(
        self, features: Features, labels: Structure, mode: str, config: RunConfig | None = None
    ) -> EstimatorSpec: ...
    def train(
        self,
        input_fn: Callable[..., Any],
        hooks: Sequence[Any] | None = None,
        steps: int | None = None,
        max_steps: int | None = None,
        saving_listeners: Sequence[Any] | None = None,
    ) -> Estimator: ...
    def evaluate(
        self,
        input_fn: Callable[..., Any],
        steps: int | None = None,
        hooks: Sequence[Any] | None = None,
        checkpoint_path: str | None = None,
        name: str | None = None,
    ) -> dict[str, Any]: ...
    def export_saved_model(
        self,
        export_dir_base: str | Path,
        serving_input_receiver_fn: Callable[[], Any],
        assets_extra: Mapping[str, str] | None = None,
        as_text: bool = False,
        checkpoint_path: str | None = None,
    ) -> bytes: ...
