"""Makes a program that fails as small as it can be while it fails."""

from __future__ import annotations

from collections.abc import Callable

from tests.fuzz.oracle import Verdict
from tests.fuzz.spec import Spec, simpler


def shrink(
    spec: Spec, verdict: Verdict, check: Callable[[Spec], Verdict], tries: int = 60
) -> tuple[Spec, Verdict]:
    """Leaves out one thing after the other, as long as what is left fails too.

    A program that differs may become one that differs elsewhere, but not one that ends in an
    error, nor the reverse: that would be another defect.

    Args:
        spec: the program that failed.
        verdict: how.
        check: runs a program and judges it.
        tries: how many programs are tried at most.

    Returns:
        The smallest program that was found, and its verdict.
    """
    while tries > 0:
        for candidate in simpler(spec):
            if tries == 0:
                break
            tries -= 1
            found = check(candidate)
            if _is_same(found, verdict):
                spec, verdict = candidate, found
                break
        else:
            break
    return spec, verdict


def _is_same(found: Verdict, wanted: Verdict) -> bool:
    return found.kind == wanted.kind and (
        found.kind != "failed" or found.signature == wanted.signature
    )
