"""The options of pipelines on the command line, each with its help text."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from tfdist.pipeline_options import SCHEDULES, STAGE_TIMEOUT

__all__ = ["OF_PIPELINES"]

#: Where the help shows them.
_PANEL: dict[str, Any] = {"rich_help_panel": "Options of pipeline"}

Stages = Annotated[
    int | None,
    typer.Option(
        help="Devices of a replica of the pipeline; more devices make more replicas.",
        show_default="all devices",
        **_PANEL,
    ),
]

Microbatches = Annotated[
    int | None,
    typer.Option(
        help="Parts of a batch that follow each other through the stages.",
        show_default="4 for each device",
        **_PANEL,
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
        **_PANEL,
    ),
]

Virtual = Annotated[
    int | None,
    typer.Option(
        help="With --schedule interleaved: parts of the model on each device.",
        show_default="1",
        **_PANEL,
    ),
]

Cuts = Annotated[
    str | None,
    typer.Option(
        help="The layers that all stages but the first begin with, separated by commas.",
        show_default="by measurement",
        **_PANEL,
    ),
]

Recompute = Annotated[
    bool | None,
    typer.Option(
        "--recompute",
        help="Run forward passes again in backward passes instead of keeping activations.",
        show_default=False,
        **_PANEL,
    ),
]

VerticalSync = Annotated[
    bool | None,
    typer.Option(
        "--vertical-sync",
        help="With --schedule pipedream: all stages use the first one's version of the weights.",
        show_default=False,
        **_PANEL,
    ),
]

StageTimeout = Annotated[
    float | None,
    typer.Option(
        help="Seconds that a stage may wait for another.",
        show_default=f"{STAGE_TIMEOUT:.0f}",
        **_PANEL,
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
