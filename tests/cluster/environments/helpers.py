from __future__ import annotations

from typing import Any

import pytest

from tfdist.cluster.environments import detection
from tfdist.cluster.environments.base import ProcessContext, TaskAssignment
from tfdist.errors import ConfigError


def found(environ: dict[str, str], environment: str | None = None, **facts: Any) -> TaskAssignment:
    return detection.detect(ProcessContext(environ=environ, **facts), environment)


def refused(environ: dict[str, str], environment: str | None = None, **facts: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        found(environ, environment, **facts)
    return str(caught.value)


def listed(assignment: TaskAssignment) -> list[str]:
    """Every task with its address, such as `worker 0 a:1`."""
    assert assignment.cluster is not None
    return [f"{task} {address}" for task, address in assignment.cluster.tasks()]
