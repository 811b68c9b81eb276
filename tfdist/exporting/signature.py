"""The inputs of an exported model: names, element types and shapes with sizes left open."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

from tfdist.errors import ConfigError

__all__ = ["Input", "fitted"]

_TEXT = re.compile(r"(?P<name>[^:\[\]]+):(?P<dtype>\w+)\[(?P<shape>[^\[\]]*)\]")
_FLOATS = ("float16", "bfloat16", "float32", "float64")
_INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
_DTYPES = (*_FLOATS, *_INTEGERS, "bool", "string")
_FORM = "NAME:DTYPE[SIZES], such as tokens:int32[?,128], with ? for a size that is left open"


@dataclasses.dataclass(frozen=True)
class Input:
    """One input of a model.

    Attributes:
        name: its name in the exported model.
        dtype: the type of its elements, as TensorFlow names it.
        shape: its sizes, the batch first; None for one that is left open.
    """

    name: str
    dtype: str
    shape: tuple[int | None, ...]

    @classmethod
    def parse(cls, text: str) -> Input:
        """An input from a text such as `tokens:int32[?,128]`.

        Raises:
            ConfigError: if the text is not of that form.
        """
        match = _TEXT.fullmatch(text.strip())
        if match is None:
            raise ConfigError(f"The input {text!r} is not of the form {_FORM}.")
        if match["dtype"] not in _DTYPES:
            raise ConfigError(
                f"The input {text!r} has an unknown type {match['dtype']!r}. "
                f"There are: {', '.join(_DTYPES)}."
            )
        sizes = [size.strip() for size in match["shape"].split(",") if match["shape"].strip()]
        for size in sizes:
            if size != "?" and not (size.isdecimal() and int(size) > 0):
                raise ConfigError(f"The input {text!r} has the size {size!r}. The form is {_FORM}.")
        shape = tuple(None if size == "?" else int(size) for size in sizes)
        return cls(match["name"].strip(), match["dtype"], shape)

    def __str__(self) -> str:
        sizes = ",".join("?" if size is None else str(size) for size in self.shape)
        return f"{self.name}:{self.dtype}[{sizes}]"


def fitted(own: Sequence[Input], given: Sequence[Input]) -> tuple[Input, ...]:
    """A model's inputs, with those that were given in their place.

    Args:
        own: the inputs that the model itself names; none if it names none.
        given: the inputs that the user asked for, by name.

    Raises:
        ConfigError: if one does not fit the model, naming both.
    """
    if not own:
        return tuple(given)
    names = [each.name for each in own]
    wanted = {each.name: each for each in given}
    if len(wanted) < len(given):
        raise ConfigError(f"The inputs {_listed(given)} name one twice. Give each once.")
    for name, each in wanted.items():
        if name not in names:
            raise ConfigError(
                f"The input {str(each)!r} is none of the model's, which are {_listed(own)}."
            )
    return tuple(_fit(each, wanted.get(each.name, each)) for each in own)


def _fit(own: Input, given: Input) -> Input:
    if len(own.shape) != len(given.shape):
        raise ConfigError(
            f"The input {str(given)!r} has {len(given.shape)} sizes, and the model takes "
            f"{str(own)!r}, with {len(own.shape)}."
        )
    for fixed, size in zip(own.shape, given.shape, strict=True):
        if fixed not in (None, size):
            raise ConfigError(
                f"The input {str(given)!r} does not fit the model, which takes {str(own)!r}: a "
                f"size that the model fixes, {fixed}, cannot be changed by an export."
            )
    if _kind(own.dtype) != _kind(given.dtype):
        raise ConfigError(
            f"The input {str(given)!r} does not fit the model, which takes {str(own)!r}: "
            f"{given.dtype} cannot stand in for {own.dtype}."
        )
    return given


def _kind(dtype: str) -> str:
    for kinds in (_FLOATS, _INTEGERS):
        if dtype in kinds:
            return kinds[0]
    return dtype


def _listed(inputs: Sequence[Input]) -> str:
    return ", ".join(str(each) for each in inputs)
