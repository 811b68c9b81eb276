"""Programs that were written for Horovod run on Keras 3, and train as one process would.

Two processes started by horovodrun do the cases of `migration_cases.py`, in one launch, and each of
the programs in `programs/`, of which only the import has been changed.
"""

from __future__ import annotations

import inspect
import json
import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from keras.src import api_export
from keras.src.optimizers.adam import Adam
from keras.src.saving import object_registration

from tfdist import environment
from tfdist.horovod import program
from tfdist.strategies.horovod import library

ROOT = pathlib.Path(__file__).parents[2]
PROGRAMS = pathlib.Path(__file__).parent / "programs"

needs_horovod = pytest.mark.skipif(library.problem() is not None, reason=str(library.problem()))


def launch(out: pathlib.Path, module: str, *arguments: str, deadline: float) -> None:
    """Runs a module in two processes, in `out`, and ends them at the deadline."""
    start = [str(pathlib.Path(sys.executable).with_name("horovodrun")), "--gloo", "-np", "2"]
    environ = environment.merged({"PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "2"})
    with (out / "log").open("wb") as log:
        process = subprocess.Popen(
            [*start, sys.executable, "-u", "-m", module, *arguments],
            cwd=out,
            env=environ,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait(deadline)
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)  # It ends the processes that it has started.
                try:
                    process.wait(15)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
    assert status == 0, tail(out)


def tail(out: pathlib.Path) -> str:
    return (out / "log").read_text(errors="replace")[-6000:]


def results_of(out: pathlib.Path) -> list[dict[str, Any]]:
    return [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The directory where the cases have left their results."""
    out = tmp_path_factory.mktemp("cases")
    try:
        launch(out, "tests.horovod.migration_cases", str(out), deadline=900)
    except (subprocess.TimeoutExpired, AssertionError) as error:
        (out / "failure").write_text(f"{type(error).__name__}: {error}\n{tail(out)}")
    return out


@pytest.fixture
def values(finished: pathlib.Path):
    """Looks up what both processes have found in a case."""

    def of(name: str) -> list[Any]:
        failure = finished / "failure"
        try:
            found = [result[name] for result in results_of(finished)]
        except (OSError, KeyError):
            pytest.fail(failure.read_text() if failure.exists() else f"{name} was not done")
        for each in found:
            assert "error" not in each, each["error"]
        return [each["value"] for each in found]

    return of


def compared(value: Any, path: str = "") -> Iterator[tuple[str, dict[str, float]]]:
    """What was compared with one process, wherever it is in a case's result."""
    if isinstance(value, dict):
        if "to_one" in value:
            yield path, value
        for name, each in value.items():
            yield from compared(each, f"{path}/{name}")
    elif isinstance(value, list):
        for number, each in enumerate(value):
            yield from compared(each, f"{path}/{number}")


#: The cases that compare, and in how many ways.
COMPARED = {
    "optimizers": 6,
    "options": 7,
    "sparse": 2,
    "passes": 4,
    "eager": 1,
    "tape": 1,
    "adasum": 1,
    "two_optimizers": 2,
    "saving": 2,
    "own_optimizer": 1,
    "old_names": 4,
    "warm_up": 1,
}


@needs_horovod
@pytest.mark.parametrize("name", COMPARED)
def test_two_processes_equal_one(values, name: str) -> None:
    for value in values(name):
        found = list(compared(value))
        assert len(found) == COMPARED[name]
        for path, difference in found:
            assert difference["to_one"] < (1e-3 if path == "/fp16" else 1e-6), path
            assert difference["to_each_other"] == 0, path


@needs_horovod
def test_passes_are_counted_as_keras_counts_them(values) -> None:
    for value in values("passes"):
        assert value["counted"] == [2, 6], "6 batches are 2 updates of 3"


@needs_horovod
def test_one_process_may_trace_more_often(values) -> None:
    for value in values("tape"):
        assert value["traced"][0] < value["traced"][1]


@needs_horovod
def test_tapes_of_all_kinds(values) -> None:
    for value in values("kinds_of_tapes"):
        assert value["before"] == 3.0, "the average of 2 and 4"
        assert value["watched"] == 3.0, "the sum of 1 and 2"
        assert value["named"] == [[12.0, 18.0], None]
        assert value["zero"] == 0.0
        assert value["is_tape"]


@needs_horovod
def test_loss_scaling_looks_at_averages(values) -> None:
    for value in values("loss_scaling"):
        for way in ("by_hand", "around"):
            skipped, scale, after = value[way]
            assert (skipped, scale) == ([1.0, 2.0], 2.0), "both skip, and halve the scale"
            assert after == [0.0, 0.5]
        assert value["kind"] == "LossScaleOptimizer"
        assert value["falls"]
        assert value["apart"] == 0


@needs_horovod
def test_saved_models_are_plain_ones(values) -> None:
    for value in values("saving"):
        assert value["saved"] == ["keras.optimizers", "Adam", None]
        for name in ("model.keras", "model.h5"):
            assert value[name]["plain"] == "keras.src.optimizers.adam.Adam"
            assert value[name]["distributed"]
            assert value[name]["updates"] == 3


@needs_horovod
def test_an_optimizer_of_the_programs_own(values) -> None:
    for value in values("own_optimizer"):
        assert value["saved"] == ["tests>Halved", True]
        assert value["made_again"] == pytest.approx(-0.05)


@needs_horovod
def test_local_gradients_stay(values) -> None:
    first, second = values("local_weights")
    assert first == {"optimizer": [-3.0, 0.0], "partial": -1.0, "tape": [[2.0]]}
    assert second == {"optimizer": [-3.0, -2.0], "partial": -3.0, "tape": [[6.0]]}


@needs_horovod
def test_process_sets(values) -> None:
    assert values("process_sets") == [[-1.0, -1.5], [-2.0, -1.5]]


@needs_horovod
def test_values_of_all_kinds_are_sent(values) -> None:
    for rank, value in enumerate(values("broadcasting")):
        assert value["eagerly"] == [1.0] * 8
        assert value["within"] == [11.0, 1]
        scattered = [[1.0], [4.0]][rank]
        assert value["values"] == [3, [0.5, 2.0], [1.0, 4.0], [0, 1], 0.5, scattered]
        assert "was given [1, 2] variables, by rank" in value["number"]


@needs_horovod
def test_logs_are_averaged(values) -> None:
    for rank, value in enumerate(values("callbacks_average")):
        assert value["difference"] < 1e-6
        assert value["own_before"]
        assert value["history"]
        assert value["only"] == [[5.0, None], [None, 5.0]][rank]


@needs_horovod
def test_learning_rates_of_the_warm_up(values) -> None:
    for value in values("warm_up"):
        assert value["rates"] < 1e-7
        assert value["logged"] == [0.15, 0.2, 0.2, 0.02, 0.02]


@needs_horovod
def test_state_at_the_start(values) -> None:
    assert values("built_by_first_batch") == [0.0, 0.0]
    assert values("seeds_stay") == [True, True]


@needs_horovod
def test_lines_of_keras_2(values) -> None:
    for value in values("programs_of_keras_2"):
        assert value == {"jit_compile": False, "variables": True, "warned": [True] * 3}
    assert values("after_shutdown") == [True, True]


@needs_horovod
def test_uneven_data_ends_with_join(values) -> None:
    assert values("uneven") == [[1, -2.5], [1, -2.5]]


#: What a message must say, by the mistake.
MESSAGES = {
    "schedule": ["LearningRateWarmupCallback", "CosineDecay", "give the optimizer a number"],
    "endless": ["how many batches", "Add steps_per_epoch"],
    "strategy": ["averages over its 2 replicas itself", "Take Horovod's lines out"],
    "xla": ["ConfigError", "jit_compile=False"],
    "twice": ["distributed already", "Distribute it once"],
    "name": ["was given a str", "keras.optimizers.Adam"],
    "op": ["Choose hvd.Average"],
    "predivide": ["gradient_predivide_factor=2.0", "Leave one of the two out"],
    "groups": ["groups=-1", "positive number"],
    "compression": ["full precision", "Leave one of the two out"],
    "passes": ["backward_passes_per_step=0"],
    "both": ["gradient_accumulation_steps=2", "Leave one of the two out"],
    "process_set": ["hvd.init(process_sets="],
    "sparse_passes": ["is sparse", "sparse_as_dense=True"],
    "sparse_adasum": ["Adasum", "sparse_as_dense=True"],
    "changed_averages": ["other pairs than those that _compute_gradients", "tf.GradientTape"],
    "get_gradients": ["graphs of TensorFlow 1", "tf.GradientTape"],
    "no_tape": ["no tape", "Give tape="],
    "elastic": ["does not work with Keras 3", "--max-np"],
    "unknown": ["no attribute 'no_such_name'"],
}


@needs_horovod
@pytest.mark.parametrize("mistake", MESSAGES)
def test_mistakes_are_explained(values, mistake: str) -> None:
    for value in values("errors"):
        assert value[mistake] is not None
        for part in MESSAGES[mistake]:
            assert part in value[mistake]


@needs_horovod
def test_use_before_init_is_explained(values) -> None:
    for value in values("before_init"):
        assert "used before hvd.init()" in value


#: The programs, how each is called, and what its rank 0 writes.
RUNS = {
    "keras_digits": ([], ["checkpoint-4.h5"]),
    "tape_digits": ([], ["checkpoint", "checkpoints-1.index"]),
    "keras_digits_advanced": ([], ["checkpoint-5.keras"]),
    "keras_synthetic": (["--fp16-allreduce"], []),
    "tape_synthetic": ([], []),
    "resuming": (["--fp16-allreduce", "--epochs", "2"], ["checkpoint-2.h5", "logs/train"]),
}


def test_all_programs_are_run() -> None:
    assert sorted(path.stem for path in PROGRAMS.glob("*.py")) == sorted(RUNS)


def run_program(out: pathlib.Path, name: str, *arguments: str) -> list[dict[str, Any]]:
    path = str(PROGRAMS / f"{name}.py")
    launch(out, "tests.horovod.program_runner", str(out), path, *arguments, deadline=300)
    results = results_of(out)
    for result in results:
        assert result["apart"] == 0, "all ranks end with the same weights"
    return results


#: Programs whose lines others have too.
SELDOM = ("keras_digits", "keras_digits_advanced", "keras_synthetic", "tape_synthetic")


@needs_horovod
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.seldom] * (n in SELDOM)) for n in RUNS]
)
def test_program_runs_with_its_import_changed(tmp_path: pathlib.Path, name: str) -> None:
    arguments, written = RUNS[name]
    first, second = run_program(tmp_path, name, *arguments)
    assert first["updates"] == second["updates"]
    assert first["losses"][-1] < first["losses"][0]
    for each in written:
        assert (tmp_path / each).exists(), each
    if name != "resuming":
        return
    # Rank 0 goes on from its checkpoint, and the other is given its state.
    results = run_program(tmp_path, name, "--epochs", "4")
    for result in results:
        assert result["updates"] == 2 * first["updates"]
        # Not as after a first epoch again.
        assert max(result["losses"]) < 0.7 * first["losses"][0]
        assert result["lr"] == pytest.approx([0.1, 0.01])


