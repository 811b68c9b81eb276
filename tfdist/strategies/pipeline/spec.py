"""The description of the strategy `pipeline` for the rest of tfdist."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from tfdist.cluster.spec import Topology
from tfdist.config.gradient_options import GradientOptions
from tfdist.config.pipeline_options import SCHEDULES, PipelineOptions, replicas_of
from tfdist.config.strategy_spec import NO_EXCHANGE, Refusal, StrategySpec
from tfdist.errors import ConfigError

if TYPE_CHECKING:
    from tfdist.config.strategy_config import StrategyConfig

__all__ = ["SPEC"]


def _check(config: StrategyConfig) -> None:
    if config.processes > 1 and (config.devices or 1) > 1:
        raise ConfigError(
            f"devices={config.devices} conflicts with processes={config.processes}: each process "
            "of a pipeline gives its GPUs, or its CPU. Leave devices out, or processes."
        )
    count = config.processes if config.processes > 1 else config.devices
    stages = config.part(PipelineOptions).stages
    if stages is not None and count is not None:
        replicas_of(count, stages)


def _describe(config: StrategyConfig) -> Mapping[str, str]:
    own = config.part(PipelineOptions)
    stages = f"{own.stages}" if own.stages else "as many as devices"
    virtual = f" of {own.virtual} parts each" if own.virtual > 1 else ""
    each = "4 for each device" if own.microbatches is None else f"{own.microbatches}"
    return {
        "schedule": f"{own.schedule} ({SCHEDULES[own.schedule]})",
        "stages": stages + virtual,
        "microbatches": "1" if own.schedule == "pipedream" else each,
    }


SPEC = StrategySpec(
    name="pipeline",
    summary="a model in stages, each on a device of its own",
    create="tfdist.strategies.pipeline.strategy:create",
    topology=Topology.STAGES,
    options=(GradientOptions, PipelineOptions),
    refuses=(
        NO_EXCHANGE,
        Refusal(
            names=("accumulate", "report"),
            instead="multi_worker",
            why=", which adds up the gradients of its microbatches.",
        ),
    ),
    check=_check,
    verified_by="devices",
    draws_timelines=True,
    describe=_describe,
)
