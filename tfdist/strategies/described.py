"""The first process of a job that divides a model, without the others.

It makes the model as that process would, with its parts of the weights and of the optimizer's
variables, and ends with the first step, which updates nothing. Exchanges return values of the right
shapes, without a meaning.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, TypedDict

import tensorflow as tf

from tfdist._keras import BaseOptimizer
from tfdist.comm import batch_sharding
from tfdist.comm.replica_collectives import Link, size_of
from tfdist.config.mesh import DATA, LayoutRule, Mesh, parse_layouts
from tfdist.config.sharding_options import MeshOptions, ShardingOptions
from tfdist.config.strategy_config import StrategyConfig
from tfdist.keras.building import build_optimizer
from tfdist.keras.hooks import Hook, HookSet
from tfdist.keras.layouts import WeightLayout, weight_layouts
from tfdist.sharding.variables import ShardedVariable, noted
from tfdist.strategies.multi_worker.strategy import MultiWorker
from tfdist.strategies.scope import Scope
from tfdist.types import Optimizer, Scalar, Tensor

__all__ = ["Described", "Description"]


class Description(TypedDict):
    """The parts of a model that a process keeps.

    Attributes:
        weights: each weight's layout.
        optimizer: the bytes of the variables of the optimizers that the first step applies; None
            if the program trains nothing.
    """

    weights: list[WeightLayout]
    optimizer: int | None


class _ShapesAlone:
    """A `Link` whose results have the shapes of those of several processes."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.index: Scalar = 0

    def sum(self, tensors: Sequence[Any]) -> list[Any]:
        return list(tensors)

    def gather(self, tensor: Tensor) -> Tensor:
        every: Tensor = tf.concat([tensor] * self.count, 0)
        return every

    def all_to_all(self, tensor: Tensor) -> Tensor:
        return tensor


class Described(MultiWorker):
    """The first process of a mesh, alone; ends the program after the first step.

    Args:
        config: the configuration of the job.
    """

    def __init__(self, config: StrategyConfig) -> None:
        mesh, sharding = config.find(MeshOptions), config.part(ShardingOptions)
        super().__init__(zero=sharding.zero, checkpoints=sharding.checkpoints)
        self.name = config.strategy
        parsed = None if mesh is None else mesh.parsed
        self.mesh = parsed or Mesh(((DATA, config.processes),))
        self.layouts = parse_layouts(None if mesh is None else mesh.layouts)
        self.default_layouts = () if parsed is None else self.layouts
        self._optimizers: dict[int, int] = {}
        self._hooks = HookSet(lambda: [Hook(BaseOptimizer, "apply", self._built)], priority=10)

    @property
    def description(self) -> Description:
        """The parts of the weights and of the optimizers that this process keeps."""
        kept = sum(self._optimizers.values()) if self._optimizers else None
        return {"weights": weight_layouts(self), "optimizer": kept}

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Runs a step; the first that has applied an optimizer ends the program."""
        result = super().run(*args, **kwargs)
        if self._optimizers:
            raise SystemExit
        return result

    @contextlib.contextmanager
    def scope(self) -> Iterator[object]:
        """The scope of all strategies; divided variables that are read in it are zeros."""
        inner = tf.distribute.MultiWorkerMirroredStrategy.scope
        with Scope(self, lambda: inner(self), self._hooks) as scope, noted.set({}):
            yield scope

    @property
    def is_chief(self) -> bool:
        """Never: it writes no files, and leaves the table of layouts to the dry run."""
        return False

    @property
    def shard(self) -> batch_sharding.Shard:
        """The first part of the data."""
        workers = 1 if self.mesh is None else self.mesh.size(DATA)
        return batch_sharding.Shard(workers=workers, worker=0, local=1)

    def link(self, axis: str = DATA) -> Link:
        """A stand-in for the processes along an axis."""
        assert self.mesh is not None
        return _ShapesAlone(self.mesh.size(axis))

    def lay_out(self, mesh: Mesh, layouts: Collection[LayoutRule] | None) -> None:
        """Takes another mesh, as `keras.distribution` asks for."""
        self.mesh, self.layouts = mesh, layouts

    def _built(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """An optimizer that is going to update weights has all of its variables."""

        @functools.wraps(original)
        def apply(
            optimizer: Optimizer, grads: object, trainable_variables: Sequence[Any] | None = None
        ) -> None:
            del grads
            build_optimizer(optimizer, list(trainable_variables or ()))
            kept = [
                v.kept if isinstance(v, ShardedVariable) else v._value for v in optimizer.variables
            ]
            self._optimizers[id(optimizer)] = sum(map(size_of, kept))
            if tf.distribute.in_cross_replica_context():
                raise SystemExit

        return apply
