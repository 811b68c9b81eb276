"""Tasks on other machines, by the system's ssh client: one connection for each task.

ssh itself is the local process of such a task, so its output, its end and its place in the job are
those of any other. The far end is `python -m tfdist.launcher.ssh`. Its standard input comes from
the launcher: one line with the command, then a beat now and then. The task runs as long as the
beats come. When the launcher dies, or nothing has been heard of it for a while because the network
is gone, the task is ended, politely and then by force.

The same program, called with `look`, reports the facts of its host that the launcher needs first.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import json
import os
import platform
import select
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from tfdist import environment
from tfdist.cluster import resources as gpu_lists
from tfdist.cluster.ports import HeldPorts
from tfdist.cluster.rendezvous.coordinator import CLOCKS_APART
from tfdist.cluster.rendezvous.join import identity
from tfdist.cluster.spec import Address, ClusterSpec
from tfdist.errors import StartError
from tfdist.launcher.plan import (
    JobPlan,
    Program,
    TaskPlan,
    cluster_variables,
    local_ranks,
    task_plan,
)

__all__ = [
    "BEAT_SECONDS",
    "Ssh",
    "carried",
    "cluster_on",
    "differences",
    "host_facts",
    "order_of",
    "plan_hosts",
]

_REMOTE = "tfdist.launcher.ssh"
_DEFAULTS = {
    "BatchMode": "yes",
    "ConnectTimeout": "10",
    "ServerAliveInterval": "3",
    "ServerAliveCountMax": "3",
}

#: Variables that belong to a machine or a login, and do not go to another.
_OWN = {
    *("HOME", "HOSTNAME", "LOGNAME", "MAIL", "OLDPWD", "PWD", "SHELL", "SHLVL", "TERM", "TMPDIR"),
    *("USER", "DISPLAY", "CUDA_VISIBLE_DEVICES", "TF_CONFIG", "_"),
}
_OWN_PREFIXES = ("SSH_", "XDG_", "DBUS_", "BASH_FUNC_")


@dataclasses.dataclass(frozen=True)
class Ssh:
    """The ssh command and options for other machines.

    Attributes:
        arguments: further arguments of ssh, such as `("-p", "2222")`.
        python: the interpreter there, in which tfdist is installed.
    """

    arguments: tuple[str, ...] = ()
    python: str = sys.executable

    def command(self, host: str, words: Sequence[str]) -> tuple[str, ...]:
        """The local command that runs `words` on a host."""
        options = [part for k, v in _DEFAULTS.items() for part in ("-o", f"{k}={v}")]
        return ("ssh", "-T", *self.arguments, *options, "--", host, shlex.join(words))

    def inspect(self, host: str, ports: int, seconds: float) -> dict[str, Any]:
        """Asks a host for free ports, its versions and its clock.

        Raises:
            StartError: if it cannot be reached, or tfdist does not run there.
        """
        words = (self.python, "-m", _REMOTE, "look", str(ports), str(Path.cwd()))
        try:
            done = subprocess.run(
                self.command(host, words),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=seconds,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise StartError(f"{host}: no answer to ssh within {seconds:.0f} s.") from None
        except OSError as error:
            raise StartError(f"{host}: ssh cannot be run here: {error.strerror}.") from error
        if done.returncode == 0 and done.stdout:
            facts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
            return facts
        errors = " ".join(done.stderr.split())[-300:]
        if done.returncode == 255:
            raise StartError(
                f"{host}: ssh did not connect: {errors}. Try `ssh {host} true`: it must work "
                "without a password."
            )
        raise StartError(
            f"{host}: {self.python} does not run tfdist in {str(Path.cwd())!r} there: {errors}. "
            "The directory and the environment must be on every host at the same path; "
            "--remote-python names another interpreter."
        )


def cluster_on(
    hosts_by_type: Mapping[str, Sequence[str]],
    ssh: Ssh,
    here: Collection[str],
    local: Sequence[int],
    seconds: float,
) -> ClusterSpec:
    """A cluster on several hosts, each of which has been seen to answer.

    Args:
        hosts_by_type: for each type of task the hosts of its tasks, in order.
        ssh: how the hosts are reached.
        here: the hosts that are this machine.
        local: free ports of this machine, held by the caller, for its own tasks.
        seconds: how long a host may take to answer.

    Raises:
        StartError: with every host that cannot be used, and why.
    """
    counts = Counter(host for hosts in hosts_by_type.values() for host in hosts)
    others = [host for host in counts if host not in here]
    ports = {host: list(local) for host in counts if host not in others}
    problems: list[str] = []
    with concurrent.futures.ThreadPoolExecutor(max(1, min(64, len(others)))) as pool:
        asked = {host: pool.submit(ssh.inspect, host, counts[host], seconds) for host in others}
    for host, answer in asked.items():
        error = answer.exception()
        if isinstance(error, StartError):
            problems.append(str(error))
            continue
        facts = answer.result()
        problems += differences(host, facts)
        ports[host] = list(facts["ports"])
    if problems:
        raise StartError("The job cannot start on all hosts:\n  " + "\n  ".join(problems))
    return ClusterSpec(
        {
            kind: tuple(Address(host, ports[host].pop(0)) for host in hosts)
            for kind, hosts in hosts_by_type.items()
        }
    )


def plan_hosts(
    program: Program,
    *,
    cluster: ClusterSpec,
    here: Collection[str],
    ssh: Ssh,
    log_dir: Path,
    environ: Mapping[str, str],
    gpus: tuple[str, ...] = (),
) -> JobPlan:
    """Plans a job whose tasks run on several hosts. Starts nothing.

    Args:
        program: what to run.
        cluster: the tasks.
        here: the hosts that are this machine: their tasks are started without ssh.
        ssh: how the others are reached.
        log_dir: where the log files go, on this machine.
        environ: the environment that is carried over.
        gpus: the GPUs of this machine; elsewhere a host's own are shared by its tasks.

    Raises:
        ConfigError: if this machine has GPUs, but too few.
    """
    shares = local_ranks(program, cluster)
    variables = cluster_variables(program, cluster, log_dir)
    tasks = []
    for task, address in cluster.tasks():
        share = shares.get(task)
        if address.host in here:
            own = gpu_lists.split(gpus, share[1])[share[0]] if gpus and share else None
            tasks.append(task_plan(program, cluster, task, log_dir, environ, own, variables))
        else:
            plan = task_plan(program, cluster, task, log_dir, {}, None, variables)
            tasks.append(_over_ssh(plan, address.host, ssh, environ, share, variables.files))
    return JobPlan(
        tasks=tuple(tasks),
        cluster=cluster,
        shown=cluster.chief,
        log_dir=log_dir,
        files=variables.files,
    )


def _over_ssh(
    plan: TaskPlan,
    host: str,
    ssh: Ssh,
    environ: Mapping[str, str],
    share: tuple[int, int] | None,
    files: Mapping[Path, str],
) -> TaskPlan:
    command = (ssh.python, *plan.command[1:])
    there = {**carried(environ), **plan.environ}
    return dataclasses.replace(
        plan,
        command=ssh.command(host, (ssh.python, "-m", _REMOTE)),
        environ={},
        host=host,
        order=functools.partial(order_of, command, there, share, files),
    )


def carried(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that go to another machine: those that belong to none."""
    return {
        name: value
        for name, value in environ.items()
        if name not in _OWN and not name.startswith(_OWN_PREFIXES)
    }


