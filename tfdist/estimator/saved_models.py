"""Writes SavedModels as TensorFlow Serving expects them."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import tensorflow as tf

from tfdist.errors import ConfigError
from tfdist.estimator import modeling, sessions
from tfdist.estimator.outputs import PredictOutput
from tfdist.estimator.receivers import Receiver
from tfdist.estimator.spec import EstimatorSpec, ModeKeys
from tfdist.estimator.types import Estimator

__all__ = ["export", "new_directory", "signatures"]

tf1 = tf.compat.v1

_DEFAULT = tf.saved_model.DEFAULT_SERVING_SIGNATURE_DEF_KEY
#: Attempts to find a second that has no directory yet.
_ATTEMPTS = 10


def export(
    estimator: Estimator,
    base: str | Path,
    receiver_fn: Callable[[], Any],
    *,
    assets_extra: Mapping[str, str] | None,
    as_text: bool,
    checkpoint: str | None,
) -> bytes:
    """Writes a SavedModel of a checkpoint into a new directory, complete or not at all.

    Args:
        estimator: the Estimator.
        base: where the directory is made.
        receiver_fn: returns the model's inputs.
        assets_extra: files to add, by their paths in `assets.extra`.
        as_text: whether the protocol buffer is written as text.
        checkpoint: the checkpoint's prefix.

    Returns:
        The directory's path, as bytes.

    Raises:
        ConfigError: if there is no checkpoint, or the signatures are wrong.
    """
    if checkpoint is None:
        raise ConfigError(
            f"model_dir={estimator.model_dir!r} has no checkpoint to export. Train first."
        )
    final = new_directory(base)
    unfinished = final.with_name(f"temp-{final.name}")
    _write(estimator, unfinished, receiver_fn, as_text=as_text, checkpoint=checkpoint)
    for target, source in (assets_extra or {}).items():
        place = unfinished / "assets.extra" / target
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, place)
    unfinished.rename(final)
    return str(final).encode()


def new_directory(base: str | Path) -> Path:
    """A directory that does not exist yet, named after the time in seconds.

    Raises:
        ConfigError: if others take each second's name.
    """
    for _ in range(_ATTEMPTS):
        place = Path(base) / str(int(time.time()))
        if not place.exists() and not place.with_name(f"temp-{place.name}").exists():
            place.parent.mkdir(parents=True, exist_ok=True)
            return place
        time.sleep(1)
    raise ConfigError(
        f"export_dir_base={str(base)!r}: another export takes the name of each second. Export "
        "into another directory."
    )


def _write(
    estimator: Estimator,
    place: Path,
    receiver_fn: Callable[[], Any],
    *,
    as_text: bool,
    checkpoint: str,
) -> None:
    with modeling.graph_for(estimator.config):
        tf1.train.get_or_create_global_step()
        receiver = receiver_fn()
        spec = estimator.call_model_fn(receiver.features, None, ModeKeys.PREDICT)
        signed = signatures(spec, receiver)
        scaffold = spec.scaffold or tf1.train.Scaffold()
        with tf1.Session(config=sessions.local_config(estimator.config)) as session:
            saver = scaffold.saver or tf1.train.Saver(sharded=True)
            saver.restore(session, checkpoint)
            initialize = scaffold.local_init_op or tf1.train.Scaffold.default_local_init_op()
            builder = tf1.saved_model.Builder(str(place))
            builder.add_meta_graph_and_variables(
                session,
                [tf.saved_model.SERVING],
                signature_def_map=signed,
                assets_collection=tf1.get_collection(tf1.GraphKeys.ASSET_FILEPATHS),
                main_op=initialize,
                saver=saver,
                strip_default_attrs=True,
            )
            builder.save(as_text)


def signatures(spec: EstimatorSpec, receiver: Receiver) -> dict[str, Any]:
    """The signatures of a model by name.

    Args:
        spec: the model's.
        receiver: the model's inputs.

    Raises:
        ConfigError: if several outputs have no default, or none goes with the receiver.
    """
    outputs = spec.export_outputs or {_DEFAULT: PredictOutput(spec.predictions)}
    if len(outputs) > 1 and _DEFAULT not in outputs:
        raise ConfigError(
            f"export_outputs has {', '.join(sorted(outputs))}, but no default. Name one "
            f"{_DEFAULT!r}."
        )
    outputs = {**outputs, _DEFAULT: outputs.get(_DEFAULT, next(iter(outputs.values())))}
    made, problems = {}, []
    for prefix, tensors in _receivers(receiver):
        for name, output in outputs.items():
            try:
                made[prefix + name] = output.as_signature_def(tensors)
            except ConfigError as error:
                problems.append(f"{prefix + name}: {error}")
    for problem in problems:
        tf1.logging.info("A signature is left out. %s", problem)
    if not made:
        lines = "\n".join(f"  {problem}" for problem in problems)
        raise ConfigError(f"No output of the model goes with the receiver:\n{lines}")
    return made


def _receivers(receiver: Receiver) -> list[tuple[str, Mapping[str, Any]]]:
    """The input receivers, with the prefix of their signatures."""
    others = receiver.receiver_tensors_alternatives or {}
    named = [(f"{name}:", tensors) for name, tensors in others.items()]
    return [("", receiver.receiver_tensors), *named]
