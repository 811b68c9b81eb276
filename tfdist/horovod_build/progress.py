"""Whom a build tells how far it is."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Protocol

__all__ = ["Progress", "percentages"]

#: What make (`[ 45%] Building`) and ninja (`[12/80] Building`) print before a step.
_STEP = re.compile(r"\[\s*(?:(?P<percent>\d+)%|(?P<done>\d+)/(?P<all>\d+))\]")


class Progress(Protocol):
    """Shows what is being done."""

    def phase(self, text: str) -> None:
        """A new phase begins."""

    def fraction(self, done: float) -> None:
        """How much of the phase is done, from 0 to 1."""

    def note(self, text: str) -> None:
        """Something worth knowing that is no error."""


def percentages(progress: Progress) -> Callable[[str], None]:
    """A reader of a build tool's lines that tells how much is done."""

    def read(line: str) -> None:
        step = _STEP.match(line)
        if step and step["percent"]:
            progress.fraction(int(step["percent"]) / 100)
        elif step and int(step["all"]):
            progress.fraction(int(step["done"]) / int(step["all"]))

    return read
