"""A program as plain data: drawn from a seed, kept as JSON, made simpler step by step."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Iterator
from typing import Any

from tests.fuzz import tasks, vocabulary

#: How the model's code is written.
STYLES = ("functional", "sequential", "lazy", "subclass")

SOURCES = (
    "arrays",
    "tensors",
    "dataset",
    "dataset_unknown",
    "dataset_repeated",
    "dataset_shuffled",
    "dataset_dropped",
    "dataset_varied",
    "lengths",
    "ragged",
    "sparse",
    "generator",
    "sequence",
    "sequence_workers",
)

#: Own training steps; the first is Keras's.
STEPS = (
    "",
    "compute_loss",
    "override",
    "mean",
    "sum",
    "scaled",
    "decayed",
    "clip",
    "two",
    "list",
    "penalty",
    "adversarial",
    "reversed",
    "counted",
    "graph",
    "own",
    "twice",
)

COMPILED = (
    "run_eagerly=True",
    "jit_compile=True",
    "steps_per_execution=2",
    "auto_scale_loss=False",
)
FITTED = ("validation", "validation_split", "shuffle", "steps")
CALLS = (
    "fit",
    "on_batch",
    "evaluate",
    "predict",
    "test_on_batch",
    "predict_on_batch",
    "again",
    "frozen",
    "cleared",
    "looked",
    "loop",
    "strategy_loop",
)
WEIGHTING = ("", "sample", "zeros", "class")
POLICIES = ("float32", "mixed_float16", "mixed_bfloat16", "float64")

#: Update rules of replicas, of parameter servers, or of both. Of most of them only properties are
#: known (see `oracle`).
MODES: tuple[dict[str, Any], ...] = (
    {"mode": "stale", "staleness": 1},
    {"mode": "stale", "staleness": 3},
    {"mode": "local", "period": 2},
    {"mode": "local", "period": 3, "outer_momentum": 0.9, "average_state": True},
    {"mode": "async"},
    {"compression": "bf16"},
    {"compression": "powersgd", "rank": 2},
    {"compression": "topk", "ratio": 0.3},
    {"compression": "randomk", "ratio": 0.3},
    {"compression": "fp16"},
    {"compression": "int8"},
    {"accumulate": 2},
    {"mode": "stale", "accumulate": 2},
    {"mode": "stale", "staleness": 2, "on_stale": "damp"},
    {"mode": "stale", "on_stale": "damp"},
    {"mode": "stale", "staleness": 1, "on_stale": "drop"},
    {"bucket_mb": 1e-4},
    {"wire_dtype": "bfloat16"},
    {"backup_workers": 1},
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Head:
    """An output: a task, its loss, its metrics."""

    task: str = "number"
    loss: str = "mse"
    reduction: str = ""
    metrics: tuple[str, ...] = ()
    weighted_metrics: bool = False
    loss_weight: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spec:
    """An ordinary Keras program. The defaults are the simplest one."""

    data: str = "table"
    parts: tuple[str, ...] = ()
    style: str = "functional"
    second: str = ""
    heads: tuple[Head, ...] = (Head(),)
    step: str = ""
    optimizer: str = "SGD"
    options: tuple[str, ...] = ()
    policy: str = "float32"
    source: str = "arrays"
    batch: int = 8
    examples: int = 16
    epochs: int = 1
    weighting: str = ""
    compiled: tuple[str, ...] = ()
    fitted: tuple[str, ...] = ()
    callbacks: tuple[str, ...] = ()
    calls: tuple[str, ...] = ("fit",)
    inside: bool = True
    mode: str = "{}"

    @property
    def rule(self) -> dict[str, Any]:
        """The update rule; empty where it is plain sync."""
        found: dict[str, Any] = json.loads(self.mode)
        return found

    @property
    def steps(self) -> int:
        """Batches of an epoch."""
        return -(-self.examples // self.batch)

    def kinds(self) -> list[str] | None:
        """The kind of tensor after the input and after each part; None if parts do not fit."""
        found = [vocabulary.DATA[self.data][0]]
        for name in self.parts:
            part = vocabulary.PARTS[name]
            if part.takes == "flat" and found[-1] in ("series", "image"):
                found[-1] = "flat"
            if found[-1] == "ids" and part.takes == "series":
                found[-1] = "series"
            if found[-1] == "ids" and part.takes == "flat":
                found[-1] = "flat"
            if part.takes != found[-1]:
                return None
            found.append(part.gives)
        return found


def to_json(spec: Spec) -> dict[str, Any]:
    """What differs from the simplest program."""
    simplest, values = dataclasses.asdict(Spec()), dataclasses.asdict(spec)
    return {name: value for name, value in values.items() if value != simplest[name]}


def from_json(values: dict[str, Any]) -> Spec:
    """The reverse of `to_json`."""
    frozen = {k: tuple(v) if isinstance(v, (list, tuple)) else v for k, v in values.items()}
    if "heads" in frozen:
        frozen["heads"] = tuple(
            Head(**{**head, "metrics": tuple(head.get("metrics", ()))}) for head in frozen["heads"]
        )
    return Spec(**frozen)


_LOOPS = {"loop", "strategy_loop"}
#: The steps that compute a loss of a number by themselves.
_BY_HAND = ("mean", "sum", "scaled", "decayed", "own")


def fits(spec: Spec) -> bool:
    """Whether the parts of a program go together, so that stock Keras can run it."""
    kinds = spec.kinds()
    if kinds is None:
        return False
    first = vocabulary.DATA[spec.data][0]
    one = len(spec.heads) == 1
    head = spec.heads[0]
    plain_rows = not spec.second and spec.source not in ("ragged", "sparse", "lengths")
    by_hand = spec.step in _BY_HAND or _LOOPS & {*spec.calls}
    loop = _LOOPS & {*spec.calls}
    return all(
        (
            one or spec.style in ("functional", "subclass"),
            not spec.second or (spec.style in ("functional", "subclass")),
            spec.second != "list" or spec.source in ("arrays", "tensors"),
            all(
                head.task not in tasks.OF_SERIES
                or (one and kinds[-1] == "series" and not spec.second)
                for head in spec.heads
            ),
            spec.source != "lengths" or (first in ("series", "ids") and not spec.second),
            spec.source != "lengths" or head.task not in tasks.OF_SERIES,
            spec.source != "ragged" or (first == "ids" and not spec.second),
            spec.source != "sparse" or (spec.data == "table" and not spec.second),
            not by_hand or (one and not spec.weighting and plain_rows),
            spec.step not in _BY_HAND or head.task in ("number", "numbers"),
            not loop or (spec.policy in ("float32", "float64") and not spec.step),
            not loop or (spec.calls == tuple(loop) and spec.source in ("arrays", "dataset")),
            spec.policy != "float64" or not _in_float32_only(spec),
            spec.step not in ("penalty", "adversarial", "reversed")
            or (first != "ids" and plain_rows),
            spec.weighting != "class" or (one and head.task in ("classes", "labels")),
            spec.weighting != "class" or spec.source != "generator",
            not spec.policy.startswith("mixed") or not {"activity", "regularized"} & {*spec.parts},
            "validation_split" not in spec.fitted or spec.source in ("arrays", "tensors"),
            "validation_split" not in spec.fitted or spec.examples >= 12,
            not {"validation", "validation_split"} <= {*spec.fitted},
            "steps" not in spec.fitted or spec.source != "dataset_repeated",
            "swap" not in spec.callbacks or "ema" in spec.options,
            "ema_often" not in spec.options or "ema" in spec.options,
            spec.optimizer != "MultiOptimizer" or not spec.options,
            spec.source != "dataset_unknown" or _counts_no_steps(spec),
            # Plain Keras reads a generator ahead between two validations (docs/promise.md).
            spec.source != "generator" or "validation" not in spec.fitted or spec.epochs == 1,
            # TensorFlow itself asks for the scope where a call makes weights, or slots.
            not loop or spec.inside or spec.style in ("functional", "sequential"),
            not loop or spec.inside or (spec.optimizer == "SGD" and not spec.options),
            # Keras's Adafactor fails on repeated rows of a table of which a column has no gradient,
            # as `topk` may leave it.
            spec.optimizer != "Adafactor" or first != "ids" or "compression" not in spec.rule,
            spec.optimizer != "ScheduleFreeAdamW" or spec.style in ("functional", "sequential"),
            "frozen" not in spec.calls or spec.style != "subclass",
            # What these compile anew outside of the scope is refused.
            spec.inside or not {"again", "frozen", "cleared"} & {*spec.calls},
            "looked" not in spec.calls or spec.source.startswith("dataset"),
            # A pass outside of the scope is not seen on parameter servers (docs/promise.md).
            "looked" not in spec.calls or spec.inside or spec.source != "dataset_shuffled",
            not spec.callbacks or "fit" in spec.calls,
            spec.source != "dataset_dropped" or spec.examples >= spec.batch,
            not {"run_eagerly=True", "steps_per_execution=2"} <= {*spec.compiled},
            spec.step != "graph" or "run_eagerly=True" not in spec.compiled,
        )
    )


def _in_float32_only(spec: Spec) -> bool:
    """Whether a metric has a kernel for float32 alone."""
    return any("SparseTopK" in metric for head in spec.heads for metric in head.metrics)


def _counts_no_steps(spec: Spec) -> bool:
    """Whether neither what is trained nor what is shown depends on the number of steps.

    At the end of a data set of unknown length stock Keras counts one step too many, in
    `optimizer.iterations`, in the mean of the steps' losses that an own step keeps, in those of a
    model's several outputs, and in weights that a step changes whatever the batch is, since nothing
    makes these wait for the batch.
    """
    return (
        spec.step in ("", "override")
        and len(spec.heads) == 1
        and not {"counter", "spectral"} & {*spec.parts}
        and (
            spec.optimizer in ("SGD", "Adagrad", "RMSprop", "Adadelta")
            and not {"ema", "ema_often", "accumulated", "accumulated_3"} & {*spec.options}
            and not {"schedule", "cosine_schedule", "loss_scale_optimizer"} & {*spec.options}
            and spec.policy != "mixed_float16"
            and spec.step not in ("two", "list")
        )
    )


def draw(seed: int, *, ruled: bool = False) -> Spec:
    """A program that differs with the seed, and with nothing else.

    Args:
        seed: the seed.
        ruled: whether it has an update rule, as some have.
    """
    rng = random.Random(seed)
    while True:
        spec = _draw(rng, ruled)
        if fits(spec):
            return spec


def _some(rng: random.Random, names: tuple[str, ...], chance: float, most: int = 1) -> Any:
    """Nothing, or with some chance up to `most` of the names."""
    if rng.random() > chance:
        return ()
    return tuple(rng.sample(names, min(len(names), rng.randint(1, most))))


def _draw(rng: random.Random, ruled: bool) -> Spec:
    data = rng.choice(list(vocabulary.DATA))
    parts = _draw_parts(rng, vocabulary.DATA[data][0])
    heads = tuple(_draw_head(rng, several=i) for i in range(rng.choice((1, 1, 1, 2))))
    optimizer = rng.choice((*tasks.OPTIMIZERS, "SGD", "Adam"))
    weighting = rng.choice(("", "", "", "sample", "zeros", "class"))
    return Spec(
        data=data,
        parts=parts,
        style=rng.choice(STYLES),
        second=rng.choice(("", "", "", "dict", "list")),
        heads=heads,
        step=rng.choice(("",) * 12 + STEPS),
        optimizer=optimizer,
        options=_draw_options(rng, optimizer),
        policy=rng.choice(("float32",) * 9 + POLICIES),
        source=rng.choice(("arrays",) * 6 + SOURCES),
        batch=rng.choice((4, 8, 8, 10)),
        examples=rng.choice((16, 24, 17, 25, 27, 30, 40, 21)),
        epochs=rng.choice((1, 2, 2, 3)),
        weighting=weighting,
        compiled=_some(rng, COMPILED, 0.15),
        fitted=_some(rng, FITTED, 0.25, 2),
        callbacks=_some(rng, tuple(tasks.CALLBACKS), 0.25, 2),
        calls=_draw_calls(rng),
        inside=rng.random() > 0.2,
        mode=json.dumps(rng.choice(MODES)) if rng.random() < (1.0 if ruled else 0.12) else "{}",
    )


def _draw_parts(rng: random.Random, kind: str) -> tuple[str, ...]:
    """Parts that go together, in the order in which they are applied."""
    found: list[str] = []
    for _ in range(rng.choice((1, 2, 2, 3, 4))):
        if found and rng.random() < 0.25 and kind in ("series", "image"):
            kind = "flat"
        names = [name for name, part in vocabulary.PARTS.items() if part.takes == kind]
        found.append(rng.choice(names))
        kind = vocabulary.PARTS[found[-1]].gives
    return tuple(found)


def _draw_head(rng: random.Random, several: int) -> Head:
    name = rng.choice(list(tasks.TASKS))
    task = tasks.TASKS[name]
    return Head(
        task=name,
        loss=rng.choice((task.losses[0], *task.losses)),
        reduction=rng.choice(("", "", "", *tasks.REDUCTIONS)),
        metrics=_some(rng, task.metrics, 0.5, 3),
        weighted_metrics=rng.random() < 0.3,
        loss_weight=rng.choice((None, 0.3, 2.0)) if several else None,
    )


def _draw_options(rng: random.Random, optimizer: str) -> tuple[str, ...]:
    if optimizer == "MultiOptimizer":
        return ()
    possible = [n for n in tasks.OPTIONS if optimizer in tasks.OPTIONS_OF.get(n, (optimizer,))]
    found = set(_some(rng, tuple(possible), 0.5, 2))
    if "ema_often" in found:
        found.add("ema")
    if any(len(group & found) > 1 for group in tasks.EXCLUSIVE):
        return ()
    if rng.random() < 0.04:
        found.add("loss_scale_optimizer")
    return tuple(sorted(found))


def _draw_calls(rng: random.Random) -> tuple[str, ...]:
    kind = rng.random()
    if kind < 0.06:
        return ("loop",)
    if kind < 0.1:
        return ("strategy_loop",)
    first = "on_batch" if kind < 0.25 else "fit"
    rest = ("evaluate", "predict", "test_on_batch", "predict_on_batch", "again", "frozen")
    second = rng.choice(("", "", "", "cleared", "looked"))
    return (first, *_some(rng, rest, 0.5), *([second] if second else []))


def simpler(spec: Spec) -> Iterator[Spec]:
    """Programs with one thing less, the larger steps first; only such as fit together."""
    seen = {spec}
    for candidate in _simpler(spec):
        if candidate not in seen and fits(candidate):
            seen.add(candidate)
            yield candidate


def _simpler(spec: Spec) -> Iterator[Spec]:
    simplest = Spec()
    yield dataclasses.replace(spec, data="table", parts=(), source="arrays")
    for field in dataclasses.fields(Spec):
        value = getattr(spec, field.name)
        default = getattr(simplest, field.name)
        if value == default or field.name in ("heads", "examples", "batch"):
            continue
        if field.name != "calls":
            yield dataclasses.replace(spec, **{field.name: default})
        if isinstance(value, tuple) and len(value) > 1:
            for i in range(len(value)):
                yield dataclasses.replace(spec, **{field.name: (*value[:i], *value[i + 1 :])})
    if spec.calls != ("fit",):
        yield dataclasses.replace(spec, calls=("fit",))
    yield from _simpler_heads(spec)
    for examples in (spec.batch, spec.batch + 1, 2 * spec.batch, 2 * spec.batch + 1):
        if examples < spec.examples:
            yield dataclasses.replace(spec, examples=examples)


def _simpler_heads(spec: Spec) -> Iterator[Spec]:
    if len(spec.heads) > 1:
        for i in range(len(spec.heads)):
            yield dataclasses.replace(spec, heads=(*spec.heads[:i], *spec.heads[i + 1 :]))
    for i, head in enumerate(spec.heads):
        first = tasks.TASKS[head.task].losses[0]
        for other in (
            Head(),
            Head(task=head.task, loss=first),
            dataclasses.replace(head, metrics=()),
            *(dataclasses.replace(head, metrics=(m,)) for m in head.metrics),
            dataclasses.replace(head, weighted_metrics=False),
            dataclasses.replace(head, loss=first),
            dataclasses.replace(head, reduction=""),
            dataclasses.replace(head, loss_weight=None),
        ):
            yield dataclasses.replace(spec, heads=(*spec.heads[:i], other, *spec.heads[i + 1 :]))
