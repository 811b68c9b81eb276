"""What the installed package says of itself."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys

import tfdist


def test_the_version_is_written_in_one_place() -> None:
    assert importlib.metadata.version("tfdist") == tfdist.__version__


def test_the_command_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "tfdist", "--version"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.startswith(f"tfdist {tfdist.__version__}\ntensorflow ")
