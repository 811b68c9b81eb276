"""Slurm's short forms: lists of hosts such as `n[001-010,12]-ib`, and counts such as `2(x3),1`.

The syntax is that of the manual page of `scontrol`, show hostnames, and of SLURM_TASKS_PER_NODE in
that of `sbatch`.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

from tfdist.errors import ConfigError

__all__ = ["MOST_HOSTS", "expand", "expand_counts"]

#: No cluster has more hosts; a list that is longer has a mistake in it.
MOST_HOSTS = 1 << 20

_RANGE = re.compile(r"([0-9]{1,12})(?:-([0-9]{1,12}))?")
_COUNT = re.compile(r"([0-9]{1,6})(?:\(x([0-9]{1,7})\))?")
_PLAIN = re.compile(r"[^\s,\[\]]*")


def expand(text: str, name: str = "host list") -> list[str]:
    """The hosts of a list in the order in which Slurm counts them.

    Numbers keep their leading zeros: `n[08-10]` is n08, n09, n10. Of several brackets in one name
    the last counts fastest.

    Args:
        text: the list.
        name: the variable that holds it, for messages.

    Raises:
        ConfigError: if it is not of that form.
    """
    problem = f"{name}={text!r} is not a list of hosts"
    hosts: list[str] = []
    for item in _items(text.strip(), problem):
        pieces = [_piece(piece, problem) for piece in re.split(r"(\[[^\[\]]*\])", item)]
        count = 1
        for alternatives in pieces:
            count *= len(alternatives)
        if len(hosts) + count > MOST_HOSTS:
            raise _mistake(problem, f"{item!r} makes it longer than {MOST_HOSTS} hosts")
        hosts += map("".join, itertools.product(*pieces))
    return hosts


def expand_counts(text: str, name: str = "counts") -> list[int]:
    """The numbers of a list with repetitions: `2(x3),1` is 2, 2, 2, 1.

    Raises:
        ConfigError: if it is not of that form.
    """
    counts: list[int] = []
    for item in text.strip().split(","):
        found = _COUNT.fullmatch(item)
        repeated = int(found[2] or 1) if found else 0
        if found is None or not 0 < repeated <= MOST_HOSTS - len(counts):
            raise ConfigError(
                f"{name}={text!r} is not a list of counts: {item!r} is none. Slurm writes it as "
                "2(x3),1. Unset it, or start the tasks with srun."
            )
        counts += [int(found[1])] * repeated
    return counts


def _items(text: str, problem: str) -> Iterator[str]:
    """The items between the commas that are not in brackets."""
    depth = begin = 0
    for end, letter in enumerate(text + ","):
        depth += {"[": 1, "]": -1}.get(letter, 0)
        if not 0 <= depth <= 1:
            raise _mistake(problem, f"the bracket at character {end + 1} has no match")
        if letter == "," and not depth:
            if begin == end:
                raise _mistake(problem, f"there is no host before character {end + 1}")
            yield text[begin:end]
            begin = end + 1
    if depth:
        raise _mistake(problem, "a bracket is not closed")


def _piece(piece: str, problem: str) -> list[str]:
    """The alternatives of one bracket, or a text outside of brackets as the only one."""
    if not piece.startswith("["):
        if not _PLAIN.fullmatch(piece):
            raise _mistake(problem, f"{piece!r} is not part of a name")
        return [piece]
    return [number for part in piece[1:-1].split(",") for number in _numbers(part, problem)]


def _numbers(part: str, problem: str) -> Iterator[str]:
    found = _RANGE.fullmatch(part)
    if found is None:
        raise _mistake(problem, f"{part!r} is not a number or a range such as 1-4")
    first, last = found[1], found[2] or found[1]
    if int(last) < int(first) or int(last) - int(first) >= MOST_HOSTS:
        raise _mistake(problem, f"{part!r} does not rise, or is longer than {MOST_HOSTS} hosts")
    for value in range(int(first), int(last) + 1):
        yield str(value).zfill(len(first))


def _mistake(problem: str, detail: str) -> ConfigError:
    return ConfigError(
        f"{problem}: {detail}. Slurm writes it as rack[1-2]n[01-04,7]-ib,login. Unset it, or start "
        "the tasks with srun."
    )
