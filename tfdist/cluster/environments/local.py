"""A process that no launcher has started: alone, on this machine."""

from __future__ import annotations

from tfdist.cluster.environments.places import Place, Surroundings
from tfdist.cluster.spec import Task

__all__ = ["place"]


def place(given: Surroundings) -> Place:
    """The only worker. What starts several on this machine decides on their addresses itself."""
    del given
    return Place(
        environment="local",
        reason="nothing else is found",
        counts={"worker": 1},
        task=Task("worker", 0),
    )
