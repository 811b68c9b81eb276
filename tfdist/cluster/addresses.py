"""Where a task listens, and what is wrong with text that should say so."""

from __future__ import annotations

import dataclasses
import ipaddress
import re

from tfdist.errors import ConfigError

__all__ = ["Address", "address_mistake", "is_any_address", "is_ip", "is_loopback"]

_LOOPBACK_NAMES = frozenset({"localhost", "localhost.localdomain", "ip6-localhost"})


@dataclasses.dataclass(frozen=True)
class Address:
    """Where a task listens.

    Attributes:
        host: a name, an IPv4 address or an IPv6 address without brackets.
        port: 1 to 65535.
    """

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @classmethod
    def parse(cls, text: str) -> Address:
        """Reads `host:port` or `[ipv6]:port`.

        Raises:
            ConfigError: if it is not of that form; a `ValueError` that says what to write.
        """
        mistake = address_mistake(text)
        if mistake is not None:
            raise ConfigError(" ".join(mistake))
        host, _, port = text.rpartition(":")
        return cls(host.removeprefix("[").removesuffix("]"), int(port))


def address_mistake(text: str) -> tuple[str, str] | None:
    """What is wrong with an address and what to write, or None for a good one."""
    return _form_mistake(text) or _host_mistake(text) or _port_mistake(text)


def _form_mistake(text: str) -> tuple[str, str] | None:
    if not text.strip():
        return f'"{text}" is empty.', "Write host:port, such as 10.0.0.1:12345."
    if "://" in text:
        bare = text.split("://", 1)[1]
        return f'"{text}" is a URL.', f'Write host:port without the scheme: "{bare}".'
    if re.search(r"[,;]", text):
        return f'"{text}" holds several addresses.', "Make each a string of its own in the list."
    if re.search(r"\s", text):
        return f'"{text}" contains a space.', f'Write "{"".join(text.split())}".'
    if _is_ip(text, 6):
        bare = f"[{text}]:12345"
        return f'"{text}" is an IPv6 address without a port.', f'Write it as in "{bare}".'
    return None


def _host_mistake(text: str) -> tuple[str, str] | None:
    host, colon, port = text.rpartition(":")
    host = host if colon and not text.endswith("]") else text
    if not host:
        return f'"{text}" has no host.', f'Write a name or address: "10.0.0.1:{port}".'
    if host.startswith("[") and host.endswith("]"):
        inside = host[1:-1]
        if not _is_ip(inside, 6):
            return f'"{inside}" in "{text}" is not an IPv6 address.', "Only those take brackets."
    elif ":" in host:
        return (
            f'"{text}" has more than one colon.',
            f'Write one port; an IPv6 address goes in brackets: "[{host}]:{port}".',
        )
    elif re.fullmatch(r"[\d.]+", host) and not _is_ip(host, 4):
        return f'"{host}" is not an IPv4 address.', "Write four numbers from 0 to 255, or a name."
    elif host.startswith("-"):
        # A program that is given such a name, as ssh is, takes it for an option.
        return f'"{host}" is not a host name.', "A name begins with a letter or a digit."
    elif re.search(r"[^\w.\-]", host):
        return f'"{host}" is not a host name.', "Write only letters, digits, hyphens and dots."
    return None


def _port_mistake(text: str) -> tuple[str, str] | None:
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]"):
        return f'"{text}" has no port.', f'Write host:port, such as "{text}:12345".'
    if not re.fullmatch(r"[0-9]{1,9}", port) or not 0 < int(port) < 65536:
        return (
            f'"{port}" in "{text}" is not a port.',
            f'Write a number from 1 to 65535, such as "{host}:12345".',
        )
    return None


def _is_ip(host: str, version: int) -> bool:
    try:
        return ipaddress.ip_address(host).version == version
    except ValueError:
        return False


def is_ip(host: str) -> bool:
    """Whether a host is an address, not a name."""
    return _is_ip(host, 4) or _is_ip(host, 6)


def is_loopback(host: str) -> bool:
    """Whether a host means "this machine" on every machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() in _LOOPBACK_NAMES


def is_any_address(host: str) -> bool:
    """Whether a host means "all interfaces", which a server can listen on and nobody can call."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False
