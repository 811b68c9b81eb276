"""A file of hosts, as Open MPI, DeepSpeed, MPICH and Horovod write it.

    # a comment
    hosta slots=2               Open MPI, DeepSpeed
    hostb slots=4 max_slots=8   Open MPI: more than 8 are an error; max-slots is the same
    hostc:2                     MPICH, Intel MPI, Horovod; IPv6 in brackets: [fd00::1]:2
    hostd                       one slot

A host in several lines has the slots of all of them. Ranks fill host after host. A file lists all
tasks, but not which of them this is. RANK gives that, as DeepSpeed and torchrun set it, or
the variables of mpirun, or, if a host has one slot, this machine's name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from tfdist.cluster.environments import mpi
from tfdist.cluster.environments.base import (
    DEFAULT_PORT,
    Absent,
    ProcessContext,
    TaskAssignment,
    assign_rank,
    check_rank,
    number,
    same_host,
    seen,
)
from tfdist.cluster.spec import Address, address_mistake
from tfdist.errors import ConfigError

__all__ = ["parse", "parse_list", "read", "resolve"]

#: More slots than any machine has cores: whoever writes a larger number means a port.
_MOST_SLOTS = 1023


def parse(text: str, name: str = "hostfile") -> dict[str, int]:
    """The slots of each host, in the order of the file.

    Args:
        text: the content of the file.
        name: the file, for messages.

    Raises:
        ConfigError: if a line is none of the forms above, or there is no host.
    """
    slots: dict[str, int] = {}
    for count, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if words:
            host, number_ = _entry(words, f"{name}, line {count}")
            slots[host] = slots.get(host, 0) + number_
    if not slots:
        raise ConfigError(f"{name} lists no host. Write a line for each, such as: hosta slots=2")
    return slots


def parse_list(text: str) -> dict[str, int]:
    """The slots of each host of a list such as `hosta:2,hostb:2`.

    Raises:
        ConfigError: if an entry is not of that form, or there is none.
    """
    slots: dict[str, int] = {}
    where = f"--hosts {text!r}"
    for entry in text.split(","):
        if not entry.strip() or len(entry.split()) > 1:
            raise ConfigError(
                f"{where}: {entry!r} is not a host. Write name:slots or name, such as "
                "hosta:2,hostb:2."
            )
        host, number_ = _entry([entry.strip()], where)
        slots[host] = slots.get(host, 0) + number_
    return slots


def read(path: Path) -> dict[str, int]:
    """The slots of each host of a file.

    Raises:
        ConfigError: if it cannot be read, or is not of the form.
    """
    try:
        return parse(path.read_text(encoding="utf-8-sig"), f"hostfile {str(path)!r}")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(f"hostfile {str(path)!r} cannot be read: {why}. Name a file.") from error


def resolve(context: ProcessContext) -> TaskAssignment | Absent:
    """The task of this process among the hosts of the file.

    Raises:
        ConfigError: if the file cannot be read, or nothing identifies this task.
    """
    if context.hostfile is None:
        return Absent("no host file is named")
    slots = read(context.hostfile)
    by_rank = [host for host, count in slots.items() for _ in range(count)]
    source = f"hostfile {str(context.hostfile)!r}"
    rank, size, reason = _rank(context, by_rank, source)
    if size > len(by_rank):
        raise ConfigError(
            f"{reason} counts {size} tasks, but {source} has {len(by_rank)} slots. Add slots, or "
            "start fewer tasks."
        )
    check_rank(rank, size, reason, source)
    _check_host(context.hostname, by_rank, rank, f"{reason} and {source}")
    return assign_rank(
        context,
        environment="hostfile",
        reason=f"{source}, {reason}",
        source=source,
        hosts=by_rank[:size],
        rank=rank,
        first_port=DEFAULT_PORT,
    )


def _rank(context: ProcessContext, by_rank: Sequence[str], source: str) -> tuple[int, int, str]:
    """This task's rank, the number of tasks, and the origin of both."""
    environ: Mapping[str, str] = context.environ
    if environ.get("RANK"):
        size = len(by_rank)
        if environ.get("WORLD_SIZE"):
            size = number(environ, "WORLD_SIZE", "a launcher", least=1)
        return number(environ, "RANK", "a launcher"), size, seen(environ, ["RANK", "WORLD_SIZE"])
    started = mpi.detect(environ)
    if started is not None:
        reason = f"rank {started.rank} of {started.size} by {started.launcher}"
        return started.rank, started.size, reason
    own = [rank for rank, host in enumerate(by_rank) if same_host(host, context.hostname)]
    if len(own) == 1:
        return own[0], len(by_rank), f"this machine is {context.hostname}"
    known = (
        f"lists this machine, {context.hostname!r}, {len(own)} times"
        if own
        else (f"does not list this machine, {context.hostname!r}")
    )
    raise ConfigError(
        f"{source} {known}, and RANK is not set, so nothing tells which of its {len(by_rank)} "
        "tasks this is. Set RANK to a number from 0, another for each process."
    )


def _check_host(hostname: str, by_rank: Sequence[str], rank: int, source: str) -> None:
    """Refuses a rank that belongs to another host of the file than this machine."""
    listed = any(same_host(host, hostname) for host in dict.fromkeys(by_rank))
    if listed and not same_host(by_rank[rank], hostname):
        raise ConfigError(
            f"By {source} this task is on {by_rank[rank]!r}, but this machine is {hostname!r}. "
            "Number the tasks host after host (mpirun --map-by slot), or reorder the file."
        )


def _entry(words: Sequence[str], where: str) -> tuple[str, int]:
    """The host and the slots of a line."""
    match = re.fullmatch(r"(\[[^\]]*\]|[^:]+):([^:]*)", words[0])
    host = (match[1] if match else words[0]).removeprefix("[").removesuffix("]")
    options: dict[str, str] = {"slots": match[2]} if match else {}
    for word in words[1:]:
        name, equals, value = word.replace("max-slots", "max_slots").partition("=")
        if name not in ("slots", "max_slots") or not equals or name in options:
            raise ConfigError(
                f"{where}: {word!r} is not slots=N or max_slots=N, or is there twice. Write: "
                f"{host} slots=2"
            )
        options[name] = value
    numbers = {name: _slots(name, value, where, host) for name, value in options.items()}
    mistake = address_mistake(str(Address(host, 1)))
    if mistake is not None:
        raise ConfigError(f"{where}: {words[0]!r} is no host: {' '.join(mistake)}")
    slots = numbers.get("slots", 1)
    if slots > numbers.get("max_slots", slots):
        raise ConfigError(
            f"{where}: slots={slots} of {host} is more than its max_slots={numbers['max_slots']}. "
            "Lower slots, or raise max_slots."
        )
    return host, slots


def _slots(name: str, text: str, where: str, host: str) -> int:
    if not re.fullmatch("[0-9]{1,6}", text) or not 0 < int(text) <= _MOST_SLOTS:
        port = text.isdecimal() and int(text) > _MOST_SLOTS
        hint = " If it is a port, give it with --port." if port else ""
        raise ConfigError(
            f"{where}: {name}={text!r} of {host} is no number of tasks from 1 to {_MOST_SLOTS}."
            f"{hint} Write: {host} slots=2"
        )
    return int(text)
