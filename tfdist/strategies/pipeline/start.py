"""Making the strategy `pipeline`."""

from __future__ import annotations

from tfdist.cluster.tf_config import own_tf_config
from tfdist.config.gradient_options import GradientOptions
from tfdist.config.pipeline_options import PipelineOptions
from tfdist.config.strategy_config import StrategyConfig
from tfdist.strategies.connection import connecting, join_own_cluster, seed_from
from tfdist.strategies.devices import connect_tasks, prepare_devices
from tfdist.strategies.membership import Member
from tfdist.strategies.pipeline.strategy import Pipeline

__all__ = ["create"]


def create(config: StrategyConfig, member: Member | None) -> Pipeline:
    """Makes the strategy of a process that trains a model in stages.

    Args:
        config: the configuration.
        member: the chief of several tasks, if they have joined already.

    Raises:
        ConfigError: if options conflict, or there are too few devices.
    """
    if member is None and (config.processes > 1 or own_tf_config() is not None):
        member = join_own_cluster(config)
    own = config.part(PipelineOptions)
    if member is None:
        devices = prepare_devices(config.devices or own.stages)
    else:
        seed_from(member)
        with connecting(member, config):
            devices = connect_tasks(member.cluster, member.task)
    return Pipeline(
        devices,
        stages=own.stages,
        microbatches=own.microbatches,
        schedule=own.schedule,
        virtual=own.virtual,
        cuts=None if own.cuts is None else [name.strip() for name in own.cuts.split(",")],
        recompute=own.recompute,
        vertical_sync=own.vertical_sync,
        timeout=own.stage_timeout,
        timeline=own.timeline,
        rule=config.part(GradientOptions),
    )
