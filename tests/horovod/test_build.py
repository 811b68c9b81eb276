"""The parts of `tfdist build-horovod`. The build itself is what `make test` begins with."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path

import pytest

from tfdist.errors import ConfigError, TfdistError
from tfdist.horovod.installer import compile, install, requirements, wheel_cache
from tfdist.horovod.installer.commands import CommandError, Commands, StoppedError, percentages
from tfdist.horovod.installer.requirements import Choice, chosen
from tfdist.horovod.installer.smoke_test import verify

HERE = "2.21.0"
LIST = "horovod/tensorflow/CMakeLists.txt"
GLOO = "horovod/common/gloo/gloo_controller.cc"
CONTEXT = "horovod/common/gloo/gloo_context.cc"
NEEDED = "horovod/tensorflow/mpi_lib.cpython-311-x86_64-linux-gnu.so"

#: What the source says of a function that TensorFlow no longer exports, and a program around it.
STREAM = """\
namespace stream_executor {
class Stream;
namespace gpu {
GpuStreamHandle AsGpuStreamValue(Stream* stream);
}
}
"""
PRELUDE = "using GpuStreamHandle = int*;\n"
USE = """\
static int seven = 7;
struct Handle { void* stream; };
struct stream_executor::Stream { Handle platform_specific_handle() { return {&seven}; } };
int main() {
  stream_executor::Stream stream;
  return *stream_executor::gpu::AsGpuStreamValue(&stream);
}
"""


@pytest.fixture
def commands(tmp_path):
    with Commands(tmp_path / "log", tmp_path) as commands:
        yield commands


# --- The source -----------------------------------------------------------------------------------


def tree(folder: Path, times: int = 1) -> Path:
    path = folder / LIST
    path.parent.mkdir(parents=True)
    left_out = 'list(APPEND TF_SOURCES "${PROJECT_SOURCE_DIR}/horovod/tensorflow/xla_mpi_ops.cc")\n'
    path.write_text("# TF SOURCES\n" + left_out * times + "set_output_dir()\n")
    path.with_name("mpi_ops.cc").write_text(STREAM)
    (folder / GLOO).parent.mkdir(parents=True)
    (folder / GLOO).write_text("{\n  global_ranks_.reserve(size_);\n}\n")
    (folder / CONTEXT).write_text("{\n  global_ctx = global_context.ctx;\n}\n")
    return folder


def test_one_file_is_left_out(tmp_path):
    compile.patch(tree(tmp_path), Choice())
    assert (tmp_path / LIST).read_text() == "# TF SOURCES\nset_output_dir()\n"
    assert (tmp_path / LIST).with_name("mpi_ops.cc").read_text() == STREAM


def test_the_list_of_ranks_gets_its_length(tmp_path):
    compile.patch(tree(tmp_path), Choice())
    assert (tmp_path / GLOO).read_text() == "{\n  global_ranks_.resize(size_);\n}\n"


def test_process_sets_get_the_interface_of_the_job(tmp_path):
    compile.patch(tree(tmp_path), Choice())
    lines = [line.strip() for line in (tmp_path / CONTEXT).read_text().splitlines()]
    assert lines[1:4] == [
        "global_ctx = global_context.ctx;",
        "gloo_iface_ = global_context.gloo_iface_;",
        "device_attr.iface = gloo_iface_;",
    ]


def test_for_gpus_a_lost_function_is_replaced(tmp_path):
    compile.patch(tree(tmp_path), Choice(nccl=True))
    path = (tmp_path / LIST).with_name("mpi_ops.cc")
    path.write_text(PRELUDE + path.read_text() + USE)
    subprocess.run(["c++", "-std=c++17", str(path), "-o", str(tmp_path / "x")], check=True)
    assert subprocess.run([str(tmp_path / "x")], check=False).returncode == 7


@pytest.mark.parametrize("times", [0, 2])
def test_another_source_is_an_error_and_stays_as_it_is(tmp_path, times):
    before = (tree(tmp_path, times) / LIST).read_text()
    with pytest.raises(TfdistError, match=f"'xla_mpi_ops.cc' {times} times instead of once"):
        compile.patch(tmp_path, Choice())
    assert (tmp_path / LIST).read_text() == before


def test_a_source_without_the_list_is_an_error(tmp_path):
    with pytest.raises(TfdistError, match="not as it was released"):
        compile.patch(tmp_path, Choice())


def test_an_archive_is_unpacked(tmp_path):
    inside = tree(tmp_path / "made" / "horovod-0.28.1")
    archive = shutil.make_archive(str(tmp_path / "x"), "gztar", tmp_path / "made", inside.name)
    unpacked = compile.unpack(Path(archive), tmp_path / "out")
    assert (unpacked / LIST).read_text() == (inside / LIST).read_text()


# --- What is built --------------------------------------------------------------------------------


def test_variables_tell_what_is_built():
    plain, all_of_it = Choice().variables(), Choice(mpi=True, nccl=True).variables()
    assert plain["HOROVOD_WITHOUT_MPI"] == plain["HOROVOD_WITH_GLOO"] == "1"
    assert "HOROVOD_GPU_OPERATIONS" not in plain
    assert all_of_it["HOROVOD_WITH_MPI"] == "1"
    assert "HOROVOD_WITHOUT_MPI" not in all_of_it
    assert all_of_it["HOROVOD_GPU_OPERATIONS"] == "NCCL"
    assert Choice(mpi=True, nccl=True).operations == ("Gloo", "MPI", "NCCL")


@pytest.mark.parametrize(
    ("gpu", "nvcc", "header", "expected"),
    [
        ("auto", True, True, True),
        ("auto", True, False, False),
        ("auto", False, True, False),
        ("nccl", False, False, True),
        ("none", True, True, False),
    ],
)
def test_nccl_where_it_can_be_built(tmp_path, gpu, nvcc, header, expected):
    environ = {"HOROVOD_CUDA_HOME": str(tmp_path), "HOROVOD_NCCL_HOME": str(tmp_path), "PATH": ""}
    for name, there in (("bin/nvcc", nvcc), ("include/nccl.h", header)):
        (tmp_path / name).parent.mkdir()
        if there:
            (tmp_path / name).touch()
    assert chosen(False, gpu, environ).nccl is expected


def test_the_progress_of_make_and_ninja():
    class Told:
        done: list[float] = []  # noqa: RUF012

        def fraction(self, done):
            self.done.append(done)

    read = percentages(Told())
    for line in ("[ 25%] Building CXX", "[3/4] Building", "[0/0] x", "[a%]", "warning: [ 99%]"):
        read(line)
    assert Told.done == [0.25, 0.75]


# --- What a build needs ---------------------------------------------------------------------------


def test_all_that_is_missing_is_told_at_once(tmp_path, monkeypatch):
    for name in ("HOROVOD_CUDA_HOME", "HOROVOD_NCCL_HOME", "PATH"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(
        "tfdist.horovod.installer.requirements._includes", lambda environ: [tmp_path]
    )
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="6 things are missing") as caught:
        requirements.check(Choice(mpi=True, nccl=True), {"the build": (tmp_path / "x", 1 << 60)})
    message = str(caught.value)
    for part in ("none of c++, g++, clang++", "apt install g++", "mpicxx", "nvcc", "nccl.h"):
        assert part in message
    assert "python -m ensurepip" in message
    assert f"Room for the build: {tmp_path / 'x'} has" in message


def test_this_machine_can_build():
    tools = requirements.check(Choice(), {})
    assert shutil.which(tools.compiler)


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ('echo "check.cc:1:1: error: optional: No such file" >&2; exit 1', "optional: No such"),
        ("exit 1", "it fails"),
    ],
)
def test_a_compiler_without_cpp17_is_missing(tmp_path, monkeypatch, script, says):
    monkeypatch.setenv("CXX", f"{program(tmp_path / 'old', script)} -O2")
    with pytest.raises(ConfigError, match=f"old -O2 cannot compile it .*{says}"):
        requirements.check(Choice(), {})


def test_an_mpi_without_its_headers_is_missing(tmp_path, monkeypatch):
    script = "echo 'check.cc:2:10: fatal error: mpi.h: No such file' >&2; exit 1"
    program(tmp_path / "mpicxx", script)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    says = r"mpicxx does not work \(.*mpi.h: No such file\). Install Open MPI"
    with pytest.raises(ConfigError, match=says):
        requirements.check(Choice(mpi=True), {})


def test_a_compiler_that_is_named_must_be_there(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ConfigError, match="CXX='no-such-compiler' is not in PATH"):
        requirements.check(Choice(), {})


@pytest.mark.parametrize(
    ("version", "found"), [("3.13.4", True), ("3.12.0", False), ("4.4.1", True), ("broken", False)]
)
def test_an_old_cmake_counts_as_none(tmp_path, version, found):
    cmake = program(tmp_path / "cmake", f"echo cmake version {version}")
    expected = cmake if found else None
    assert requirements._find_cmake({"PATH": str(tmp_path)}) == expected


def program(path: Path, script: str) -> str:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


# --- Commands -------------------------------------------------------------------------------------


def test_a_failure_shows_the_error_the_end_and_the_log(commands):
    script = "echo start; echo 'a.cc:3: error: no such header'; seq 100; echo end; exit 3"
    with pytest.raises(CommandError) as caught:
        commands.run("The compilation", ["sh", "-c", script], hint="Try this.")
    message = str(caught.value)
    assert message.startswith("The compilation failed: it ended with status 3.")
    assert "  a.cc:3: error: no such header\n  1\n" in message
    assert "\n  …\n" in message
    assert "\n  100\n  end\n" in message
    assert "start" not in message
    assert "  50\n" not in message
    assert f"The whole log: {commands.log}\nTry this." in message
    assert "\n50\n" in commands.log.read_text()


@pytest.mark.parametrize(
    ("printed", "advice"),
    [
        ("x.s: No space left on device", "Make room"),
        ("g++: fatal error: Killed signal terminated program", "CMAKE_BUILD_PARALLEL_LEVEL=1"),
    ],
)
def test_known_causes_have_their_own_advice(commands, printed, advice):
    with pytest.raises(CommandError, match=advice):
        commands.run("It", ["sh", "-c", f"echo {shlex.quote(printed)}; exit 1"], hint="Other.")


def test_what_only_says_that_a_command_failed_is_left_out(commands):
    trace = "import subprocess; print('cause', flush=True); subprocess.check_call(['false'])"
    with pytest.raises(CommandError) as caught:
        commands.run("It", [sys.executable, "-c", trace])
    assert "  cause\nThe whole log" in str(caught.value)


def test_a_command_that_cannot_be_started_or_is_killed_is_a_failure(commands):
    with pytest.raises(CommandError, match="Cannot start 'no-such-program'"):
        commands.run("It", ["no-such-program"])
    with pytest.raises(CommandError, match="ended by signal SIGTERM"):
        commands.run("It", ["sh", "-c", "kill -TERM $$"])


def test_a_deadline_ends_a_command_and_its_children(commands, tmp_path):
    script = "sleep 1000 & echo $! > child; sleep 1000"
    with pytest.raises(CommandError, match=r"it took more than 0\.5 s"):
        commands.run("It", ["sh", "-c", script], seconds=0.5)
    assert_gone(int((tmp_path / "child").read_text()))


def test_what_a_command_leaves_running_is_ended(commands, tmp_path):
    commands.run("It", ["sh", "-c", "sleep 1000 & echo $! > child"])
    assert_gone(int((tmp_path / "child").read_text()))


def test_a_short_command_is_not_cut_in_half(commands, tmp_path):
    def stop(line):
        os.kill(os.getpid(), signal.SIGINT)

    commands.run("It", ["sh", "-c", "echo x; sleep 0.5; touch done"], each=stop, shielded=True)
    assert (tmp_path / "done").exists()
    with pytest.raises(StoppedError, match="Stopped by Ctrl-C") as caught:
        commands.run("The next", ["touch", "never"])
    assert caught.value.exit_status == 130
    assert not (tmp_path / "never").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_end_of_the_command_leaves_anything_running(tmp_path, number):
    program = (
        "import sys; from pathlib import Path\n"
        "from tfdist.horovod.installer.commands import Commands\n"
        "with Commands(Path('log'), Path('.').absolute()) as commands:\n"
        "    commands.run('It', ['sh', '-c', 'sleep 1000 & echo $! > child; sleep 1000'])\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], cwd=tmp_path, stderr=subprocess.DEVNULL
    )
    child = tmp_path / "child"
    while not (child.exists() and child.read_text().endswith("\n")):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(number)
    assert process.wait(10) != 0
    assert_gone(int(child.read_text()))


def assert_gone(process: int) -> None:
    for _ in range(100):
        try:
            state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return
        if state == "Z":
            return
        time.sleep(0.05)
    pytest.fail(f"process {process} lives on")


# --- Wheels that are kept -------------------------------------------------------------------------


def wheel(path: Path, tensorflow: str | None = HERE, library: str = NEEDED) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    metadata = {"tensorflow": tensorflow} if tensorflow else {"dummy": "none"}
    with zipfile.ZipFile(path, "w") as content:
        content.writestr("horovod/metadata.json", json.dumps(metadata))
        content.writestr(library, b"library" * 1000)
    return path


def test_a_good_wheel_is_used(tmp_path):
    assert wheel_cache.wheel_problem(wheel(tmp_path / "x.whl"), HERE) is None


@pytest.mark.parametrize(
    ("tensorflow", "library", "says"),
    [
        ("2.20.0", NEEDED, "built for TensorFlow 2.20.0, and this is TensorFlow 2.21.0"),
        (None, NEEDED, "built without TensorFlow"),
        (HERE, "horovod/torch/mpi_lib_v2.so", "built without TensorFlow"),
    ],
)
def test_a_wheel_for_something_else_is_not_used(tmp_path, tensorflow, library, says):
    other = wheel(tmp_path / "x.whl", tensorflow, library)
    assert says in wheel_cache.wheel_problem(other, HERE)


@pytest.mark.parametrize("damage", ["cut", "changed", "empty", "missing"])
def test_a_damaged_wheel_is_not_used(tmp_path, damage):
    path = wheel(tmp_path / "x.whl")
    content = path.read_bytes()
    middle = len(content) // 2
    changed = content[:middle] + b"LIBRARY" + content[middle + 7 :]
    path.write_bytes({"cut": content[:middle], "changed": changed}.get(damage, b""))
    if damage == "missing":
        path.unlink()
    assert "damaged" in wheel_cache.wheel_problem(path, HERE)


def test_each_kind_of_wheel_has_a_place_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CXXFLAGS", raising=False)
    plain = wheel_cache.entry(Choice(), HERE)
    assert plain == wheel_cache.entry(Choice(), HERE)
    assert plain.folder.is_relative_to(tmp_path / "tfdist" / "horovod")
    others = [
        wheel_cache.entry(Choice(mpi=True), HERE),
        wheel_cache.entry(Choice(nccl=True), HERE),
        wheel_cache.entry(Choice(), "2.21.1"),
    ]
    monkeypatch.setenv("CXXFLAGS", "-O0")
    others.append(wheel_cache.entry(Choice(), HERE))
    assert len({each.folder for each in (plain, *others)}) == 5


def test_a_wheel_is_kept_as_a_whole_or_not_at_all(tmp_path, monkeypatch):
    built, place = wheel(tmp_path / "built" / "x.whl"), wheel_cache.Entry(tmp_path / "kept", HERE)
    place.folder.mkdir()

    def full_disk(old, new):
        Path(new).write_bytes(built.read_bytes()[:100])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfile", full_disk)
        with pytest.raises(OSError, match="No space"):
            place.store(built)
    assert list(place.folder.iterdir()) == []
    assert place.wheel() is None
    kept = place.store(built)
    assert place.wheel() == kept
    assert kept.read_bytes() == built.read_bytes()
    place.discard()
    assert place.wheel() is None


def test_one_process_at_a_time_builds_a_wheel(tmp_path):
    place, order = wheel_cache.Entry(tmp_path / "a", HERE), []

    def second():
        with place.locked(lambda: order.append("waits")):
            order.append("second")

    with place.locked(lambda: order.append("never")):
        thread = threading.Thread(target=second)
        thread.start()
        while not order:
            time.sleep(0.01)
        order.append("first")
    thread.join()
    assert order == ["waits", "first", "second"]


# --- What is installed ----------------------------------------------------------------------------


def test_the_installed_horovod_is_the_one_that_was_built(monkeypatch):
    here = requirements.tensorflow_version()
    assert install.is_intact()
    assert "Gloo" in install.operations()
    assert install.fits(Choice(), here)
    assert not install.fits(Choice(), "2.20.0")
    monkeypatch.setattr(install, "operations", lambda: ("Gloo",))
    assert not install.fits(Choice(mpi=True), here)


def test_the_release_without_the_changes_is_not_enough(monkeypatch):
    monkeypatch.setattr(install, "installed_version", lambda name: "0.28.1")
    assert not install.fits(Choice(), requirements.tensorflow_version())


def test_a_changed_or_missing_file_is_seen(tmp_path, monkeypatch):
    package = tmp_path / "horovod-0.28.1.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: horovod\nVersion: 0.28.1\n")
    hashed = "sha256=n4bQgYhMfWWaL-qgxVrQFaO_TxsrC4Is0V1sFbDwCgg,4"
    (package / "RECORD").write_text(f"horovod/a.so,{hashed}\nhorovod/a.pyc,,\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert not install.is_intact()
    (tmp_path / "horovod").mkdir()
    library = tmp_path / "horovod" / "a.so"
    library.write_bytes(b"test")
    assert install.is_intact()
    library.write_bytes(b"tesT")
    assert not install.is_intact()
    library.write_bytes(b"te")
    assert not install.is_intact()


def test_what_a_library_was_built_with_can_be_seen(tmp_path, monkeypatch):
    library = tmp_path / "horovod" / "tensorflow" / "mpi_lib.so"
    library.parent.mkdir(parents=True)
    (tmp_path / "horovod" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert install.operations() == ()
    for content, expected in [
        (b"", ()),
        (b"\0ncclCommInitRank\0_ZN4gloo3AllE\0", ("Gloo", "NCCL")),
        (b"\0MPI_Init_thread\0", ("MPI",)),
    ]:
        library.write_bytes(content)
        assert install.operations() == expected


# --- The test of a Horovod ------------------------------------------------------------------------


def test_two_processes_of_the_installed_horovod_add_up(commands):
    verify(commands)
    printed = commands.log.read_text()
    for rank in (0, 1):
        assert f"rank {rank} of 2: the sum is [3.0, 6.0, 9.0]\n" in printed


@pytest.mark.parametrize(
    ("code", "seconds", "says"),
    [("raise ImportError('undefined symbol')", 60, "undefined symbol"), (None, 2, "more than 2 s")],
)
def test_a_horovod_that_does_not_work_fails_its_test(commands, tmp_path, code, seconds, says):
    trial = tmp_path / "trial"
    (trial / "horovod").mkdir(parents=True)
    (trial / "horovod" / "__init__.py").write_text(code or "import time; time.sleep(1000)")
    with pytest.raises(CommandError, match=says) as caught:
        verify(commands, trial, seconds)
    assert str(commands.log) in str(caught.value)


def test_the_variables_of_another_job_do_not_reach_the_test(commands, tmp_path, monkeypatch):
    (tmp_path / "horovod.py").write_text(
        "import os; print(sorted(os.environ)); raise SystemExit(3)"
    )
    monkeypatch.setenv("HOROVOD_RANK", "5")
    monkeypatch.setenv("TF_CONFIG", "{}")
    with pytest.raises(CommandError):
        verify(commands, tmp_path)
    assert "'PYTHONPATH'" in commands.log.read_text()
    assert "HOROVOD_RANK" not in commands.log.read_text()
    assert "TF_CONFIG" not in commands.log.read_text()
