"""The options of a strategy on the command line, each with its help text."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from tfdist.config.gradient_options import CLIPPINGS, COMPRESSIONS, LR_RULES
from tfdist.config.horovod_options import DEFAULT_CYCLE_MS, REDUCTIONS
from tfdist.config.pipeline_options import SCHEDULES, STAGE_TIMEOUT
from tfdist.config.server_options import ON_STALE, STEP_TIMEOUT, WIRE_DTYPES
from tfdist.config.strategy_config import COMMUNICATIONS, MODES

__all__ = [
    "OF_PIPELINES",
    "OF_STRATEGY",
    "OF_UPDATES",
    "Autotune",
    "BackupWorkers",
    "Communication",
    "CycleMs",
    "Devices",
    "FusionMb",
    "Groups",
    "Hierarchical",
    "MaxShards",
    "MinShardBytes",
    "Mode",
    "OnStale",
    "Processes",
    "Ps",
    "Reduction",
    "Seed",
    "Staleness",
    "StallTimeout",
    "StartTimeout",
    "StepTimeout",
    "Timeline",
    "WireDtype",
]


# The options of pipelines on the command line, each with its help text.

#: Where the help shows them.
_PIPELINE_PANEL: dict[str, Any] = {"rich_help_panel": "Options of pipeline"}

Stages = Annotated[
    int | None,
    typer.Option(
        help="Devices of a replica of the pipeline; more devices make more replicas.",
        show_default="all devices",
        **_PIPELINE_PANEL,
    ),
]

Microbatches = Annotated[
    int | None,
    typer.Option(
        help="Parts of a batch that follow each other through the stages.",
        show_default="4 for each device",
        **_PIPELINE_PANEL,
    ),
]

SchedulePick = Annotated[
    str | None,
    typer.Option(
        "--schedule",
        help="The order of the steps. "
        + "; ".join(f"{name}: {what}" for name, what in SCHEDULES.items())
        + ".",
        show_default="1f1b",
        **_PIPELINE_PANEL,
    ),
]

Virtual = Annotated[
    int | None,
    typer.Option(
        help="With --schedule interleaved: parts of the model on each device.",
        show_default="1",
        **_PIPELINE_PANEL,
    ),
]

Cuts = Annotated[
    str | None,
    typer.Option(
        help="The layers that all stages but the first begin with, separated by commas.",
        show_default="by measurement",
        **_PIPELINE_PANEL,
    ),
]

Recompute = Annotated[
    bool | None,
    typer.Option(
        "--recompute",
        help="Run forward passes again in backward passes instead of keeping activations.",
        show_default=False,
        **_PIPELINE_PANEL,
    ),
]

VerticalSync = Annotated[
    bool | None,
    typer.Option(
        "--vertical-sync",
        help="With --schedule pipedream: all stages use the first one's version of the weights.",
        show_default=False,
        **_PIPELINE_PANEL,
    ),
]

StageTimeout = Annotated[
    float | None,
    typer.Option(
        help="Seconds that a stage may wait for another.",
        show_default=f"{STAGE_TIMEOUT:.0f}",
        **_PIPELINE_PANEL,
    ),
]

OF_PIPELINES: dict[str, Any] = {
    "stages": Stages,
    "microbatches": Microbatches,
    "schedule": SchedulePick,
    "virtual": Virtual,
    "cuts": Cuts,
    "recompute": Recompute,
    "vertical_sync": VerticalSync,
    "stage_timeout": StageTimeout,
}


# The options of gradient updates on the command line, each with its help text.

#: Where the help shows them.
_PANEL: dict[str, Any] = {
    "rich_help_panel": "Gradient updates (mirrored, multi_worker, horovod)",
}

#: Where the help shows those of one mode.
_LOCAL: dict[str, Any] = {"rich_help_panel": "Options of --mode local"}


def _choices(table: dict[str, str]) -> str:
    return "; ".join(f"{name}: {what}" for name, what in table.items()) + "."


Accumulate = Annotated[
    int | None,
    typer.Option(
        help="Batches whose gradients are added up for one update.", show_default="1", **_PANEL
    ),
]

Compression = Annotated[
    str | None,
    typer.Option(
        help=f"How gradients travel. {_choices(COMPRESSIONS)}", show_default="none", **_PANEL
    ),
]

Ratio = Annotated[
    float | None,
    typer.Option(
        help="With topk and randomk: the part of the gradients that is sent.",
        show_default="0.01",
        **_PANEL,
    ),
]

Rank = Annotated[
    int | None,
    typer.Option(help="With powersgd: the width of the thin matrices.", show_default="4", **_PANEL),
]

BucketMb = Annotated[
    float | None,
    typer.Option(
        "--bucket-mb",
        help="MiB of gradients that are exchanged together, while others are computed.",
        show_default="all at once",
        **_PANEL,
    ),
]

Clip = Annotated[
    str | None,
    typer.Option(
        help=f"Where the optimizer's clipping acts. {_choices(CLIPPINGS)}",
        show_default="after",
        **_PANEL,
    ),
]

LrRule = Annotated[
    str | None,
    typer.Option(
        "--lr-rule",
        help=f"How the learning rate follows the examples of an update. {_choices(LR_RULES)}",
        show_default="none",
        **_PANEL,
    ),
]

BaseBatch = Annotated[
    int | None,
    typer.Option(
        help="With --lr-rule: examples of an update for which the rate was chosen.", **_PANEL
    ),
]

LrWarmup = Annotated[
    int | None,
    typer.Option(
        "--lr-warmup",
        help="With --lr-rule: updates in which the factor grows from 1.",
        show_default="0",
        **_PANEL,
    ),
]

Report = Annotated[
    bool | None,
    typer.Option(
        "--report",
        help="Measure where the time of a step goes, and what it sends.",
        show_default=False,
        **_PANEL,
    ),
]

Period = Annotated[
    int | None,
    typer.Option(help="Steps of a replica between two averages.", show_default="8", **_LOCAL),
]

SyncSteps = Annotated[
    int | None,
    typer.Option(help="Synchronous steps at the beginning.", show_default="0", **_LOCAL),
]

OuterMomentum = Annotated[
    float | None,
    typer.Option(
        help="Nesterov momentum of the averaged change, as in DiLoCo.",
        show_default="0",
        **_LOCAL,
    ),
]

OuterLr = Annotated[
    float | None,
    typer.Option("--outer-lr", help="Factor of the averaged change.", show_default="1", **_LOCAL),
]

AverageState = Annotated[
    bool | None,
    typer.Option(
        "--average-state",
        help="Average the optimizer's state with the weights.",
        show_default=False,
        **_LOCAL,
    ),
]

#: The options of `StrategyConfig` that say how gradients become updates.
OF_UPDATES: dict[str, Any] = {
    "accumulate": Accumulate,
    "compression": Compression,
    "ratio": Ratio,
    "rank": Rank,
    "bucket_mb": BucketMb,
    "clip": Clip,
    "lr_rule": LrRule,
    "base_batch": BaseBatch,
    "lr_warmup": LrWarmup,
    "report": Report,
    "period": Period,
    "sync_steps": SyncSteps,
    "outer_momentum": OuterMomentum,
    "outer_lr": OuterLr,
    "average_state": AverageState,
}

#: Where the help shows the options of `parameter_server`.
_SERVERS: dict[str, Any] = {"rich_help_panel": "Options of parameter_server"}

#: Where the help shows the options of `horovod`.
_HOROVOD: dict[str, Any] = {"rich_help_panel": "Options of horovod"}

Processes = Annotated[
    int | None,
    typer.Option(
        "-n",
        "--processes",
        help="Processes; workers of parameter_server; stages of pipeline; devices of mirrored's "
        "one process.",
    ),
]

Devices = Annotated[
    int | None,
    typer.Option(help="GPUs of each process, or CPU devices where there are no GPUs."),
]

Mode = Annotated[
    str | None,
    typer.Option(
        help="When a gradient becomes an update: "
        f"{', '.join(dict.fromkeys(mode for modes in MODES.values() for mode in modes))}.",
        show_default="sync",
    ),
]

Communication = Annotated[
    str | None, typer.Option(help=f"{', '.join(COMMUNICATIONS)}.", show_default="auto")
]

Seed = Annotated[int | None, typer.Option(help="Seed of all processes.", show_default="drawn")]

StartTimeout = Annotated[
    float | None,
    typer.Option(help="Seconds until all processes must have joined.", show_default="60"),
]

Ps = Annotated[
    int | None,
    typer.Option(
        "--ps",
        help="Parameter servers, besides -n workers and a chief.",
        show_default="1",
        **_SERVERS,
    ),
]

Staleness = Annotated[
    int | None,
    typer.Option(
        help="With --mode stale: updates that come between a gradient's read of the weights and "
        "its own; on parameter servers at most.",
        show_default="1, on parameter servers none",
    ),
]

OnStale = Annotated[
    str | None,
    typer.Option(
        help="With --mode stale: "
        + "; ".join(f"{name}: {what}" for name, what in ON_STALE.items())
        + ".",
        show_default="wait",
    ),
]

BackupWorkers = Annotated[
    int | None,
    typer.Option(
        help="With --mode sync: gradients of an update that need not be waited for.",
        show_default="0",
        **_SERVERS,
    ),
]

WireDtype = Annotated[
    str | None,
    typer.Option(
        help=f"Type in which weights and gradients are sent: {', '.join(WIRE_DTYPES)}.",
        show_default="float32",
        **_SERVERS,
    ),
]

MinShardBytes = Annotated[
    int | None,
    typer.Option(
        help="Least size of a part of a split variable.", show_default="1 MiB", **_SERVERS
    ),
]

MaxShards = Annotated[
    int | None,
    typer.Option(help="Most parts of a variable.", show_default="as many as servers", **_SERVERS),
]

StepTimeout = Annotated[
    float | None,
    typer.Option(
        help="Seconds after which a step is taken from a worker that has not ended it.",
        show_default=f"{STEP_TIMEOUT:.0f}",
        **_SERVERS,
    ),
]

Reduction = Annotated[
    str | None,
    typer.Option(
        help="What the gradients become: "
        + "; ".join(f"{name}: {what}" for name, what in REDUCTIONS.items())
        + ".",
        show_default="mean",
        **_HOROVOD,
    ),
]

Groups = Annotated[
    int | None,
    typer.Option(
        help="Groups of gradients; each is exchanged as soon as it is complete.",
        show_default="1",
        **_HOROVOD,
    ),
]

FusionMb = Annotated[
    float | None,
    typer.Option(
        "--fusion-mb",
        help="MiB of tensors that are sent as one (HOROVOD_FUSION_THRESHOLD).",
        show_default="128",
        **_HOROVOD,
    ),
]

CycleMs = Annotated[
    float | None,
    typer.Option(
        "--cycle-ms",
        help="Milliseconds between two looks for tensors that are ready (HOROVOD_CYCLE_TIME).",
        show_default=str(DEFAULT_CYCLE_MS),
        **_HOROVOD,
    ),
]

Hierarchical = Annotated[
    bool | None,
    typer.Option(
        "--hierarchical",
        help="All-reduce within each host first, by NCCL, then between the hosts.",
        show_default=False,
        **_HOROVOD,
    ),
]

Autotune = Annotated[
    bool | None,
    typer.Option(
        "--autotune",
        help="Let Horovod try out its settings while it trains.",
        show_default=False,
        **_HOROVOD,
    ),
]

Timeline = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="Write Horovod's timeline, or a pipeline's, for chrome://tracing; a pipeline's as a "
        "picture if FILE ends in .png.",
    ),
]

StallTimeout = Annotated[
    float | None,
    typer.Option(
        help="Seconds that a tensor may wait for a rank before the job ends.",
        show_default="600",
        **_HOROVOD,
    ),
]

#: The options of `StrategyConfig`; None where one is not given.
OF_STRATEGY: dict[str, Any] = {
    "processes": Processes,
    "devices": Devices,
    "mode": Mode,
    "communication": Communication,
    "ps": Ps,
    "staleness": Staleness,
    "on_stale": OnStale,
    "backup_workers": BackupWorkers,
    "wire_dtype": WireDtype,
    "min_shard_bytes": MinShardBytes,
    "max_shards": MaxShards,
    "step_timeout": StepTimeout,
    **OF_UPDATES,
    **OF_PIPELINES,
    "reduction": Reduction,
    "groups": Groups,
    "fusion_mb": FusionMb,
    "cycle_ms": CycleMs,
    "hierarchical": Hierarchical,
    "autotune": Autotune,
    "timeline": Timeline,
    "stall_timeout": StallTimeout,
    "seed": Seed,
    "start_timeout": StartTimeout,
}
