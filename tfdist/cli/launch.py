"""`tfdist.launch`: a function instead of a script, from a notebook or a program.

The function travels to `tfdist run` in a file, by value if it was written in a notebook, and its
result comes back in another. Processes are started anew and not forked: TensorFlow cannot be used
after a fork, and the notebook may have used it.

A class that was sent by value is a copy in the task. In the result its name stands for it, so that
objects come back as instances of the caller's own classes.
"""

from __future__ import annotations

import codecs
import contextlib
import functools
import importlib
import io
import operator
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, Unpack

import cloudpickle

from tfdist import environment
from tfdist.cluster import resources
from tfdist.cluster.tf_config import own_tf_config
from tfdist.config.resolution import resolve
from tfdist.config.strategy_config import accepted, all_options
from tfdist.config.strategy_file import is_file, load_file
from tfdist.config.strategy_keywords import StrategyKeywords
from tfdist.errors import ConfigError, TaskFailedError
from tfdist.launcher import root_cause
from tfdist.launcher.process import Guard

__all__ = ["launch"]

_Result = TypeVar("_Result")

#: Seconds that `tfdist run` gets to end its tasks after an interrupt, which it promises to do in 5.
_AFTER_INTERRUPT = 10.0
_FUNCTION, _RESULT, _TYPE = "function.pkl", "result.pkl", "type.txt"
#: Keras finds what these packages define.
_KNOWN_TO_KERAS = ("keras", "tensorflow", "builtins")

#: Classes and functions that were sent by value and that their module has under their name.
_Named = list[tuple[str, str, object]]


