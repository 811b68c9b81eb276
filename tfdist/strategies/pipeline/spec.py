"""What the rest of tfdist knows of the strategy `pipeline`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tfdist.cluster.spec import Topology
from tfdist.config import gradient_options, pipeline_options
from tfdist.config.pipeline_options import SCHEDULES
from tfdist.config.strategy_spec import Refusal, StrategySpec

__all__ = ["SPEC"]


def _check(config: Any) -> None:
    gradient_options.check(config)
    pipeline_options.check(config)


def _describe(config: Any) -> Mapping[str, str]:
    stages = f"{config.stages}" if config.stages else "as many as devices"
    virtual = f" of {config.virtual} parts each" if config.virtual > 1 else ""
    each = "4 for each device" if config.microbatches is None else f"{config.microbatches}"
    return {
        "schedule": f"{config.schedule} ({SCHEDULES[config.schedule]})",
        "stages": stages + virtual,
        "microbatches": "1" if config.schedule == "pipedream" else each,
    }


SPEC = StrategySpec(
    name="pipeline",
    summary="a model in stages, each on a device of its own",
    create="tfdist.strategies.pipeline.start:create",
    topology=Topology.STAGES,
    own_options=(
        *("stages", "microbatches", "schedule", "virtual", "cuts", "recompute", "vertical_sync"),
        *("stage_timeout", "timeline"),
    ),
    lacking=", which does not cut the model into stages.",
    refuses=(
        gradient_options.NO_EXCHANGE,
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
