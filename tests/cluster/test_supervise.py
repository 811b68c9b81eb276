"""Real processes, without TensorFlow: the first failure ends the job, and nothing is left."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tfdist.cluster.spec import Task
from tfdist.launcher import root_cause, supervisor
from tfdist.launcher.output import Pump, TaskOutput
from tfdist.launcher.plan import JobPlan, Program, local_cluster, plan_local
from tfdist.launcher.process import Guard, Terminal, spawn

HEAD = """
import json, os, signal, subprocess, sys, time
index = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
def await_file(name):
    while not os.path.exists(name):
        time.sleep(0.01)
"""

LAUNCHER = """
import os, sys
from pathlib import Path
from tfdist.launcher import supervisor
from tfdist.launcher.plan import Program, local_cluster, plan_local
from tfdist.launcher.process import Terminal
program = Program(script="task.py", config="{}", seed=1, env_only=True)
plan = plan_local(program, cluster=local_cluster([1, 2]), log_dir=Path("."), environ={})
outcome = supervisor.run(plan, terminal=Terminal(), grace=float(sys.argv[1]))
assert "tensorflow" not in sys.modules
print(outcome.message, file=sys.stderr)
sys.exit(outcome.status)
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def plan_of(script: str, tasks: int = 2) -> JobPlan:
    Path("task.py").write_text(HEAD + script)
    program = Program(script="task.py", config="{}", seed=1, env_only=True)
    cluster = local_cluster(range(1, tasks + 1))
    return plan_local(program, cluster=cluster, log_dir=Path("."), environ={})


def run(script: str, tasks: int = 2, **more: object) -> supervisor.Outcome:
    return supervisor.run(plan_of(script, tasks), **more)  # type: ignore[arg-type]


