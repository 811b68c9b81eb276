from __future__ import annotations

from typing import Any

import pytest

from tfdist.cluster.environments import detection
from tfdist.cluster.environments.base import Place, Surroundings
from tfdist.errors import ConfigError


def found(environ: dict[str, str], environment: str | None = None, **given: Any) -> Place:
    return detection.detect(Surroundings(environ=environ, **given), environment)


def refused(environ: dict[str, str], environment: str | None = None, **given: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        found(environ, environment, **given)
    return str(caught.value)


def listed(place: Place) -> list[str]:
    """Every task with its address, such as `worker 0 a:1`."""
    assert place.cluster is not None
    return [f"{task} {address}" for task, address in place.cluster.tasks()]
