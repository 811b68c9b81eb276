"""What the installed package says of itself."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import pytest

import tfdist
from tfdist import environment
from tfdist.cluster.validation import machine
from tfdist.errors import ConfigError

ROOT = Path(__file__).parents[2]


def test_the_version_is_written_in_one_place() -> None:
    assert importlib.metadata.version("tfdist") == tfdist.__version__


def test_without_tensorflow_the_message_says_how_to_install_it(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    hidden = "import sys\nsys.modules['tensorflow'] = None\n"
    call = "import tfdist\ntfdist.strategy('single')"
    command = "from tfdist.cli.main import app\nsys.argv = ['tfdist', 'run', 'train.py']\napp()"
    for code in (call, command):
        words = [sys.executable, "-c", hidden + code]
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert 'TensorFlow is not installed. Run: pip install "tfdist[cpu]"' in done.stderr


WITHOUT_TENSORFLOW = """
import sys
from importlib import metadata
version = metadata.version
def found(name):
    if name == "tensorflow":
        raise metadata.PackageNotFoundError(name)
    return version(name)
metadata.version = found
from tfdist.cli.main import app
sys.argv = ["tfdist", "--version"]
app()
"""


def test_the_version_is_shown_without_tensorflow() -> None:
    words = [sys.executable, "-c", WITHOUT_TENSORFLOW]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert "tensorflow is not installed" in done.stdout, done.stderr


def test_later_versions_are_warned_of(recwarn: pytest.WarningsRecorder) -> None:
    machine.check_versions({"tensorflow": "2.99.1", "keras": "3.15.0", "numpy": "2.1.0"}.get)
    (warning,) = recwarn
    named = r"TensorFlow: Version 2\.99\.1 is not >=2\.\d+,<2\.\d+,"
    assert re.search(named, str(warning.message))
    assert warning.filename == __file__


def test_earlier_versions_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"Keras: Version 3\.12\.0 is not >=3[.\d]+,<3[.\d]+,"):
        machine.check_versions({"tensorflow": "2.21.0", "keras": "3.12.0", "numpy": "2.1.0"}.get)


def test_the_installed_package_has_the_examples(tmp_path: Path) -> None:
    """Built as for a wheel, whose files are the same."""
    setup = "from setuptools import setup; setup()"
    words = [sys.executable, "-c", setup, "-q", "build_py", "--build-lib", str(tmp_path / "lib")]
    subprocess.run(words, cwd=ROOT, check=True, timeout=120)
    script = "import sys, tfdist.cli.main as cli; print(cli.__file__); cli.app(sys.argv[1:])"
    command = [sys.executable, "-c", script, "init", "."]
    for name in ("examples", "strategies", "cluster"):
        command += ["--example", name]
    environ = environment.merged({"PYTHONPATH": str(tmp_path / "lib")})
    done = subprocess.run(
        command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.startswith(str(tmp_path))
    for name in ("examples", "strategies", "cluster"):
        for path in (ROOT / name).glob("*.*"):
            assert (tmp_path / name / path.name).read_bytes() == path.read_bytes()


def test_the_command_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "tfdist", "--version"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.startswith(f"tfdist {tfdist.__version__}\ntensorflow ")
