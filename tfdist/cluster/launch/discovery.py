"""How many processes this machine may run now, as a script of the user's says."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import subprocess
import threading
from types import TracebackType

from tfdist.errors import ConfigError

__all__ = ["Discovery", "slots_of"]

_SCRIPT_SECONDS = 10.0
_PERIOD = 1.0


def slots_of(text: str, script: str) -> int:
    """Adds up the slots of a list of hosts.

    Args:
        text: a line for each host, `name:slots` or `name` for one slot, as Horovod's discovery
            scripts print them.
        script: where it came from, for messages.

    Raises:
        ConfigError: if a line is none of these, or names another machine.
    """
    total = 0
    for line in filter(None, map(str.strip, text.splitlines())):
        host, _, count = line.rpartition(":") if ":" in line else (line, "", "1")
        if not count.isdecimal():
            raise ConfigError(
                f"--host-discovery-script {script!r} printed {line!r}. It must print a line for "
                "each host, such as localhost:4."
            )
        if not _is_here(host):
            raise ConfigError(
                f"--host-discovery-script {script!r} printed {line!r}, which is another machine. "
                "Elastic jobs run on the machine where they are started: let it print localhost "
                "and the number of processes, such as localhost:4."
            )
        total += int(count)
    return total


class Discovery:
    """Asks the script again and again while a job runs. A context manager.

    Args:
        script: a program that prints hosts and their slots.
    """

    def __init__(self, script: str) -> None:
        self._script = script
        self._slots = self._ask()
        self._problem: str | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="tfdist discovery", daemon=True)

    def __enter__(self) -> Discovery:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join(_SCRIPT_SECONDS + 1)

    @property
    def slots(self) -> int:
        """How many processes may run, as the script said last."""
        return self._slots

    def news(self) -> str | None:
        """What is wrong with the script since it was asked last, once."""
        problem, self._problem = self._problem, None
        return problem

    def _watch(self) -> None:
        while not self._stop.wait(_PERIOD):
            try:
                self._slots = self._ask()
            except ConfigError as error:
                self._problem = str(error)

    def _ask(self) -> int:
        try:
            done = subprocess.run(
                [self._script],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_SCRIPT_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise ConfigError(
                f"--host-discovery-script {self._script!r} took longer than "
                f"{_SCRIPT_SECONDS:.0f} s. Let it print what it knows and end."
            ) from None
        except OSError as error:
            raise ConfigError(
                f"--host-discovery-script {self._script!r} cannot be run: {error.strerror}. Give "
                "the path of an executable file, such as ./hosts.sh."
            ) from error
        if done.returncode:
            raise ConfigError(
                f"--host-discovery-script {self._script!r} failed with exit status "
                f"{done.returncode}: {done.stderr.strip()[-300:]}"
            )
        return slots_of(done.stdout, self._script)


def _is_here(host: str) -> bool:
    names = {"localhost", socket.gethostname(), socket.getfqdn()}
    if host.strip("[]") in names:
        return True
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    return False
