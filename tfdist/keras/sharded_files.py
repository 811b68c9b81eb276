"""Models in sharded files: each process writes its part of the variables, and reads what it needs.

With `checkpoints="sharded"` the path that a program gives to `model.save`, `model.save_weights` or
a callback becomes a directory (`tfdist.sharding.checkpoint`). Keras walks through the model as it
does for a file of its own; the stores below are what it writes to and reads from.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, KeysView, Mapping
from typing import Any, NamedTuple, TypeAlias

import h5py
import numpy as np
import tensorflow as tf

from tfdist._keras import BaseOptimizer, file_utils, keras_backend, saving_lib
from tfdist._tf.distribute import eagerly_outside_of_scope
from tfdist.comm import host_collectives
from tfdist.config.mesh import DATA, Mesh
from tfdist.errors import ConfigError
from tfdist.keras import saving, updating
from tfdist.keras.hooks import Hook
from tfdist.sharding import checkpoint
from tfdist.sharding.checkpoint import Checkpoint, Entry, Index, LoadError, Saved, Slice
from tfdist.sharding.layout import Layout, Region, writers
from tfdist.sharding.variables import ShardedVariable, WholeWeight, noted
from tfdist.types import Array, Model, Optimizer, Strategy
from tfdist.utils.atomic_io import SaveError, set_aside

#: A path as programs give it to Keras.
Path: TypeAlias = "str | os.PathLike[str]"

__all__ = ["exists", "hooks", "is_for", "save_weights"]


def hooks() -> list[Hook]:
    """The seams at which Keras writes and reads files of models."""
    return [
        Hook(saving_lib, "save_model", _save_model, priority=1),
        Hook(saving_lib, "save_weights_only", _save_weights_only, priority=1),
        Hook(BaseOptimizer, "save_own_variables", _variables_of_optimizer),
        Hook(saving_lib, "load_model", _load_model),
        Hook(saving_lib, "load_weights_only", _load_weights_only),
    ]


def exists(path: str) -> bool:
    """Whether there is a file, or a sharded checkpoint that is complete."""
    return bool(file_utils.exists(path)) and (
        not file_utils.isdir(path) or checkpoint.is_checkpoint(path)
    )


def is_for(path: object) -> bool:
    """Whether what a program saves to a path is to be sharded."""
    return (
        getattr(tf.distribute.get_strategy(), "checkpoints", None) == "sharded"
        and isinstance(path, (str, os.PathLike))
        and not file_utils.is_remote_path(path)
        and not os.fspath(path).startswith("hf://")
    )


# Saving.


def _save_model(original: Callable[..., None]) -> Callable[..., None]:
    """A directory with the parts of all processes, in place of one file."""

    @functools.wraps(original)
    def save_model(model: Model, filepath: Path, *args: object, **kwargs: object) -> None:
        if is_for(filepath):
            _save(model, os.fspath(filepath), whole_model=True)
        else:
            original(model, filepath, *args, **kwargs)

    return save_model


def _save_weights_only(original: Callable[..., None]) -> Callable[..., None]:
    """The same for weights; Keras's own files of a largest size stay Keras's."""

    @functools.wraps(original)
    def save_weights_only(model: Model, filepath: Path, *args: object, **kwargs: object) -> None:
        plain = not any(each is not None for each in [*args, *kwargs.values()])
        if is_for(filepath) and plain and model.built:
            save_weights(model, os.fspath(filepath))
        else:
            original(model, filepath, *args, **kwargs)

    return save_weights_only


def save_weights(model: Model, path: str) -> None:
    """Writes a model's weights and optimizer to a sharded checkpoint. All processes must call it.

    Args:
        model: the model; built.
        path: the directory.

    Raises:
        SaveError: on all processes, if a disk refuses; what was there before is unchanged then.
    """
    _save(model, path, whole_model=False)


class _Planned(NamedTuple):
    """A variable that is going to be written.

    Attributes:
        name: its own path in the model, or its place.
        shape: the whole one's.
        dtype: of its elements.
        layout: its division, in words.
        regions: by the ranks of the processes that write it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    layout: str
    regions: dict[int, Region]


