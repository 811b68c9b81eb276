"""The options of `tfdist run`, each with its help text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from tfdist.config import COMMUNICATIONS, MODES, STRATEGIES
from tfdist.server_options import ON_STALE, WIRE_DTYPES

#: Where the help shows the options of `parameter_server`.
_SERVERS: dict[str, Any] = {"rich_help_panel": "Options of parameter_server"}

Script = Annotated[str, typer.Argument(metavar="SCRIPT", help="The Keras 3 script.")]

Args = Annotated[
    list[str] | None,
    typer.Argument(metavar="ARGS", help="Arguments of the script, whatever they look like."),
]

Strategy = Annotated[
    str | None,
    typer.Option(
        "--strategy",
        "-s",
        metavar="NAME|FILE",
        help=f"auto, {', '.join(STRATEGIES)}, or a TOML file of options.",
        show_default="auto",
    ),
]

Processes = Annotated[
    int | None,
    typer.Option(
        "-n",
        "--processes",
        help="Processes; workers of parameter_server; devices of mirrored's one process.",
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

Grace = Annotated[
    float, typer.Option(min=0, help="Seconds between TERM and KILL for the others of a failure.")
]

LogDir = Annotated[
    Path | None,
    typer.Option(help="Directory of the log files.", show_default="tfdist-logs/TIME-PID"),
]

DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the plan, start nothing.")]

EnvOnly = Annotated[
    bool, typer.Option("--env-only", help="Only set TF_CONFIG: SCRIPT makes its own strategy.")
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
        help="With --mode stale: updates that may come between a gradient's read of the weights "
        "and its own.",
        **_SERVERS,
    ),
]

OnStale = Annotated[
    str | None,
    typer.Option(
        help="; ".join(f"{name}: {what}" for name, what in ON_STALE.items()) + ".",
        show_default="wait",
        **_SERVERS,
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

MaxRestarts = Annotated[
    int,
    typer.Option(
        min=0,
        help="How often a failed job, or a worker that died, is started again. The script resumes "
        "by its own checkpoints.",
    ),
]

EveryTask = Annotated[
    bool,
    typer.Option(
        "--every-task",
        help="Between-graph programs: each of -n workers and --ps servers runs SCRIPT itself, with "
        "TF_CONFIG set.",
    ),
]

TaskFlags = Annotated[
    bool,
    typer.Option(
        "--task-flags",
        help="With --every-task: append --job_name, --task_index, --ps_hosts and --worker_hosts.",
    ),
]
