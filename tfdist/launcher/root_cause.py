"""Finds which of several failed tasks is the cause, and words it. Pure functions.

When one task dies, its peers fail too, within moments or seconds: their collectives are aborted.
The user wants to see the first, not the loudest.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
import signal
from collections.abc import Sequence
from pathlib import Path

from tfdist.cluster.spec import Task
from tfdist.utils.watchdog import ENDED

__all__ = [
    "LINES_SHOWN",
    "PACKAGE",
    "Ending",
    "describe",
    "exit_status",
    "headline",
    "is_consequence",
    "is_of_program",
    "loss",
    "names_a_lost_peer",
    "root_cause",
    "site",
    "without_stacks",
]

#: Lines of a failed task's log that are shown.
LINES_SHOWN = 20

_LINES_SEARCHED = 60

_EXCEPTION = re.compile(r"^(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit)\b(?::|$)")

#: Messages of TensorFlow, gRPC, Horovod and tfdist's own start if it is another task that has gone.
_PEER = re.compile(
    r"""
    \bUnavailableError\b | \bUNAVAILABLE\b
    | Collective\ ops?\ (?:is|are)\ aborted
    | coordination\ (?:service|agent) | CoordinationService | distributed\ service\ detected
    | Connection\ (?:reset|refused) | Socket\ closed | failed\ to\ connect\ to\ all\ addresses
    | [Hh]eartbeat\ timeout | task\ is\ unhealthy | peer\ .*\ (?:died|unreachable|restarted)
    | The\ chief\ stopped\ the\ start
    | Horovod\ has\ been\ shut\ down | Connection\ closed\ by\ peer
    | ^tfdist:\ chief\ .*\ (?:has\ gone|has\ failed)\b
    """,
    re.VERBOSE,
)


#: The exit status of ssh if it failed itself.
_SSH_FAILED = 255

#: The ends of stock TensorFlow's `fit` on several processes and on parameter servers with Keras 3
#: (keras#20585).
_STOCK_FIT = (
    ".distribute.values.PerReplica'>) to a Tensor",
    "Cannot get the cardinality of a dataset that is not built",
)

#: A task of which TensorFlow's coordination service has had no heartbeat, on a line of its own.
_SILENT = re.compile(r"^/job:(\w+)/replica:\d+/task:(\d+)$")

#: A rank that Horovod has given up waiting for.
_MISSING = re.compile(r"^(\d+)!: \[")


@dataclasses.dataclass(frozen=True)
class Ending:
    """The end of a task.

    Attributes:
        task: which task.
        returncode: as in `subprocess`: negative for a signal.
        log: its log file, or None if it could not be written.
        lines: its last lines, oldest first.
        stopped: whether it ended because the job was being stopped.
        shown: whether its output is on the terminal already.
        host: the machine on which it ran, if it was another.
        crash: where in the program native code has crashed, in words, if it has.
        peak_rss: its largest resident memory in bytes, if it ran on this machine.
        paused: whether it was stopped by SIGSTOP or a debugger when the job was to end.
    """

    task: Task
    returncode: int
    log: Path | None
    lines: Sequence[str] = ()
    stopped: bool = False
    shown: bool = False
    host: str | None = None
    crash: str | None = None
    peak_rss: int | None = None
    paused: bool = False


def exit_status(returncode: int) -> int:
    """The status a shell would show: 128 + n for signal n."""
    return returncode if returncode >= 0 else 128 - returncode


def names_a_lost_peer(message: str) -> bool:
    """Whether an error's message reports that another task has gone."""
    return any(_PEER.search(line) for line in message.splitlines())


def loss(message: str) -> list[str]:
    """The lines of an error's message that name the lost task: the first, and a list after it."""
    lines = message.splitlines()
    found = [number for number, line in enumerate(lines) if _PEER.search(line)]
    if not found:
        return []
    silent = itertools.takewhile(_SILENT.match, lines[found[0] + 1 :])
    return [lines[found[0]].strip(), *silent]


