"""The options of `tfdist run`, each with its help text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tfdist.config import COMMUNICATIONS, STRATEGIES

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
    typer.Option("-n", "--processes", help="Processes; with mirrored, devices of its process."),
]

Devices = Annotated[
    int | None,
    typer.Option(help="GPUs of each process, or CPU devices where there are no GPUs."),
]

Mode = Annotated[
    str | None, typer.Option(help="When a gradient becomes an update.", show_default="sync")
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
