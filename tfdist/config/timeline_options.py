"""The option of strategies that write a timeline of their steps."""

from __future__ import annotations

import dataclasses
from typing import Annotated

from tfdist.config.option import About, Options

__all__ = ["TimelineOptions"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TimelineOptions(Options):
    """The file of a timeline."""

    timeline: Annotated[
        str | None,
        About(
            "Write Horovod's timeline, or a pipeline's, for chrome://tracing; a pipeline's as a "
            "picture if FILE ends in .png.",
            example='"step.json"',
            metavar="FILE",
        ),
    ] = None
