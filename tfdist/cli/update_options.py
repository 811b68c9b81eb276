"""The options of gradient updates on the command line, each with its help text."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from tfdist.update_options import CLIPPINGS, COMPRESSIONS, LR_RULES

__all__ = ["OF_UPDATES"]

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