class _Planner(saving.Nowhere):
    """Notes the variables that Keras saves, and who writes what of them."""

    def __init__(self, strategy: Strategy) -> None:
        super().__init__()
        self._mesh = _mesh_of(strategy)
        self._loads = [0] * self._mesh.processes
        self._path = ""
        self.variables: dict[str, _Planned] = {}
        self.groups: dict[str, str] = {}

    def make(self, path: str, metadata: Mapping[str, str] | None = None) -> _Planner:
        """The store itself, which notes the name of a layer."""
        self._path = f"{path}/vars" if path else "vars"
        if metadata:
            self.groups[self._path] = metadata["name"]
        return self

    def __setitem__(self, key: str, value: Any) -> None:
        place = f"{self._path}/{key}"
        name, layout = getattr(value, "path", place), _layout_of(value)
        if layout is not None:
            ranks = range(self._mesh.processes)
            regions = writers([layout.at(self._mesh, r).region for r in ranks], self._loads)
            shape, said = layout.shape, str(layout)
        else:
            super().__setitem__(key, value)
            shape = tuple(value.shape) if hasattr(value, "shape") else np.shape(value)
            regions, said = {0: Region.whole(shape)}, " ".join("-" * len(shape))
            self._loads[0] += regions[0].size
        self.variables[place] = _Planned(name, shape, _dtype_of(value), said, regions)


class _Writer(_Planner):
    """Writes this process's part of the variables that Keras saves.

    Args:
        strategy: the strategy.
        planned: the variables by their places.
        file: an `h5py.File`.
    """

    def __init__(
        self, strategy: Strategy, planned: Mapping[str, _Planned], file: h5py.File
    ) -> None:
        super().__init__(strategy)
        self._planned, self._file = planned, file
        self._rank = host_collectives.rank(strategy)

    def __setitem__(self, key: str, value: object) -> None:
        place = f"{self._path}/{key}"
        region = self._planned[place].regions.get(self._rank)
        if region is not None:
            checkpoint.put(self._file, place, _part(value, region))


def _variables_of_optimizer(original: Callable[..., None]) -> Callable[..., None]:
    """Keras gives a store the values of an optimizer's variables, which would be gathered."""

    @functools.wraps(original)
    def save_own_variables(self: Optimizer, store: object) -> None:
        if not isinstance(store, _Planner):
            original(self, store)
            return
        for number, variable in enumerate(self.variables):
            store[str(number)] = variable

    return save_own_variables


def _mesh_of(strategy: Strategy) -> Mesh:
    """The mesh of all processes; without one they are the data axis."""
    mesh: Mesh | None = getattr(strategy, "mesh", None)
    return mesh or Mesh(((DATA, host_collectives.worker_count(strategy)),))


def _layout_of(value: object) -> Layout | None:
    return value.layout if isinstance(value, (ShardedVariable, WholeWeight)) else None


def _dtype_of(value: object) -> str:
    dtype = value.dtype if hasattr(value, "dtype") else np.asarray(value).dtype
    return str(keras_backend.standardize_dtype(dtype))


def _part(value: Any, region: Region) -> Array:
    """A region of a variable of which this process keeps it."""
    if isinstance(value, ShardedVariable):
        kept: Array = value.kept.numpy()
        return kept[region.within(value.kept_layout.region)]
    if isinstance(value, WholeWeight):
        whole: Array = value.kept.numpy()
        return whole[region.within(Region.whole(region.shape))]
    return np.asarray(keras_backend.convert_to_numpy(value))