@contextlib.contextmanager
def launcher(script: str, grace: float = 5, **streams: object) -> Iterator[subprocess.Popen[bytes]]:
    """A launcher in a process of its own, so that it can be killed."""
    plan_of(script)
    command = [sys.executable, "-c", LAUNCHER, str(grace)]
    process = subprocess.Popen(command, **streams)  # type: ignore[call-overload]
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def wait_until(condition: Callable[[], object], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def pids(*names: str) -> list[int]:
    wait_until(lambda: all(Path(name).exists() and Path(name).read_text() for name in names))
    return [int(Path(name).read_text()) for name in names]


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def all_gone(*numbers: int) -> Callable[[], bool]:
    return lambda: not any(map(is_alive, numbers))


def test_all_goes_well(here: Path) -> None:
    outcome = run("print('hello from', index)", tasks=3)
    assert outcome == supervisor.Outcome(0)
    assert Path("worker-2.log").read_text() == "hello from 2\n"


def test_an_early_end_is_no_failure(here: Path) -> None:
    assert run("time.sleep(0 if index else 0.5)").status == 0


def test_the_first_failure_ends_the_job(here: Path) -> None:
    script = """
Path = __import__("pathlib").Path
Path(f"pid{index}").write_text(str(os.getpid()))
if index == 1:
    await_file("pid0")
    for number in range(30):
        print("line", number)
    raise ValueError("the third step")
time.sleep(60)
"""
    begin = time.monotonic()
    outcome = run(script)
    assert time.monotonic() - begin < 20
    assert outcome.status == 1
    assert outcome.message.startswith("worker 1 failed with exit status 1.")
    assert "ValueError: the third step" in outcome.message
    assert "Its log: worker-1.log" in outcome.message
    assert "  line 29\n" in outcome.message
    assert "line 0\n" not in outcome.message
    assert outcome.message.endswith("\nStopped with it: worker 0.")
    assert all_gone(*pids("pid0"))()


@pytest.mark.parametrize(
    ("end", "status", "words"),
    [
        ("sys.exit(7)", 7, "failed with exit status 7"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "signal 9 (SIGKILL)"),
        ("os.abort()", 134, "signal 6 (SIGABRT)"),
    ],
)
def test_the_exit_status_is_the_failed_tasks(here: Path, end: str, status: int, words: str) -> None:
    outcome = run(f"{end} if index == 1 else time.sleep(60)")
    assert outcome.status == status
    assert words in outcome.message


def test_a_task_that_ignores_term_is_killed(here: Path) -> None:
    script = """
if index == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    open("deaf", "w").write(str(os.getpid()))
    time.sleep(60)
await_file("deaf")
sys.exit(3)
"""
    begin = time.monotonic()
    assert run(script, grace=0.5).status == 3
    assert 1.0 < time.monotonic() - begin < 20
    assert all_gone(*pids("deaf"))()


def test_children_of_a_task_end_with_it(here: Path) -> None:
    script = """
child = subprocess.Popen(["sleep", "60"])
open(f"child{index}", "w").write(str(child.pid))
"""
    begin = time.monotonic()
    assert run(script).status == 0
    assert time.monotonic() - begin < 20
    wait_until(all_gone(*pids("child0", "child1")))


def test_the_cause_is_told_from_its_consequences(here: Path) -> None:
    """The survivor fails first, since the guilty task takes time to exit."""
    script = """
if index == 0:
    await_file("raised")
    sys.exit("tensorflow.python.framework.errors_impl.UnavailableError: Socket closed")
open("raised", "w")
try:
    raise ValueError("boom")
finally:
    time.sleep(1.5)
"""
    outcome = run(script)
    assert outcome.message.startswith("worker 1 failed with exit status 1.")
    assert "ValueError: boom" in outcome.message
    assert "worker 0 failed with exit status 1 because it lost another task" in outcome.message


CRASH = """
import ctypes
def broken():
    ctypes.string_at(0)
if index == 1:
    print("before the crash", flush=True)
    broken()
time.sleep(30)
"""


def test_a_crash_names_the_line_of_the_program(here: Path) -> None:
    outcome = run(CRASH)
    line = (HEAD + CRASH).splitlines().index("    ctypes.string_at(0)") + 1
    assert outcome.message.startswith("worker 1 was ended by signal 11 (SIGSEGV).")
    assert f"native code, which was called by line {line} of " in outcome.message
    assert "task.py, in broken. Its log has" in outcome.message
    assert "  before the crash\n" in outcome.message
    assert "most recent call first" not in outcome.message
    assert 'string_at\n  File "' in Path("worker-1.log").read_text()


STACKS = f"""\
UNAVAILABLE: Socket closed
Fatal Python error: Aborted

Thread 0x00007ff3ece786c0 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 982 in run

Current thread 0x00007ff3ece786c1 (most recent call first):
  <no Python frame>

Thread 0x00007ff3eda15b80 (most recent call first):
  File "/venv/lib/python3.11/site-packages/keras/src/trainer.py", line 377 in fit
  File "{Path(root_cause.__file__).parents[1]}/keras/binding.py", line 57 in call
  File "/home/me/train.py", line 20 in main
  File "/home/me/train.py", line 30 in <module>
  File "<frozen runpy>", line 88 in _run_code

Extension modules: numpy._core._multiarray_umath (total: 1)""".splitlines()


def test_the_stacks_of_a_crash_are_told_from_what_was_said() -> None:
    assert root_cause.without_stacks(STACKS) == STACKS[:2]
    assert root_cause.is_consequence(root_cause.without_stacks(STACKS), -6)
    assert root_cause.site(STACKS) == (
        "The crash is in another thread, while the program was at line 20 of /home/me/train.py, "
        "in main."
    )
    assert root_cause.site(["ValueError: x"]) is None
    beside = f"{Path(root_cause.__file__).parents[1]}_examples/train.py"
    assert f"at line 20 of {beside}" in str(
        root_cause.site([line.replace("/home/me/train.py", beside) for line in STACKS])
    )
    assert root_cause.without_stacks(['  File "a.py", line 1 in f']) == [
        '  File "a.py", line 1 in f'
    ]


def test_stock_tensorflows_end_of_fit_is_explained() -> None:
    kind = "<class 'tensorflow.python.distribute.values.PerReplica'>"
    lines = [f"}}) with an unsupported type ({kind}) to a Tensor."]
    ending = root_cause.Ending(Task("worker", 0), 1, None, lines)
    assert "(keras#20585). Leave --env-only out" in root_cause.describe(ending, [ending])


def test_a_task_without_heartbeats_is_named() -> None:
    lines = [
        "tensorflow.python.framework.errors_impl.UnavailableError: Collective ops is aborted by: "
        "Error reported from /job:worker/task:1: The following tasks are unhealthy "
        "(stopped sending heartbeats):",
        "/job:worker/replica:0/task:1",
        "The tasks have crashed. Check the task logs for an earlier error.",
    ]
    ending = root_cause.Ending(Task("worker", 0), 1, None, lines)
    silent = root_cause.Ending(Task("worker", 1), -signal.SIGKILL, None, stopped=True)
    assert "no more heartbeats of worker 1 " in root_cause.describe(ending, [ending, silent])


def test_a_task_that_is_stopped_is_named_when_another_fails(here: Path) -> None:
    script = """
if index == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
time.sleep(1)
raise SystemExit(3)
"""
    outcome = run(script)
    assert outcome.status == 3
    assert outcome.message.startswith("worker 0 failed with exit status 3.")
    named = "Stopped by SIGSTOP, a debugger or Ctrl-Z when the job ended: worker 1."
    assert named in outcome.message


def test_a_task_that_ended_unseen_is_not_taken_for_stopped(here: Path) -> None:
    """All tasks of a job may end at once, between two looks at them."""
    plan = plan_of("raise SystemExit(3)").tasks[0]
    pump = Pump()
    with Guard() as guard:
        task = spawn(plan, guard=guard, pump=pump, terminal=None, complain=pytest.fail)
        pid = task._process.pid
        assert os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT) is not None  # Not yet collected.
        task.note_pause()
        assert task.poll() == 3
    pump.close()
    task.close()
    assert not task.paused


