"""The option of strategies that write a timeline of their steps."""

from __future__ import annotations

import dataclasses
from typing import Annotated

from tfdist.config.option import About, Options

__all__ = ["TimelineOptions", "is_picture"]


def is_picture(path: str) -> bool:
    """Whether the name of a timeline's file asks for a picture; else it is a trace."""
    return path.endswith(".png")


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
