"""One description of each option: its type, its bounds and choices, its help, its panel.

Flags, strategy files, `tfdist.strategy`, the checks, the help and docs/options.md read it.
"""

from __future__ import annotations

import dataclasses
import json
import math
import numbers
import os
import types
import typing
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Union

import msgspec

from tfdist.errors import ConfigError
from tfdist.utils.validation import LONGEST_SECONDS, check_choice

__all__ = [
    "About",
    "NonNegative",
    "Option",
    "Options",
    "Positive",
    "Seconds",
    "Size",
    "listed",
    "options_of",
]

Positive = Annotated[int, msgspec.Meta(ge=1)]
NonNegative = Annotated[int, msgspec.Meta(ge=0)]
Seconds = Annotated[float, msgspec.Meta(gt=0, le=LONGEST_SECONDS)]

#: A size in MiB, not more than an exbibyte.
Size = Annotated[float, msgspec.Meta(gt=0, le=2**20)]

#: TensorFlow's counters, with which options are compared, have 64 bits.
_LARGEST = 2**63 - 1

#: The types of options: the words for each, and an example of how TOML writes it.
_TYPES: dict[type, tuple[str, str]] = {
    bool: ("true or false", "true"),
    int: ("a whole number", "2"),
    float: ("a number", "0.5"),
    str: ("text in quotes", '"…"'),
}

#: The bounds of `msgspec.Meta`, and the words for each.
_BOUNDS = {"ge": "of {:.10g} or more", "gt": "above {:.10g}", "le": "at most {:.10g}"}
_BOUNDS["lt"] = "below {:.10g}"


@dataclasses.dataclass(frozen=True)
class About:
    """Describes an option in its annotation, beside its type.

    Attributes:
        help: the help text.
        panel: the heading of the help under which it stands; None for the first.
        shown: the default in words; None shows the value, and "" nothing.
        why: a sentence for the error about a value out of bounds.
        example: a value as TOML writes it; by default one for the type.
        flags: the flags; by default `--` and the name.
        metavar: the word for the value in the help.
        mode: the one update mode in which it has an effect; None if it has in all.
        separator: the text between the entries of a table in its flag; None if the value cannot be
            a table.
    """

    help: str
    panel: str | None = None
    shown: str | None = None
    why: str = ""
    example: str | None = None
    flags: tuple[str, ...] = ()
    metavar: str | None = None
    mode: str | None = None
    separator: str | None = None