def test_a_program_that_does_not_exist(here: Path) -> None:
    program = Program(script="x.py", config="{}", seed=1, env_only=True, python="/no/python")
    plan = plan_local(program, cluster=None, log_dir=here, environ={})
    outcome = supervisor.run(plan)
    assert outcome.status == 127
    assert "Cannot start '/no/python'" in outcome.message


SLEEPERS = """
child = subprocess.Popen(["sleep", "100"])
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGINT, signal.SIG_IGN)
open(f"child{index}", "w").write(str(child.pid))
open(f"task{index}", "w").write(str(os.getpid()))
time.sleep(100)
"""
SLEEPERS_PIDS = ("task0", "task1", "child0", "child1")


def test_nothing_is_left_when_the_launcher_is_killed(here: Path) -> None:
    with launcher(SLEEPERS) as process:
        numbers = pids(*SLEEPERS_PIDS)
        process.kill()
        wait_until(all_gone(*numbers), 5)


def test_nothing_is_left_when_the_launcher_is_killed_while_it_starts(here: Path) -> None:
    """As soon as it has a child, and some moments later: with one task, or with both."""
    for delay in (0.0, 0.01, 0.03, 0.1):
        with launcher(SLEEPERS) as process:
            wait_until(lambda own=process.pid: children_in(here, own), 20)
            time.sleep(delay)
            assert children_in(here, process.pid)
            process.kill()
        wait_until(lambda: not children_in(here), 10)


def children_in(folder: Path, launched_by: int | None = None) -> list[int]:
    """Living processes that work in a folder, this one and the launcher apart."""
    found = [int(e.name) for e in Path("/proc").glob("[0-9]*") if _cwd(e) == str(folder)]
    return [pid for pid in found if pid not in (os.getpid(), launched_by) and is_alive(pid)]


def _cwd(process: Path) -> str:
    try:
        return os.readlink(process / "cwd")
    except OSError:
        return ""