def _save(model: Model, path: str, *, whole_model: bool) -> None:
    strategy = tf.distribute.get_strategy()
    path, rank = os.path.abspath(path), host_collectives.rank(strategy)
    updating.flush(model, batches=False)
    plan = _Planner(strategy)
    reads = saving.walk(model, plan)
    save = _agree(strategy, path, plan)
    part = os.path.join(path, checkpoint.file_of(save, rank))
    keeps_assets = whole_model and rank == 0
    assets = os.path.join(path, checkpoint.assets_of(save)) if keeps_assets else None

    def write() -> int:
        with _explained(path, part):
            os.makedirs(path, exist_ok=True)
            with checkpoint.new_file(path, save, rank) as file:
                writer = _Writer(strategy, plan.variables, file)
                _walk_to_write(model, writer, assets, rank)
            return os.path.getsize(part)

    def publish(sizes: list[int]) -> None:
        with _explained(path, part):
            config = saving_lib._serialize_model_as_json(model) if whole_model else None
            checkpoint.publish(path, _index(plan, save, str(_mesh_of(strategy)), sizes, config))

    with saving.shared_reads(reads, keep=rank == 0), eagerly_outside_of_scope():
        try:
            sizes = host_collectives.together(strategy, write, f"writing a part of {path!r}")
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(part)
            raise
        name = f"writing the index of {path!r}"
        host_collectives.on_chief(strategy, lambda: publish(sizes), name)


def _agree(strategy: Strategy, path: str, plan: _Planner) -> str:
    """The id of the save, on which all processes agree, as on what is saved where."""
    planned = json.dumps([plan.variables, plan.groups], default=dataclasses.astuple)
    digest = hashlib.sha256(planned.encode()).hexdigest()
    asked = {"path": path, "variables": f"{len(plan.variables)} ({digest[:8]})"}
    answers = host_collectives.all_gather_json(strategy, asked, "saving a sharded checkpoint")
    if any(answer != answers[0] for answer in answers):
        raise SaveError(
            f"Cannot save to {path!r}: the processes have different models, or name different "
            f"directories: {answers}. Save the same model to the same path on all of them."
        )

    def begin() -> str:
        if os.path.lexists(path) and not os.path.isdir(path):
            set_aside(path)
        return secrets.token_hex(4)

    return str(host_collectives.on_chief(strategy, begin, f"beginning to save to {path!r}"))


@contextlib.contextmanager
def _explained(path: str, part: str) -> Iterator[None]:
    """Names the path of the user's where the disk refuses."""
    try:
        yield
    except Exception as error:
        if SaveError.covers(error) and not isinstance(error, SaveError):
            raise SaveError.of(path, error, part) from error
        raise


def _walk_to_write(model: Model, writer: _Writer, assets: str | None, rank: int) -> None:
    """Lets Keras save a model; whole values of divided variables are read on the chief only."""
    if assets is not None:
        os.mkdir(assets)
    with contextlib.nullcontext() if rank == 0 else noted.set({}):
        saving_lib._save_state(model, writer, _store_of(assets), "", set())
    if assets is not None and not os.listdir(assets):
        os.rmdir(assets)


def _store_of(assets: str | None) -> object:
    """Keras's store of vocabularies and the like, in a directory."""
    # In this mode it uses the directory itself, for writing too.
    return None if assets is None else saving_lib.DiskIOStore(assets, mode="r")


def _index(
    plan: _Planner, save: str, mesh: str, sizes: list[int], config: tuple[str, str] | None
) -> Index:
    files = {checkpoint.file_of(save, rank): size for rank, size in enumerate(sizes)}
    names = [*files]
    variables = {
        place: Entry(
            each.name,
            each.shape,
            each.dtype,
            each.layout,
            tuple(Slice(names[rank], region) for rank, region in each.regions.items()),
        )
        for place, each in plan.variables.items()
    }
    return Index(
        save=save, mesh=mesh, files=files, groups=plan.groups, variables=variables, config=config
    )


# Loading.


