"""The finding of a check."""

from __future__ import annotations

import dataclasses
import json
from typing import Literal

__all__ = ["Finding", "Severity", "error", "quoted", "warning"]

Severity = Literal["error", "warning", "ok"]


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        severity: "error" for a mistake that fails, hangs or trains the wrong thing; "warning" for
            one that may; "ok" for a value that is right.
        where: the place, such as `TF_CONFIG.cluster.worker[1]`.
        problem: the mistake, with the value; for "ok", the value.
        remedy: the action to take; empty if none is needed.
    """

    severity: Severity
    where: str
    problem: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.where}: {self.problem} {self.remedy}".rstrip()


def error(where: str, problem: str, remedy: str) -> Finding:
    """A finding of something that must be changed."""
    return Finding("error", where, problem, remedy)


def warning(where: str, problem: str, remedy: str) -> Finding:
    """A finding of something that should be looked at."""
    return Finding("warning", where, problem, remedy)


def quoted(value: object, longest: int = 60) -> str:
    """A value as JSON writes it, cut in the middle if it is long."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    if len(text) <= longest:
        return text
    half = (longest - 1) // 2
    return f"{text[:half]}…{text[-half:]}"