def launch(
    function: Callable[..., _Result],
    args: Sequence[object] = (),
    kwargs: Mapping[str, object] | None = None,
    *,
    strategy: str | os.PathLike[str] = "auto",
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
        None if the function ends by `sys.exit(0)`.

    Raises:
        ConfigError: for a wrong option, or a function, argument or result that cannot be pickled.
            Also for a result that cannot be loaded here; the message names the file that keeps it.
        TaskFailedError: if a process fails. The output says why.

    Examples:
        >>> history = tfdist.launch(train, strategy="multi_worker", processes=2)
    """
    if environment.read("TFDIST_LAUNCHED") is not None:
        raise ConfigError(
            "tfdist.launch was called in a program that `tfdist run` has started, which has its "
            "processes already. Start the program with python, or call the function itself."
        )
    name = _checked(function, strategy, options)
    words = ["--strategy", name, *_words(options)]
    words += ["--log-dir", os.fspath(log_dir)] if log_dir is not None else []
    with tempfile.TemporaryDirectory(prefix="tfdist-launch-") as folder:
        Path(folder, _FUNCTION).write_bytes(_order(function, args, kwargs or {}))
        status, last = _run([*words, "-m", __name__, folder])
        if status:
            raise TaskFailedError(last or f"The job ended with status {status}.", status)
        result: _Result = _loaded(Path(folder), Path(log_dir or "."))
    return result


def _checked(function: object, strategy: object, options: Mapping[str, Any]) -> str:
    """Refuses mistakes here, and not in the output of another process; returns the strategy."""
    if not callable(function):
        raise ConfigError(
            f"function={function!r} is not a function. Give the function itself, without calling "
            "it, and its arguments after it: tfdist.launch(train, (16,))."
        )
    name: str = accepted("strategy", strategy)
    for option, value in options.items():
        accepted(option, value)
    file = load_file(Path(name)) if is_file(name) else None
    flags = options if file else {"strategy": name, **options}
    chosen = file.values.get("strategy", "auto") if file else name
    if chosen != "auto":
        resolve(flags, file)
    elif own_tf_config() is None:  # Else the cluster adds options, which `tfdist run` checks.
        resolve(flags, file, gpus=len(resources.visible()), on_this_machine=True)
    return name


def _words(options: Mapping[str, Any]) -> Iterator[str]:
    """Options as they stand on a command line."""
    for name, value in options.items():
        option = all_options()[name]
        if value is None:
            continue
        if value is False:  # A strategy file may switch it on.
            yield f"--no-{option.flags[0].removeprefix('--')}"
            continue
        yield max(option.flags, key=len)
        if option.kind is not bool:
            yield str(option.accept(value))


class _Pickler(cloudpickle.CloudPickler):  # type: ignore[misc]
    """Pickles by value, but names the caller's own classes, and gives Keras the classes of a model.

    Args:
        buffer: takes the bytes.
        named: takes the classes and functions that are pickled by value, with their names.
        own: the names of those of the caller, by the `id` of their copies here.
    """

    def __init__(
        self, buffer: io.BytesIO, named: _Named, own: Mapping[int, tuple[str, str]]
    ) -> None:
        super().__init__(buffer)
        self._named, self._own = named, own

    def reducer_override(self, value: Any) -> object:
        """As cloudpickle reduces a value, but for those above and the file of code."""
        if id(value) in self._own:
            return _attribute, self._own[id(value)]
        if isinstance(value, types.CodeType):
            return self._code(value)
        if hasattr(type(value), "_unpickle_model"):  # Of Keras, which need not be imported here.
            return _with_custom_objects(value)
        reduced = super().reducer_override(value)
        if reduced is not NotImplemented and _has_name(value):
            self._named.append((value.__module__, value.__qualname__, value))
        return reduced

    def _code(self, value: types.CodeType) -> tuple[object, ...]:
        """Keeps the files of functions, which the frames of an error name.

        cloudpickle 3.1.3 and later put "<dynamic-code>" in their place.
        """
        make, arguments = self.dispatch_table[types.CodeType](value)
        kept = (value.co_filename if each == _NO_FILE else each for each in arguments)
        return make, tuple(kept)


_NO_FILE = "<dynamic-code>"


def _has_name(value: Any) -> bool:
    """Whether a class or function is found in its module under its name."""
    try:
        found = operator.attrgetter(value.__qualname__)(sys.modules[value.__module__])
    except (AttributeError, KeyError):
        return False
    return found is value


def _attribute(module: str, name: str) -> object:
    """A class or function by its name."""
    return operator.attrgetter(name)(importlib.import_module(module))


def _with_custom_objects(value: Any) -> tuple[object, ...]:
    """Reduces a Keras object, with the classes and functions for the names in its file.

    Keras looks for them among those that are registered, which is done where they are defined.
    """
    with _custom_objects() as custom:
        make, arguments, *rest = value.__reduce_ex__(pickle.DEFAULT_PROTOCOL)
    if not custom:
        return make, arguments, *rest
    return _made_with, (custom, make, arguments), *rest


def _made_with(custom: dict[str, object], make: Callable[..., object], arguments: Any) -> object:
    """Makes a Keras object whose file names these classes and functions."""
    import keras

    with keras.saving.custom_object_scope(custom):
        return make(*arguments)


@contextlib.contextmanager
def _custom_objects() -> Iterator[dict[str, object]]:
    """Notes the classes and functions that Keras names in the block, but for known ones."""
    from tfdist._keras import object_registration
    from tfdist.keras.hooks import Hook, HookSet

    noted: dict[str, object] = {}

    def noting(original: Callable[[Any], str]) -> Callable[[Any], str]:
        """Keras asks for the name of each class and function that it writes."""

        @functools.wraps(original)
        def get_registered_name(obj: Any) -> str:
            name = original(obj)
            if "_tfdist_settings" in vars(obj):  # Horovod's optimizer is saved as the one it wraps.
                obj = obj.__bases__[-1]
            if str(obj.__module__).partition(".")[0] not in _KNOWN_TO_KERAS:
                noted[name] = obj
            return name

        return get_registered_name

    hooks = HookSet(lambda: [Hook(object_registration, "get_registered_name", noting)])
    hooks.enter()
    try:
        yield noted
    finally:
        hooks.leave()


def _order(
    function: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]
) -> bytes:
    """The function and its arguments; before them the path, as they may need modules of it."""
    named: _Named = []
    parts = {
        f"The function {function!r}": function,
        **{_argument(f"args[{n}]", each): each for n, each in enumerate(args)},
        **{_argument(f"kwargs[{name!r}]", each): each for name, each in kwargs.items()},
    }
    order = (function, tuple(args), dict(kwargs), named)  # The last is complete by its turn.
    return pickle.dumps(sys.path) + _pickled(order, parts, named)


def _argument(place: str, value: object) -> str:
    return f"The argument {place} of type {type(value).__name__}"


def _dumps(
    value: object, named: _Named | None = None, own: Mapping[int, tuple[str, str]] | None = None
) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer, [] if named is None else named, own or {}).dump(value)
    return buffer.getvalue()


def _pickled(
    value: object,
    parts: Mapping[str, object],
    named: _Named | None = None,
    own: Mapping[int, tuple[str, str]] | None = None,
) -> bytes:
    """The bytes of a value; an error names the first of its parts that cannot be pickled."""
    try:
        return _dumps(value, named, own)
    except Exception as error:  # Objects raise errors of their own.
        culprit = next((name for name, each in parts.items() if _fails(each)), next(iter(parts)))
        raise ConfigError(
            f"{culprit} cannot be sent to another process: {error}. Give paths, numbers and "
            "arrays, make data sets and models within the function, and return what can be pickled."
        ) from error


def _fails(value: object) -> bool:
    try:
        _dumps(value)
    except Exception:
        return True
    return False


def _loaded(folder: Path, directory: Path) -> Any:
    """The result of a job that has ended well; if it cannot be loaded, the directory keeps it."""
    file = folder / _RESULT
    if not file.exists():  # `sys.exit(0)` has ended the function.
        return None
    try:
        return cloudpickle.loads(file.read_bytes())
    except Exception as error:  # Objects raise errors of their own.
        kind, kept = (folder / _TYPE).read_text(), _kept(file, directory)
        why = textwrap.shorten(f"{type(error).__name__}: {error}", 300, placeholder=" …")
        raise ConfigError(
            f"The result of type {kind} cannot be loaded here: {why.rstrip('.')}. It is kept in "
            f"{str(kept)!r}: repair or import what it needs and load that file with pickle.load."
        ) from error


def _kept(file: Path, directory: Path) -> Path:
    """Moves the file of a result to where it stays."""
    name = f"{file.parent.name}.pkl"
    try:
        return Path(shutil.move(file, directory / name))
    except OSError:  # The directory may be read-only.
        return Path(shutil.move(file, file.parent.with_name(name)))


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

    with Path(folder, _FUNCTION).open("rb") as file:
        sys.path += [each for each in pickle.load(file) if each not in sys.path]
        function, args, kwargs, named = pickle.load(file)
    result = function(*args, **kwargs)
    if tfdist.strategy().is_chief:
        kind = type(result).__name__
        own = {id(value): (module, name) for module, name, value in named}
        data = _pickled(result, {f"The result of type {kind}": result}, own=own)
        Path(folder, _TYPE).write_text(kind)
        Path(folder, _RESULT).write_bytes(data)  # It is read only if the job has ended well.


if __name__ == "__main__":
    from tfdist.cli import launch as _importable  # Pickles name its functions.

    _importable._call(sys.argv[1])
