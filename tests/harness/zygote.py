"""A process that has imported TensorFlow and is forked: `python -m tests.harness.zygote NAME`.

The import takes 4 s of a CPU, a fork none. It is safe as long as there is one thread, so the
process imports, and does nothing else with TensorFlow. It ends with its parent, and its children
with it.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import pickle
import select
import signal
import socket
import sys
import traceback
from typing import Any

#: Of <sys/prctl.h>: the signal that a process gets when the thread that has started it ends.
_PR_SET_PDEATHSIG = 1
MESSAGE_BYTES = 1 << 18


def die_with_parent() -> None:
    """Ends this process when the thread ends that has forked it, also where it is stopped."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def load() -> None:
    """Imports TensorFlow and Keras, so that forks of this process have them."""
    # Keras imports these: the one comes with all of SciPy, the other with threads.
    left_out = dict.fromkeys(("sklearn", "pandas"))
    sys.modules.update(left_out)  # type: ignore[arg-type]
    import tensorflow as tf

    tf.keras.layers.Dense  # noqa: B018 - loads Keras
    for name in left_out:
        del sys.modules[name]
    gc.collect()
    gc.freeze()  # TensorFlow's own objects, half a million, are not looked at after each case.
    assert len(os.listdir("/proc/self/task")) == 1, "a process with threads cannot be forked"


def main(name: str) -> None:
    """Forks for everyone who connects to the abstract socket `name`, until standard input ends."""
    load()
    importlib.import_module("tests.harness.worker")
    signal.signal(signal.SIGCHLD, lambda *_: None)
    ended, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind("\0" + name)
        listener.listen(16)
        _serve(listener, ended)


def _serve(listener: socket.socket, ended: int) -> None:
    while True:
        ready, _, _ = select.select([0, listener, ended], [], [])
        if 0 in ready:
            return
        if ended in ready:
            os.read(ended, 4096)
            _reap()
        if listener in ready:
            connection, _ = listener.accept()
            with connection:
                _fork(connection, listener)


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def _fork(connection: socket.socket, listener: socket.socket) -> None:
    message, files, _, _ = socket.recv_fds(connection, MESSAGE_BYTES, 8)
    if not message:
        return  # Somebody who wanted to know whether we listen.
    pid = os.fork()
    if not pid:
        listener.close()
        connection.close()
        try:
            _become(files, *pickle.loads(message))
        except BaseException:
            traceback.print_exc()
        os._exit(1)
    handle = os.pidfd_open(pid)
    socket.send_fds(connection, [str(pid).encode()], [handle])
    for each in (*files, handle):
        os.close(each)


def _become(files: list[int], environ: dict[str, str], entry: str, arguments: list[Any]) -> None:
    """Runs `entry` with the numbers of the files after the first two, and the arguments."""
    die_with_parent()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    source, output, *others = files
    for number, standard in ((source, 0), (output, 1), (output, 2)):
        os.dup2(number, standard)
    os.close(source)
    os.close(output)
    os.environ.clear()  # noqa: TID251 - a new process's
    os.environ.update(environ)  # noqa: TID251
    module, _, name = entry.partition(":")
    getattr(importlib.import_module(module), name)(*others, *arguments)


if __name__ == "__main__":
    main(sys.argv[1])
