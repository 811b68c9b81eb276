"""Models from Keras files, SavedModels and factories in Python, and weights for them."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import keras
import tensorflow as tf

from tfdist.errors import ConfigError
from tfdist.exporting.subject import first_line
from tfdist.types import Model

__all__ = ["import_modules", "load", "restore"]

_FILES = (".keras", ".h5", ".hdf5")
_WEIGHTS = (".weights.h5", ".weights.json")
_CLASS = re.compile(r"Could not locate (?:class|function) '(?P<name>[^']+)'")


def import_modules(names: Sequence[str]) -> None:
    """Imports modules, or Python files, that register a model's own layers with Keras.

    Raises:
        ConfigError: if one cannot be imported.
    """
    for name in names:
        _module(name, f"--import {name}")


def load(source: str, weights: str | None = None) -> Model | str:
    """A model from where it was saved.

    Args:
        source: a `.keras` or `.h5` file, the directory of a SavedModel, or a factory
            `module:function` or `file.py:function` that returns a Keras model.
        weights: a `.weights.h5` or `.weights.json` file, or a checkpoint of `tf.train`, that the
            model's weights are read from.

    Returns:
        A Keras model; of a SavedModel its path.

    Raises:
        ConfigError: if there is no such thing, or it cannot be read.
    """
    path = Path(source)
    if source.endswith(_WEIGHTS) or _is_checkpoint(path):
        raise ConfigError(
            f"{source!r} holds weights and not the model that they belong to. Give the model, such "
            f"as file.py:function, and --weights {source}. Of an Estimator, give what its "
            "export_saved_model has written."
        )
    if (path / "saved_model.pb").is_file():
        if weights is not None:
            raise ConfigError(
                f"--weights {weights} goes with a Keras model; {source!r} is a SavedModel, whose "
                "weights cannot be replaced. Leave it out."
            )
        return source
    model = _read(path) if path.exists() else _made(source)
    if weights is not None:
        restore(model, weights)
    return model


def restore(model: Model, weights: str) -> None:
    """Reads a model's weights.

    Args:
        model: a built Keras model.
        weights: a `.weights.h5` or `.weights.json` file, the prefix of a checkpoint of
            `tf.train.Checkpoint`, or the directory of a `tf.train.CheckpointManager`.

    Raises:
        ConfigError: if they cannot be read, or are of another model.
    """
    path = Path(weights)
    try:
        if weights.endswith(_WEIGHTS):
            if not path.is_file():
                raise ConfigError(f"The weights {weights!r} do not exist.")
            model.load_weights(weights)
            return
        _restore_checkpoint(model, _prefix(path))
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"The weights {weights!r} do not fit the model {model.name!r}: {first_line(error)}"
        ) from error


def _read(path: Path) -> Model:
    if path.is_dir():
        raise ConfigError(
            f"{str(path)!r} is a directory without a saved_model.pb, so it is no SavedModel."
        )
    if path.suffix not in _FILES:
        raise ConfigError(
            f"{str(path)!r} is not a model that can be read. There are: .keras and .h5 files, "
            "directories of SavedModels, and factories such as file.py:function."
        )
    if path.suffix == ".keras" and not zipfile.is_zipfile(path):
        raise ConfigError(f"{str(path)!r} is damaged, or no model that Keras 3 has saved.")
    try:
        return keras.models.load_model(path, compile=False)
    except Exception as error:
        raise _explained(path, error) from error


def _explained(path: Path, error: Exception) -> ConfigError:
    missing = _CLASS.search(str(error))
    if missing:
        return ConfigError(
            f"{str(path)!r} uses {missing['name']!r}, which Keras does not know. Name the module "
            "that registers it (@keras.saving.register_keras_serializable): --import MODULE."
        )
    if "lambda" in str(error).lower():
        return ConfigError(
            f"{str(path)!r} holds Python code of a Lambda layer, which is not run unasked. If you "
            "trust it, load it in Python with safe_mode=False and call tfdist.export(model, …)."
        )
    return ConfigError(f"{str(path)!r} cannot be read: {first_line(error)}")


def _made(source: str) -> Model:
    """A model from a factory."""
    module, colon, name = source.rpartition(":")
    if not colon or not name.isidentifier() or not module:
        raise ConfigError(
            f"The model {source!r} does not exist. Give a .keras or .h5 file, the directory of a "
            "SavedModel, or a factory such as file.py:function."
        )
    factory = getattr(_module(module, source), name, None)
    if not callable(factory):
        raise ConfigError(f"{module!r} has no function {name!r}, which {source!r} names.")
    try:
        model = factory()
    except Exception as error:
        raise ConfigError(f"{source!r} failed: {type(error).__name__}: {error}") from error
    if not isinstance(model, keras.Model):
        raise ConfigError(
            f"{source!r} returned a {type(model).__name__}, and should return a keras.Model."
        )
    return model


def _module(name: str, asked: str) -> ModuleType:
    """A module by its name, as seen from here, or by the path of its file."""
    here = str(Path.cwd())
    try:
        if not name.endswith(".py"):
            if here not in sys.path:
                sys.path.insert(0, here)
            return importlib.import_module(name)
        path = Path(name)
        if not path.is_file():
            raise ConfigError(f"The file {name!r}, which {asked!r} names, does not exist.")
        spec = importlib.util.spec_from_file_location(path.stem, path)
        if spec is None or spec.loader is None:
            raise ConfigError(f"{name!r} is not a Python file.")
        module = importlib.util.module_from_spec(spec)
        sys.modules.setdefault(path.stem, module)
        spec.loader.exec_module(module)
        return module
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{asked!r} cannot be imported: {type(error).__name__}: {error}"
        ) from error


def _is_checkpoint(path: Path) -> bool:
    return Path(f"{path}.index").is_file() or (path / "checkpoint").is_file()


def _prefix(path: Path) -> str:
    if path.is_dir():
        latest = tf.train.latest_checkpoint(str(path))
        if latest is None:
            raise ConfigError(f"The directory {str(path)!r} holds no checkpoint.")
        return str(latest)
    prefix = str(path).removesuffix(".index")
    if not Path(f"{prefix}.index").is_file():
        raise ConfigError(
            f"The weights {str(path)!r} do not exist. Give a .weights.h5 or .weights.json file, "
            "the prefix of a checkpoint (such as ckpt-3), or the directory of several."
        )
    return prefix


def _restore_checkpoint(model: Model, prefix: str) -> None:
    """Restores a model that was saved as some attribute of a checkpoint, or as its root."""
    keys = [key for key, _ in tf.train.list_variables(prefix)]
    roots = dict.fromkeys(key.split("/")[0] for key in keys if "/" in key)
    attempts = [{name: model} for name in sorted(roots, key=lambda root: root != "model")]
    for attributes in (*attempts, {"root": model}):
        # `read`, as `restore` also wants the counter that `save` keeps and `write` does not.
        status = tf.train.Checkpoint(**attributes).read(prefix).expect_partial()
        try:
            status.assert_existing_objects_matched()
            return
        except AssertionError:
            continue
    raise ConfigError(
        f"The checkpoint {prefix!r} does not hold the weights of the model {model.name!r}. It "
        f"holds: {', '.join(keys[:5])}{', …' if len(keys) > 5 else ''}."
    )
