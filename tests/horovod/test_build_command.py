"""`tfdist build-horovod` as a whole: what it does in which case, and what it says to mistakes."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.horovod.test_build import HERE, program, wheel
from tfdist import environment
from tfdist.errors import TfdistError
from tfdist.horovod.installer import Done, Order, ensure, install, requirements
from tfdist.horovod.installer.commands import CommandError
from tfdist.horovod.installer.requirements import Choice
from tfdist.horovod.installer.wheel_cache import entry

SECONDS = 120
NAME = "horovod-0.28.1-cp311-cp311-linux_x86_64.whl"
#: Where pip finds nothing.
OFFLINE = {
    "PIP_CONFIG_FILE": "/dev/null",
    "PIP_NO_INDEX": "1",
    "PIP_FIND_LINKS": "/nonexistent",
    "PIP_EXTRA_INDEX_URL": None,
}


class Shown:
    """Keeps what a build tells."""

    def __init__(self):
        self.phases, self.notes = [], []

    def phase(self, text):
        self.phases.append(text)

    def fraction(self, done):
        pass

    def note(self, text):
        self.notes.append(text)


class Bench:
    """A build whose steps are noted instead of done."""

    def __init__(self, folder, monkeypatch):
        self.steps, self.shown, self.fails, self.there = [], Shown(), set(), None
        monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        monkeypatch.setattr("tempfile.tempdir", str(folder))
        self.folder, self.entry = folder, entry(Choice(), HERE)
        place = "tfdist.horovod.installer"
        monkeypatch.setattr(requirements, "tensorflow_version", lambda: HERE)
        monkeypatch.setattr(requirements, "check", lambda choice, places: None)
        monkeypatch.setattr(f"{place}.compile.build", self._build)
        monkeypatch.setattr(f"{place}.install.verify", lambda commands, folder: self._step("test"))
        for step in ("get_dependencies", "install"):
            monkeypatch.setattr(install, step, getattr(self, f"_{step}"))
        monkeypatch.setattr(install, "fits", lambda choice, here: self.there is not None)
        monkeypatch.setattr(install, "operations", lambda: ("Gloo",))

    def run(self, **options):
        return ensure(Order(Choice(), **options), self.shown)

    def left(self):
        return sorted(path.name for path in self.folder.glob("tfdist-horovod-*"))

    def _step(self, name):
        self.steps.append(name)
        if name in self.fails:
            self.fails.discard(name)
            raise CommandError(name, "it broke", ["x"], Path("log"), "Do it.")

    def _build(self, shop, choice):
        self._step("build")
        return wheel(shop.folder / "out" / NAME)

    def _get_dependencies(self, commands, folder):
        self._step("dependencies" if folder is None else f"dependencies in {folder.name}")

    def _install(self, commands, wheel):
        self._step("install")
        self.there = wheel


@pytest.fixture
def bench(tmp_path, monkeypatch):
    return Bench(tmp_path, monkeypatch)


BUILT = ["build", "dependencies", "test", "install"]
REUSED = ["dependencies", "test", "install"]


def test_it_is_built_tested_kept_and_installed(bench):
    outcome = bench.run()
    assert bench.steps == BUILT
    assert outcome.done is Done.BUILT
    assert outcome.wheel == bench.entry.wheel() == bench.there
    assert outcome.log == bench.entry.log("build")
    assert bench.left() == []


def test_the_next_environment_gets_the_wheel_that_was_kept(bench):
    bench.entry.folder.mkdir(parents=True)
    wheel(bench.entry.folder / NAME)
    assert bench.run().done is Done.REUSED
    assert bench.steps == REUSED


def test_nothing_is_done_where_it_is_there(bench):
    bench.there = Path("x")
    assert bench.run().done is Done.NOTHING
    assert bench.steps == []
    assert bench.run(force=True).done is Done.BUILT
    assert bench.steps == BUILT


@pytest.mark.parametrize("tensorflow", [HERE, "2.20.0"])
def test_a_kept_wheel_that_is_no_good_is_replaced(bench, tensorflow):
    bench.entry.folder.mkdir(parents=True)
    kept = wheel(bench.entry.folder / NAME, tensorflow)
    if tensorflow == HERE:
        kept.write_bytes(kept.read_bytes()[:200])
    assert bench.run().done is Done.BUILT
    assert bench.steps == BUILT
    (note,) = bench.shown.notes
    assert "damaged" in note or "built for TensorFlow 2.20.0" in note
    assert zipfile.ZipFile(kept).testzip() is None


def test_a_kept_wheel_that_fails_its_test_is_replaced(bench):
    bench.entry.folder.mkdir(parents=True)
    wheel(bench.entry.folder / NAME)
    bench.fails = {"test"}
    assert bench.run().done is Done.BUILT
    assert bench.steps == ["dependencies", "test", *BUILT]
    assert "failed its test" in bench.shown.notes[0]


@pytest.mark.parametrize("step", ["dependencies", "install"])
def test_a_kept_wheel_is_not_blamed_for_what_pip_cannot_do(bench, step):
    bench.entry.folder.mkdir(parents=True)
    kept = wheel(bench.entry.folder / NAME)
    bench.fails = {step}
    with pytest.raises(CommandError, match="it broke"):
        bench.run()
    assert "build" not in bench.steps
    assert bench.entry.wheel() == kept


@pytest.mark.parametrize("step", ["build", "dependencies", "test"])
def test_a_failure_installs_and_keeps_nothing(bench, step):
    bench.fails = {step}
    with pytest.raises(CommandError, match="it broke"):
        bench.run()
    assert bench.there is None
    assert bench.entry.wheel() is None
    assert bench.left() == []


def test_a_wheel_can_be_written_without_being_installed(bench):
    outcome = bench.run(wheel_dir=bench.folder / "new" / "wheels")
    assert outcome.wheel == bench.folder / "new" / "wheels" / NAME
    assert outcome.wheel.read_bytes() == bench.entry.wheel().read_bytes()
    assert bench.steps == ["build", "dependencies in trial", "test"]
    assert bench.there is None


def test_a_place_that_cannot_be_written_is_named(bench, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    with pytest.raises(TfdistError, match=r"/dev/null/.*: Not a directory. .*XDG_CACHE_HOME"):
        bench.run()


# --- The command ----------------------------------------------------------------------------------


def tfdist(*words: str, before: str = "", **variables: str | None):
    start = "from tfdist.cli.main import app; app()"
    return subprocess.run(
        [sys.executable, "-c", before + start, "build-horovod", *words],
        env=environment.merged({"CXX": None, "COLUMNS": "100", **variables}),
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )


def failure(status: int, *words: str, **variables: str | None) -> str:
    """The message of a call that fails: no trace, nothing on standard output."""
    done = tfdist(*words, **variables)
    assert done.returncode == status, done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    return done.stderr


def test_it_is_quick_where_horovod_is_there():
    done = tfdist(PATH="/nonexistent", **OFFLINE)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert f"for TensorFlow {requirements.tensorflow_version()}, with Gloo" in done.stdout
    assert "is there already. --force builds it anew." in done.stdout
    done = tfdist("--quiet", PATH="/nonexistent")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_what_is_missing_is_told_before_anything_is_done(tmp_path):
    variables = {"PATH": "/nonexistent", "XDG_CACHE_HOME": str(tmp_path), "TMPDIR": str(tmp_path)}
    message = failure(2, "--force", "--mpi", "--quiet", **variables)
    assert message.startswith("tfdist: Horovod cannot be built here: 2 things are missing.\n  - A ")
    assert "C++17" in message
    assert "mpicxx" in message
    assert list(tmp_path.glob("tfdist-horovod-*")) == []


def test_without_cmake_and_without_pips_index(tmp_path):
    """The compiler is there; CMake would have to come from an index that is not there."""
    for name in ("c++", "g++", "as", "ld", "make"):
        if path := shutil.which(name):
            (tmp_path / name).symlink_to(path)
    variables = {"PATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    message = failure(1, "--force", TMPDIR=str(tmp_path), **variables, **OFFLINE)
    assert "[0 s] looking for what the build needs …\n" in message
    assert "Getting the build tools by pip failed: it ended with status 1." in message
    assert "No matching distribution found for" in message
    assert "CMake 3.13 or later is not in PATH, so pip must get it." in message
    assert "build on a machine like this one with --wheel-dir" in message
    (log,) = (tmp_path / "cache").rglob("build.log")
    assert f"The whole log: {log}" in message
    assert "No matching distribution" in log.read_text()
    assert list(tmp_path.glob("tfdist-horovod-*")) == []


def test_a_compiler_that_does_not_work(tmp_path):
    broken = program(tmp_path / "broken", "echo 'broken: error: no standard library'; exit 1")
    message = failure(2, "--force", XDG_CACHE_HOME=str(tmp_path), CXX=broken)
    assert f"{broken} cannot compile it (broken: error: no standard library)" in message


def test_without_tensorflow():
    before = (
        "import importlib.metadata as m; real = m.version\n"
        "def version(name):\n"
        "    if name == 'tensorflow': raise m.PackageNotFoundError(name)\n"
        "    return real(name)\n"
        "m.version = version\n"
    )
    done = tfdist(before=before)
    assert done.returncode == 2
    assert "TensorFlow is not installed in this Python environment" in done.stderr
    assert "pip install tensorflow" in done.stderr


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--gpu", "cuda"], "--gpu 'cuda' is not one of auto, nccl, none."),
        (["--wheel-dir", __file__], "is not a directory. Name a directory."),
        (["--fource"], "--fource"),
    ],
)
def test_a_wrong_call_is_one_error(words, says):
    assert says in failure(2, *words)


def test_help_names_every_option():
    done = tfdist("--help")
    assert done.returncode == 0
    for option in ("--force", "--mpi", "--gpu", "--wheel-dir", "--quiet"):
        assert option in done.stdout


# --- Without Horovod ------------------------------------------------------------------------------

#: Makes this Python look as if Horovod were not installed.
_HIDDEN = """
import sys

