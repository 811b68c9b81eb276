"""Judges what a program came to on a strategy by what it came to in stock Keras."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from tests.fuzz.spec import Spec

#: Allowed differences, relative to the largest value of an array, and absolute. Half precision
#: rounds each replica's part of a sum by itself, so only what is plainly wrong can be told.
TOLERANCES = {
    "float32": (3e-5, 2e-5),
    "float64": (1e-5, 1e-5),
    "mixed_bfloat16": (0.1, 0.03),
    "mixed_float16": (0.03, 0.01),
}
#: A state of an optimizer may be a sum of squares, or the difference of nearly equal gradients.
STATE_FACTOR = 30.0
#: Options of update rules that change no result.
EXACT = {"bucket_mb"}


@dataclasses.dataclass(frozen=True)
class Verdict:
    """How a program went on a target.

    Attributes:
        kind: `equal`, `refused`, `differs`, `failed`, or `invalid` where stock Keras cannot run it.
        signature: what differs, without figures; the refusal or error without its particulars.
        details: the figures.
        places: the numbers that differ.
    """

    kind: str
    signature: str = ""
    details: tuple[str, ...] = ()
    places: frozenset[str] = frozenset()

    @property
    def is_defect(self) -> bool:
        """Whether the promise is broken."""
        return self.kind in ("differs", "failed")


def judge(spec: Spec, reference: dict[str, Any], results: list[dict[str, Any]]) -> Verdict:
    """The verdict on what every worker returned."""
    if "error" in reference:
        return Verdict("invalid", _short(reference["error"]))
    refusals = [result["refused"] for result in results if "refused" in result]
    if len(refusals) == len(results):
        return Verdict("refused", _short(refusals[0]), (refusals[0],))
    if refusals:
        return Verdict("failed", "some workers refuse", tuple(refusals))
    check = _differences if {*spec.rule} <= EXACT else _properties
    found = [each for result in results for each in check(spec, reference, result)]
    found += [f"another worker's {e}" for r in results[1:] for e in _apart(spec, results[0], r)]
    if not found:
        return Verdict("equal")
    places = sorted({text.partition(":")[0] for text in found})
    numbers = frozenset(re.sub(r"^([^:]*:(?: (?:\[\d+\])+)?).*", r"\1", each) for each in found)
    return Verdict("differs", ", ".join(places)[:200], tuple(found[:12]), numbers)


def failure(errors: list[str]) -> Verdict:
    """The verdict where processes raised what is not a refusal, died, or gave no answer."""
    said = [error for error in errors if error] or ["no error"]
    first = next((e for e in said if not e.startswith(("No answer", "The process"))), said[0])
    return Verdict("failed", _short(first), (first[:1500],))


def _short(text: str) -> str:
    """The last line that says something, without numbers and addresses."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    kind = lines[0].partition(":")[0] if lines else ""
    in_code = "in user code" in text or "Detected at node" in text
    last = lines[-1] if in_code and lines else lines[0] if lines else ""
    last = last if last.startswith(kind) else f"{kind}: {last}"
    return re.sub(r"0x[0-9a-f]+|\d+", "#", last)[:160]


def _properties(spec: Spec, reference: Any, result: Any) -> Iterator[str]:
    """What holds under every update rule: as many updates as steps, and finite weights.

    Late gradients may diverge at a rate at which those of one process do not.
    """
    rule = spec.rule
    late = rule.get("mode") == "stale"
    fewer = "accumulate" in rule or rule.get("on_stale") == "drop" or rule.get("mode") == "local"
    counted = not fewer and spec.source != "dataset_unknown"
    if counted and result["iterations"] != reference["iterations"]:
        yield f"iterations: {result['iterations']}, expected {reference['iterations']}"
    for i, (left, right) in enumerate(zip(reference["weights"], result["weights"], strict=True)):
        if left.shape != right.shape:
            yield f"weights: /{i} has shape {right.shape}, expected {left.shape}"
        elif not late and _is_finite(left) and not _is_finite(right):
            yield f"weights: /{i} is not finite"


def _is_finite(values: Any) -> bool:
    return bool(np.isfinite(values.astype("float64")).all())


def _differences(spec: Spec, reference: Any, result: Any) -> Iterator[str]:
    relative, absolute = TOLERANCES[spec.policy]
    names = ("iterations", "weights", "seen", "optimizer")
    if spec.source == "dataset_unknown":  # See `spec._counts_no_steps`.
        names = ("weights", "seen")
    for name in names:
        factor = STATE_FACTOR if name == "optimizer" else 1.0
        yield from _compare(reference[name], result[name], relative * factor, absolute, name, "")


def _apart(spec: Spec, first: Any, other: Any) -> Iterator[str]:
    """Replicas are equal at the end; but each has its own optimizer state between two averages."""
    own = spec.rule.get("mode") == "local" and not spec.rule.get("average_state")
    for name in first:
        if name != "optimizer" or not own:
            yield from _compare(first[name], other[name], 1e-6, 1e-6, f"results/{name}", "")


def _compare(
    a: Any, b: Any, relative: float, absolute: float, name: str, path: str
) -> Iterator[str]:
    if isinstance(a, dict):
        if sorted(a) != sorted(b):
            yield f"{name}{path}: has {sorted(b)}, expected {sorted(a)}"
            return
        for key in a:
            # The path of what a program saw tells defects apart; the number of a weight does not.
            yield from _compare(a[key], b[key], relative, absolute, name, f"{path}/{key}")
    elif isinstance(a, (list, tuple)):
        if len(a) != len(b):
            yield f"{name}{path}: {len(b)} values, expected {len(a)}"
            return
        for i, (left, right) in enumerate(zip(a, b, strict=True)):
            for text in _compare(left, right, relative, absolute, name, path):
                place, _, rest = text.partition(": ")
                yield f"{place}: [{i}]{rest if rest.startswith('[') else ' ' + rest}"
    else:
        yield from _numbers(np.asarray(a), np.asarray(b), relative, absolute, f"{name}{path}")


def _numbers(a: Any, b: Any, relative: float, absolute: float, path: str) -> Iterator[str]:
    if a.shape != b.shape:
        yield f"{path}: shape {b.shape}, expected {a.shape}"
    elif a.dtype.kind in "OSU":
        if not (a == b).all():
            yield f"{path}: {b!r}, expected {a!r}"
    elif a.size:
        a, b = a.astype("float64"), b.astype("float64")
        finite = np.isfinite(a)
        if (finite != np.isfinite(b)).any():
            yield f"{path}: finite elsewhere than in stock Keras"
        elif finite.any():
            apart, scale = np.abs(a - b)[finite].max(), np.abs(a[finite]).max()
            if apart > relative * scale + absolute * min(1.0, 10 * scale + 1e-3):
                shown = f"{b.item():.7g}, expected {a.item():.7g}, " if a.size == 1 else ""
                yield f"{path}: {shown}apart by {apart:.2e} of {scale:.2e}"
