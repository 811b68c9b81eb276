"""What is said of Ray's resources and errors. Pure functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

__all__ = ["lacking", "short"]

_LONGEST = 300


def lacking(
    bundles: Sequence[Mapping[str, float]],
    placement: str,
    total: Mapping[str, float],
    free: Mapping[str, float],
) -> str:
    """What was asked for, and what there is.

    Args:
        bundles: the resources of each task.
        placement: how they are to be spread.
        total: the cluster's resources.
        free: what of these is free.
    """
    kinds = Counter(_listed(bundle) for bundle in bundles)
    asked = " and ".join(f"{count} x ({kind})" for kind, count in kinds.items())
    names = sorted({"CPU", *(name for bundle in bundles for name in bundle)})
    has = ", ".join(f"{n} {total.get(n, 0):g} ({free.get(n, 0):g} free)" for n in names)
    return f"Asked for: {asked}, {placement}. The cluster has: {has}."


def short(error: BaseException) -> str:
    """The end of an error's message, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[-1] if lines else type(error).__name__
    return text[-_LONGEST:].rstrip(".")


def _listed(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {count:g}" for name, count in resources.items())
