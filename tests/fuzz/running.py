"""Runs a program in a worker process of the harness."""

from __future__ import annotations

import contextlib
import linecache
import pathlib
import traceback
from collections.abc import Iterator
from typing import Any

import keras
import ml_dtypes
import numpy as np
import tensorflow as tf

import tfdist
from tests.cases.common import scope
from tests.fuzz import script
from tests.fuzz.spec import from_json
from tfdist.config.gradient_options import PLAIN, GradientOptions
from tfdist.config.server_options import ServerOptions
from tfdist.errors import EquivalenceWarning, TfdistError

_TFDIST = str(pathlib.Path(tfdist.__file__).parent)


def run(
    strategy: Any, *, program: dict[str, Any], broken: str = "", noise: int = 0
) -> dict[str, Any]:
    """What a program comes to: the numbers it saw, all variables, or an error.

    Stock Keras's errors and tfdist's refusals are results. Other errors are raised: the processes
    of a strategy may not be in step after one, so the harness starts new ones.

    Args:
        strategy: what to train on, or None.
        program: a spec as `to_json` writes it.
        broken: a defect to put into the strategy, by which this tool is tested.
        noise: a seed by which the last bits of the first weights are changed, or 0.
    """
    keras.config.disable_traceback_filtering()
    tf.debugging.disable_traceback_filtering()
    spec = from_json(program)
    names: dict[str, Any] = {"__name__": "__main__"}
    try:
        with _ruled(strategy, spec.rule), _broken(strategy, broken), _noisy(noise):
            with scope(strategy):
                _execute(f"{script.HEADER}{script.made(spec)}", "program_made.py", names)
                if spec.inside:
                    _execute(script.used(spec), "program_used.py", names)
            if not spec.inside:
                _execute(script.used(spec), "program_used.py", names)
            with scope(strategy):
                if strategy is not None and spec.rule:
                    strategy.flush(names["model"])  # As docs/updates.md asks of `train_on_batch`.
                return _found(names)
    except Exception as error:
        if strategy is None:
            return {"error": f"{type(error).__name__}: {error}"[:2000]}
        if is_refusal(error):
            return {"refused": f"{type(error).__name__}: {error}"}
        raise
    finally:
        keras.config.set_floatx("float32")
        keras.config.set_dtype_policy("float32")


def _execute(text: str, file: str, names: dict[str, Any]) -> None:
    """Runs a part of a script. Its lines are kept where tracebacks and AutoGraph look for them."""
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    exec(compile(text, file, "exec"), names)


def _found(names: dict[str, Any]) -> dict[str, Any]:
    model = names["model"]
    optimizer = names.get("optimizer", getattr(model, "optimizer", None))
    optimizers = [optimizer, *names.get("optimizers", ())]
    return {
        "seen": _plain(names["seen"]),
        "weights": [np.asarray(w) for w in model.get_weights()],
        "optimizer": [[_array(v) for v in o.variables] for o in optimizers],
        "iterations": [int(_array(o.iterations)) for o in optimizers],
    }


def _array(variable: Any) -> np.ndarray:
    return np.asarray(keras.ops.convert_to_numpy(variable))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return value if value is None or isinstance(value, str) else np.asarray(value)


def is_refusal(error: BaseException) -> bool:
    """Whether tfdist itself raised an error, and so found words of its own for it.

    Of an error in a traced function AutoGraph raises a copy, whose context is the first one. What a
    line of tfdist ends in without raising it, such as a `zip` of unequal lengths, is a mistake.
    """
    while error.__context__ is not None and "in user code" in str(error):
        error = error.__context__
    frames = traceback.extract_tb(error.__traceback__)
    last = frames[-1] if frames else None
    raised = last is not None and _TFDIST in last.filename and (last.line or "").startswith("raise")
    return raised or isinstance(error, (TfdistError, EquivalenceWarning))


@contextlib.contextmanager
def _ruled(strategy: Any, rule: dict[str, Any]) -> Iterator[None]:
    """The strategy with another update rule in the block."""
    if strategy is None or not rule:
        yield
    elif hasattr(strategy, "serving"):
        before = strategy.servers.rule
        strategy.serving.use(ServerOptions(**rule))
        try:
            yield
        finally:
            strategy.serving.use(before)
    else:
        strategy.rule = GradientOptions(**rule)
        try:
            yield
        finally:
            strategy.rule = PLAIN


@contextlib.contextmanager
def _broken(strategy: Any, kind: str) -> Iterator[None]:
    """Puts a defect into a strategy, for the tests of this tool."""
    if not kind or strategy is None:
        yield
        return
    factor = {"sum": 1.1, "sign": -1.0}[kind]
    original = type(strategy).sum_gradients
    strategy.sum_gradients = lambda values: [factor * g for g in original(strategy, values)]
    try:
        yield
    finally:
        del strategy.sum_gradients


@contextlib.contextmanager
def _noisy(seed: int) -> Iterator[None]:
    """Changes the weights that layers are built with by a rounding error of the computation."""
    if not seed:
        yield
        return
    rng, original = np.random.default_rng(seed), keras.Layer.add_weight

    def add_weight(layer: Any, shape: Any = None, initializer: Any = None, **options: Any) -> Any:
        first = keras.initializers.get(initializer or "glorot_uniform")

        def rounded(shape: Any, dtype: Any = None) -> Any:
            value = first(shape, dtype=dtype)
            if not tf.as_dtype(value.dtype).is_floating:
                return value
            error = ml_dtypes.finfo(layer.compute_dtype).eps
            signs = rng.choice([-1.0, 1.0], size=value.shape)
            return value * tf.cast(1 + float(error) * signs, value.dtype)

        return original(layer, shape, rounded, **options)

    keras.Layer.add_weight = add_weight
    try:
        yield
    finally:
        keras.Layer.add_weight = original
