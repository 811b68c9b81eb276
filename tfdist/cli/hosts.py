"""From `--hosts` to a cluster on several machines."""

from __future__ import annotations

import contextlib
import dataclasses
import getopt
import shlex
import socket
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

from tfdist.cluster.environments import hostfile as host_files
from tfdist.cluster.environments.base import DEFAULT_PORT, addresses
from tfdist.cluster.ports import HeldPorts, local_among
from tfdist.cluster.spec import ClusterSpec
from tfdist.config.strategy_config import StrategyConfig
from tfdist.config.strategy_spec import having, spec_of
from tfdist.errors import ConfigError
from tfdist.launcher.ssh import Ssh, cluster_on

__all__ = ["assign", "cluster_of", "of", "ssh_of"]


def of(hosts: str | None, hostfile: Path | None) -> Mapping[str, int] | None:
    """The slots of the machines that the command line names, or None.

    Raises:
        ConfigError: if both options are given, or one has a mistake.
    """
    if hosts is not None and hostfile is not None:
        raise ConfigError(
            f"--hosts {hosts} conflicts with --hostfile {str(hostfile)!r}: both name the machines. "
            "Leave one of them out."
        )
    if hosts is not None:
        return host_files.parse_list(hosts)
    return None if hostfile is None else host_files.read(hostfile)


def assign(machines: Mapping[str, int], count: int) -> tuple[str, ...]:
    """The host of each of `count` processes: each host is filled before the next.

    Args:
        machines: the slots of each host.
        count: the number of processes.

    Raises:
        ConfigError: if there are fewer slots.
    """
    by_slot = [host for host, slots in machines.items() for _ in range(slots)]
    if count > len(by_slot):
        listed = ", ".join(f"{host}:{slots}" for host, slots in machines.items())
        raise ConfigError(
            f"-n {count} is more than the {len(by_slot)} slots of the hosts {listed}. Lower it, or "
            "give a host more slots."
        )
    return tuple(by_slot[:count])


def ssh_of(arguments: str | None, python: str | None) -> Ssh:
    """The ssh command and options of a command line."""
    if python is not None and not python.strip():
        raise ConfigError(
            "--remote-python is empty. Give the path of Python on the other machines, or leave it "
            "out: tfdist then takes the path that it has here."
        )
    ssh = Ssh(arguments=_ssh_options(arguments or ""))
    return ssh if python is None else dataclasses.replace(ssh, python=python)


#: The options of OpenSSH's client, as getopt takes them: those before a colon have a value.
_OF_SSH = "46AaCfGgKkMNnqsTtVvXxYyB:b:c:D:E:e:F:I:i:J:L:l:m:O:o:P:p:Q:R:S:W:w:"


def _ssh_options(text: str) -> tuple[str, ...]:
    """The options for ssh, none of which it could take for a host or a command.

    Raises:
        ConfigError: if they are not options.
    """
    try:
        words = shlex.split(text)
        _, rest = getopt.getopt(words, _OF_SSH)
    except (ValueError, getopt.GetoptError) as error:
        raise ConfigError(
            f"--ssh-args {text!r} is not a list of ssh's options: {error}. Write them as in a "
            "shell, such as --ssh-args '-p 2222 -i key'."
        ) from error
    if rest:
        raise ConfigError(
            f"--ssh-args {text!r} has {rest[0]!r}, which is not an option of ssh's. ssh would take "
            "it for the host. Give hosts by --hosts, and options such as "
            "--ssh-args '-p 2222 -i key'."
        )
    return tuple(words)


@contextlib.contextmanager
def cluster_of(
    config: StrategyConfig, machines: Mapping[str, int], ssh: Ssh, *, dry_run: bool = False
) -> Iterator[tuple[ClusterSpec, Collection[str]]]:
    """The job's tasks, and the hosts that are this one; its ports are held within the block.

    Processes that train fill one machine after the other. With parameter servers, the chief is on
    the first machine, and the servers take turns on all. A dry run asks no host: its ports count
    from `DEFAULT_PORT`, while those of a job are found at its start.

    Raises:
        ConfigError: if there are too few slots, or the strategy runs in one process.
        StartError: if a machine cannot be used.
    """
    spec = spec_of(config.strategy)
    if not spec.is_clustered:
        clustered = having(lambda other: other.is_clustered)
        raise ConfigError(
            f"--hosts conflicts with strategy={config.strategy!r}, which runs in one process. "
            f"Choose {', '.join(clustered)}, or leave it out."
        )
    placed = list(assign(machines, config.processes))
    hosts_by_type: dict[str, list[str]] = {"worker": placed}
    if spec.has_stages:
        hosts_by_type = {"chief": placed[:1], "worker": placed[1:]}
    if spec.has_servers:
        names = list(machines)
        hosts_by_type = {
            "chief": names[:1],
            **hosts_by_type,
            "ps": [names[number % len(names)] for number in range(config.counts["ps"])],
        }
    everywhere = [host for hosts in hosts_by_type.values() for host in hosts]
    _check_loopback(everywhere)
    if dry_run:
        listed = iter(addresses(everywhere, DEFAULT_PORT, "--hosts"))
        assumed = {
            kind: tuple(next(listed) for _ in hosts) for kind, hosts in hosts_by_type.items()
        }
        yield ClusterSpec(assumed), {"localhost", socket.gethostname()}
        return
    here = local_among(everywhere)
    count = sum(host in here for host in everywhere)
    with contextlib.ExitStack() as stack:
        held = stack.enter_context(HeldPorts(count)) if count else None
        ports = held.ports if held else ()
        yield cluster_on(hosts_by_type, ssh, here, ports, config.start_timeout), here


def _check_loopback(hosts: Sequence[str]) -> None:
    """Another machine cannot reach this one at a loopback address."""
    loopback = [h for h in hosts if h == "localhost" or h.startswith("127.") or h == "::1"]
    if loopback and len(loopback) < len(hosts):
        raise ConfigError(
            f"--hosts names {loopback[0]!r}, which on each machine is that machine itself. Write "
            "the name or address by which the others reach this one."
        )