@pytest.mark.parametrize(
    ("number", "grace"), [(signal.SIGINT, 5), (signal.SIGTERM, 5), (signal.SIGHUP, 0.1)]
)
def test_a_signal_to_the_launcher_ends_all_in_time(
    here: Path, number: signal.Signals, grace: float
) -> None:
    with launcher(SLEEPERS, grace, stderr=subprocess.PIPE) as process:
        numbers = pids(*SLEEPERS_PIDS)
        begin = time.monotonic()
        process.send_signal(number)
        _, said = process.communicate(timeout=10)
        assert time.monotonic() - begin < 20
        assert process.returncode == 128 + number
        assert b"Stopped by " in said
        assert all_gone(*numbers)()


def test_ctrl_c_reaches_the_script_and_a_second_one_kills(here: Path) -> None:
    script = """
try:
    open(f"task{index}", "w").write(str(os.getpid()))
    time.sleep(100)
except KeyboardInterrupt:
    open(f"saved{index}", "w").write("1")
    time.sleep(100)
"""
    with launcher(script, stderr=subprocess.PIPE) as process:
        pids("task0", "task1")
        process.send_signal(signal.SIGINT)
        pids("saved0", "saved1")
        begin = time.monotonic()
        process.send_signal(signal.SIGINT)
        process.wait(timeout=10)
        assert time.monotonic() - begin < 15


