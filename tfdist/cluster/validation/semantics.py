"""Finds mistakes of a well-formed TF_CONFIG: in its meaning, its machine and its host names."""

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
from tfdist.cluster.spec import Address, ClusterUse, Task, Topology, is_any_address, is_loopback
from tfdist.cluster.validation.finding import Finding, error, quoted, warning
from tfdist.cluster.validation.structure import CLUSTER, TASK, WHOLE, Listed, Reading, names

__all__ = ["Network", "Resolution", "ThisMachine", "meaning_findings", "network_findings"]


def meaning_findings(reading: Reading, use: ClusterUse | None) -> Iterator[Finding]:
    """The findings on a TF_CONFIG for the strategy that is to run on it.

    Args:
        reading: the TF_CONFIG.
        use: how the strategy uses it, or None if the strategy is not known.
    """
    topology = None if use is None else use.topology
    if not reading.listed:
        return
    if use is not None and topology is Topology.ONE_PROCESS:
        yield _ignored(use.strategy)
        return
    yield from _no_task(reading)
    yield from _hosts(reading)
    yield from _gaps(reading, use)
    if topology is Topology.SERVERS:
        yield from _parameter_server(reading)
    elif topology is Topology.STAGES:
        yield from _pipeline(reading)
    else:
        yield from _multi_worker(reading, certain=use is not None and use.tensorflow_connects)


def _no_task(reading: Reading) -> Iterator[Finding]:
    if not reading.has_task:
        yield error(
            TASK,
            'There is no "task", so this process does not know which task of the cluster it is.',
            'Add "task": {"type": "worker", "index": 0}, with another index in each process.',
        )


def _hosts(reading: Reading) -> Iterator[Finding]:
    addressed = [(entry, entry.address) for entry in reading.listed if entry.address is not None]
    for entry, address in addressed:
        if is_any_address(address.host):
            yield error(
                entry.where,
                f'"{address}" means all interfaces of a machine: no other task can call it.',
                "Write the machine's name or address; 127.0.0.1 if all tasks run on one machine.",
            )
    local = [(e, a) for e, a in addressed if is_loopback(a.host)]
    others = [a for _, a in addressed if not is_loopback(a.host) and not is_any_address(a.host)]
    if local and others:
        entry, address = local[0]
        yield error(
            entry.where,
            f'"{address}" means another machine to each task, but there are tasks elsewhere, such '
            f'as "{others[0]}".',
            f"Write the address by which the others reach {names([e.task for e, _ in local])}.",
        )


def _gaps(reading: Reading, use: ClusterUse | None) -> Iterator[Finding]:
    for kind in dict.fromkeys(entry.task.type for entry in reading.listed):
        present = {entry.task.index for entry in reading.of_type(kind)}
        missing = sorted(set(range(max(present) + 1)) - present)
        if missing:
            make = warning if use is None else error
            yield make(
                f"{CLUSTER}.{kind}",
                f"It lists {kind} {', '.join(map(str, sorted(present)))} but not "
                f"{', '.join(map(str, missing[:10]))}. Only programs of TensorFlow 1 allow gaps.",
                "List all tasks, numbered from 0 without gaps, the same in each process.",
            )


def _ignored(strategy: str) -> Finding:
    return warning(
        WHOLE,
        f"It is set, but strategy {quoted(strategy)} uses only this process and ignores it.",
        "Use strategy multi_worker, or unset TF_CONFIG.",
    )


def _multi_worker(reading: Reading, certain: bool) -> Iterator[Finding]:
    """The errors of multi_worker; only a warning if another strategy may be meant."""
    servers = reading.of_type("ps")
    if servers:
        where, remedy = f"{CLUSTER}.ps", 'Remove "ps" from the cluster, in each process.'
        problem = f"{len(servers)} ps task{'s are' if len(servers) > 1 else ' is'} listed."
        if certain:
            yield error(where, f"{problem} multi_worker waits for them without end.", remedy)
        else:
            yield warning(
                where,
                f"{problem} Only parameter-server training uses them; multi_worker waits for them "
                "without end.",
                f"For multi_worker: {remedy[0].lower()}{remedy[1:]}",
            )
    task = reading.task
    if task is None or task.type != "evaluator" or reading.of_type("evaluator"):
        return
    if certain:
        yield error(
            TASK,
            f"{task} is not in the cluster: TensorFlow's multi-worker strategy ends in KeyError: "
            "'evaluator'.",
            "Run the evaluator with strategy single or mirrored, or list its address.",
        )


