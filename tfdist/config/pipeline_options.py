"""The options of pipelines, and their conflicts."""

from __future__ import annotations

import dataclasses
from typing import Annotated, ClassVar, Literal

from tfdist.config.option import About, Positive, Seconds, listed
from tfdist.config.timeline_options import TimelineOptions
from tfdist.errors import ConfigError

__all__ = ["SCHEDULES", "PipelineOptions", "Schedule", "replicas_of"]

#: The schedules, in a few words each: GPipe (arXiv:1811.06965), PipeDream-Flush and 2BW
#: (arXiv:2006.09503), Megatron-LM's interleaved 1F1B (arXiv:2104.04473), PipeDream
#: (arXiv:1806.03377).
Schedule = Literal["gpipe", "1f1b", "interleaved", "pipedream", "2bw"]
SCHEDULES: dict[Schedule, str] = {
    "gpipe": "all forwards, then all backwards",
    "1f1b": "one forward, one backward in turn; holds fewer activations",
    "interleaved": "1f1b with several parts of the model a device (--virtual)",
    "pipedream": "no flush, an update for each backward, on late weights",
    "2bw": "no flush between batches, on weights one update late",
}

_PANEL = "Options of pipeline"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PipelineOptions(TimelineOptions):
    """The stages of a pipelined model, and the order in which they compute."""

    lacking: ClassVar[str] = ", which does not cut the model into stages."

    stages: Annotated[
        Positive | None,
        About(
            "Devices of a replica of the pipeline; more devices make more replicas.",
            _PANEL,
            shown="all devices",
        ),
    ] = None
    microbatches: Annotated[
        Positive | None,
        About(
            "Parts of a batch that follow each other through the stages.",
            _PANEL,
            shown="4 for each device",
        ),
    ] = None
    schedule: Annotated[Schedule, About(f"The order of the steps. {listed(SCHEDULES)}", _PANEL)] = (
        "1f1b"
    )
    virtual: Annotated[
        Positive,
        About(
            "With --schedule interleaved: parts of the model on each device.",
            _PANEL,
            why="It counts the parts of the model on each device.",
        ),
    ] = 1
    cuts: Annotated[
        str | None,
        About(
            "The layers that all stages but the first begin with, separated by commas.",
            _PANEL,
            shown="by measurement",
            example='"dense2,…"',
        ),
    ] = None
    recompute: Annotated[
        bool,
        About(
            "Run forward passes again in backward passes instead of keeping activations.", _PANEL
        ),
    ] = False
    vertical_sync: Annotated[
        bool,
        About(
            "With --schedule pipedream: all stages use the first one's version of the weights.",
            _PANEL,
        ),
    ] = False
    stage_timeout: Annotated[
        Seconds,
        About("Seconds that a stage may wait for another.", _PANEL, why="It is in seconds."),
    ] = 600.0

    def check(self) -> None:
        """Refuses options that conflict; see `Options.check`."""
        super().check()
        if self.vertical_sync and self.schedule != "pipedream":
            raise ConfigError(
                f"vertical_sync conflicts with schedule={self.schedule!r}: it is an option of "
                "'pipedream'. Choose that, or leave vertical_sync out."
            )
        if self.cuts is not None and not all(name.strip() for name in self.cuts.split(",")):
            raise ConfigError(
                f"cuts={self.cuts!r} has an empty name of a layer. Name the first layer of each "
                "stage but the first, as in cuts='dense2,dense4', or leave it out."
            )


def replicas_of(devices: int, stages: int) -> int:
    """The number of replicas of a pipeline.

    Raises:
        ConfigError: if the stages do not divide the devices.
    """
    replicas, rest = divmod(devices, stages)
    if rest or not replicas:
        raise ConfigError(
            f"stages={stages} does not divide the {devices} devices of the pipeline. Give a "
            "multiple of devices: each replica of the pipeline has one for each stage."
        )
    return replicas