def test_only_the_chief_is_shown_and_streams_stay_apart(here: Path) -> None:
    script = "print('out', index); print('err', index, file=sys.stderr)"
    with launcher(script, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        out, err = process.communicate(timeout=20)
    assert out == b"out 0\n"
    assert err == b"err 0\n\n"
    assert sorted(Path("worker-0.log").read_text().split("\n")) == ["", "err 0", "out 0"]


def test_a_failed_chief_is_not_shown_twice(here: Path) -> None:
    script = "time.sleep(60) if index else 1 / 0"
    with launcher(script, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        out, _ = process.communicate(timeout=20)
    assert out.count(b"ZeroDivisionError") == 1
    assert b"Its log: worker-0.log" in out


PROGRESS = """
print(sys.stdout.isatty(), os.get_terminal_size().columns if index == 0 else 0)
for number in range(4):
    print(f"\\r\\x1b[1m{number}/3\\x1b[0m", end="", flush=True)
print()
"""


def test_the_chief_has_a_terminal_if_the_launcher_has_one(here: Path) -> None:
    ours, theirs = pty.openpty()
    subprocess.run(["stty", "cols", "123"], stdin=theirs, check=True)
    with launcher(PROGRESS, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        shown = _read_terminal(ours)
        process.wait(timeout=10)
    assert b"True 123\r\n" in shown
    assert shown.count(b"\r\x1b[1m") == 4
    assert Path("worker-0.log").read_text() == "True 123\n3/3\n"
    assert Path("worker-1.log").read_text() == "False 0\n3/3\n"


def _read_terminal(fd: int) -> bytes:
    data = b""
    while select.select([fd], [], [], 15)[0]:
        try:
            data += os.read(fd, 4096)
        except OSError:
            break
    os.close(fd)
    return data


def test_a_full_disk_costs_the_log_not_the_training(here: Path) -> None:
    complaints: list[str] = []
    Path("worker-1.log").symlink_to("/dev/full")
    script = "print('x' * 100); time.sleep(0.2); print('y'); sys.exit(index * 4)"
    outcome = run(script, complain=complaints.append)
    assert outcome.status == 4
    assert len(complaints) == 1
    assert "'worker-1.log': No space left on device" in complaints[0]
    assert "  y" in outcome.message
    assert "Its log" not in outcome.message


def test_a_reader_that_goes_away_does_not_stop_the_job(here: Path) -> None:
    script = "print(index, flush=True); time.sleep(0.5); print(index); print('end')"
    with launcher(script, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(timeout=20) == 0
    assert Path("worker-0.log").read_text() == "0\n0\nend\n"


def test_the_log_has_the_last_state_of_each_line(tmp_path: Path) -> None:
    output = TaskOutput(tmp_path / "log", lambda text: None)
    pump = Pump()
    out, into = os.pipe()
    pump.add(out, output)
    os.write(into, b"1/3\r2/3\r3/3 done\nplain\n\b\b\b\r4/4\x1b[0m\nwithout an end")
    os.close(into)
    pump.close()
    output.close()
    assert (tmp_path / "log").read_text() == "3/3 done\nplain\n4/4\nwithout an end\n"
    assert output.tail()[-2:] == ["4/4", "without an end"]


def test_no_descriptor_is_left_open(here: Path) -> None:
    before = os.listdir("/proc/self/fd")
    run("print(1)", terminal=Terminal())
    assert os.listdir("/proc/self/fd") == before


TRACE = ["Traceback (most recent call last):", '  File "a.py", line 1, in f', "    1 / 0"]


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([*TRACE, "ZeroDivisionError: division by zero"], False),
        ([*TRACE, "ZeroDivisionError: x", "E0000 coordination service: Socket closed"], False),
        ([*TRACE, "tensorflow.python.framework.errors_impl.UnavailableError: Graph"], True),
        (
            [
                *TRACE,
                "tensorflow.python.framework.errors_impl.InternalError: Graph execution error:",
                "",
                "Collective ops is aborted by: Connection reset by peer",
            ],
            True,
        ),
        (["F0000 Terminating process because the distributed service detected fatal errors"], True),
        (["tfdist: The chief stopped the start:", "The cluster did not come together"], True),
        ([], False),
        (["Epoch 1/3"], False),
    ],
)
def test_consequences_are_recognised(lines: list[str], expected: bool) -> None:
    assert root_cause.is_consequence(lines) is expected


def test_the_cause_may_have_been_stopped_before_it_could_exit() -> None:
    follower = root_cause.Ending(Task("worker", 0), 1, None, ["UnavailableError: x"])
    guilty = root_cause.Ending(
        Task("worker", 1), -15, None, [*TRACE, "ValueError: x"], stopped=True
    )
    assert root_cause.root_cause([follower, guilty]) is guilty
    assert re.match(r"worker 1 raised an error", root_cause.describe(guilty, [follower, guilty]))
    assert root_cause.root_cause([root_cause.Ending(Task("worker", 0), 0, None)]) is None


KEY_ERROR = [*TRACE, "KeyError: 'missing'"]
CONFLICT = "tfdist: --zero 3 conflicts with the optimizer Lamb."


@pytest.mark.parametrize(
    ("lines", "of_shown", "same"),
    [
        (KEY_ERROR, ["Epoch 1/3", *TRACE, "KeyError: 'missing'"], True),
        (KEY_ERROR, [*TRACE, "KeyError: 'other'"], False),
        (KEY_ERROR, ["Epoch 1/3"], False),
        ([CONFLICT], ["tfdist: global batch: 32 examples a step", CONFLICT], True),
        ([CONFLICT], ["tfdist: global batch: 32 examples a step"], False),
    ],
)
def test_an_error_that_is_on_the_terminal_is_not_shown_again(
    lines: list[str], of_shown: list[str], same: bool
) -> None:
    root = root_cause.Ending(Task("worker", 1), 1, None, lines)
    shown = root_cause.Ending(Task("worker", 0), 1, None, of_shown, shown=True)
    message = root_cause.describe(root, [root, shown])
    assert ("Its error is the one of worker 0 above." in message) is same
    assert (lines[-1] in message) is not same
    assert message.startswith("worker 1 failed with exit status 1.")
    assert message.endswith("worker 0 failed with exit status 1 too")


def test_an_end_without_an_exception_is_not_taken_for_that_of_another() -> None:
    root = root_cause.Ending(Task("worker", 1), 5, None, ["no data"])
    shown = root_cause.Ending(Task("worker", 0), 5, None, ["no data"], shown=True)
    assert "  no data" in root_cause.describe(root, [root, shown])


def test_the_lines_of_a_message_that_name_the_lost_task() -> None:
    message = """Graph execution error:

Detected at node CollectiveReduceV2 defined at (most recent call last):
Collective ops is aborted by: The following tasks are unhealthy (stopped sending heartbeats):
/job:worker/replica:0/task:1
The tasks have crashed."""
    assert root_cause.loss(message) == message.splitlines()[3:5]
    assert root_cause.loss("Matrix size-incompatible") == []
