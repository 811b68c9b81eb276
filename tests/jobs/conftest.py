"""The directories of jobs, and what those of several files are compared with."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.jobs.test_jobs import SCRIPT, TFDIST, results, run


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with the module's `FILES`, in an environment without TF_CONFIG."""
    monkeypatch.delenv("TF_CONFIG", raising=False)
    for name, text in request.module.FILES.items():
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory) -> float:
    """The loss of `SCRIPT` with seed 3 on one process, which trains once for all tests."""
    folder = tmp_path_factory.mktemp("alone")
    (folder / "train.py").write_text(SCRIPT)
    command = ("run", "-s", "single", "--seed", 3, "train.py")
    done = run(folder, *TFDIST, *command, TF_CONFIG=None)
    assert done.returncode == 0, done.stderr
    return float(results(done.stdout)[0][0])
