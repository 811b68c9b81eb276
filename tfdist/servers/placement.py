"""Which server holds which variable. Pure arithmetic.

Each variable goes to the server that holds the fewest bytes. Big ones are split by rows into parts
that differ by one row at most (the "div" rule of TensorFlow's partitioners).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

__all__ = ["Held", "Shelves", "row_ranges"]


@dataclasses.dataclass(frozen=True)
class Held:
    """A variable, or a part of one, on a server.

    Attributes:
        name: the variable's name.
        shape: shape of what is held.
        bytes: its size.
        part: number of this part and of all parts; None where the variable is whole.
    """

    name: str
    shape: tuple[int, ...]
    bytes: int
    part: tuple[int, int] | None = None


class Shelves:
    """What each server holds.

    Args:
        servers: how many servers there are.
        min_shard_bytes: least size of a part.
        max_shards: most parts of a variable; None means one for each server.
    """

    def __init__(self, servers: int, min_shard_bytes: int, max_shards: int | None = None) -> None:
        self.held: list[list[Held]] = [[] for _ in range(servers)]
        self._min_shard_bytes = min_shard_bytes
        self._max_shards = servers if max_shards is None else max_shards

    def bytes_on(self, server: int) -> int:
        """Bytes that a server holds."""
        return sum(held.bytes for held in self.held[server])

    def emptiest(self, without: Sequence[int] = ()) -> int:
        """The server that holds the fewest bytes, the first of equals.

        Args:
            without: servers to pass over, unless there is no other.
        """
        servers = range(len(self.held))
        choices = [server for server in servers if server not in without] or list(servers)
        return min(choices, key=self.bytes_on)

    def put(self, server: int, held: Held) -> None:
        """Notes what a server holds."""
        self.held[server].append(held)

    def remove(self, server: int, held: Held) -> None:
        """Notes that a server does not hold a variable any more."""
        self.held[server].remove(held)

    def parts(self, shape: Sequence[int], item_bytes: int) -> int:
        """Into how many parts a variable of this shape is split; 1 leaves it whole."""
        if not shape or not shape[0]:
            return 1
        size = item_bytes
        for length in shape:
            size *= length
        return max(1, min(self._max_shards, size // self._min_shard_bytes, shape[0]))


def row_ranges(rows: int, parts: int) -> list[tuple[int, int]]:
    """First and last + 1 row of each of `parts` parts, whose sizes differ by one at most."""
    small, more = divmod(rows, parts)
    ends = [(part + 1) * small + min(part + 1, more) for part in range(parts)]
    return list(zip([0, *ends[:-1]], ends, strict=True))
