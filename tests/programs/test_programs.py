"""Programs of every kind that Keras's documentation teaches, unmodified, on the strategies.

What runs on one device runs on every strategy. Where the replicas draw the same random numbers as
one device, or none, the results are equal; else they are finite and the same on every worker.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.cases.program_cases import PROGRAMS
from tests.contract.conftest import assert_same
from tests.harness import PLAIN, STRATEGIES, TARGETS, CallError, Pool, turns

CASE = "tests.cases.program_cases:program"

#: Programs whose whole RESULT equals one process's, and the tolerance.
EQUAL = {
    "accumulation": 1e-4,
    "actor_critic": 1e-4,
    "autoencoder": 1e-4,
    "ctc_captcha": 1e-4,
    "custom_parts": 1e-4,
    "distillation": 1e-4,
    "graph_network": 1e-4,
    "hub_text": 1e-4,
    "image_classifier": 1e-4,
    "multi_task": 1e-4,
    "own_loop": 1e-4,
    "q_learning": 1e-4,
    "ragged_text": 1e-4,
    "recommender": 1e-4,
    "segmentation": 1e-4,
    "seq2seq": 1e-4,
    "siamese": 1e-4,
    "string_features": 1e-4,
    "structured_data": 1e-4,
    "style_transfer": 1e-4,
    "super_resolution": 1e-4,
    "text_classifier": 1e-4,
    "text_generation": 1e-4,
    "time_series": 1e-4,
    "transfer_learning": 1e-4,
}

#: Programs that only have to run, with finite results: why they cannot equal one process.
FINITE = {
    "contrastive": "augmentation",
    "dcgan": "noise drawn in the step",
    "image_augmentation": "augmentation, dropout",
    "mixed_precision": "float16; batch statistics of each replica",
    "transformer_classifier": "dropout",
    "vae": "sampling",
    "vq_vae": "the codebook's moving average is not linear in the examples",
    "wgan_gp": "noise drawn in the step",
}

#: Programs that several replicas name as different from one process, and what of them.
NAMED = {"contrastive": "The examples of a batch meet in the loss"}

#: Programs whose steps run eagerly or are loops of their own, which divided models refuse by name.
REFUSED = {
    "zero1": ("actor_critic",),
    "zero": ("actor_critic",),
    "zero3": ("actor_critic", "own_loop"),
    "mesh": ("actor_critic", "own_loop"),
    "mesh4": ("actor_critic", "own_loop"),
}

#: Of these, those that only `make test-everything` runs: others have steps of the same kind.
SELDOM = (
    *("autoencoder", "contrastive", "distillation", "image_augmentation", "image_classifier"),
    *("multi_task", "segmentation", "siamese", "super_resolution", "text_classifier"),
    *("time_series", "vae", "vq_vae", "wgan_gp"),
)

#: The one that `make test` runs, on one strategy.
FIRST = "mixed_precision"

_NAMES = sorted([*EQUAL, *FINITE])


def test_each_program_says_what_is_compared() -> None:
    assert sorted(p.stem for p in PROGRAMS.glob("*.py") if p.stem != "__init__") == _NAMES


#: Programs are not written for a pipeline, whose models must be cut into stages.
_TARGETS = [name for name in STRATEGIES if "any model" not in TARGETS[name].lacks]

#: Those that cannot equal one process are compared between workers, so there must be several.
_SEVERAL = [name for name in _TARGETS if TARGETS[name].processes > 1]


def _marks(target: str, name: str) -> list[pytest.MarkDecorator]:
    if name in SELDOM or (name in FINITE and target not in _SEVERAL):
        return [pytest.mark.seldom]
    if name == "hub_text":  # Servers and workers have not loaded the library of its ops.
        return [pytest.mark.slow if target == "parameter_server" else pytest.mark.seldom]
    return [pytest.mark.turns("test" if name == FIRST else "all")]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Makes a test of each program on each strategy."""
    if "target" in metafunc.fixturenames:
        metafunc.parametrize(
            ("target", "name"),
            [
                pytest.param(target, name, marks=_marks(target, name))
                for name in _NAMES
                for target in _TARGETS
            ],
        )


def test_program(request: pytest.FixtureRequest, cluster: Pool, name: str, target: str) -> None:
    cluster.prefetch([PLAIN, *turns.targets_beside(request)], CASE, name=name)
    expected = (
        r"(zero=\d|mesh='\S*model=2') conflicts with" if name in REFUSED.get(target, ()) else None
    )
    if name in NAMED and TARGETS[target].replicas > 1:
        expected = NAMED[name]
    if expected is not None:
        with pytest.raises(CallError, match=expected):
            cluster.results(target, CASE, name=name)
        return
    reference = cluster.plain(CASE, name=name)
    results = cluster.results(target, CASE, name=name)
    for result in results[1:]:
        assert_same(results[0], result, 1e-6, "another worker")
    if name in EQUAL or target == "single":
        assert_same(reference, results[0], EQUAL.get(name, 1e-3), target)
    assert sorted(reference) == sorted(results[0])
    assert all(np.isfinite(value) for value in _leaves(results[0]))


def _leaves(value: Any) -> Iterator[float]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            yield from _leaves(each)
    elif not isinstance(value, (str, type(None))):
        yield float(value)