def _pipeline(reading: Reading) -> Iterator[Finding]:
    yield from _no_chief(reading, "has the first stage")
    for kind in ("ps", "evaluator"):
        yield from _superfluous(reading, kind, f"pipeline has no stage on a task of type {kind}.")


def _parameter_server(reading: Reading) -> Iterator[Finding]:
    for kind in ("ps", "worker"):
        if not reading.of_type(kind):
            yield error(
                CLUSTER,
                f"It lists no {kind}. Parameter-server training needs at least one.",
                f'Add "{kind}": ["host:port"].',
            )
    yield from _no_chief(reading, "gives the workers their steps")
    task = reading.task
    if task is not None and task.type == "evaluator":
        yield error(
            TASK,
            f"{task} has nothing to do: with parameter_server `evaluate` runs on the workers.",
            "Start no evaluator. A program that evaluates checkpoints by itself runs with strategy "
            "single, and TF_CONFIG unset.",
        )
        return
    why = "parameter_server starts no evaluator: `evaluate` runs on the workers."
    yield from _superfluous(reading, "evaluator", why)


def _no_chief(reading: Reading, work: str) -> Iterator[Finding]:
    if not reading.of_type("chief"):
        yield error(
            CLUSTER,
            f"It lists no chief, the task that runs the script and {work}.",
            'Add "chief": ["host:port"], a task besides the workers.',
        )


def _superfluous(reading: Reading, kind: str, why: str) -> Iterator[Finding]:
    if reading.of_type(kind):
        yield warning(f"{CLUSTER}.{kind}", why, f'Remove "{kind}" from the cluster.')


# The machine that this runs on, and the names in the cluster.

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
        resolutions = dict.fromkeys(hosts, Resolution(late=True))
        waiting = list(resolutions)

        def resolve_waiting() -> None:
            with contextlib.suppress(IndexError):  # All have been taken.
                while True:
                    host = waiting.pop()
                    resolutions[host] = _resolve(host)

        count = min(_LOOKUPS_AT_ONCE, len(resolutions))
        threads = [threading.Thread(target=resolve_waiting, daemon=True) for _ in range(count)]
        deadline = time.monotonic() + self.lookup_seconds
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return dict(resolutions)

    def owns(self, address: str) -> bool:
        """Whether an IP address is this machine's."""
        return ports.is_local_host(address)

    def port_is_free(self, port: int) -> bool:
        """Whether a server can listen on a port of this machine, on all interfaces."""
        try:
            return ports.port_is_free(ports.ALL_INTERFACES, port)
        except OSError:
            return False


def _resolve(host: str) -> Resolution:
    try:
        entries = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as problem:
        return Resolution(failure=getattr(problem, "strerror", None) or str(problem))
    return Resolution(tuple(dict.fromkeys(str(entry[4][0]) for entry in entries)))


def network_findings(reading: Reading, network: Network) -> Iterator[Finding]:
    """The findings on the host names of a cluster and on this task's own address.

    Args:
        reading: the TF_CONFIG.
        network: whom to ask.
    """
    entries = [(entry, entry.address) for entry in reading.listed if entry.address is not None]
    resolved = network.resolve(address.host for _, address in entries)
    yield from _unresolved(entries, resolved)
    yield from _same_machine(entries, resolved)
    own = [(e, a) for e, a in entries if e.task == reading.task]
    for entry, address in own[:1]:
        if _is_here(address, resolved, network):
            yield from _port_in_use(entry, address, network)
        elif resolved[address.host].addresses:
            yield _not_here(entry, address, entries, resolved, network)


def _unresolved(
    entries: Sequence[tuple[Listed, Address]], resolved: Mapping[str, Resolution]
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
