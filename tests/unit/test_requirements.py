"""`pytest --require`: what a machine lacks is an error, not a reason to skip."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.harness import requirements


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    checks = {"slurm": lambda: "srun is not installed", "mpi": lambda: None}
    monkeypatch.setattr(requirements, "CHECKS", checks)
    assert requirements.lacking("mpi") == requirements.lacking("") == []
    assert requirements.lacking("mpi,slurm") == ["slurm: srun is not installed"]
    assert requirements.lacking("slum") == ["slum: is none of slurm, mpi"]


def test_a_run_that_lacks_something_fails() -> None:
    command = [sys.executable, "-m", "pytest", "--require=slum", "--collect-only", __file__]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "--require=slum: is none of netns, sshd, slurm, ray, mpi" in done.stderr
