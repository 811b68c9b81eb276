"""Connects the processes of a job by Horovod's Gloo, and sets Horovod's variables.

The chief runs Horovod's own rendezvous server and names its port to the others when they join, so
every job that TF_CONFIG describes needs no other launcher. A job that was started by `horovodrun`
has all of this in its environment already.
"""

from __future__ import annotations

import contextlib
import dataclasses
import ipaddress
import socket
from collections.abc import Callable, Mapping
from typing import Any

from tfdist import environment
from tfdist.cluster.spec import ClusterSpec, Rank, Task, rank_of, ranks
from tfdist.config import horovod_options
from tfdist.config.strategy_config import StrategyConfig
from tfdist.errors import ConfigError, StartError

__all__ = ["OFFER", "meeting", "offer", "offer_of", "prepare", "started_by_horovodrun"]

#: Under this name the chief offers the port of its rendezvous server.
OFFER = "horovod_port"

#: Seconds by which Horovod's own deadline for its start, and for each collective, is later.
_LATER = 30

#: Keeps the server of this process alive: process sets meet there later.
_servers: list[Any] = []


def started_by_horovodrun(environ: Mapping[str, str] | None = None) -> bool:
    """Whether `horovodrun`, or what sets the same variables, has given this process its rank.

    Args:
        environ: where to look; by default the process's own environment.
    """
    return environment.read("HOROVOD_RANK", environ) is not None


def offer(cluster: ClusterSpec) -> Mapping[str, str]:
    """Starts the rendezvous server; called by the chief before the others join.

    Args:
        cluster: the tasks.

    Returns:
        The values that the others must be given.
    """
    from horovod.runner.common.util.hosts import SlotInfo
    from horovod.runner.http import http_server
    from horovod.runner.util.network import find_port
    from horovod.runner.util.threads import in_thread

    server = http_server.RendezvousServer()
    if cluster.is_on_loopback:
        # Horovod's own `start` listens on all interfaces.
        host = socket.gethostbyname(next(cluster.tasks())[1].host)
        listen, handler = http_server.RendezvousHTTPServer, http_server.RendezvousHandler
        server._httpd, port = find_port(lambda address: listen((host, address[1]), handler, 0))
        server._listen_thread = in_thread(server._httpd.serve_forever)
    else:
        port = server.start()
    slots = [SlotInfo(**_slot(rank)) for rank in ranks(cluster)]
    server.init(slots)
    _servers[:] = [server]
    return {OFFER: str(port)}


def offer_of(config: StrategyConfig) -> Callable[[ClusterSpec], Mapping[str, str]] | None:
    """The function that makes the chief's offer to the others, as `join_cluster` takes it."""
    return offer if config.strategy == "horovod" else None


def prepare(
    config: StrategyConfig,
    cluster: ClusterSpec | None,
    task: Task | None,
    offered: Mapping[str, str],
) -> None:
    """Sets the variables that Horovod reads when it is initialised.

    Args:
        config: the configuration.
        cluster: the tasks, or None if Horovod's own launcher has set the ranks.
        task: this one.
        offered: the chief's offer.

    Raises:
        ConfigError: if an option contradicts a variable that the user has set.
        StartError: if the launcher's rendezvous server does not answer.
    """
    now = environment.snapshot()
    asked = dict(horovod_options.variables(config.part(horovod_options.HorovodOptions)))
    for name, value in asked.items():
        if now.get(name, value) != value:
            raise ConfigError(
                f"{name}={now[name]!r} in the environment conflicts with {value!r}, which an "
                "option of tfdist asks for. Unset the variable or leave the option out."
            )
    wanted = {**horovod_options.defaults(), **now, **asked}
    # Horovod ends the process without a word after its own deadline: tfdist's comes first.
    own_deadline = round(config.start_timeout) + _LATER
    wanted.setdefault("HOROVOD_GLOO_TIMEOUT_SECONDS", str(own_deadline))
    if cluster is None:
        _check_server(now, config.start_timeout)
    if cluster is not None and task is not None:
        wanted.update(meeting(cluster, task, offered, now))
    environment.set_for_good({k: v for k, v in wanted.items() if k.startswith("HOROVOD_")})


def _check_server(now: Mapping[str, str], timeout: float) -> None:
    """Checks that the rendezvous server answers at the address that the launcher has set."""
    host = now.get("HOROVOD_GLOO_RENDEZVOUS_ADDR")
    port = now.get("HOROVOD_GLOO_RENDEZVOUS_PORT", "")
    if host is None or not port.isdecimal():
        return
    try:
        socket.create_connection((host, int(port)), timeout).close()
    except OSError as error:
        raise StartError(
            f"Horovod's rendezvous server at {host}:{port} does not answer ({error}). The launcher "
            "that set HOROVOD_GLOO_RENDEZVOUS_ADDR and HOROVOD_RANK for this process has ended, or "
            "this host cannot reach it. Start the job again, or unset these variables."
        ) from error


def meeting(
    cluster: ClusterSpec, task: Task, offered: Mapping[str, str], now: Mapping[str, str]
) -> dict[str, str]:
    """The variables by which a task finds the others, as Horovod's own launcher would set them.

    Args:
        cluster: the tasks.
        task: this one.
        offered: the chief's offer.
        now: the environment, which may name an interface.
    """
    rank = rank_of(cluster, task)
    slot = {name: value for name, value in _slot(rank).items() if name != "hostname"}
    variables = {f"HOROVOD_{name.upper()}": str(value) for name, value in slot.items()}
    variables.update(
        HOROVOD_HOSTNAME=rank.host, HOROVOD_CONTROLLER="gloo", HOROVOD_CPU_OPERATIONS="gloo"
    )
    if rank.size > 1:
        variables["HOROVOD_GLOO_RENDEZVOUS_ADDR"] = _address(cluster.address(cluster.chief).host)
        variables["HOROVOD_GLOO_RENDEZVOUS_PORT"] = offered[OFFER]
    interface = now.get("HOROVOD_GLOO_IFACE") or _interface(_address(rank.host))
    if interface:
        variables["HOROVOD_GLOO_IFACE"] = interface
    return variables


def _slot(rank: Rank) -> dict[str, Any]:
    slot = dataclasses.asdict(rank)
    slot["hostname"] = slot.pop("host")
    return slot


def _address(host: str) -> str:
    """A host's address: Horovod's own look-up takes no IPv6 and gives no reason."""
    with contextlib.suppress(ValueError):
        return str(ipaddress.ip_address(host))
    try:
        return socket.gethostbyname(host)
    except OSError as error:
        raise ConfigError(
            f"The host {host!r} of TF_CONFIG has no IPv4 address here ({error}). Horovod needs "
            "one: write the address instead of the name, or correct the name."
        ) from error


def _interface(address: str) -> str | None:
    """The network interface of this host that has an address."""
    import psutil

    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address.split("%")[0] == address for entry in entries):
            return str(name)
    return None