def differences(host: str, facts: Mapping[str, Any]) -> list[str]:
    """The differences between a host and this machine that would affect a task.

    Args:
        host: the host's name, for messages.
        facts: the result of `host_facts` a moment ago.
    """
    here = identity("")
    problems = [
        f"{host}: {name} {facts['identity'].get(name)} there, {version} here. Install the same."
        for name, version in here.items()
        if facts["identity"].get(name) != version
    ]
    apart = facts["time"] - time.time()
    if abs(apart) > CLOCKS_APART:
        problems.append(f"{host}: its clock is {apart:+.0f} s from this one's. Set it, as by NTP.")
    return problems


# The far end, and the order that it reads.

#: Seconds between two beats, and without one after which the task is ended.
BEAT_SECONDS, _SILENCE_SECONDS = 2.0, 20.0

_GRACE = 5.0
_POLL = 0.2


def order_of(
    command: tuple[str, ...],
    environ: Mapping[str, str | None],
    share: tuple[int, int] | None,
    files: Mapping[Path, str],
) -> bytes:
    """The line with the command.

    Args:
        command: the program and its arguments.
        environ: changes to the environment there; None removes a variable.
        share: which of how many equal parts of the host's GPUs the task gets, or None for all.
        files: texts that variables of `environ` name by their paths here.
    """
    order = {
        "command": command,
        "environ": dict(environ),
        "share": share,
        "cwd": os.getcwd(),
        "files": {str(path): text for path, text in files.items()},
    }
    return json.dumps(order).encode() + b"\n"


def host_facts(ports: int) -> dict[str, Any]:
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
            "gpus": len(gpu_lists.visible(environment.snapshot())),
        }


def _main(arguments: list[str]) -> int:
    """Looks, or runs one task; its exit status is 128 + n if signal n ended it."""
    if arguments[:1] == ["look"]:
        os.chdir(arguments[2])
        print(json.dumps(host_facts(int(arguments[1]))), flush=True)
        return 0
    with open(0, "rb", buffering=0, closefd=False) as lines:  # No beat is read with the order.
        order = json.loads(lines.readline())
    with tempfile.TemporaryDirectory(prefix="tfdist-") as folder:
        changes = {**_with_files(order["environ"], order["files"], folder), **_gpus(order["share"])}
        try:
            os.chdir(order["cwd"])
            process = subprocess.Popen(
                order["command"],
                stdin=subprocess.DEVNULL,
                env=environment.merged(changes),
                start_new_session=True,
            )
        except OSError as error:
            where = f"{order['command'][0]!r} in {order['cwd']!r}"
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
    seen = gpu_lists.visible(environment.snapshot())
    if share is None or not seen:
        return {}
    part, parts = share
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpu_lists.split(seen, parts, None)[part])}


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
        elif time.monotonic() - heard > _SILENCE_SECONDS:
            print(f"tfdist: nothing was heard of the launcher for {_SILENCE_SECONDS:.0f} s.")
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
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
