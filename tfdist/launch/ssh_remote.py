"""The far end of a task that is started over ssh: `python -m tfdist.launch.ssh_remote`.

Its standard input comes from the launcher: one line with the command, then a beat now and
then. The task runs as long as the beats come. When the launcher dies, or nothing has been heard of
it for a while because the network is gone, the task is ended, politely and then by force.

The same program, called with `look`, reports the facts of this host that the launcher needs first.
"""

from __future__ import annotations

import json
import os
import platform
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tfdist import environment
from tfdist.cluster import resources
from tfdist.cluster.ports import HeldPorts
from tfdist.cluster.rendezvous.join import identity

__all__ = ["BEAT_SECONDS", "SILENCE_SECONDS", "look", "order"]

#: Seconds between two beats, and without one after which the task is ended.
BEAT_SECONDS, SILENCE_SECONDS = 2.0, 20.0

_GRACE = 5.0
_POLL = 0.2


def order(
    command: tuple[str, ...],
    environ: Mapping[str, str | None],
    share: Any,
    files: Mapping[Path, str],
) -> bytes:
    """The line with the command.

    Args:
        command: the program and its arguments.
        environ: changes to the environment there; None removes a variable.
        share: which of how many equal parts of the host's GPUs the task gets, or None for all.
        files: texts that variables of `environ` name by their paths here.
    """
    said = {
        "command": command,
        "environ": dict(environ),
        "share": share,
        "cwd": os.getcwd(),
        "files": {str(path): text for path, text in files.items()},
    }
    return json.dumps(said).encode() + b"\n"


def look(ports: int) -> dict[str, Any]:
    """The facts of a host for the launcher: free ports, versions, the clock.

    Args:
        ports: how many.
    """
    with HeldPorts(ports) as held:
        return {
            "ports": held.ports,
            "identity": identity(""),
            "python": platform.python_version(),
            "time": time.time(),
            "gpus": len(resources.visible(environment.snapshot())),
        }


def main(arguments: list[str]) -> int:
    """Looks, or runs one task to its end.

    Returns:
        The task's exit status, or 128 + n if signal n ended it.
    """
    if arguments[:1] == ["look"]:
        os.chdir(arguments[2])
        print(json.dumps(look(int(arguments[1]))), flush=True)
        return 0
    with open(0, "rb", buffering=0, closefd=False) as lines:  # No beat is read with the order.
        said = json.loads(lines.readline())
    with tempfile.TemporaryDirectory(prefix="tfdist-") as folder:
        changes = {**_with_files(said["environ"], said["files"], folder), **_gpus(said["share"])}
        try:
            os.chdir(said["cwd"])
            process = subprocess.Popen(
                said["command"],
                stdin=subprocess.DEVNULL,
                env=environment.merged(changes),
                start_new_session=True,
            )
        except OSError as error:
            where = f"{said['command'][0]!r} in {said['cwd']!r}"
            print(f"tfdist: cannot start {where}: {error.strerror}.")
            return 127
        status = _wait(process)
    return status if status >= 0 else 128 - status


def _with_files(
    environ: Mapping[str, str | None], files: Mapping[str, str], folder: str
) -> dict[str, str | None]:
    """The environment with the launcher's files as they are called here, if they are written."""
    names = {}
    for path, text in files.items():
        names[path] = str(Path(folder) / Path(path).name)
        Path(names[path]).write_text(text)
    return {
        name: value if value is None else names.get(value, value) for name, value in environ.items()
    }


def _gpus(share: Any) -> dict[str, str]:
    """The task's part of the GPUs of this host."""
    seen = resources.visible(environment.snapshot())
    if share is None or not seen:
        return {}
    part, parts = share
    return {"CUDA_VISIBLE_DEVICES": ",".join(resources.split(seen, parts, None)[part])}


def _wait(process: subprocess.Popen[bytes]) -> int:
    """Waits for the task, and ends it when the launcher is gone."""
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, lambda *_: _end(process))
    heard = time.monotonic()
    while process.poll() is None:
        ready, _, _ = select.select([0], [], [], _POLL)
        if ready:
            if not os.read(0, 4096):
                _end(process)
                break
            heard = time.monotonic()
        elif time.monotonic() - heard > SILENCE_SECONDS:
            print(f"tfdist: nothing was heard of the launcher for {SILENCE_SECONDS:.0f} s.")
            _end(process)
            break
    _signal(process, signal.SIGKILL)
    return process.wait()


def _end(process: subprocess.Popen[bytes]) -> None:
    _signal(process, signal.SIGTERM)
    deadline = time.monotonic() + _GRACE
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    _signal(process, signal.SIGKILL)


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Signals the task's group, in which its children are."""
    try:
        os.killpg(process.pid, number)
    except (ProcessLookupError, PermissionError):
        return


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
