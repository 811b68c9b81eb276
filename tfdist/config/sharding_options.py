"""The options that divide a model's state over the processes of a job."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import msgspec

from tfdist.config.gradient_options import GradientOptions
from tfdist.config.mesh import DATA, MEGATRON, MODEL, Mesh, parse_layouts
from tfdist.config.option import About, Options
from tfdist.errors import ConfigError

if TYPE_CHECKING:
    from tfdist.config.strategy_config import StrategyConfig

__all__ = [
    "MeshOptions",
    "ShardingOptions",
    "check_mesh",
    "check_sharding",
    "check_size",
    "describe_mesh",
    "describe_sharding",
]

Checkpoints = Literal["whole", "sharded"]

#: The parts of a model's state that are divided, by the stage of ZeRO.
_DIVIDED = {
    1: "the optimizer's state",
    2: "the optimizer's state and the averaged gradients",
    3: "the weights, the optimizer's state and the averaged gradients",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardingOptions(Options):
    """The division of a model's state over the processes."""

    lacking: ClassVar[str] = ", which keeps whole models."

    zero: Annotated[
        Annotated[int, msgspec.Meta(ge=0, le=3)],
        About(
            "ZeRO's stage: what each process holds a part of. 0: nothing; 1: the optimizer's "
            "state; 2: also the averaged gradients; 3: also the weights.",
            "Models larger than a device (multi_worker, horovod)",
            why="They are ZeRO's stages.",
        ),
    ] = 0
    checkpoints: Annotated[
        Checkpoints,
        About(
            "What model.save, save_weights, ModelCheckpoint and BackupAndRestore write. whole: "
            "ordinary files, gathered by the chief; sharded: directories to which each process "
            "writes its part. `tfdist consolidate` makes them ordinary files.",
            "Models larger than a device (multi_worker, horovod)",
        ),
    ] = "whole"


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshOptions(Options):
    """The arrangement of the processes along axes, and the division of weights along one."""

    lacking: ClassVar[str] = ", which keeps whole models."

    mesh: Annotated[
        str | None,
        About(
            "The processes as a mesh of axes, such as data=2,model=2. data: "
            "along it processes have different examples; model: along it they compute parts of "
            "layers (tensor parallelism), and keep parts of weights.",
            "Models larger than a device (multi_worker, horovod)",
            shown="data alone",
            example="{ data = 2, model = 2 }",
            metavar="AXIS=SIZE,...",
            separator=",",
        ),
    ] = None
    layouts: Annotated[
        str | None,
        About(
            "With a model axis in --mesh: how weights are divided. megatron: by the kind of each "
            "layer; or patterns of weights' paths with an axis or - for each dimension, such as "
            "'ffn.*kernel=- model;logits/kernel=model -'.",
            "Models larger than a device (multi_worker, horovod)",
            shown=MEGATRON,
            example='{ "ffn.*kernel" = "- model" }',
            metavar="megatron|PATTERN=AXES;...",
            separator=";",
        ),
    ] = None

    def check(self) -> None:
        """Refuses a mesh or rules that cannot be read, and rules without an axis for them."""
        parse_layouts(self.layouts)
        if self.layouts is not None and not self.divides_layers:
            raise ConfigError(
                f"layouts={self.layouts!r} needs an axis {MODEL!r} of 2 or more, and "
                f"{'no mesh is set' if self.mesh is None else f'mesh={self.mesh!r} has none'}. "
                f"Set one, as in mesh='{DATA}=2,{MODEL}=2', or leave layouts out."
            )

    @property
    def parsed(self) -> Mesh | None:
        """The mesh; None if the processes are the data axis alone."""
        return None if self.mesh is None else Mesh.parse(self.mesh)

    @property
    def divides_layers(self) -> bool:
        """Whether there is a model axis of several processes."""
        return self.parsed is not None and self.parsed.size(MODEL) > 1


def check_mesh(config: StrategyConfig) -> None:
    """Refuses options that conflict with a mesh, and with the division of the model's state.

    Raises:
        ConfigError: if an option does.
    """
    check_sharding(config)
    options = config.part(MeshOptions)
    mesh = options.parsed
    if mesh is None:
        return
    asked = f"mesh={options.mesh!r}"
    if config.processes not in (1, mesh.processes):
        raise ConfigError(
            f"{asked} conflicts with processes={config.processes}: its axes make "
            f"{mesh.processes}. Give -n {mesh.processes}, or sizes whose product is "
            f"{config.processes}."
        )
    gradients = config.part(GradientOptions)
    if not gradients.is_plain:
        raise ConfigError(
            f"{asked} conflicts with the options of gradient updates ({gradients.in_words}), "
            "which know replicas of a whole model only. Leave mesh or the other options out."
        )
    if (config.devices or 1) > 1:
        raise ConfigError(
            f"{asked} conflicts with devices={config.devices}: it arranges processes of one device "
            "each. Start a process for each device with processes (-n), or leave mesh out."
        )


def check_size(mesh: Mesh, processes: int) -> None:
    """Checks that a mesh is one of so many processes.

    Raises:
        ConfigError: if it is not.
    """
    if mesh.processes != processes:
        raise ConfigError(
            f"mesh='{mesh}' conflicts with a job of {processes} processes: its axes make "
            f"{mesh.processes}. Start as many (-n {mesh.processes}), or give sizes whose product "
            f"is {processes}."
        )


def check_sharding(config: StrategyConfig) -> None:
    """Refuses options that conflict with the division of the model's state.

    Raises:
        ConfigError: if an option does.
    """
    zero = config.part(ShardingOptions).zero
    if not zero:
        return
    gradients = config.part(GradientOptions)
    if gradients.mode != "sync":
        raise ConfigError(
            f"zero={zero} conflicts with mode={gradients.mode!r}, in which a process has weights "
            "or gradients of its own between two updates. Choose mode='sync', or leave zero out."
        )
    if (config.devices or 1) > 1:
        raise ConfigError(
            f"zero={zero} conflicts with devices={config.devices}: it divides the model's state "
            "over processes of one device each. Start a process for each device with "
            "processes (-n), or leave zero out."
        )
    if zero > 1 and not gradients.is_plain:
        raise ConfigError(
            f"zero={zero} conflicts with the options of gradient updates ({gradients.in_words}), "
            "which need whole gradients. Choose zero=1, or leave the other options out."
        )


def describe_sharding(config: StrategyConfig) -> Mapping[str, str]:
    """The rows of the start table: the update mode, and what is divided if anything is."""
    rows = {"update mode": config.part(GradientOptions).in_words}
    zero = config.part(ShardingOptions).zero
    return {**rows, "ZeRO": f"stage {zero}: {_DIVIDED[zero]} divided"} if zero else rows


def describe_mesh(config: StrategyConfig) -> Mapping[str, str]:
    """The rows of `describe_sharding`, and those of the mesh if there is one."""
    rows = dict(describe_sharding(config))
    options = config.part(MeshOptions)
    if options.parsed is not None:
        rows["mesh"] = " x ".join(f"{name} {size}" for name, size in options.parsed.sizes)
    if options.divides_layers:
        rows["layouts"] = options.layouts or MEGATRON
    return rows
