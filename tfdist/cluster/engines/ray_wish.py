"""What a job asks of Ray, and what Ray answers, as data. Pure: nothing here talks to Ray."""

from __future__ import annotations

import argparse
import dataclasses
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from tfdist.cluster.spec import Address, ClusterSpec, Task
from tfdist.errors import ConfigError

__all__ = ["PLACEMENTS", "Bundle", "Options", "Seat", "Wish", "bundles", "cluster_of", "options"]

#: Ray's strategies of placement groups.
PLACEMENTS = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What `--engine-args` says of Ray.

    Attributes:
        address: HOST:PORT of a running Ray, or None to look for one.
        cpus_per_task: Ray's CPUs for each task.
        placement: how the tasks are spread over the nodes, one of `PLACEMENTS`.
    """

    address: str | None = None
    cpus_per_task: float = 1.0
    placement: str = "PACK"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bundle:
    """What one task needs of a node.

    Attributes:
        task: the task.
        cpus: Ray's CPUs, which are a count and bind nothing.
        gpus: whole GPUs.
    """

    task: Task
    cpus: float
    gpus: int

    @property
    def resources(self) -> dict[str, float]:
        """As a placement group wants it."""
        return {"CPU": self.cpus, **({"GPU": self.gpus} if self.gpus else {})}

    def __str__(self) -> str:
        return ", ".join(f"{name} {count:g}" for name, count in self.resources.items())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wish:
    """A placement group with an actor for each task.

    Attributes:
        name: the job's name.
        bundles: what the tasks need, in the order of their ranks.
        options: where and how.
        folder: the directory in which the tasks are to run.
        seconds: how long the placing may take.
    """

    name: str
    bundles: tuple[Bundle, ...]
    options: Options
    folder: str
    seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Seat:
    """What an actor tells of its node.

    Attributes:
        host: the node's address.
        port: a free port, which the actor holds.
        python: the interpreter of Ray there.
        gpus: the GPUs that Ray has given the actor.
        folder: whether the directory of the job is there.
        found: versions and clock, as `tfdist.cluster.launch.remote.look` gives them.
    """

    host: str
    port: int
    python: str
    gpus: tuple[str, ...]
    folder: bool
    found: Mapping[str, Any]

    @classmethod
    def from_look(cls, found: Mapping[str, Any]) -> Seat:
        """From the answer of `Runner.look`."""
        return cls(
            host=found["host"],
            port=found["ports"][0],
            python=found["executable"],
            gpus=tuple(found["gpus"]),
            folder=found["folder"],
            found=found,
        )


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(
            f"--engine-args of ray: {message}. There are --address=HOST:PORT, --cpus-per-task=N "
            f"and --placement={'|'.join(PLACEMENTS)}."
        )


def options(text: str | None) -> Options:
    """Reads `--engine-args`.

    Raises:
        ConfigError: for a word that is not known, or a number that is none.
    """
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--address")
    parser.add_argument("--cpus-per-task", type=float, default=Options.cpus_per_task)
    parser.add_argument("--placement", choices=PLACEMENTS, default=Options.placement)
    try:
        words = shlex.split(text or "")
    except ValueError as error:
        parser.error(f"{text!r} cannot be split into words ({error})")
    found = Options(**vars(parser.parse_args(words)))
    if not 0 < found.cpus_per_task < float("inf"):
        parser.error(f"--cpus-per-task={found.cpus_per_task:g} is no number of CPUs")
    if found.address is not None and found.address.startswith("ray://"):
        parser.error(f"--address={found.address} is Ray Client's; give HOST:PORT of the head node")
    return found


def bundles(counts: Mapping[str, int], cpus: float, gpus: int) -> tuple[Bundle, ...]:
    """What the tasks need: GPUs go to those that train.

    Args:
        counts: how many tasks there are of each type, in the order of their ranks.
        cpus: for each task.
        gpus: for each task that trains.
    """
    return tuple(
        Bundle(task=Task(kind, index), cpus=cpus, gpus=gpus if kind == "worker" else 0)
        for kind, count in counts.items()
        for index in range(count)
    )


def cluster_of(placed: Sequence[tuple[Bundle, Seat]]) -> ClusterSpec:
    """The tasks where Ray has placed them."""
    addresses: dict[str, tuple[Address, ...]] = {}
    for bundle, seat in placed:
        kind = bundle.task.type
        addresses[kind] = (*addresses.get(kind, ()), Address(seat.host, seat.port))
    return ClusterSpec(addresses)
