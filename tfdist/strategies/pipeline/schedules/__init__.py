"""Schedules of a pipeline: what each device does in which order, as data."""

from tfdist.strategies.pipeline.schedules.programs import (
    SCHEDULES,
    Box,
    Kind,
    Program,
    Schedule,
    Step,
    check,
    is_synchronous,
    make,
    version,
)
from tfdist.strategies.pipeline.schedules.simulator import (
    bubble,
    dependencies,
    ideal_bubble,
    live_activations,
    simulate,
)

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
