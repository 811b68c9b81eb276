"""A program on a target, beside stock Keras."""

from __future__ import annotations

import dataclasses
from typing import Any

from tests.fuzz import oracle
from tests.fuzz.spec import Spec, to_json
from tests.fuzz.vocabulary import OF_THE_BATCH
from tests.harness import PLAIN, Pool
from tests.harness.cluster import CallError
from tests.harness.targets import TARGETS
from tfdist.config.gradient_options import GradientOptions
from tfdist.config.server_options import ServerOptions
from tfdist.errors import ConfigError

FUNCTION = "tests.fuzz.running:run"
#: Seconds for a program, which takes some; one in which a process waits for another takes all.
DEADLINE = 100.0
AMPLIFIES = "amplifies rounding"
_NOT_STARTED = "start failed"


def _is_load(error: CallError) -> bool:
    """Whether the machine may only have had too much else to do."""
    silent = all(each.startswith("No answer") for each in error.errors if each)
    return silent or str(error).startswith(_NOT_STARTED)


class Trial:
    """Runs programs on one target and judges them.

    Args:
        pool: the targets' processes.
        target: name of the target.
        broken: a defect to put into the strategy, by which this tool is tested.
    """

    def __init__(self, pool: Pool, target: str, broken: str = "") -> None:
        self.pool = pool
        self.target = target
        self._more = {"broken": broken} if broken else {}

    def begin(self, spec: Spec) -> None:
        """Starts a program without waiting for it."""
        values = {"deadline": DEADLINE, "program": to_json(spec)}
        self.pool.prefetch([PLAIN], FUNCTION, **values)
        self.pool.prefetch([self.target], FUNCTION, **values, **self._more)

    def __call__(self, spec: Spec) -> oracle.Verdict:
        """The verdict on a program."""
        values = {"deadline": DEADLINE, "program": to_json(spec)}
        self.begin(spec)
        try:
            reference = self.pool.results(PLAIN, FUNCTION, **values)[0]
        except CallError as error:
            return oracle.Verdict("invalid", str(error.errors)[:150])
        if "error" in reference:
            return oracle.judge(spec, reference, [])
        try:
            results = self.pool.results(self.target, FUNCTION, **values, **self._more)
        except CallError as error:
            if not _is_load(error):
                return oracle.failure(error.errors)
            return self._again(spec, reference, values)
        return self._confirmed(spec, oracle.judge(spec, reference, results))

    def _confirmed(self, spec: Spec, verdict: oracle.Verdict) -> oracle.Verdict:
        """The verdict, unless the program amplifies rounding.

        No two orders of summation train such a program the same. Either the difference is gone in
        double precision; or stock Keras itself differs there, and nowhere less, when its first
        weights are changed in their last bits, as a bias in front of a BatchNormalization does:
        its gradient is the rounding of zero, and Adam divides it by its own size.
        """
        if verdict.kind != "differs" or spec.rule:
            return verdict
        amplifies = oracle.Verdict("invalid", AMPLIFIES, verdict.details)
        if spec.policy == "float32":
            double = self(dataclasses.replace(spec, policy="float64"))
            if double.kind == "equal" or double.signature == AMPLIFIES:
                return amplifies
            if double.is_defect:
                return verdict
        return amplifies if verdict.places <= self._moved_by_rounding(spec) else verdict

    def _moved_by_rounding(self, spec: Spec) -> frozenset[str]:
        """The numbers of stock Keras that the last bits of its first weights move too far."""
        values = {"deadline": DEADLINE, "program": to_json(spec)}
        reference = self.pool.results(PLAIN, FUNCTION, **values)[0]
        moved: frozenset[str] = frozenset()
        for noise in (1, 2, 3):
            results = self.pool.results(PLAIN, FUNCTION, **values, noise=noise)
            moved |= oracle.judge(spec, reference, results).places
        return moved

    def _again(self, spec: Spec, reference: Any, values: dict[str, Any]) -> oracle.Verdict:
        """A second try with twice the time."""
        late = {**values, "deadline": 2 * DEADLINE, **self._more}
        try:
            results = self.pool(self.target).call(FUNCTION, **late)
        except CallError as error:
            if str(error).startswith(_NOT_STARTED):
                return oracle.Verdict("invalid", "the processes did not start")
            return oracle.failure(error.errors)
        return self._confirmed(spec, oracle.judge(spec, reference, results))


def can_run(target: str, spec: Spec) -> bool:
    """Whether a program says something on a target that this tool can judge.

    A pipeline has no update modes of this kind, normalizes microbatches, and refuses steps of a
    program's own, models without a graph and batches that microbatches do not divide; a loop with
    `Strategy.run` needs TensorFlow's coordinator on parameter servers (tests/servers has one).
    """
    rule, calls = spec.rule, {*spec.calls}
    if target == "parameter_server":
        return _takes(ServerOptions, rule) and "strategy_loop" not in calls
    if target == "pipeline":
        of_the_batch = {*OF_THE_BATCH} & {*spec.parts}
        by_graph = spec.style in ("functional", "sequential") and not spec.step
        divides = spec.batch % TARGETS[target].options["microbatches"] == 0
        eager = "run_eagerly=True" in spec.compiled or {"loop", "strategy_loop"} & calls
        return not rule and not of_the_batch and by_graph and divides and not eager
    if target in ("single", "zero", "zero3", "mesh"):
        return not rule  # The command refuses these; the harness sets the rule past its checks.
    return _takes(GradientOptions, rule)


def _takes(kind: type[GradientOptions] | type[ServerOptions], rule: dict[str, Any]) -> bool:
    try:
        kind(**rule).check()
    except (ConfigError, TypeError):
        return False
    return True
