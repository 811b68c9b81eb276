"""Strategies whose processes may be arranged along the axes of a mesh."""

from __future__ import annotations

import contextlib
from collections.abc import Collection

from tfdist.comm import batch_sharding
from tfdist.config.mesh import DATA, MODEL, Axis, LayoutRule, Mesh, parse_layouts
from tfdist.config.sharding_options import check_size
from tfdist.errors import ConfigError
from tfdist.sharding.deferred import exchanging_what_is_read
from tfdist.strategies.base import StrategyMixin

__all__ = ["Meshed"]


class Meshed(StrategyMixin):
    """The base of strategies of several processes, whose extended part is `Lined`."""

    _world: batch_sharding.Shard

    @property
    def shard(self) -> batch_sharding.Shard:
        """This process's part of the data."""
        extended = self.extended
        return batch_sharding.Shard(
            workers=extended._num_workers,
            worker=extended._id_in_cluster,
            local=len(extended.worker_devices),
        )

    def arrange(self, mesh: str | None, layouts: str | None) -> None:
        """Arranges the processes, once they have met, by the options of the job.

        Args:
            mesh: the axes, such as "data=2,model=2"; None if all processes are data.
            layouts: the rules by which weights are divided along the model axis.

        Raises:
            ConfigError: if the mesh is not one of the processes.
        """
        self._world = self.shard
        if mesh is not None:
            self.default_layouts = parse_layouts(layouts)
            self.lay_out(Mesh.parse(mesh), self.default_layouts)

    def lay_out(self, mesh: Mesh, layouts: Collection[LayoutRule] | None) -> None:
        """See `StrategyMixin.lay_out`; a mesh cannot be changed any more.

        Raises:
            ConfigError: if the mesh is not one of the processes, is not the one that they have, or
                conflicts with the treatment of gradients.
        """
        check_size(mesh, self._world.workers)
        axes = self._axes_of(mesh)
        if self.mesh is None:
            if not self.rule.is_plain or self._world.local > 1:
                raise ConfigError(
                    f"mesh='{mesh}' conflicts with options of gradient updates, or with several "
                    "devices in a process. Leave them out."
                )
            self.extended.lay_out(axes, exchanging_what_is_read)
            self.mesh = mesh
        elif _coordinates(axes) != _coordinates(self._axes_of(self.mesh)):
            raise ConfigError(
                f"mesh='{mesh}' conflicts with mesh='{self.mesh}', which the job has already. "
                "Leave one of them out."
            )
        self.layouts = layouts

    def _axes_of(self, mesh: Mesh) -> list[Axis]:
        return [mesh.axis(name, self._world.worker) for name in (DATA, MODEL)]

    @property
    def world(self) -> batch_sharding.Shard:
        """This process among all of the mesh."""
        return self._world

    @property
    def parted(self) -> Axis | None:
        """The axis along which layers are divided, if it has several processes."""
        if not self.mesh or self.mesh.size(MODEL) == 1:
            return None
        return self.mesh.axis(MODEL, self._world.worker)

    def among_all(self) -> contextlib.AbstractContextManager[None]:
        """A block in which all processes of the mesh are replicas."""
        return self.extended.among_all() if self.mesh else contextlib.nullcontext()


def _coordinates(axes: list[Axis]) -> list[tuple[int, int]]:
    return [(axis.size, axis.index) for axis in axes]
