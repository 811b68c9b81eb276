"""`python -m tests.fuzz`: tries programs drawn from seeds on strategies, beside stock Keras."""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import pathlib
import random
import tempfile
import time
from collections.abc import Iterator

from tests.fuzz import script
from tests.fuzz.oracle import Verdict
from tests.fuzz.shrink import shrink
from tests.fuzz.spec import Spec, draw, from_json, to_json
from tests.fuzz.trial import Trial, can_run
from tests.harness import Pool
from tests.harness.targets import TARGETS

CASES = pathlib.Path(__file__).parent / "cases"
#: Programs under way at a time: stock Keras is ahead of the strategies.
AHEAD = 4
DEFAULT = (
    "mirrored,multi_worker,horovod,parameter_server,multi_worker3,pipeline,single,zero,zero3,mesh"
)


def main() -> int:
    """Tries the programs; the exit status tells whether the promise was broken."""
    options = _options()
    targets = options.targets.split(",")
    unknown = [name for name in targets if name not in TARGETS]
    if unknown:
        raise SystemExit(f"--targets={options.targets}: no target {unknown[0]!r} in {[*TARGETS]}")
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    refusals: collections.Counter[str] = collections.Counter()
    found: list[tuple[str, str, str, Spec]] = []
    with _pool() as pool:
        for seed, target, spec, verdict, seconds in _verdicts(pool, options, targets):
            counts[target][verdict.kind] += 1
            said = f"{verdict.kind:8} {seconds:5.1f} s  {verdict.signature}"
            print(f"{seed:6} {target:17} {said}", flush=True)
            if verdict.is_defect:
                spec, verdict = shrink(spec, verdict, Trial(pool, target), options.shrink)
                _show(seed, target, spec, verdict)
                _keep(pathlib.Path(options.keep), seed, target, spec, verdict)
                found.append((target, verdict.kind, verdict.signature, spec))
            elif verdict.kind != "equal":
                refusals[f"{verdict.kind}: {verdict.signature}"] += 1
    _table(counts, refusals, found)
    return int(bool(found))


@contextlib.contextmanager
def _pool() -> Iterator[Pool]:
    with tempfile.TemporaryDirectory() as logs, contextlib.closing(Pool(pathlib.Path(logs))) as it:
        yield it


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--programs", type=int, default=300, help="how many")
    parser.add_argument("--seed", type=int, default=0, help="the first program's seed")
    parser.add_argument("--targets", default=DEFAULT, help="names of tests/harness/targets.py")
    parser.add_argument("--each", type=int, default=1, help="targets that each program runs on")
    parser.add_argument("--rules", action="store_true", help="only programs with an update rule")
    parser.add_argument("--shrink", type=int, default=40, help="programs that shrinking may try")
    parser.add_argument("--keep", default="fuzz-found", help="where minimal cases are written")
    parser.add_argument("--case", help="a JSON file: print its script, run it, and end")
    return parser.parse_args()


def _verdicts(
    pool: Pool, options: argparse.Namespace, targets: list[str]
) -> Iterator[tuple[int, str, Spec, Verdict, float]]:
    """Runs programs in order, some ahead of the one that is judged."""
    waiting: collections.deque[tuple[int, Spec, Trial]] = collections.deque()
    for seed, spec, target in _tries(options, targets):
        trial = Trial(pool, target)
        trial.begin(spec)
        waiting.append((seed, spec, trial))
        if len(waiting) > AHEAD:
            yield _judged(*waiting.popleft())
    while waiting:
        yield _judged(*waiting.popleft())


def _judged(seed: int, spec: Spec, trial: Trial) -> tuple[int, str, Spec, Verdict, float]:
    begin = time.monotonic()
    verdict = trial(spec)
    return seed, trial.target, spec, verdict, time.monotonic() - begin


def _tries(options: argparse.Namespace, targets: list[str]) -> Iterator[tuple[int, Spec, str]]:
    if options.case:
        kept = json.loads(pathlib.Path(options.case).read_text())
        print(script.source(from_json(kept["program"])))
        for target in kept["targets"]:
            yield 0, from_json(kept["program"]), target
        return
    for seed in range(options.seed, options.seed + options.programs):
        spec = draw(seed, ruled=options.rules)
        possible = [name for name in targets if can_run(name, spec)]
        random.Random(seed).shuffle(possible)
        for target in possible[: options.each]:
            yield seed, spec, target


def _show(seed: int, target: str, spec: Spec, verdict: Verdict) -> None:
    print(f"\n##### seed {seed} on {target}: {verdict.kind}")
    for text in verdict.details:
        print(f"#     {text}")
    print(f"{script.source(spec)}\n# {json.dumps(to_json(spec))}\n#####\n", flush=True)


def _keep(directory: pathlib.Path, seed: int, target: str, spec: Spec, verdict: Verdict) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    values = {
        "targets": [target],
        "seed": seed,
        "program": to_json(spec),
        "found": [verdict.kind, verdict.signature, *verdict.details[:3]],
    }
    path = directory / f"{target}_{seed}.json"
    path.write_text(json.dumps(values, indent=2) + "\n")


def _table(
    counts: dict[str, collections.Counter[str]],
    refusals: collections.Counter[str],
    found: list[tuple[str, str, str, Spec]],
) -> None:
    kinds = ("equal", "refused", "invalid", "differs", "failed")
    print(f"\n{'target':17}" + "".join(f"{kind:>9}" for kind in kinds))
    for target, each in counts.items():
        print(f"{target:17}" + "".join(f"{each[kind]:9}" for kind in kinds))
    for text, times in refusals.most_common():
        print(f"{times:4}  {text}")
    for target, kind, signature, spec in found:
        print(f"{target} {kind}: {signature}\n      {json.dumps(to_json(spec))}")


if __name__ == "__main__":
    raise SystemExit(main())
