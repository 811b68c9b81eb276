"""What the tests of Estimators share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def run(request: pytest.FixtureRequest, cluster: Any, tmp_path: Path) -> Callable[..., Any]:
    """Calls a case of the module's `CASES` in the shared process."""

    def call(name: str, **kwargs: Any) -> Any:
        case = f"{request.module.CASES}:{name}"
        return cluster("plain").call(case, path=str(tmp_path), **kwargs)[0]

    return call
