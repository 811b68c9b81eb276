"""The command that each process of a job runs: `python -m tfdist.cli.task [-m] SCRIPT [ARGS]`.

Joins the cluster, makes the strategy, and runs the script as `__main__` inside its scope; after
`-m` it is the name of a module.
"""

from __future__ import annotations

import contextlib
import linecache
import os
import runpy
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NoReturn

from tfdist import environment
from tfdist.cluster.rendezvous import liveness
from tfdist.cluster.tf_config import own_tf_config
from tfdist.cluster.validation.machine import versions
from tfdist.config.strategy_config import StrategyConfig
from tfdist.config.strategy_spec import spec_of
from tfdist.errors import ConfigError, TfdistError
from tfdist.launcher import root_cause
from tfdist.launcher.elastic_directory import RESUME_STATUS, ElasticDirectory
from tfdist.strategies.horovod import rendezvous
from tfdist.strategies.membership import Member, join_cluster, joining_cluster
from tfdist.utils.imports import quiet_import
from tfdist.utils.run_record import Record

#: Parts of the message of an error of TensorFlow or Horovod, all of which it must contain, and a
#: hint for the user.
_HINTS: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        ("tf.distribute.Strategy", "different"),
        "the script makes a strategy inside the one that tfdist made, of a class of its own or of "
        "a private module of TensorFlow. Take tfdist's: `strategy = tfdist.strategy()`. With "
        "--env-only the script's own stays, and loops for Strategy.run train.",
    ),
    (
        ("cannot be modified after being initialized",),
        "tfdist sets up the devices before the script, with memory growth. Give their number with "
        "--devices, or the GPUs in CUDA_VISIBLE_DEVICES, and leave the call out.",
    ),
    (
        ("parallelism cannot be modified after initialization",),
        "tfdist starts TensorFlow before the script. Set the number of threads in the environment, "
        "TF_NUM_INTRAOP_THREADS and TF_NUM_INTEROP_THREADS, and leave the call out.",
    ),
    (
        ("Shape mismatch in the collective",),
        "another worker is at another place of the program, which its own log names. Look for code "
        "that only some workers run, such as `if rank == 0`.",
    ),
    (
        ("Horovod has been shut down",),
        "another rank has ended, or a rank did not come to this exchange before --stall-timeout. "
        "The launcher names it; its own log says why.",
    ),
    (
        ("Mismatched", "One rank"),
        "the ranks met with different tensors: they are at different places of the program, or "
        "their models differ. All ranks must run the same steps on models of the same shape; what "
        "only one does must not compute with the strategy.",
    ),
)


def main(argv: Sequence[str], make: Callable[[], Any] | None = None) -> int:
    """Runs one task.

    Args:
        argv: the script's path, or `-m` and the name of a module, and its arguments.
        make: makes the strategy; by default that of this task of its cluster.

    Returns:
        The exit status: the script's, or that of the error that kept it from running.
    """
    if not argv:
        print("tfdist: usage: python -m tfdist.cli.task [-m] SCRIPT [ARGS]", file=sys.stderr)
        return 2
    try:
        strategy = (make or _make_strategy)()
        with _recording():
            return _run_script(strategy, argv)
    except TfdistError as error:
        print(f"tfdist: {_as_typed(error)}", file=sys.stderr, flush=True)
        return error.exit_status
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _as_typed(error: TfdistError) -> str:
    """The message of an error, in the words of the command if one has started this task."""
    if environment.read("TFDIST_LAUNCHED") is None or not isinstance(error, ConfigError):
        return str(error)
    from tfdist.cli.options import in_flags  # Takes time to load.

    written = environment.read("TFDIST_WRITTEN") or ""
    return in_flags(str(error), written.split(","))


def _make_strategy() -> Any:
    config = config_of_task()
    record = _record()
    with _joining(config, record) as joined:
        record.add("imports")
        with quiet_import():
            import tensorflow as tf

            from tfdist.strategies.factory import create

            tf.config.list_physical_devices()
        record.add("joins")
        member = joined()
    seed(environment.read("TFDIST_SEED"))
    strategy = create(config, member)
    _begin_record(record)
    return strategy


def config_of_task() -> StrategyConfig:
    """The configuration that the launcher gives a task.

    Raises:
        ConfigError: if no launcher has started this process.
    """
    text = environment.read("TFDIST_CONFIG")
    if text is None:
        raise ConfigError("TFDIST_CONFIG is not set. Start the script with `tfdist run SCRIPT`.")
    return StrategyConfig.from_json(text)


def _joining(
    config: StrategyConfig, record: Record
) -> AbstractContextManager[Callable[[], Member | None]]:
    """Joins the cluster if there is one, during the block where that can be."""
    text = own_tf_config() if spec_of(config.strategy).is_clustered else None
    if text is None:
        return contextlib.nullcontext(lambda: None)
    offer = rendezvous.offer_of(config)
    if offer is None:
        return joining_cluster(text, config)
    record.add("joins")
    member = join_cluster(text, config, offer)  # The offer starts a thread, so nothing may fork.
    return contextlib.nullcontext(lambda: member)


def seed(text: str | None) -> None:
    """Seeds Python, NumPy and TensorFlow, so that all tasks of a job draw alike."""
    if text is None:
        return
    import keras

    keras.utils.set_random_seed(int(text))


def _record() -> Record:
    """The record of this task, if the launcher names a file for it."""
    path = environment.read("TFDIST_RECORD")
    return Record(None if path is None else Path(path))