class Without:
    def __init__(self, finder):
        self._finder = finder
    def __getattr__(self, name):
        return getattr(self._finder, name)
    def find_spec(self, name, *rest):
        return None if name.split(".")[0] == "horovod" else self._finder.find_spec(name, *rest)

sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
"""

_WORKS = """
import tfdist
assert "tensorflow" not in sys.modules
import keras, numpy, tfdist.errors
from tfdist.strategies.horovod import library
try:
    library.load()
except tfdist.errors.ConfigError as error:
    print(error)
with tfdist.strategy("single").scope():
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile(loss="mse")
model.fit(numpy.ones((4, 2)), numpy.ones((4, 1)), verbose=0)
from tfdist.diagnostics import diagnose
(row,) = [each for each in diagnose().findings if each.where == "Horovod"]
assert (row.severity, row.remedy) == ("ok", "Run: tfdist build-horovod"), row
"""


def test_tfdist_works_where_horovod_is_absent():
    done = subprocess.run(
        [sys.executable, "-c", _HIDDEN + _WORKS],
        env=environment.merged({"TF_CONFIG": None, "CUDA_VISIBLE_DEVICES": "-1"}),
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Horovod is not installed" in done.stdout
    assert "tfdist build-horovod" in done.stdout


def test_a_job_that_needs_horovod_names_the_command_that_builds_it(tmp_path):
    (tmp_path / "train.py").touch()
    run = "from tfdist.cli.main import app; app()"
    done = subprocess.run(
        [sys.executable, "-c", _HIDDEN + run, "run", "-s", "horovod", "-n", "2", "train.py"],
        cwd=tmp_path,
        env=environment.merged({"TF_CONFIG": None}),
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 2
    assert "Horovod is not installed" in done.stderr
    assert "Run: tfdist build-horovod" in done.stderr


def test_the_builder_imports_neither_tensorflow_nor_horovod():
    names = "import sys, tfdist.cli.main, tfdist.horovod.installer.smoke_test"
    check = "assert not {'tensorflow', 'keras', 'horovod'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", f"{names}; {check}"], timeout=SECONDS, check=True)
