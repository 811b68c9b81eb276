"""Schedules of a pipeline: what each device does in which order, as data."""

from tfdist.pipelines.schedules.analysis import (
    bubble,
    dependencies,
    ideal_bubble,
    live_activations,
    simulate,
)
from tfdist.pipelines.schedules.programs import Program, make, version
from tfdist.pipelines.schedules.rules import SCHEDULES, check, is_synchronous
from tfdist.pipelines.schedules.steps import Box, Kind, Schedule, Step

__all__ = [
    "SCHEDULES",
    "Box",
    "Kind",
    "Program",
    "Schedule",
    "Step",
    "bubble",
    "check",
    "dependencies",
    "ideal_bubble",
    "is_synchronous",
    "live_activations",
    "make",
    "simulate",
    "version",
]
