"""Free TCP ports, held until the task that they are meant for takes them over.

TensorFlow's gRPC server listens on all interfaces of the machine, whatever host TF_CONFIG names, so
a port counts as free only if it is free on all of them.

A held port is handed over by rules of Linux: two sockets may bind one port if both set
SO_REUSEADDR and none of them listens yet, or if both set SO_REUSEPORT and have the same user. gRPC
sets SO_REUSEADDR on its own sockets. SO_REUSEPORT alone would not do: TensorFlow turns that off in
gRPC unless TF_GRPC_REUSE_PORT is set (TensorFlow 2.21). A held port sets both.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import errno
import socket
from collections.abc import Iterable
from types import TracebackType

from tfdist.cluster.spec import Address
from tfdist.errors import ConfigError

__all__ = ["ALL_INTERFACES", "HeldPorts", "bind", "is_local_host", "local_among", "port_is_free"]

#: The host that stands for all interfaces of this machine, as in Python's `socket`.
ALL_INTERFACES = ""


_LOOKUPS = 64


class HeldPorts:
    """Free TCP ports that the system gives to no other process while they are held.

    Bound, but not listening: who connects to one is refused, as if nothing were there. A server
    that asks for this very port and sets SO_REUSEADDR, such as TensorFlow's, can take it over at
    any time, without a moment in which nobody has it. The sockets are not inherited by child
    processes and vanish with this process.

    Example:
        with HeldPorts(2) as held:
            start_tasks(held.addresses)   # each task's server binds its port
            wait_until_all_listen()

    Args:
        count: how many ports.

    Raises:
        ConfigError: if the count is not positive.
        OSError: if the machine has no free port left.
    """

    def __init__(self, count: int) -> None:
        if count < 1:
            raise ConfigError(f"HeldPorts({count}): ask for at least one port.")
        self._sockets: dict[int, socket.socket] = {}
        try:
            for _ in range(count):
                held = bind(ALL_INTERFACES, 0, shared=True)
                self._sockets[held.getsockname()[1]] = held
        except BaseException:
            self.release()
            raise
        self._ports = tuple(self._sockets)

    @property
    def ports(self) -> tuple[int, ...]:
        """The ports, in the order in which they were taken; also after their release."""
        return self._ports

    @property
    def addresses(self) -> tuple[Address, ...]:
        """The ports, as addresses that this machine alone can reach."""
        return tuple(Address("127.0.0.1", port) for port in self._ports)

    def release(self, port: int | None = None) -> None:
        """Gives up one port, or all that are left. Ports given up already are not an error."""
        for number in [port] if port is not None else list(self._sockets):
            held = self._sockets.pop(number, None)
            if held is not None:
                held.close()

    def __enter__(self) -> HeldPorts:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


def port_is_free(host: str, port: int) -> bool:
    """Whether TensorFlow's server could bind a port now.

    A port that `HeldPorts` holds is free in this sense, and so is one whose last connections are
    still closing (TIME_WAIT).

    Args:
        host: a name or address of this machine, or `ALL_INTERFACES`, which is what TensorFlow
            listens on.
        port: 1 to 65535.

    Raises:
        OSError: if `host` is not this machine, or the port is reserved for the administrator.
    """
    try:
        bind(host, port).close()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return False
        raise
    return True


def is_local_host(host: str) -> bool:
    """Whether a name or address belongs to this machine. A name that does not resolve does not."""
    with contextlib.suppress(OSError, UnicodeError):
        bind(host, 0).close()
        return True
    return False


def local_among(hosts: Iterable[str]) -> set[str]:
    """The hosts that are this machine. Names are looked up side by side.

    Args:
        hosts: names or addresses.
    """
    names = list(dict.fromkeys(hosts))
    with concurrent.futures.ThreadPoolExecutor(max(1, min(_LOOKUPS, len(names)))) as pool:
        here = pool.map(is_local_host, names)
        return {name for name, local in zip(names, here, strict=True) if local}


def bind(host: str, port: int, shared: bool = False) -> socket.socket:
    """A socket bound as gRPC binds its own; `shared` as with TF_GRPC_REUSE_PORT.

    Raises:
        OSError: if another program has the port, or the address is not of this machine.
    """
    if host == ALL_INTERFACES and socket.has_dualstack_ipv6():
        with contextlib.suppress(_NoIPv6Error):
            return _bind_to(socket.AF_INET6, "::", port, shared)
    return _bind_to(socket.AF_INET6 if ":" in host else socket.AF_INET, host, port, shared)


class _NoIPv6Error(OSError):
    """This machine's kernel knows IPv6, but no interface has it."""


def _bind_to(family: socket.AddressFamily, host: str, port: int, shared: bool) -> socket.socket:
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared and hasattr(socket, "SO_REUSEPORT"):
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if host == "::":
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        if host == "::" and error.errno == errno.EADDRNOTAVAIL:
            raise _NoIPv6Error from error
        raise
    return bound
