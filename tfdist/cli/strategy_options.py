"""The options of a strategy on the command line, each with its help text."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from tfdist.cli.pipeline_options import OF_PIPELINES
from tfdist.cli.update_options import OF_UPDATES
from tfdist.config import COMMUNICATIONS, MODES
from tfdist.horovod_options import DEFAULT_CYCLE_MS, REDUCTIONS
from tfdist.server_options import ON_STALE, STEP_TIMEOUT, WIRE_DTYPES

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
