"""The fuzzer finds what is broken and makes it small; programs it has found before are kept."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import pytest

from tests.fuzz import script
from tests.fuzz.oracle import Verdict, judge
from tests.fuzz.shrink import shrink
from tests.fuzz.spec import Head, Spec, draw, fits, from_json, simpler, to_json
from tests.fuzz.trial import AMPLIFIES, Trial, can_run
from tests.harness import Pool
from tfdist import environment

#: Those that train any program; a seed draws one of them.
STRATEGIES = ("single", "mirrored", "multi_worker", "horovod", "parameter_server")
#: Some of them in each run of everything; `make fuzz` searches.
SEEDS = [*range(6), *(pytest.param(seed, marks=pytest.mark.seldom) for seed in range(6, 25))]
CASES = sorted((pathlib.Path(__file__).parent / "cases").glob("*.json"))


def test_a_seed_is_a_program_in_every_process() -> None:
    code = "from tests.fuzz.spec import draw; print([draw(seed) for seed in range(50)])"
    other = subprocess.run(
        [sys.executable, "-c", code],
        cwd=pathlib.Path(__file__).parents[2],
        env=environment.merged({"PYTHONHASHSEED": "7"}),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    drawn = [draw(seed) for seed in range(50)]
    assert other.stdout.strip() == str(drawn)
    assert len(set(drawn)) == 50


def test_each_program_is_a_script_and_data() -> None:
    for seed in range(300):
        spec = draw(seed)
        compile(script.source(spec), f"seed {seed}", "exec")
        assert from_json(json.loads(json.dumps(to_json(spec)))) == spec
        assert all(fits(other) and other != spec for other in simpler(spec))


@pytest.mark.parametrize("seed", range(3, 60))
def test_a_program_shrinks_to_what_fails(seed: int) -> None:
    """Of a failure that needs an optimizer and a batch size only these two are left."""
    spec = draw(seed)

    def check(candidate: Spec) -> Verdict:
        guilty = candidate.optimizer == spec.optimizer and candidate.batch == spec.batch
        return Verdict("differs" if guilty else "equal")

    found, _ = shrink(spec, Verdict("differs"), check, 200)
    wanted = {"optimizer": spec.optimizer, "batch": spec.batch, "examples": spec.batch}
    simplest = {name: value for name, value in wanted.items() if value != getattr(Spec(), name)}
    assert to_json(found) == simplest


def test_an_error_does_not_shrink_to_another() -> None:
    spec = Spec(parts=("dense", "relu"), options=("clipnorm",))

    def check(candidate: Spec) -> Verdict:
        return Verdict("failed", "clip" if candidate.options else "another")

    found, verdict = shrink(spec, Verdict("failed", "clip"), check)
    assert (found.parts, found.options, verdict.signature) == ((), ("clipnorm",), "clip")


def test_a_broken_strategy_is_found_and_the_program_shrinks(cluster: Pool) -> None:
    spec = Spec(parts=("dense",), options=("momentum",))
    assert Trial(cluster, "mirrored")(spec) == Verdict("equal")
    broken = Trial(cluster, "mirrored", broken="sum")
    verdict = broken(spec)
    assert verdict.kind == "differs"
    assert "weights" in verdict.signature
    smallest, verdict = shrink(spec, verdict, broken)
    assert smallest == Spec(examples=Spec().batch)
    assert verdict.kind == "differs"


@pytest.mark.seldom
def test_the_rounding_of_a_zero_gradient_is_no_defect(cluster: Pool) -> None:
    """BatchNormalization takes away what a bias in front of it adds; Lion steps by the sign."""
    head = Head(task="classes", loss="sparse")
    parts = ("conv2d", "separable", "batch_norm_fast")
    spec = Spec(data="images", parts=parts, heads=(head,), optimizer="Lion", examples=24)
    assert Trial(cluster, "mirrored")(spec).signature == AMPLIFIES
    assert Trial(cluster, "mirrored", broken="sign")(spec).kind == "differs"


def test_what_only_one_worker_refuses_is_a_defect() -> None:
    fine = {"seen": {}, "weights": [], "optimizer": [], "iterations": [1]}
    refused = {"refused": "ConfigError: no"}
    assert judge(Spec(), fine, [refused, refused]).kind == "refused"
    assert judge(Spec(), fine, [refused, fine]).kind == "failed"
    assert judge(Spec(), {"error": "ValueError"}, []).kind == "invalid"


@pytest.mark.parametrize("seed", SEEDS)
def test_programs_of_fixed_seeds(cluster: Pool, seed: int) -> None:
    spec = draw(seed)
    names = [name for name in STRATEGIES if can_run(name, spec)]
    target = names[seed % len(names)]
    verdict = Trial(cluster, target)(spec)
    if verdict.kind == "invalid":
        pytest.skip(f"Stock Keras does not run this program: {verdict.signature}")
    _is_fine(verdict, target, spec)


@pytest.mark.seldom
@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_programs_that_failed_once(
    request: pytest.FixtureRequest, cluster: Pool, path: pathlib.Path
) -> None:
    """Replays a case. One that was refused without a reason has `"expect": "equal"`.

    A case has an entry `open` while its defect is: its replay then must fail.
    """
    case = json.loads(path.read_text())
    if "open" in case:
        request.applymarker(pytest.mark.xfail(reason=case["open"], strict=True))
    for target in case["targets"]:
        spec = from_json(case["program"])
        _is_fine(Trial(cluster, target)(spec), target, spec, case.get("expect", "refused"))


def _is_fine(verdict: Verdict, target: str, spec: Spec, expected: str = "refused") -> None:
    assert verdict.kind in ("equal", expected), "\n".join(
        [f"{verdict.kind} on {target}: {verdict.signature}", *verdict.details, script.source(spec)]
    )