class _Parts(saving_lib.H5IOStore):  # type: ignore[misc]
    """The store that Keras loads a model's variables from.

    Args:
        saved: the open checkpoint.
    """

    def __init__(self, saved: Checkpoint) -> None:
        self.mode = "r"
        self._saved = saved
        self._prefix = ""
        self._places: dict[str, dict[str, str]] = {}
        for place in saved.index.variables:
            prefix, _, key = place.rpartition("/")
            self._places.setdefault(prefix, {})[key] = place

    def __bool__(self) -> bool:
        return True

    def get(self, path: str) -> _Parts:
        """The variables of a layer."""
        self._prefix = f"{path}/vars" if path else "vars"
        return self

    def has_path(self, path: str) -> bool:
        """Whether anything was saved of what is at a place of the model."""
        known = [*self._places, *self._saved.index.groups]
        return any(each == path or each.startswith(f"{path}/") for each in known)

    def close(self) -> None:
        """The checkpoint is closed by who has opened it."""

    def __len__(self) -> int:
        return len(self.keys())

    def keys(self) -> KeysView[str]:
        """The numbers of the variables."""
        return self._places.get(self._prefix, {}).keys()

    def __contains__(self, key: object) -> bool:
        return key in self.keys()

    def __getitem__(self, key: str) -> Saved:
        return self._saved.saved(self._places.get(self._prefix, {})[key])


def _load_weights_only(original: Callable[..., None]) -> Callable[..., None]:
    """Reads of a sharded checkpoint what this process keeps."""

    @functools.wraps(original)
    def load_weights_only(
        model: Model,
        filepath: Path,
        skip_mismatch: bool = False,
        objects_to_skip: Iterable[object] | None = None,
        **kwargs: object,
    ) -> None:
        if not checkpoint.is_checkpoint(filepath):
            more = {} if objects_to_skip is None else {"objects_to_skip": objects_to_skip}
            original(model, filepath, skip_mismatch, **more, **kwargs)
            return
        if not model.built:
            raise ConfigError(
                f"{os.fspath(filepath)!r} cannot be loaded into a model that has no weights yet. "
                "Build it first: call it on a batch, or `model.build(...)`."
            )
        with Checkpoint(os.fspath(filepath)) as saved:
            skipped = {id(each) for each in objects_to_skip or ()}
            _load(model, saved, None, skip_mismatch, skipped)

    return load_weights_only


def _load_model(original: Callable[..., Model]) -> Callable[..., Model]:
    """Makes a model by its saved configuration, and reads what this process keeps."""

    @functools.wraps(original)
    def load_model(
        filepath: Path,
        custom_objects: Mapping[str, object] | None = None,
        compile: bool = True,
        safe_mode: bool = True,
    ) -> Model:
        if not checkpoint.is_checkpoint(filepath):
            return original(filepath, custom_objects, compile, safe_mode)
        with Checkpoint(os.fspath(filepath)) as saved:
            if saved.index.config is None:
                raise LoadError(
                    f"{os.fspath(filepath)!r} has the weights of a model only. Make the model, "
                    "and call its `load_weights`."
                )
            make = saving_lib._model_from_config
            model = make(saved.index.config[0], custom_objects, compile, safe_mode)
            _load(model, saved, saved.assets)
        return model

    return load_model


def _load(
    model: Model,
    saved: Checkpoint,
    assets: str | None,
    skip_mismatch: bool = False,
    visited: set[int] | None = None,
) -> None:
    failed: set[int] = set()
    errors: dict[int, object] = {}
    saving_lib._load_state(
        model,
        weights_store=_Parts(saved),
        assets_store=_store_of(assets),
        inner_path="",
        skip_mismatch=skip_mismatch,
        visited_saveables=visited or set(),
        failed_saveables=failed,
        error_msgs=errors,
    )
    if failed:
        saving_lib._raise_loading_failure(errors, warn_only=skip_mismatch)
