"""Two hosts on one machine: network namespaces, a cable between them, sshd on the second."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

NEAR, FAR = "10.77.31.1", "10.77.31.2"


@dataclass(frozen=True)
class TwoHosts:
    """The hosts.

    Attributes:
        near, far: their network namespaces.
        ssh_args: with which ssh on the first reaches the second.
    """

    near: str
    far: str
    ssh_args: str

    def on_near(self, *words: object) -> list[str]:
        """A command that runs on the first host."""
        return ["ip", "netns", "exec", self.near, *map(str, words)]

    def cut(self) -> None:
        """Takes the cable out."""
        _run("ip", "-n", self.near, "link", "set", "near", "down")

    def mend(self) -> None:
        """Puts it in again."""
        _run("ip", "-n", self.near, "link", "set", "near", "up")


def missing() -> str | None:
    """What this machine lacks for two hosts, or None."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for program, package in (("ip", "iproute2"), ("/usr/sbin/sshd", "openssh-server")):
        if shutil.which(program) is None:
            return f"{program} is not installed (Debian: {package})"
    probe = subprocess.run(["ip", "netns", "add", f"probe{os.getpid()}"], capture_output=True)
    if probe.returncode:
        return f"no network namespace can be made: {probe.stderr.decode().strip()}"
    _run("ip", "netns", "del", f"probe{os.getpid()}")
    return None


@contextlib.contextmanager
def two_hosts(folder: Path) -> Iterator[TwoHosts]:
    """Makes the hosts; they and their sshd are gone after the block.

    Args:
        folder: for the keys and sshd's files.
    """
    hosts = _named(folder)
    try:
        _wire(hosts)
        _keys(folder)
        sshd = ["ip", "netns", "exec", hosts.far, "/usr/sbin/sshd", "-D", "-f", folder / "conf"]
        server = subprocess.Popen(
            [*map(str, sshd)], stderr=subprocess.DEVNULL, start_new_session=True
        )
        try:
            _await_ssh(hosts)
            yield hosts
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGKILL)
            server.wait()
    finally:
        for space in (hosts.near, hosts.far):
            subprocess.run(["ip", "netns", "del", space], capture_output=True, check=False)


def _named(folder: Path) -> TwoHosts:
    quiet = "-o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR"
    return TwoHosts(
        f"near{os.getpid()}", f"far{os.getpid()}", f"-i {folder / 'key'} -F /dev/null {quiet}"
    )


def _wire(hosts: TwoHosts) -> None:
    for space in (hosts.near, hosts.far):
        _run("ip", "netns", "add", space)
        _run("ip", "-n", space, "link", "set", "lo", "up")
    cable = ("link", "add", "near", "netns", hosts.near, "type", "veth")
    _run("ip", *cable, "peer", "name", "far", "netns", hosts.far)
    for space, end, address in ((hosts.near, "near", NEAR), (hosts.far, "far", FAR)):
        _run("ip", "-n", space, "addr", "add", f"{address}/24", "dev", end)
        _run("ip", "-n", space, "link", "set", end, "up")


def _keys(folder: Path) -> None:
    for name in ("key", "host"):
        _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name)
    Path("/run/sshd").mkdir(exist_ok=True)
    (folder / "conf").write_text(
        f"HostKey {folder / 'host'}\nAuthorizedKeysFile {folder / 'key.pub'}\nStrictModes no\n"
        f"PermitRootLogin yes\nUsePAM no\nPidFile {folder / 'pid'}\nListenAddress {FAR}\n"
    )


def _await_ssh(hosts: TwoHosts) -> None:
    deadline = time.monotonic() + 20
    command = hosts.on_near("ssh", *hosts.ssh_args.split(), FAR, "true")
    while subprocess.run(command, capture_output=True).returncode:
        if time.monotonic() > deadline:
            raise TimeoutError(f"sshd on {FAR} does not answer")
        time.sleep(0.2)


def _run(*words: object) -> None:
    subprocess.run([*map(str, words)], check=True, capture_output=True)