def is_consequence(lines: Sequence[str], returncode: int = 1) -> bool:
    """Whether the last lines of a failed task report that another task has gone.

    The last exception counts if there is one: a task with an error of its own also logs the end of
    its connections. A task that was killed by SIGKILL did not end because of its last lines.
    """
    if returncode == -signal.SIGKILL:
        return False
    recent = list(lines)[-_LINES_SEARCHED:]
    message = _last_error(recent)
    if message and not _from_tensorflow(message[0]):
        message = message[:1]
    return any(_PEER.search(line) for line in message or recent)


def root_cause(endings: Sequence[Ending]) -> Ending | None:
    """The task to blame for the end of a job, or None if all went well.

    Args:
        endings: all tasks, in the order in which they ended.

    Returns:
        The first that failed of itself; else the first that was still busy with its own error when
        the job was stopped; else the first that failed at all.
    """
    failed = [ending for ending in endings if ending.returncode != 0 and not ending.stopped]
    if not failed:
        return None
    own = [ending for ending in failed if not is_consequence(ending.lines, ending.returncode)]
    dying = [ending for ending in endings if ending.stopped and _has_own_error(ending)]
    return (own or dying or failed)[0]


def headline(ending: Ending) -> str:
    """The task and its end, as "worker 1 was ended by signal 9 (SIGKILL)"."""
    where = "" if ending.host is None else f" on {ending.host}"
    return f"{ending.task}{where} {_how(ending)}"


def describe(root: Ending, endings: Sequence[Ending]) -> str:
    """A message for the user: who failed, how, its last lines, and who only followed."""
    parts = [f"{headline(root)}."]
    paused = [str(ending.task) for ending in endings if ending.paused]
    if paused:
        parts.append(
            f"Stopped by SIGSTOP, a debugger or Ctrl-Z when the job ended: {', '.join(paused)}. "
            "The other tasks waited for it until their deadline."
        )
    hint = _hint(root)
    if hint:
        parts.append(hint)
    same = _shown_error_of(root, endings)
    if same is not None:
        parts.append(f"Its error is the one of {same.task} above.")
    elif not root.shown and root.lines:
        parts.append("Its last lines:")
        parts += [f"  {line}" for line in list(root.lines)[-LINES_SHOWN:]]
    if root.log is not None:
        parts.append(f"Its log: {root.log}")
    followers = [e for e in endings if e is not root and e.returncode != 0 and not e.stopped]
    for ending in followers:
        follows = is_consequence(ending.lines, ending.returncode)
        because = " because it lost another task" if follows else " too"
        log = f"; its log: {ending.log}" if ending.log is not None else ""
        parts.append(f"{headline(ending)}{because}{log}")
    stopped = [str(ending.task) for ending in endings if ending.stopped and ending is not root]
    if stopped:
        parts.append(f"Stopped with it: {', '.join(stopped)}.")
    return "\n".join(parts)


def _shown_error_of(root: Ending, endings: Sequence[Ending]) -> Ending | None:
    """Another failed task whose output is on the terminal and ends with the same error, if any."""
    error = _last_error(root.lines)
    if not error:
        return None
    failed = (each for each in endings if each is not root and each.returncode != 0)
    return next((e for e in failed if e.shown and _last_error(e.lines) == error), None)


def _last_error(lines: Sequence[str]) -> list[str]:
    """The last error of Python or tfdist in a task's output and all after it; or nothing."""
    starts = [
        number
        for number, line in enumerate(lines)
        if _EXCEPTION.match(line) or line.startswith("tfdist: ")
    ]
    return list(lines[starts[-1] :]) if starts else []


def _has_own_error(ending: Ending) -> bool:
    if is_consequence(ending.lines):
        return False
    return any(_EXCEPTION.match(line) for line in ending.lines)


def _from_tensorflow(line: str) -> bool:
    """Whether an exception is TensorFlow's: their messages go over many lines."""
    return "errors_impl" in line or "Unavailable" in line


def _how(ending: Ending) -> str:
    if ending.stopped:
        return "raised an error"
    if ending.host is not None and ending.returncode == _SSH_FAILED:
        return f"was lost: ssh has no connection to {ending.host} (exit status {_SSH_FAILED})"
    if ending.returncode >= 0:
        return f"failed with exit status {ending.returncode}"
    number = -ending.returncode
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = "unnamed"
    return f"was ended by signal {number} ({name})"


