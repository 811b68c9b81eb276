"""`tfdist.launch`: a function instead of a script, from a notebook or a program.

The function travels to `tfdist run` in a file, by value if it was written in a notebook, and its
result comes back in another. Processes are started anew and not forked: TensorFlow cannot be used
after a fork, and the notebook may have used it.
"""

from __future__ import annotations

import codecs
import contextlib
import io
import os
import signal
import subprocess
import sys
import tempfile
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, Unpack

import cloudpickle

from tfdist import environment
from tfdist.config.strategy_config import StrategyConfig, accepted, all_options
from tfdist.config.strategy_keywords import StrategyKeywords
from tfdist.errors import ConfigError, TaskFailedError
from tfdist.launcher import root_cause
from tfdist.launcher.process import Guard

__all__ = ["launch"]

_Result = TypeVar("_Result")

#: Seconds that `tfdist run` gets to end its tasks after an interrupt, which it promises to do in 5.
_AFTER_INTERRUPT = 10.0
_FUNCTION, _RESULT = "function.pkl", "result.pkl"


def launch(
    function: Callable[..., _Result],
    args: Sequence[object] = (),
    kwargs: Mapping[str, object] | None = None,
    *,
    strategy: str = "auto",
    log_dir: str | os.PathLike[str] | None = None,
    **options: Unpack[StrategyKeywords],
) -> _Result:
    """Runs a function under a strategy, in processes of its own, as `tfdist run` runs a script.

    Each process that would run the script calls the function inside the strategy's scope. The
    chief's output is shown. An interrupt ends all processes, and so does the end of the caller.

    Args:
        function: makes the data and the model and trains it. If it was defined in a notebook, or in
            the program that runs, all that it refers to is sent too; modules are imported.
        args: its positional arguments.
        kwargs: its keyword arguments.
        strategy: the name of a strategy, `"auto"`, or a TOML file of options.
        log_dir: directory of the log files of all processes; by default `tfdist-logs/TIME-PID`.
        **options: the options of strategies, such as `processes=2` (docs/options.md).

    Returns:
        What the function returns in the chief: anything that can be pickled, such as a Keras model.

    Raises:
        ConfigError: for a wrong option, or a function, argument or result that cannot be pickled.
        TaskFailedError: if a process fails. The output says why.

    Examples:
        >>> history = tfdist.launch(train, strategy="multi_worker", processes=2)
    """
    if environment.read("TFDIST_LAUNCHED") is not None:
        raise ConfigError(
            "tfdist.launch was called in a program that `tfdist run` has started, which has its "
            "processes already. Start the program with python, or call the function itself."
        )
    _check(strategy, options)
    words = ["--strategy", strategy, *_words(options)]
    words += ["--log-dir", os.fspath(log_dir)] if log_dir is not None else []
    with tempfile.TemporaryDirectory(prefix="tfdist-launch-") as folder:
        order = (function, tuple(args), dict(kwargs or {}), sys.path)
        Path(folder, _FUNCTION).write_bytes(_pickled(order, f"The function {function!r}"))
        status, last = _run([*words, "-m", __name__, folder])
        if status:
            raise TaskFailedError(last or f"The job ended with status {status}.", status)
        result: _Result = cloudpickle.loads(Path(folder, _RESULT).read_bytes())
    return result


def _check(strategy: str, options: Mapping[str, Any]) -> None:
    """Refuses wrong options here, and not in the output of another process."""
    if strategy != "auto" and not strategy.endswith(".toml"):
        StrategyConfig.of(strategy=strategy, **options)
        return
    for name, value in options.items():  # Those that conflict are found once the rest is known.
        accepted(name, value)


def _words(options: Mapping[str, Any]) -> Iterator[str]:
    """Options as they stand on a command line."""
    for name, value in options.items():
        option = all_options()[name]
        if value is None or value is False:
            continue
        yield max(option.flags, key=len)
        if option.kind is not bool:
            yield str(option.accept(value))


class _Pickler(cloudpickle.CloudPickler):  # type: ignore[misc]
    """Keeps the files of functions, which the frames of an error name.

    cloudpickle 3.1.3 and later put "<dynamic-code>" in their place.
    """

    def reducer_override(self, value: object) -> object:
        """As cloudpickle reduces a value, but for the file of code."""
        if not isinstance(value, types.CodeType):
            return super().reducer_override(value)
        make, arguments = self.dispatch_table[types.CodeType](value)
        kept = (value.co_filename if each == _NO_FILE else each for each in arguments)
        return make, tuple(kept)


_NO_FILE = "<dynamic-code>"


def _dumps(value: object) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer).dump(value)
    return buffer.getvalue()


def _pickled(value: object, what: str) -> bytes:
    try:
        data = _dumps(value)
    except Exception as error:  # Objects raise errors of their own.
        raise ConfigError(
            f"{what} cannot be sent to another process: {error}. Give paths, numbers and arrays, "
            "make data sets and models within the function, and return what can be pickled."
        ) from error
    return data


def _run(words: list[str]) -> tuple[int, str]:
    """Runs `tfdist run` and shows its output here; returns its status and last own line."""
    with Guard() as guard:
        process = subprocess.Popen(
            guard.command((sys.executable, "-m", "tfdist", "run", *words)),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=[guard.pipe],
            start_new_session=True,
        )
        try:
            last = _shown(process)
            status = process.wait()
        except BaseException:  # Also an interrupt.
            _stop(process)
            raise
        finally:
            guard.cross_out(process.pid)
    return root_cause.exit_status(status), last


def _shown(process: subprocess.Popen[bytes]) -> str:
    """Writes the output to `sys.stdout`, which notebooks show; returns tfdist's last line."""
    assert process.stdout is not None
    decoder, last, rest = codecs.getincrementaldecoder("utf-8")(errors="replace"), "", ""
    while block := os.read(process.stdout.fileno(), 65536):
        text = decoder.decode(block)
        sys.stdout.write(text)
        sys.stdout.flush()
        *lines, rest = (rest + text).split("\n")
        last = next((x[8:] for x in reversed(lines) if x.startswith("tfdist: ")), last)
    return last


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Interrupts the job and reads on, as it does not end while its output is not read."""
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGINT)
    end = threading.Timer(_AFTER_INTERRUPT, process.kill)
    end.start()
    try:
        _shown(process)
        process.wait()
    finally:
        end.cancel()


def _call(folder: str) -> None:
    """Calls the function in a task; the chief leaves its result."""
    import tfdist

    function, args, kwargs, path = cloudpickle.loads(Path(folder, _FUNCTION).read_bytes())
    sys.path += [each for each in path if each not in sys.path]
    result = function(*args, **kwargs)
    if tfdist.strategy().is_chief:
        data = _pickled(result, f"The result of type {type(result).__name__}")
        Path(folder, _RESULT).write_bytes(data)  # It is read only if the job has ended well.


if __name__ == "__main__":
    _call(sys.argv[1])
