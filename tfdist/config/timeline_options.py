"""The option of strategies that write a timeline of their steps."""

from __future__ import annotations

import dataclasses
import os
from typing import Annotated

from tfdist.config.option import About, Options
from tfdist.errors import ConfigError

__all__ = ["TimelineOptions", "check_ending", "is_picture"]


_PICTURES = (".png", ".svg", ".pdf")


def is_picture(path: str) -> bool:
    """Whether the name of a timeline's file asks for a picture; else it is a trace."""
    return _ending(path) in _PICTURES


def check_ending(path: str) -> None:
    """Refuses a name that ends as no trace and no picture does; a trace's may have no ending.

    Raises:
        ConfigError: with the endings that there are.
    """
    if _ending(path) not in ("", ".json", *_PICTURES):
        raise ConfigError(
            f"timeline={path!r} ends in {_ending(path)!r}, which no timeline is written as. Give a "
            f"name that ends in .json (for chrome://tracing), or for a pipeline's picture in one "
            f"of: {', '.join(_PICTURES)}."
        )


def _ending(path: str) -> str:
    return os.path.splitext(path)[1].lower()


@dataclasses.dataclass(frozen=True, kw_only=True)
class TimelineOptions(Options):
    """The file of a timeline."""

    timeline: Annotated[
        str | None,
        About(
            "Write Horovod's timeline, or a pipeline's, for chrome://tracing; a pipeline's as a "
            "picture if FILE ends in .png, .svg or .pdf.",
            example='"step.json"',
            metavar="FILE",
        ),
    ] = None

    def check(self) -> None:
        """Refuses endings of other formats."""
        if self.timeline is not None:
            check_ending(self.timeline)
