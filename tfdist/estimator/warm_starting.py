"""Starting from the variables of another model."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf

from tfdist.errors import ConfigError
from tfdist.types import Variable

__all__ = ["VocabInfo", "WarmStartSettings", "apply", "settings_of"]

tf1 = tf.compat.v1

#: The vocabulary of a feature, and the old one from which its rows are taken over.
VocabInfo = tf1.train.VocabInfo


@dataclasses.dataclass(frozen=True)
class WarmStartSettings:
    """The variables that a new model takes over from a checkpoint.

    Args:
        ckpt_to_initialize_from: a checkpoint's prefix, or a directory with one.
        vars_to_warm_start: a regular expression of trainable variables, a list of such for any
            variables, a list of variables, or None for none but those with vocabularies.
        var_name_to_vocab_info: `VocabInfo` by a variable's name.
        var_name_to_prev_var_name: the names in the checkpoint that differ.

    Raises:
        ConfigError: if there is no checkpoint to start from.
    """

    ckpt_to_initialize_from: str
    vars_to_warm_start: str | Sequence[str] | Sequence[Variable] | None = ".*"
    var_name_to_vocab_info: Mapping[str, Any] | None = None
    var_name_to_prev_var_name: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        if not self.ckpt_to_initialize_from:
            raise ConfigError(
                f"ckpt_to_initialize_from={self.ckpt_to_initialize_from!r} is no checkpoint. Give "
                "its prefix, or the directory that has it."
            )


def settings_of(warm_start_from: object) -> WarmStartSettings | None:
    """The settings that a path of a checkpoint, its directory, or a SavedModel stands for."""
    if warm_start_from is None or isinstance(warm_start_from, WarmStartSettings):
        return warm_start_from
    if not isinstance(warm_start_from, str | Path):
        raise ConfigError(
            f"warm_start_from={warm_start_from!r} is neither a path nor "
            "tfdist.estimator.WarmStartSettings."
        )
    if tf.saved_model.contains_saved_model(str(warm_start_from)):
        return WarmStartSettings(str(Path(warm_start_from) / "variables" / "variables"))
    return WarmStartSettings(str(warm_start_from))


def apply(settings: WarmStartSettings | None, model_dir: str) -> None:
    """Initializes the variables of the default graph from another model.

    Nothing is done if the model has a checkpoint of its own.
    """
    if settings is None or tf.train.latest_checkpoint(model_dir) is not None:
        return
    source = settings.ckpt_to_initialize_from
    if not tf1.train.checkpoint_exists(source) and tf.train.latest_checkpoint(source) is None:
        raise ConfigError(
            f"warm_start_from={source!r} has no checkpoint. Give a checkpoint's prefix, its "
            "directory, or a SavedModel."
        )
    tf1.train.warm_start(
        source,
        settings.vars_to_warm_start,
        settings.var_name_to_vocab_info,
        settings.var_name_to_prev_var_name,
    )
