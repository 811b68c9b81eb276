"""The user's own examples: what models are tried on, calibrated with and scored on."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tfdist.errors import ConfigError
from tfdist.exporting.signature import Input
from tfdist.exporting.subject import Arrays, Subject

__all__ = ["Examples", "read"]


@dataclasses.dataclass(frozen=True)
class Examples:
    """Examples as arrays, examples first.

    Attributes:
        inputs: by input name.
        labels: by output name; empty if none were given.
    """

    inputs: Arrays
    labels: Arrays

    @classmethod
    def of(cls, data: Mapping[str, Any], subject: Subject) -> Examples:
        """Examples from arrays by name.

        Args:
            data: `x` for the only input, or arrays by the inputs' names; `y` for the labels of
                the only output, or arrays by the outputs' names.
            subject: the model, which is tried on the first example.

        Raises:
            ConfigError: if an input is missing, a name is unknown, or sizes do not fit.
        """
        arrays = {name: np.asarray(value) for name, value in data.items()}
        names = [each.name for each in subject.inputs]
        if len(names) == 1 and "x" in arrays and "x" not in names:
            arrays[names[0]] = arrays.pop("x")
        missing = [name for name in names if name not in arrays]
        if missing:
            raise ConfigError(_unnamed(arrays, names, ()))
        result = {each.name: _fitting(arrays.pop(each.name), each) for each in subject.inputs}
        _check_counts({**result, **arrays})
        return cls(result, _labels(arrays, names, _outputs(subject, result)))

    def __len__(self) -> int:
        return len(next(iter(self.inputs.values())))

    def part(self, start: int, stop: int | None = None) -> Examples:
        """The examples from `start` to before `stop`."""
        return Examples(
            {name: value[start:stop] for name, value in self.inputs.items()},
            {name: value[start:stop] for name, value in self.labels.items()},
        )


def read(path: str) -> dict[str, Any]:
    """The arrays of an `.npz` file.

    Raises:
        ConfigError: if it is missing or no such file.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            if not isinstance(file, np.lib.npyio.NpzFile):
                raise ConfigError(f"The data {path!r} is one array. Write it with np.savez.")
            return {name: file[name] for name in file.files}
    except FileNotFoundError as error:
        raise ConfigError(f"The data {path!r} does not exist.") from error
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"The data {path!r} is no .npz file of arrays, as np.savez(…, x=…, y=…) writes it."
        ) from error


def _outputs(subject: Subject, inputs: Arrays) -> Arrays:
    """The model's outputs for the first example."""
    try:
        return subject.compute({name: value[:1] for name, value in inputs.items()})
    except Exception as error:
        text = str(error).strip().splitlines()[0]
        raise ConfigError(f"The model does not accept the data: {text}") from error


def _labels(arrays: Arrays, inputs: Sequence[str], outputs: Arrays) -> Arrays:
    """The labels by output, each of a shape that can be scored."""
    if "y" in arrays and "y" not in outputs and len(outputs) == 1:
        arrays[next(iter(outputs))] = arrays.pop("y")
    unknown = [name for name in arrays if name not in outputs]
    if unknown:
        raise ConfigError(_unnamed(dict.fromkeys([*inputs, *arrays]), inputs, tuple(outputs)))
    for name, labels in arrays.items():
        own = outputs[name].shape[1:]
        if labels.shape[1:] not in (own, own[:-1], (*own[:-1], 1)):
            raise ConfigError(
                f"The labels for {name!r} have the shape {list(labels.shape)}, and the output has "
                f"[examples{''.join(f', {size}' for size in own)}]. Give a class or a value each."
            )
    return arrays


def _unnamed(there: Mapping[str, Any], inputs: Sequence[str], outputs: Sequence[str]) -> str:
    alone = "x or " if len(inputs) == 1 else ""
    labels = "y or " if len(outputs) == 1 else ""
    named = f" Labels are named {labels}{', '.join(outputs)}." if outputs else ""
    return (
        f"The data has {', '.join(there) or 'nothing'}, and the model takes {alone}"
        f"{', '.join(inputs)}.{named}"
    )


def _fitting(array: np.ndarray[Any, Any], own: Input) -> np.ndarray[Any, Any]:
    sizes = zip(own.shape[1:], array.shape[1:], strict=False)
    if array.ndim != len(own.shape) or any(want not in (None, got) for want, got in sizes):
        raise ConfigError(
            f"The data for {str(own)!r} has the shape {list(array.shape)}, which does not fit."
        )
    return array if own.dtype in ("string", "bfloat16") else array.astype(own.dtype)


def _check_counts(arrays: Arrays) -> None:
    counts = {name: len(value) for name, value in arrays.items()}
    if len(set(counts.values())) != 1:
        listed = ", ".join(f"{name}: {count}" for name, count in counts.items())
        raise ConfigError(f"The data has different numbers of examples ({listed}).")
    if not next(iter(counts.values())):
        raise ConfigError("The data holds no examples.")