def _begin_record(record: Record) -> None:
    """Describes this task in its record, and has `fit` write its progress there."""
    if not record.is_open:
        return
    import tensorflow as tf

    from tfdist.keras import progress

    devices = tf.config.list_physical_devices()
    record.add(
        "task",
        host=socket.gethostname(),
        pid=os.getpid(),
        cores=len(os.sched_getaffinity(0)),
        devices=[each.name.removeprefix("/physical_device:") for each in devices],
        versions=versions(),
    )
    progress.begin(record)


def _recording() -> Any:
    from tfdist.diagnostics import recorder

    return recorder.recording_if_asked()


def _run_script(strategy: Any, argv: Sequence[str]) -> int:
    state_path = None
    run = _program(argv)
    try:
        with strategy.scope():
            state_path = _begin_elastic()
            run()
    except Exception as error:
        if state_path is not None and root_cause.names_a_lost_peer(str(error)):
            return _left_for_others()
        if isinstance(error, TfdistError):
            raise
        return _shown(error)
    except SystemExit as end:
        if end.code not in (None, 0):
            if isinstance(end.code, int):
                return end.code
            print(end.code, file=sys.stderr)
            return 1
    try:
        _leave_together(strategy)
    except TfdistError:
        raise
    except Exception as error:
        return _shown(error)
    return 0


def _program(argv: Sequence[str]) -> Callable[[], object]:
    """Sets `sys.argv` and `sys.path` as Python does; returns a function that runs the program."""
    if argv[0] == "-m":
        sys.argv, sys.path[0] = list(argv[1:]), str(Path.cwd())
        return lambda: runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
    sys.argv, sys.path[0] = list(argv), str(Path(argv[0]).resolve().parent)
    return lambda: runpy.run_path(argv[0], run_name="__main__")


def _shown(error: Exception) -> int:
    """Shows an error that ends the script; returns the exit status."""
    hint = _explain(error)
    if hint is not None:
        error.add_note(f"tfdist: {hint}")
    if _is_aborted(error):
        print("\n".join(_in_short(error)), file=sys.stderr, flush=True)
    else:
        error.__traceback__ = _of_program(error)
        sys.excepthook(type(error), error, error.__traceback__)
    return 1


def _explain(error: BaseException) -> str | None:
    """A hint for the user if an error's message is one of those known, or None."""
    text = str(error)
    for parts, hint in _HINTS:
        if all(part in text for part in parts):
            return hint
    return None


def _is_aborted(error: BaseException) -> bool:
    """Whether TensorFlow or Horovod ended an operation because another task was lost.

    Its stack would only bury the error of that task. It stays if Keras's filter is off.
    """
    from keras.config import is_traceback_filtering_enabled

    return (
        type(error).__module__.startswith(("tensorflow.", "horovod."))
        and own_tf_config() is not None
        and root_cause.names_a_lost_peer(str(error))
        and is_traceback_filtering_enabled()
    )


def _in_short(error: BaseException) -> list[str]:
    """The program's line and the lost task; `root_cause.is_consequence` reads them in the log."""
    stack = traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in stack if root_cause.is_of_program(frame.filename)]
    place = traceback.format_list(frames[-1:])
    kind = f"{type(error).__module__}.{type(error).__qualname__}"
    first, *more = root_cause.loss(str(error))
    notes = getattr(error, "__notes__", ())
    at = " The program was at:" if place else ""
    return [
        f"tfdist: this task ends because another was lost.{at}",
        *(text.rstrip("\n") for text in place),
        *(f"{kind}: {first}", *more, *notes),
    ]


def _of_program(error: BaseException) -> TracebackType | None:
    """The traceback without the frames of tfdist, which the program does not know.

    All stay if tfdist itself raised the error, or if Keras's own filter of tracebacks is off.
    """
    from keras.config import is_traceback_filtering_enabled

    entries, entry = [], error.__traceback__
    while entry is not None:
        entries.append(entry)
        entry = entry.tb_next
    last = entries[-1]
    # Keras has taken its own frames out, so that a hook which called Keras may be the last one.
    line = linecache.getline(last.tb_frame.f_code.co_filename, last.tb_lineno)
    raised_here = _is_tfdists(last.tb_frame) and "original(" not in line
    if raised_here or not is_traceback_filtering_enabled():
        return error.__traceback__
    kept: TracebackType | None = None
    for entry in reversed(entries):
        # Python reads the script in frozen modules: an error of its syntax has no other frame.
        if not _is_tfdists(entry.tb_frame) and not _is_frozen(entry.tb_frame):
            kept = TracebackType(kept, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return kept


def _is_tfdists(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(root_cause.PACKAGE)


def _is_frozen(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith("<frozen ")


def _begin_elastic() -> str | None:
    """The directory for the state of an elastic job; `fit` can then be taken up again."""
    path = environment.read("TFDIST_ELASTIC")
    if path is not None:
        from tfdist.keras import elastic

        elastic.begin(ElasticDirectory(Path(path)))
    return path


def _left_for_others() -> int:
    from tfdist.keras import elastic

    kept = elastic.leave_state()
    print(f"tfdist: another task is lost; {kept}", file=sys.stderr, flush=True)
    return RESUME_STATUS


def _leave_together(strategy: Any) -> None:
    """Waits for the other tasks, since TensorFlow ends those that outlive the chief with an error.

    A task that dies meanwhile ends the wait, as it ends a training step.
    """
    from tfdist.comm import host_collectives

    host_collectives.barrier(strategy, "the end of the script")


def _run() -> NoReturn:
    status = main(sys.argv[1:])
    liveness.send_farewell(status)
    sys.exit(status)


if __name__ == "__main__":
    _run()
