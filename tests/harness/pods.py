"""The places of pods on one machine: a network namespace each, and one bridge between them."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator


def missing() -> str | None:
    """What this machine lacks for pods, or None."""
    if os.geteuid() != 0:
        return "namespaces need root"
    for program, package in (("ip", "iproute2"), ("unshare", "util-linux"), ("hostname",) * 2):
        if shutil.which(program) is None:
            return f"{program} is not installed (Debian: {package})"
    probe = f"podprobe{os.getpid()}"
    steps = (f"netns add {probe}", f"-n {probe} link add bridge type bridge", f"netns del {probe}")
    for step in steps:
        done = subprocess.run(["ip", *step.split()], capture_output=True, text=True)
        if done.returncode:
            subprocess.run(["ip", "netns", "del", probe], capture_output=True)
            return f"no networks can be made (ip {step}): {done.stderr.strip()}"
    return None


@contextlib.contextmanager
def network(names: list[str]) -> Iterator[dict[str, tuple[str, str]]]:
    """For each name a network namespace and its address; all are on one bridge."""
    spaces = {name: f"pod{os.getpid()}n{i}" for i, name in enumerate(names, 1)}
    switch = f"pod{os.getpid()}n0"

    def ip(words: str) -> None:
        subprocess.run(["ip", *words.split()], check=True, capture_output=True)

    try:
        ip(f"netns add {switch}")
        ip(f"-n {switch} link add bridge type bridge")
        ip(f"-n {switch} link set bridge up")
        for i, space in enumerate(spaces.values(), 1):
            ip(f"netns add {space}")
            ip(f"link add eth0 netns {space} type veth peer name port{i} netns {switch}")
            ip(f"-n {switch} link set port{i} master bridge up")
            ip(f"-n {space} addr add 10.77.32.{i}/24 dev eth0")
            ip(f"-n {space} link set eth0 up")
            ip(f"-n {space} link set lo up")
        yield {name: (space, f"10.77.32.{i}") for i, (name, space) in enumerate(spaces.items(), 1)}
    finally:
        for space in (switch, *spaces.values()):
            subprocess.run(["ip", "netns", "del", space], capture_output=True, check=False)


#: Puts the hosts file in the place of the machine's, for this process alone, and starts a command.
AS_POD = 'mount --bind "$1" /etc/hosts && hostname "$2" && shift 2 && exec "$@"'