def in_new_python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_is_lazy() -> None:
    code = "import sys, tfdist.horovod; print({'tensorflow', 'horovod', 'keras'} & {*sys.modules})"
    assert in_new_python(code).strip() == "set()"


def test_the_first_use_says_what_to_do_without_horovod() -> None:
    code = """
import sys
sys.modules["horovod"] = None
import tfdist.horovod as hvd
import keras
from tfdist.errors import ConfigError
for use in (
    lambda: hvd.init(),
    lambda: hvd.size(),
    lambda: hvd.DistributedOptimizer(keras.optimizers.SGD()),
    lambda: hvd.callbacks.MetricAverageCallback().set_model(None),
):
    try:
        use()
    except ConfigError as error:
        print(error)
print(hasattr(hvd, "__wrapped__"), "DistributedOptimizer" in dir(hvd))
"""
    *messages, last = in_new_python(code).splitlines()
    assert len(messages) == 4
    assert all("not installed" in m and "tfdist build-horovod" in m for m in messages)
    assert last == "False True"


#: The seams of Keras that a Horovod program needs, and their signatures.
SEAMS = {
    "Trainer.compile": (
        "(self, optimizer='rmsprop', loss=None, loss_weights=None, metrics=None, "
        "weighted_metrics=None, run_eagerly=False, steps_per_execution=1, jit_compile='auto', "
        "auto_scale_loss=True)"
    ),
    "LossScaleOptimizer.apply": "(self, grads, trainable_variables=None)",
    "LossScaleOptimizer.variables": None,
    "BaseOptimizer.variables": None,
    "BaseOptimizer.__init__": (
        "(self, learning_rate, weight_decay=None, clipnorm=None, clipvalue=None, "
        "global_clipnorm=None, use_ema=False, ema_momentum=0.99, ema_overwrite_frequency=None, "
        "loss_scale_factor=None, gradient_accumulation_steps=None, name=None, **kwargs)"
    ),
    **{f"legacy.{name}": None for name in ("Adagrad", "Adam", "Ftrl", "RMSprop", "SGD")},
}


def test_seams_of_keras() -> None:
    hooks = {".".join(hook.path.split(".")[-2:]): hook for hook in program.hooks()}
    assert sorted(hooks) == sorted(SEAMS)
    for name, signature in SEAMS.items():
        original = getattr(hooks[name].owner, hooks[name].name)
        if signature is not None:
            assert str(inspect.signature(original)) == signature
    assert isinstance(hooks["BaseOptimizer.variables"].owner.variables, property)
    places = list(inspect.signature(hooks["Trainer.compile"].owner.compile).parameters)
    assert places[1 + program._JIT_POSITION] == "jit_compile"
    assert api_export.REGISTERED_OBJS_TO_NAMES[Adam] == "keras.optimizers.Adam"
    assert isinstance(object_registration.GLOBAL_CUSTOM_NAMES, dict)