def _hint(ending: Ending) -> str:
    missing = sorted({int(rank) for line in ending.lines for rank in _MISSING.findall(line)})
    if missing:
        ranks = ", ".join(map(str, missing))
        return (
            f"Horovod waited for rank {ranks}, which did not come to the same exchange of tensors. "
            "Either it was busy for longer than --stall-timeout, or it is at another place of the "
            "program: all ranks must run the same steps."
        )
    silent = sorted({" ".join(each) for line in ending.lines for each in _SILENT.findall(line)})
    if silent and any("stopped sending heartbeats" in line for line in ending.lines):
        return (
            f"TensorFlow had no more heartbeats of {', '.join(silent)} and ended the exchanges of "
            "all others. That task was stopped (by a debugger or SIGSTOP), its machine was busy or "
            "asleep, or the network between them failed."
        )
    if any(words in line for line in ending.lines for words in _STOCK_FIT):
        return (
            "Keras 3 cannot `fit` on a strategy of TensorFlow's own for several processes "
            "(keras#20585). Leave --env-only out: tfdist then gives the program its own strategy."
        )
    if ending.crash is not None:
        return f"{ending.crash} Its log has the stacks of all threads."
    by_itself = any(ENDED in line for line in ending.lines)
    if ending.returncode == -signal.SIGKILL and not ending.stopped and not by_itself:
        return (
            "tfdist did not send that signal. Often it is the kernel, because memory ran out: "
            "see `dmesg`."
        )
    return ""


# Python's stacks in the output of a task whose native code has crashed.
#
# Each task runs with PYTHONFAULTHANDLER=1: if it gets a fatal signal such as SIGSEGV, Python prints
# the stacks of all its threads. The crash is in native code, such as TensorFlow's, but what the
# user can change is the line of the program that called it.

_BEGIN = "Fatal Python error: "
_THREAD = re.compile(r"(?P<current>Current t|T)hread 0x[0-9a-f]+ .*\(most recent call first\):$")
_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.*)$')
_REST = re.compile(r"$|  <no Python frame>$|  \.\.\.$|Extension modules: ")

#: The beginning of the paths of tfdist's own files, and of no others.
PACKAGE = f"{Path(__file__).parents[1]}/"
#: Files that are not part of the user's program: installed packages, Python's own, and tfdist.
_NOT_THE_USERS = re.compile(
    rf"/(?:site|dist)-packages/|/lib/python3\.\d+/|^<|^{re.escape(PACKAGE)}"
)


def is_of_program(file: str) -> bool:
    """Whether a file in a stack is the user's: not of a package, of Python, or of tfdist."""
    return not _NOT_THE_USERS.search(file)


def without_stacks(lines: Sequence[str]) -> list[str]:
    """The lines of a task's output without the stacks that Python prints at a crash."""
    kept, crashed = [], False
    for line in lines:
        crashed = crashed or line.startswith(_BEGIN)
        if not (crashed and any(form.match(line) for form in (_THREAD, _FRAME, _REST))):
            kept.append(line)
    return kept


def site(lines: Sequence[str]) -> str | None:
    """The line of the user's program at which a task has crashed, in words.

    Args:
        lines: the last lines of its output.

    Returns:
        A sentence; None if there was no crash, or its stacks show no line of the program.
    """
    starts = [number for number, line in enumerate(lines) if line.startswith(_BEGIN)]
    if not starts:
        return None
    own: list[re.Match[str]] = []
    latest: list[re.Match[str]] = []
    stack = latest
    for line in lines[starts[-1] :]:
        thread = _THREAD.match(line)
        if thread is not None:
            # Python lists the threads from the youngest to the main one.
            stack = latest = []
            if thread["current"] == "Current t":
                own = stack
        frame = _FRAME.match(line)
        if frame is not None and is_of_program(frame["file"]):
            stack.append(frame)
    if own:
        return f"The crash is in native code, which was called by {_frame_text(own[0])}."
    if latest:
        return f"The crash is in another thread, while the program was at {_frame_text(latest[0])}."
    return None


def _frame_text(frame: re.Match[str]) -> str:
    return f"line {frame['line']} of {frame['file']}, in {frame['name']}"
