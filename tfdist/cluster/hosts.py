"""Machines and how many processes each may run: `a:2,b:2`, or a file of them. Pure functions."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from tfdist.errors import ConfigError

__all__ = ["Host", "assign", "parse_hostfile", "parse_hosts", "read_hostfile"]

_ENTRY = re.compile(r"(?P<name>\[[0-9A-Fa-f:.%\w]+\]|[\w.-]+)(?::(?P<slots>\d+))?")
_SLOTS = re.compile(r"slots?\s*=\s*(\d+)")
_WORDS = re.compile(r"(max[-_]slots?|slots?)\s*=\s*\d+")


@dataclasses.dataclass(frozen=True)
class Host:
    """A machine.

    Attributes:
        name: its name or address, as the others and ssh reach it; IPv6 without brackets.
        slots: how many processes may train on it.
    """

    name: str
    slots: int = 1

    def __str__(self) -> str:
        return f"[{self.name}]:{self.slots}" if ":" in self.name else f"{self.name}:{self.slots}"


def parse_hosts(text: str) -> tuple[Host, ...]:
    """Reads `a:2,b:2`: a host for each entry, with one slot where none are given.

    Raises:
        ConfigError: for an entry of another form, or a host that is named twice.
    """
    entries = [entry.strip() for entry in text.split(",")]
    found = []
    for entry in entries:
        match = _ENTRY.fullmatch(entry)
        if match is None:
            raise ConfigError(
                f"--hosts {text!r}: {entry!r} is no host. Write name:slots, such as node1:2, with "
                "commas between."
            )
        found.append(Host(match["name"].strip("[]"), int(match["slots"] or 1)))
    return _checked(found, f"--hosts {text!r}")


def parse_hostfile(text: str, name: str) -> tuple[Host, ...]:
    """Reads lines such as `node1 slots=2`, as Open MPI and DeepSpeed write them, or `node1:2`.

    What follows `#` is passed over, and so are `max_slots` and empty lines.

    Args:
        text: the file's text.
        name: the file's name, for messages.

    Raises:
        ConfigError: for a line of another form, a host that is named twice, or no host at all.
    """
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split(None, 1)
        if not words:
            continue
        match = _ENTRY.fullmatch(words[0])
        rest = words[1] if len(words) > 1 else ""
        if match is None or _WORDS.sub("", rest).strip():
            raise ConfigError(
                f"{name}, line {number}: {line.strip()!r} is no host. Write `name slots=2`."
            )
        slots = _SLOTS.match(rest)
        found.append(
            Host(match["name"].strip("[]"), int(slots[1] if slots else match["slots"] or 1))
        )
    return _checked(found, name)


def read_hostfile(path: Path) -> tuple[Host, ...]:
    """Reads a hostfile; see `parse_hostfile`.

    Raises:
        ConfigError: if it cannot be read, or has a mistake.
    """
    try:
        return parse_hostfile(path.read_text(), f"The hostfile {str(path)!r}")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"The hostfile {str(path)!r} cannot be read: {error}.") from error


def assign(hosts: Sequence[Host], count: int) -> tuple[str, ...]:
    """The host of each of `count` processes: each host is filled before the next.

    Raises:
        ConfigError: if there are fewer slots.
    """
    places = [host.name for host in hosts for _ in range(host.slots)]
    if count > len(places):
        raise ConfigError(
            f"-n {count} is more than the {len(places)} slots of the hosts "
            f"{', '.join(map(str, hosts))}. Lower it, or give a host more slots."
        )
    return tuple(places[:count])


def _checked(found: Iterable[Host], where: str) -> tuple[Host, ...]:
    hosts = tuple(found)
    names = [host.name for host in hosts]
    if not hosts:
        raise ConfigError(f"{where} names no host.")
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"{where} names {twice[0]!r} twice. Name it once, with all of its slots.")
    if any(host.slots < 1 for host in hosts):
        raise ConfigError(f"{where} gives a host no slot. Give it 1 or more, or leave it out.")
    return hosts