@dataclasses.dataclass(frozen=True)
class Option:
    """One option, read from the annotation of a field.

    Attributes:
        name: the field, which is the key in a strategy file.
        hint: the annotation, from which msgspec takes the type and its bounds.
        default: the value if nothing is set.
        about: the description.
    """

    name: str
    hint: Any
    default: Any
    about: About

    @property
    def flags(self) -> tuple[str, ...]:
        """The flags of the command line."""
        return self.about.flags or (f"--{self.name.replace('_', '-')}",)

    @property
    def kind(self) -> type:
        """The type of a value that is set: bool, int, float or str."""
        return (
            str if self.choices else next(each for each in _flattened(self.hint) if each in _TYPES)
        )

    @property
    def choices(self) -> tuple[str, ...]:
        """The values of an option that has few; empty for others."""
        return tuple(each for each in _flattened(self.hint) if isinstance(each, str))

    @property
    def allowed(self) -> str:
        """The type and the bounds in words, such as "a whole number of 1 or more"."""
        metas = [each for each in _flattened(self.hint) if isinstance(each, msgspec.Meta)]
        bounds = [
            words.format(getattr(meta, bound))
            for meta in metas
            for bound, words in _BOUNDS.items()
            if getattr(meta, bound) is not None
        ]
        return " ".join([_TYPES[self.kind][0], " and ".join(bounds)]).rstrip()

    @property
    def shown(self) -> str:
        """The default in words; empty if there is none to show."""
        if self.about.shown is not None:
            return self.about.shown
        if self.default is None or self.default is dataclasses.MISSING or self.kind is bool:
            return ""
        return f"{self.default:g}" if isinstance(self.default, float) else str(self.default)

    @property
    def example(self) -> str:
        """A value as TOML writes it: the one of the description, else the default, else any."""
        if self.about.example is not None:
            return self.about.example
        if self.default is None or self.default is dataclasses.MISSING:
            return _TYPES[self.kind][1]
        return json.dumps(self.default)

    def accept(self, value: object) -> Any:
        """Converts a value to the option's type.

        Raises:
            ConfigError: for a value of another type, or out of bounds.
        """
        try:
            made = msgspec.convert(self._as_text(_plain(value)), self.hint, strict=True)
        except (msgspec.ValidationError, UnicodeEncodeError):  # Words may be of any bytes.
            raise ConfigError(self._refusal(value)) from None
        if (isinstance(made, float) and not math.isfinite(made)) or _is_too_large(made):
            raise ConfigError(self._refusal(value))
        return made

    def _as_text(self, value: Any) -> Any:
        """A table as the text of its flag, and other values as they are."""
        if self.about.separator is None or not isinstance(value, Mapping):
            return value
        return self.about.separator.join(f"{key}={_words(each)}" for key, each in value.items())

    def _refusal(self, value: object) -> str:
        if self.choices and isinstance(value, str):
            check_choice(self.name, value, self.choices)
        example = self.about.example or _TYPES[self.kind][1]
        written = f"Write it as in {self.name} = {example}."
        advice = f"Give one of: {', '.join(self.choices)}." if self.choices else written
        allowed = f"{self.allowed}, in 64 bits" if _is_too_large(value) else self.allowed
        problem = f"{self.name}={_shown(value)} is not {allowed}."
        return " ".join(filter(None, [problem, self.about.why, advice]))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Options that belong together: each field is annotated with an `About`.

    Checked when made.

    Attributes:
        lacking: the end of a sentence about a strategy that has none of them and was given one.

    Raises:
        ConfigError: for a value of another type or out of bounds, or values that conflict.
    """

    lacking: ClassVar[str] = ", which does not have it."

    def __post_init__(self) -> None:
        for option in options_of(type(self)).values():
            object.__setattr__(self, option.name, option.accept(getattr(self, option.name)))
        self.check()

    def check(self) -> None:
        """Refuses values that conflict with each other.

        Raises:
            ConfigError: if they do.
        """

    def is_set(self, name: str) -> bool:
        """Whether an option differs from its default."""
        return bool(getattr(self, name) != options_of(type(self))[name].default)


#: The options of each class, once they have been read.
_known: dict[type[Options], Mapping[str, Option]] = {}


def options_of(kind: type[Options]) -> Mapping[str, Option]:
    """The options of a class of them, by name."""
    if kind not in _known:
        _known[kind] = _read(kind)
    return _known[kind]


def _read(kind: type[Options]) -> Mapping[str, Option]:
    hints = typing.get_type_hints(kind, include_extras=True)
    options = {}
    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        about = next((each for each in typing.get_args(hint) if isinstance(each, About)), None)
        if about is not None:
            options[field.name] = Option(field.name, hint, field.default, about)
    return options


def listed(words: Mapping[str, str]) -> str:
    """Choices with the words for each, as a sentence of a help text."""
    return "; ".join(f"{name}: {what}" for name, what in words.items()) + "."


def _is_too_large(value: object) -> bool:
    return isinstance(value, int) and abs(value) > _LARGEST


def _shown(value: object) -> str:
    """A value as Python writes it, which refuses to write whole numbers of thousands of digits."""
    try:
        return repr(value)
    except ValueError:
        return f"a number of {value.bit_length()} bits" if isinstance(value, int) else "a value"


def _words(value: object) -> str:
    """An entry of a table: the dimensions of a layout may be a list, in which None is "-"."""
    if not isinstance(value, (list, tuple)):
        return str(value)
    return " ".join("-" if each is None else str(each) for each in value)


def _flattened(hint: Any) -> list[Any]:
    """The types, choices and bounds that a type hint is made of."""
    nested = typing.get_origin(hint) in (Annotated, Union, types.UnionType, typing.Literal)
    return (
        [each for part in typing.get_args(hint) for each in _flattened(part)] if nested else [hint]
    )


def _plain(value: Any) -> Any:
    """A value of NumPy or `pathlib` as Python's own."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        return int(value)
    return float(value) if isinstance(value, numbers.Real) and not isinstance(value, int) else value
