"""Finds mistakes of a TF_CONFIG about the machine it is on and the names it uses."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from tfdist.cluster import ports
from tfdist.cluster.spec import Address, Task, is_loopback
from tfdist.cluster.validation.finding import Finding, error, warning
from tfdist.cluster.validation.structure import TASK, Listed, Reading, names

__all__ = ["Network", "Resolution", "ThisMachine", "network_findings"]

_LOOKUPS_AT_ONCE = 16


@dataclasses.dataclass(frozen=True)
class Resolution:
    """The result of looking up a host name.

    Attributes:
        addresses: its IP addresses.
        failure: why there are none; empty if there are some.
        late: whether the answer did not come in time.
    """

    addresses: tuple[str, ...] = ()
    failure: str = ""
    late: bool = False


class Network(Protocol):
    """The questions that the checks ask a machine."""

    def resolve(self, hosts: Iterable[str]) -> Mapping[str, Resolution]:
        """Looks up host names."""
        ...

    def owns(self, address: str) -> bool:
        """Whether an IP address is this machine's."""
        ...

    def port_is_free(self, port: int) -> bool:
        """Whether a server can listen on a port of this machine, on all interfaces."""
        ...


@dataclasses.dataclass(frozen=True)
class ThisMachine:
    """The machine that this runs on.

    Attributes:
        lookup_seconds: how long all lookups together may take.
    """

    lookup_seconds: float = 5.0

    def resolve(self, hosts: Iterable[str]) -> Mapping[str, Resolution]:
        """Looks up host names, several at a time.

        In daemon threads: a lookup cannot be cancelled and may outlast any deadline.
        """
        found = dict.fromkeys(hosts, Resolution(late=True))
        waiting = list(found)

        def look_up() -> None:
            with contextlib.suppress(IndexError):  # All have been taken.
                while True:
                    host = waiting.pop()
                    found[host] = _look_up(host)

        count = min(_LOOKUPS_AT_ONCE, len(found))
        threads = [threading.Thread(target=look_up, daemon=True) for _ in range(count)]
        deadline = time.monotonic() + self.lookup_seconds
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return dict(found)

    def owns(self, address: str) -> bool:
        """Whether an IP address is this machine's."""
        return ports.is_local_host(address)

    def port_is_free(self, port: int) -> bool:
        """Whether a server can listen on a port of this machine, on all interfaces."""
        try:
            return ports.port_is_free(ports.ALL_INTERFACES, port)
        except OSError:
            return False


def _look_up(host: str) -> Resolution:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as problem:
        return Resolution(failure=getattr(problem, "strerror", None) or str(problem))
    return Resolution(tuple(dict.fromkeys(str(entry[4][0]) for entry in found)))


def network_findings(reading: Reading, network: Network) -> Iterator[Finding]:
    """The findings on the host names of a cluster and on this task's own address.

    Args:
        reading: the TF_CONFIG.
        network: whom to ask.
    """
    entries = [(entry, entry.address) for entry in reading.listed if entry.address is not None]
    resolved = network.resolve(address.host for _, address in entries)
    yield from _unresolved(entries, resolved, network)
    yield from _same_machine(entries, resolved)
    own = [(e, a) for e, a in entries if e.task == reading.task]
    for entry, address in own[:1]:
        if _is_here(address, resolved, network):
            yield from _port_in_use(entry, address, network)
        elif resolved[address.host].addresses:
            yield _not_here(entry, address, entries, resolved, network)


def _unresolved(
    entries: Sequence[tuple[Listed, Address]],
    resolved: Mapping[str, Resolution],
    network: Network,
) -> Iterator[Finding]:
    users: defaultdict[str, list[Listed]] = defaultdict(list)
    for entry, address in entries:
        users[address.host].append(entry)
    for host, tasks in users.items():
        who = names([entry.task for entry in tasks])
        if resolved[host].late:
            yield warning(
                tasks[0].where,
                f'The lookup of the host "{host}" of {who} has not ended after some seconds.',
                "Check the name server of this machine, or write the IP address.",
            )
        elif not resolved[host].addresses:
            yield error(
                tasks[0].where,
                f'The host "{host}" of {who} does not resolve here: {resolved[host].failure}.',
                f"Correct the name, write the IP address, or check `getent hosts {host}`.",
            )


def _same_machine(
    entries: Sequence[tuple[Listed, Address]], resolved: Mapping[str, Resolution]
) -> Iterator[Finding]:
    """Different names of one machine with the same port: they collide, like equal addresses."""
    users: defaultdict[tuple[str, int], dict[str, Listed]] = defaultdict(dict)
    for entry, address in entries:
        if not is_loopback(address.host):
            for number in resolved[address.host].addresses[:1]:
                users[number, address.port].setdefault(address.host.lower(), entry)
    for (number, port), by_host in users.items():
        if len(by_host) > 1:
            hosts = " and ".join(f'"{host}"' for host in by_host)
            tasks = [entry.task for entry in by_host.values()]
            yield error(
                list(by_host.values())[-1].where,
                f"{hosts} are one machine, {number}, and {names(tasks)} use its port {port}.",
                "Give each task of a machine a port of its own.",
            )


def _is_here(address: Address, resolved: Mapping[str, Resolution], network: Network) -> bool:
    return any(network.owns(number) for number in resolved[address.host].addresses)


def _port_in_use(entry: Listed, address: Address, network: Network) -> Iterator[Finding]:
    if not network.port_is_free(address.port):
        yield error(
            entry.where,
            f'Port {address.port} of this task\'s address "{address}" is in use on this machine. '
            'TensorFlow would say only "Could not start gRPC server".',
            f"Stop who uses it (`ss -ltnp 'sport = :{address.port}'` tells), or choose another "
            "port in each process. If this task is running already, all is well.",
        )


def _not_here(
    own: Listed,
    address: Address,
    entries: Sequence[tuple[Listed, Address]],
    resolved: Mapping[str, Resolution],
    network: Network,
) -> Finding:
    here: list[Task] = [e.task for e, a in entries if _is_here(a, resolved, network)]
    number = resolved[address.host].addresses[0]
    shown = f'"{address.host}"' if number == address.host else f'"{address.host}" ({number})'
    if here:
        return error(
            TASK,
            f"This process is said to be {own.task} at {shown}, but this machine is that of "
            f"{names(here)}.",
            f'Set "type": "{here[0].type}", "index": {here[0].index}.',
        )
    return warning(
        own.where,
        f"{shown}, the host of {own.task}, is not this machine, so the others may not reach it "
        "here.",
        "Correct the address, if this is its machine. If it is a forwarded address, or you check "
        "for another machine, all is well.",
    )
