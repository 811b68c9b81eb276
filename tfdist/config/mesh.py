"""Meshes of processes, and the rules by which weights are divided over them.

A mesh arranges the processes of a job along named axes, as `keras.distribution.DeviceMesh` does
with devices. Processes are numbered along the last axis first.
"""

from __future__ import annotations

import dataclasses
import math
import re

from tfdist.errors import ConfigError

__all__ = ["AXES", "DATA", "MEGATRON", "MODEL", "Axis", "LayoutRule", "Mesh", "parse_layouts"]

#: The axis along which processes train on different examples.
DATA = "data"

#: The axis along which processes compute different parts of a layer.
MODEL = "model"

#: The axes, with what each divides.
AXES = {DATA: "the examples", MODEL: "the layers' weights"}

#: The layouts that follow from the kind of each layer.
MEGATRON = "megatron"

_EXAMPLE = "data=2,model=2"


@dataclasses.dataclass(frozen=True)
class Axis:
    """One axis of a mesh, as one process sees it.

    Attributes:
        name: the axis.
        ranks: the numbers of the processes along it, in order.
        index: this process's number among them.
        line: a number that the processes along it have in common, and no others of the mesh.
    """

    name: str
    ranks: tuple[int, ...]
    index: int
    line: int

    @property
    def size(self) -> int:
        """The number of processes along it."""
        return len(self.ranks)


@dataclasses.dataclass(frozen=True)
class Mesh:
    """Axes of processes.

    Attributes:
        sizes: the name and the size of each axis; the last one's processes are neighbours.
    """

    sizes: tuple[tuple[str, int], ...]

    @classmethod
    def parse(cls, text: str) -> Mesh:
        """Reads a mesh from text such as "data=2,model=2".

        Raises:
            ConfigError: for text of another form, an unknown axis, one that comes twice, or a size
                that is not positive.
        """
        sizes = []
        for word in text.split(","):
            name, equals, size = (part.strip() for part in word.partition("="))
            if name not in AXES:
                known = " and ".join(f"{axis} (divides {what})" for axis, what in AXES.items())
                raise ConfigError(
                    f"mesh={text!r} names an axis {name!r}. The axes are {known}: write it as in "
                    f"mesh={_EXAMPLE!r}."
                )
            if not equals or not size.isdecimal() or not 0 < int(size) < 1 << 31:
                raise ConfigError(
                    f"mesh={text!r} gives the axis {name!r} no size of 1 or more. Write it as in "
                    f"mesh={_EXAMPLE!r}."
                )
            sizes.append((name, int(size)))
        if len(dict(sizes)) < len(sizes):
            raise ConfigError(f"mesh={text!r} names an axis twice. Give each axis one size.")
        return cls(tuple(sizes))

    @property
    def processes(self) -> int:
        """The number of processes."""
        return math.prod(size for _, size in self.sizes)

    def size(self, name: str) -> int:
        """The processes along an axis; 1 along one that the mesh does not have."""
        return dict(self.sizes).get(name, 1)

    def axis(self, name: str, rank: int) -> Axis:
        """The axis of a name, as the process of a rank sees it."""
        stride = self.processes
        for number, (each, size) in enumerate(self.sizes):
            stride //= size
            if each == name:
                index = rank // stride % size
                first = rank - index * stride
                ranks = tuple(range(first, first + size * stride, stride))
                return Axis(name, ranks, index, (number + 1) * self.processes + first)
        return Axis(name, (rank,), 0, (len(self.sizes) + 1) * self.processes + rank)

    def __str__(self) -> str:
        """The text that `parse` reads."""
        return ",".join(f"{name}={size}" for name, size in self.sizes)


@dataclasses.dataclass(frozen=True)
class LayoutRule:
    """The layout of the weights whose path a pattern is found in.

    Attributes:
        pattern: a regular expression.
        axes: for each dimension of the weight the axis that divides it, or None.
        required: whether it is a mistake that it matches no weight.
        key: the key of a `keras.distribution.LayoutMap`: as there, the rule of a weight whose path
            it is goes before all patterns.
    """

    pattern: str
    axes: tuple[str | None, ...]
    required: bool = True
    key: str | None = None

    def dimension(self, axis: str) -> int | None:
        """The dimension that an axis divides; None if it divides none."""
        return self.axes.index(axis) if axis in self.axes else None

    def matches(self, path: str) -> bool:
        """Whether this is the rule for a weight."""
        return re.search(self.pattern, path) is not None

    def __str__(self) -> str:
        return f"{self.key or self.pattern}={' '.join(each or '-' for each in self.axes)}"


def parse_layouts(text: str | None) -> tuple[LayoutRule, ...] | None:
    """Reads rules from text such as "dense.*kernel=- model;embeddings=model -".

    Args:
        text: the rules; with None, or "megatron", layouts follow from the kind of layers.

    Returns:
        The rules; None if there are none and the kind of a layer decides.

    Raises:
        ConfigError: for text of another form, a pattern that is not a regular expression or comes
            twice, an unknown axis, or one that comes twice.
    """
    rules: list[LayoutRule] = []
    if text in (None, MEGATRON):
        return None
    for word in filter(None, map(str.strip, str(text).split(";"))):
        pattern, equals, axes = word.rpartition("=")
        if not equals or not pattern or not axes.split():
            raise ConfigError(
                f"layouts={text!r} has a rule {word!r} without a pattern and an axis for each "
                f"dimension. Write it as in layouts='dense.*kernel=- model', or "
                f"layouts={MEGATRON!r}."
            )
        named = (None if axis in ("-", "None") else axis for axis in axes.split())
        rules.append(LayoutRule(pattern.strip(), tuple(named)))
        _check_rule(rules[-1])
    patterns = [rule.pattern for rule in rules]
    twice = [pattern for pattern in patterns if patterns.count(pattern) > 1]
    if twice:
        raise ConfigError(f"layouts has two rules for {twice[0]!r}. Leave one of them out.")
    return tuple(rules)


def _check_rule(rule: LayoutRule) -> None:
    try:
        re.compile(rule.pattern)
    except re.error as error:
        raise ConfigError(
            f"layouts has the pattern {rule.pattern!r}, which is not a regular expression: {error}."
        ) from error
    named = [each for each in rule.axes if each is not None]
    if set(named) - {*AXES} or len(named) > len({*named}):
        raise ConfigError(
            f"The layout '{rule}' names {' and '.join(map(repr, named))}: the axes are {DATA!r} "
            f"and {MODEL!r}, each divides one dimension, and '-' stands for the others."
        )
