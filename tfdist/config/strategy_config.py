"""What the user asked for: one frozen value, checked when it is made."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import typing
from collections.abc import Mapping
from typing import Any

from tfdist.cluster.environments.base import Roles
from tfdist.config import gradient_options, horovod_options, pipeline_options, server_options
from tfdist.config.strategy_spec import StrategySpec, having, spec_of, specs
from tfdist.errors import ConfigError
from tfdist.utils.validation import (
    LONGEST_SECONDS,
    check_choice,
    check_number,
    check_range,
    check_type,
    refuse_set,
)

__all__ = [
    "MODES",
    "STRATEGIES",
    "StrategyConfig",
    "check_option",
]

#: Every strategy and what it runs on, in the order in which they grow.
STRATEGIES: dict[str, str] = {name: spec.summary for name, spec in specs().items()}

#: The update modes of each strategy.
MODES: dict[str, tuple[str, ...]] = {name: spec.modes for name, spec in specs().items()}

#: Ways to exchange tensors between processes.
COMMUNICATIONS = ("auto", "ring", "nccl")

#: The values of the options that have few.
_CHOICES: dict[str, tuple[str, ...]] = {
    "strategy": ("auto", *STRATEGIES),
    "mode": tuple(dict.fromkeys(mode for modes in MODES.values() for mode in modes)),
    "communication": COMMUNICATIONS,
    "on_stale": tuple(server_options.ON_STALE),
    "wire_dtype": server_options.WIRE_DTYPES,
    "compression": tuple(gradient_options.COMPRESSIONS),
    "clip": tuple(gradient_options.CLIPPINGS),
    "lr_rule": tuple(gradient_options.LR_RULES),
    "reduction": tuple(horovod_options.REDUCTIONS),
    "schedule": tuple(pipeline_options.SCHEDULES),
}

#: Values of options that need more than the example of their type.
_EXAMPLES = {"cuts": '"dense2,…"', "start_timeout": "60.0", "timeline": '"step.json"'}


@dataclasses.dataclass(frozen=True, kw_only=True)
class StrategyConfig:
    """How to train. Checked when it is made.

    Attributes:
        strategy: a key of `STRATEGIES`, or `"auto"`.
        processes: number of worker processes; more than one only on clusters. Those of a
            pipeline are its devices, the first of which is the chief.
        devices: replicas in each process: GPUs, or logical CPU devices where there are no GPUs.
            None means all GPUs, or one CPU device.
        mode: when a gradient becomes a weight change, one of the strategy's `MODES`.
        communication: `"ring"` (TensorFlow's gRPC ring), `"nccl"` (GPUs), or `"auto"`.
        seed: given to Python, NumPy and TensorFlow in every task, 0 to 2**32 - 1. None leaves them
            alone.
        start_timeout: seconds that a task waits for all others to join.
        ps: number of parameter servers; this and those to `step_timeout`, but for the two of
            staleness, are `parameter_server`'s only.
        staleness: with mode `"stale"`, how many updates may come between the read of the weights
            that a gradient was computed from and its own application; on collectives exactly so
            many do, 1 by default.
        on_stale: how the bound is kept, one of `ON_STALE`; on collectives `"wait"` or `"damp"`.
        backup_workers: with mode `"sync"`, how many of the last gradients of an update are dropped.
        wire_dtype: type in which weights and gradients cross the network, one of `WIRE_DTYPES`.
        min_shard_bytes: variables are split over the servers into parts of this size at least.
        max_shards: most parts of a variable; None means one for each server.
        step_timeout: seconds after which a step is taken from a worker that has not ended it.
        accumulate: batches whose gradients are added up for one update.
        compression: in what gradients are sent, one of `COMPRESSIONS`.
        ratio: with compression `"topk"` or `"randomk"`, the part of the gradients that is sent.
        rank: with compression `"powersgd"`, the width of the thin matrices.
        bucket_mb: MiB of gradients that are exchanged together, the last layers' first, while the
            others are computed; None means all at once.
        clip: where the optimizer's clipping acts, one of `CLIPPINGS`.
        period: with mode `"local"`, steps that each replica takes alone between two averages.
        sync_steps: with mode `"local"`, steps at the beginning that are synchronous (post-local
            SGD).
        outer_momentum: with mode `"local"`, Nesterov momentum of the averaged change (DiLoCo).
        outer_lr: with mode `"local"`, what the averaged change is multiplied by.
        average_state: with mode `"local"`, average the optimizer's state too.
        lr_rule: how the learning rate follows a larger global batch, one of `LR_RULES`.
        base_batch: with a rule, the examples of an update for which the rate was chosen.
        lr_warmup: with a rule, updates in which the factor grows from 1.
        report: measure where the time of a step goes, and the bytes that it sends.
        reduction: how the replicas' gradients become one, one of `REDUCTIONS`; this and all below
            are `horovod`'s only.
        groups: number of groups in which gradients are exchanged, the last layers' first. None
            means one. More than one exchanges some while others are computed.
        fusion_mb: MiB of tensors that Horovod sends as one; None means Horovod's 128.
        cycle_ms: milliseconds between two looks of Horovod for tensors that are ready.
        hierarchical: all-reduce within each host first, by NCCL, then between the hosts.
        autotune: let Horovod try out `fusion_mb`, `cycle_ms` and the like while it trains.
        timeline: a file for Horovod's timeline, or `pipeline`'s, in the format of
            chrome://tracing; a pipeline's picture if it ends in `.png`.
        stall_timeout: seconds that a tensor may wait for a rank before the job ends.
        stages: devices of a replica of the pipeline, None for all; this and all below are
            `pipeline`'s only.
        microbatches: parts of a batch; None means four for each device.
        schedule: the order of the stages' steps, one of `SCHEDULES`.
        virtual: with schedule `"interleaved"`, parts of the model on each device.
        cuts: the paths of the layers that all stages but the first begin with, separated by commas;
            None for a plan by measurement.
        recompute: run forward passes again in backward passes instead of keeping activations.
        vertical_sync: with schedule `"pipedream"`, let all stages use the first one's version.
        stage_timeout: seconds that a stage may wait for another.

    Raises:
        ConfigError: if a value is out of range or conflicts with another.
    """

    strategy: str = "auto"
    processes: int = 1
    devices: int | None = None
    mode: str = "sync"
    communication: str = "auto"
    seed: int | None = None
    start_timeout: float = 60.0
    ps: int = 1
    staleness: int | None = None
    on_stale: str = "wait"
    backup_workers: int = 0
    wire_dtype: str = "float32"
    min_shard_bytes: int = 1 << 20
    max_shards: int | None = None
    step_timeout: float = server_options.STEP_TIMEOUT
    accumulate: int = 1
    compression: str = "none"
    ratio: float = 0.01
    rank: int = 4
    bucket_mb: float | None = None
    clip: str = "after"
    period: int = 8
    sync_steps: int = 0
    outer_momentum: float = 0.0
    outer_lr: float = 1.0
    average_state: bool = False
    lr_rule: str = "none"
    base_batch: int | None = None
    lr_warmup: int = 0
    report: bool = False
    reduction: str = "mean"
    groups: int | None = None
    fusion_mb: float | None = None
    cycle_ms: float | None = None
    hierarchical: bool = False
    autotune: bool = False
    timeline: str | None = None
    stall_timeout: float = horovod_options.STALL_TIMEOUT
    stages: int | None = None
    microbatches: int | None = None
    schedule: str = "1f1b"
    virtual: int = 1
    cuts: str | None = None
    recompute: bool = False
    vertical_sync: bool = False
    stage_timeout: float = pipeline_options.STAGE_TIMEOUT

    @property
    def roles(self) -> Roles:
        """What the ranks of a scheduler become: with servers, the first chief and the last ps."""
        spec = spec_of(self.strategy)
        return Roles(chief=spec.chief_runs_script, ps=self.ps if spec.has_servers else 0)

    @property
    def counts(self) -> dict[str, int]:
        """How many tasks of each type there are, in the order of their ranks."""
        spec = spec_of(self.strategy)
        if spec.has_servers:
            return {"chief": 1, "worker": self.processes, "ps": self.ps}
        if spec.has_stages:
            return {"chief": 1, "worker": self.processes - 1}
        return {"worker": self.processes if spec.is_clustered else 1}

    def __post_init__(self) -> None:
        if isinstance(self.timeline, os.PathLike):
            object.__setattr__(self, "timeline", os.fspath(self.timeline))
        for field in dataclasses.fields(self):
            check_option(field.name, getattr(self, field.name))
        check_choice("strategy", self.strategy, _CHOICES["strategy"])
        check_choice("communication", self.communication, COMMUNICATIONS)
        check_number("processes", self.processes, 1)
        if self.devices is not None:
            check_number("devices", self.devices, 1)
        why = "It is in seconds, such as 60."
        check_range("start_timeout", self.start_timeout, above=0, most=LONGEST_SECONDS, why=why)
        if self.seed is not None and not 0 <= self.seed < 2**32:
            raise ConfigError(f"seed={self.seed!r} is not between 0 and 2**32 - 1.")
        for options in (server_options, horovod_options, gradient_options, pipeline_options):
            options.check_ranges(self)
        if self.strategy != "auto":
            self._check_for(spec_of(self.strategy))

    def _check_for(self, spec: StrategySpec) -> None:
        """Checks the options against the strategy."""
        if self.mode not in spec.modes:
            names = having(lambda other: self.mode in other.modes)
            raise ConfigError(
                f"mode={self.mode!r} does not go with strategy={spec.name!r}, which has "
                f"{', '.join(spec.modes)}. Strategies with that mode: {', '.join(names)}."
            )
        if self.processes > 1 and not spec.is_clustered:
            raise ConfigError(
                f"processes={self.processes} conflicts with strategy={spec.name!r}, which runs "
                "in one process. Choose strategy='multi_worker', or leave processes out."
            )
        for other in specs().values():
            own = [name for name in other.own_options if name not in spec.own_options]
            refuse_set(self, own, other.name, other.lacking)
        for refusal in spec.refuses:
            refuse_set(self, refusal.names, refusal.instead, refusal.why)
        spec.check(self)

    def to_json(self) -> str:
        """The configuration as JSON text, for the tasks of a job."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> StrategyConfig:
        """Reads what `to_json` wrote.

        Raises:
            ConfigError: if the text is not a configuration.
        """
        try:
            return cls(**json.loads(text))
        except (TypeError, json.JSONDecodeError) as error:
            raise ConfigError(
                f"TFDIST_CONFIG={text!r} is not a configuration written by this version of tfdist "
                f"({error}). Unset it; `tfdist run` sets it for its tasks."
            ) from error


def check_option(name: str, value: object) -> None:
    """Checks the name of an option and the type of its value, apart from all other options.

    Raises:
        ConfigError: for an unknown name, or a value of another type.
    """
    check_choice("option", name, _types())
    if name == "timeline" and isinstance(value, os.PathLike):
        return
    check_type(name, value, _types()[name], _CHOICES.get(name, ()), _EXAMPLES.get(name))


@functools.cache
def _types() -> Mapping[str, Any]:
    """The annotated type of each option."""
    return typing.get_type_hints(StrategyConfig)
