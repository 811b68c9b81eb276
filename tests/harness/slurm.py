"""A Slurm of two nodes on one machine, each a host with a name, an address and ports of its own."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tfdist import environment

#: The nodes and their addresses. The first also runs the controller, and takes commands.
NODES = {"n1": "10.77.33.1", "n2": "10.77.33.2"}
GPUS_ON_A_NODE = 2

_PROGRAMS = {
    "munged": "munge",
    "slurmctld": "slurm-wlm",
    "slurmd": "slurm-wlm",
    "sbatch": "slurm-wlm",
    "ip": "iproute2",
    "nsenter": "util-linux",
    "unshare": "util-linux",
}
_START_SECONDS = 60
_END_SECONDS = 45

_CONF = """
ClusterName=tfdist
SlurmctldHost=n1
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
KillWait=10
GresTypes=gpu
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,bf_interval=1
NodeName=n[1-2] CPUs=8 RealMemory=1000 Gres=gpu:{gpus} State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=60 State=UP
"""


@dataclass
class Slurm:
    """A cluster that is up.

    Attributes:
        folder: its configuration and logs.
    """

    folder: Path
    daemons: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def on(self, node: str, *words: object) -> list[str]:
        """A command that runs on a node, in the present directory."""
        enter = 'mount --bind "$0" /etc/hosts && hostname "$1" && shift && exec "$@"'
        return [
            *("nsenter", f"--net=/run/netns/{_space(node)}", "unshare", "--mount", "--uts"),
            *("sh", "-c", enter, str(self.folder / "hosts"), node),
            *map(str, words),
        ]

    def environ(self, **more: str) -> dict[str, str]:
        """The variables of a user of this cluster."""
        own = {k: v for k, v in environment.snapshot().items() if not k.startswith("SLURM_")}
        return {**own, "SLURM_CONF": str(self.folder / "slurm.conf"), **more}

    def ask(self, *words: object) -> str:
        """What a command of Slurm prints."""
        done = subprocess.run(
            self.on("n1", *words),
            env=self.environ(),
            text=True,
            capture_output=True,
            timeout=30,
            check=True,
        )
        return done.stdout.strip()

    def jobs(self) -> list[str]:
        """The state of each job that has not ended."""
        return self.ask("squeue", "--noheader", "--format=%T").split()

    def wait_for(self, *states: str, seconds: float = 60) -> None:
        """Waits until the jobs are in these states."""
        deadline = time.monotonic() + seconds
        while self.jobs() != [*states]:
            if time.monotonic() > deadline:
                raise TimeoutError(f"jobs are {self.jobs()} after {seconds} s, not {states}")
            time.sleep(0.2)


def missing() -> str | None:
    """What this machine lacks for a Slurm, or None."""
    if os.geteuid() != 0:
        return "a Slurm of its own needs root"
    for program, package in _PROGRAMS.items():
        if shutil.which(program) is None:
            return f"{program} is not installed (Debian: {package})"
    probe = f"slurm{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, check=False)
    if made.returncode:
        return f"no network namespace can be made: {made.stderr.decode().strip()}"
    _run("ip", "netns", "del", probe)
    return None


@contextlib.contextmanager
def slurm(folder: Path) -> Iterator[Slurm]:
    """Starts a cluster; its jobs, daemons and namespaces are gone after the block.

    Args:
        folder: for all its files; it shares nothing with a Slurm or munge that the machine runs.
    """
    cluster = Slurm(folder)
    try:
        _wire()
        _write_files(folder)
        _start(cluster)
        yield cluster
    finally:
        _end(cluster)
        for node in NODES:
            subprocess.run(["ip", "netns", "del", _space(node)], capture_output=True, check=False)


def _space(node: str) -> str:
    return f"slurm-{node}-{os.getpid()}"


def _wire() -> None:
    for node in NODES:
        _run("ip", "netns", "add", _space(node))
        _run("ip", "-n", _space(node), "link", "set", "lo", "up")
    ends = dict(zip(NODES, ("one", "two"), strict=True))
    cable = ("link", "add", "one", "netns", _space("n1"), "type", "veth", "peer", "name", "two")
    _run("ip", *cable, "netns", _space("n2"))
    for node, end in ends.items():
        _run("ip", "-n", _space(node), "addr", "add", f"{NODES[node]}/24", "dev", end)
        _run("ip", "-n", _space(node), "link", "set", end, "up")


def _write_files(folder: Path) -> None:
    for name in ("state", *(f"spool-{node}" for node in NODES)):
        (folder / name).mkdir()
    hosts = "".join(f"{address} {node}\n" for node, address in NODES.items())
    (folder / "hosts").write_text(f"127.0.0.1 localhost\n{hosts}")
    (folder / "slurm.conf").write_text(_CONF.format(folder=folder, gpus=GPUS_ON_A_NODE))
    for number in range(GPUS_ON_A_NODE):
        (folder / f"gpu{number}").touch()
    gpus = f"File={folder}/gpu[0-{GPUS_ON_A_NODE - 1}]"
    (folder / "gres.conf").write_text(f"NodeName=n[1-2] Name=gpu {gpus}\n")
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)


def _start(cluster: Slurm) -> None:
    names = {"key-file": "key", "socket": "socket", "pid-file": "pid", "seed-file": "seed"}
    own = [f"--{option}={cluster.folder}/munge.{name}" for option, name in names.items()]
    log = f"--log-file={cluster.folder}/munge.log"
    _launch(cluster, ["munged", "--foreground", "--force", *own, log])
    deadline = time.monotonic() + _START_SECONDS
    while not (cluster.folder / "munge.socket").exists():
        _look(cluster, deadline)
    _launch(cluster, cluster.on("n1", "slurmctld", "-D"))
    for node in NODES:
        _launch(cluster, cluster.on(node, "slurmd", "-D"))
    idle = ("sinfo", "--noheader", "--states=idle", "--format=%D")
    while _said(cluster, *idle) != str(len(NODES)):
        _look(cluster, deadline)


def _launch(cluster: Slurm, words: list[str]) -> None:
    with (cluster.folder / "daemons.log").open("ab") as log:
        cluster.daemons.append(
            subprocess.Popen(
                words,
                env=cluster.environ(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        )


def _look(cluster: Slurm, deadline: float) -> None:
    """Waits a moment for a cluster that comes up."""
    ended = [daemon.args for daemon in cluster.daemons if daemon.poll() is not None]
    if ended or time.monotonic() > deadline:
        said = (cluster.folder / "daemons.log").read_text()[-3000:]
        raise TimeoutError(f"Slurm is not up; ended: {ended}. Its daemons say:\n{said}")
    time.sleep(0.2)


def _said(cluster: Slurm, *words: str) -> str:
    try:
        return cluster.ask(*words)
    except subprocess.SubprocessError:
        return ""


def _end(cluster: Slurm) -> None:
    """Ends the jobs, then the daemons."""
    if len(cluster.daemons) > 1:
        with contextlib.suppress(subprocess.SubprocessError, TimeoutError):
            cluster.ask("scancel", "--user=root")
            cluster.wait_for(seconds=_END_SECONDS)
    for number in (signal.SIGTERM, signal.SIGKILL):
        for daemon in reversed(cluster.daemons):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(daemon.pid, number)
        deadline = time.monotonic() + 10
        while any(d.poll() is None for d in cluster.daemons) and time.monotonic() < deadline:
            time.sleep(0.1)


def _run(*words: object) -> None:
    subprocess.run([*map(str, words)], check=True, capture_output=True)
