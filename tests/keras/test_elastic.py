"""A training that is left at any step and taken up again equals one that was not disturbed."""

from __future__ import annotations

import pathlib
import re

import numpy as np
import pytest

from tests.harness import Pool

CASES = "tests.cases.elastic_cases"


TRAININGS = [
    ("arrays", (1, 2), False),
    ("arrays", (0, 0), True),
    ("known", (1, 0), False),
    ("unknown", (0, 4), False),
    ("endless", (1, 3), False),
    ("generator", (2, 2), False),
    ("optimizers", (2, 1), False),
    ("by hand", (1, 1), False),
]


#: Others at another step of the same kind of training.
SELDOM = [
    ("arrays", (2, 4), False),
    ("arrays", (1, 1), True),
    ("unknown", (2, 1), False),
    ("endless", (2, 2), False),
]


#: Kinds of which a ring is left and taken up; what the others show does not depend on it.
ON_A_RING = ("arrays", "optimizers")


def _marks(target, training):
    due = "horovod" if training[0] in ON_A_RING else "single"
    return [pytest.mark.seldom] if training in SELDOM or target != due else []


@pytest.mark.parametrize(
    ("target", "kind", "at", "deferred"),
    [
        pytest.param(target, *training, marks=_marks(target, training))
        for target in ("single", "horovod")
        for training in (*TRAININGS, *SELDOM)
    ],
)
def test_left_and_taken_up(cluster: Pool, tmp_path, kind, at, deferred, target):
    whole = cluster.results(target, f"{CASES}:undisturbed", kind=kind, deferred=deferred)
    taken_up = cluster(target).call(
        f"{CASES}:left_and_taken_up",
        path=str(tmp_path),
        kind=kind,
        at=at,
        deferred=deferred,
        deadline=100,
    )
    for undisturbed, resumed in zip(whole, taken_up, strict=True):
        assert len(undisturbed) == len(resumed)
        for expected, found in zip(undisturbed, resumed, strict=True):
            np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("hidden optimizer", "the optimizer 'hidden': .* no attribute of the model holds it"),
        ("hidden variable", "updates 'beside', which the model does not hold"),
    ],
)
def test_a_state_that_could_not_be_found_again_is_refused(
    cluster: Pool, tmp_path: pathlib.Path, kind: str, said: str
) -> None:
    for message in cluster("single").call(f"{CASES}:refused", path=str(tmp_path), kind=kind):
        assert re.search(said, message), message
