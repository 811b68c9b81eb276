"""What jobs of several files are compared with."""

from __future__ import annotations

import pytest

from tests.jobs.test_jobs import SCRIPT, TFDIST, results, run


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory) -> float:
    """The loss of `SCRIPT` with seed 3 on one process, which trains once for all tests."""
    folder = tmp_path_factory.mktemp("alone")
    (folder / "train.py").write_text(SCRIPT)
    command = ("run", "-s", "single", "--seed", 3, "train.py")
    done = run(folder, *TFDIST, *command, TF_CONFIG=None)
    assert done.returncode == 0, done.stderr
    return float(results(done.stdout)[0][0])
