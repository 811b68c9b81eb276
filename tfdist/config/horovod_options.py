"""The options of Horovod, and the variables by which Horovod gets them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

import msgspec

from tfdist.config.option import About, Positive, listed
from tfdist.config.timeline_options import TimelineOptions
from tfdist.utils.validation import LONGEST_SECONDS

__all__ = ["REDUCTIONS", "HorovodOptions", "Reduction", "defaults", "variables"]

#: The ways in which the replicas' gradients become one.
Reduction = Literal["mean", "adasum"]
REDUCTIONS: dict[Reduction, str] = {
    "mean": "their mean over the examples",
    "adasum": "Adasum (arXiv:2006.02924), which adds orthogonal gradients and averages parallel "
    "ones; 2, 4, 8, ... processes",
}

#: Milliseconds between two looks of Horovod's thread for tensors that are ready. Horovod's own 1 ms
#: is most of the cost of a small all-reduce; see docs/horovod.md.
DEFAULT_CYCLE_MS = 0.3

#: Seconds after which Horovod names the ranks that a tensor waits for.
_STALL_WARNING = 60

_PANEL = "Options of horovod"


@dataclasses.dataclass(frozen=True, kw_only=True)
class HorovodOptions(TimelineOptions):
    """The reduction of gradients by Horovod, and its deadlines."""

    lacking: ClassVar[str] = ": it is an option of Horovod."

    reduction: Annotated[
        Reduction, About(f"What the gradients become: {listed(REDUCTIONS)}", _PANEL)
    ] = "mean"
    groups: Annotated[
        Positive | None,
        About(
            "Groups of gradients; each is exchanged as soon as it is complete.", _PANEL, shown="1"
        ),
    ] = None
    fusion_mb: Annotated[
        Annotated[float, msgspec.Meta(ge=0, le=2**20)] | None,
        About(
            "MiB of tensors that are sent as one (HOROVOD_FUSION_THRESHOLD).",
            _PANEL,
            shown="128",
            why="It is in MiB.",
        ),
    ] = None
    cycle_ms: Annotated[
        Annotated[float, msgspec.Meta(ge=0)] | None,
        About(
            "Milliseconds between two looks for tensors that are ready (HOROVOD_CYCLE_TIME).",
            _PANEL,
            shown=str(DEFAULT_CYCLE_MS),
        ),
    ] = None
    hierarchical: Annotated[
        bool, About("All-reduce within each host first, by NCCL, then between the hosts.", _PANEL)
    ] = False
    autotune: Annotated[
        bool, About("Let Horovod try out its settings while it trains.", _PANEL)
    ] = False
    stall_timeout: Annotated[
        Annotated[float, msgspec.Meta(ge=0, le=LONGEST_SECONDS)],
        About("Seconds that a tensor may wait for a rank before the job ends.", _PANEL),
    ] = 600.0


def variables(options: HorovodOptions) -> Mapping[str, str]:
    """The environment variables that Horovod gets for the options that are set."""
    environ: dict[str, str] = {}
    if options.fusion_mb is not None:
        environ["HOROVOD_FUSION_THRESHOLD"] = str(int(options.fusion_mb * 2**20))
    if options.cycle_ms is not None:
        environ["HOROVOD_CYCLE_TIME"] = str(options.cycle_ms)
    if options.hierarchical:
        environ["HOROVOD_HIERARCHICAL_ALLREDUCE"] = "1"
    if options.autotune:
        environ["HOROVOD_AUTOTUNE"] = "1"
    if options.timeline is not None:
        environ["HOROVOD_TIMELINE"] = options.timeline
    if options.is_set("stall_timeout"):
        environ.update(_stall(options.stall_timeout))
    return environ


def defaults() -> Mapping[str, str]:
    """The variables that tfdist sets if neither an option nor the user's environment does."""
    return {"HOROVOD_CYCLE_TIME": str(DEFAULT_CYCLE_MS), **_stall(HorovodOptions.stall_timeout)}


def _stall(seconds: float) -> dict[str, str]:
    """Horovod shuts down only at times after its warning, and 0 means never."""
    whole = max(2, round(seconds))
    return {
        "HOROVOD_STALL_CHECK_TIME_SECONDS": str(min(_STALL_WARNING, whole // 2)),
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": str(whole),
    }
