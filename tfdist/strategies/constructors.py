"""TensorFlow's constructors of strategies give the open strategy inside its scope.

A program that is written for `tf.distribute` makes a strategy by itself. Under `tfdist run` the
strategy exists already, and a process has one. Within a scope, classes of TensorFlow's public API
are therefore replaced by stand-ins: types that equal them, but whose call gives the open strategy
if it can do what the program asks for, and else raises an error that names both.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist.errors import ConfigError
from tfdist.keras.hooks import PROGRAM, Hook, HookSet, is_of_program
from tfdist.types import Strategy
from tfdist.utils.messages import logger

__all__ = ["ConstructorHooks", "hooks"]

#: Classes below `tf.distribute` whose replicas train in lockstep, so that each of tfdist's
#: strategies in lockstep can take their place.
_LOCKSTEP = (
    "MirroredStrategy",
    "MultiWorkerMirroredStrategy",
    "OneDeviceStrategy",
    "experimental.CentralStorageStrategy",
    "experimental.MultiWorkerMirroredStrategy",
)
_PARAMETER_SERVER = ("ParameterServerStrategy", "experimental.ParameterServerStrategy")
_TPU = ("TPUStrategy", "experimental.TPUStrategy")
_COORDINATOR = ("coordinator.ClusterCoordinator", "experimental.coordinator.ClusterCoordinator")

#: Names that TensorFlow 1's API lacks. Those that it has are classes of their own.
_NOT_IN_V1 = {
    "MultiWorkerMirroredStrategy",
    "ParameterServerStrategy",
    "TPUStrategy",
    *_COORDINATOR,
}

#: TensorFlow's own class, also while a stand-in is in its place.
_ServerStrategy = tf.distribute.ParameterServerStrategy

#: The base classes of all strategies, of TensorFlow 2 and 1.
_STRATEGIES = (tf.distribute.Strategy, tf.compat.v1.distribute.Strategy)

#: The strategies whose scopes are open, the outermost first. Threads share them, as the hooks.
_open: list[Any] = []

#: Notices that were given since the outermost scope was opened.
_notices: set[str] = set()


class ConstructorHooks:
    """Lets TensorFlow's constructors give a strategy while its scope is open.

    Args:
        strategy: the strategy.
    """

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy

    def enter(self) -> None:
        """Hooks TensorFlow, unless an outer scope has."""
        _hooks.enter()
        _open.append(self._strategy)

    def leave(self) -> None:
        """Restores TensorFlow when the outermost scope closes."""
        _open.remove(self._strategy)
        if not _open:
            _notices.clear()
        _hooks.leave()


def hooks() -> list[Hook]:
    """The seams of TensorFlow's public APIs: `tf.distribute`, its copy in `compat.v2`, and v1's."""
    makers: dict[str, Callable[[str, Any], Any]] = {
        **dict.fromkeys(_LOCKSTEP, functools.partial(_constructor, _refuse_servers)),
        **dict.fromkeys(_PARAMETER_SERVER, functools.partial(_constructor, _require_servers)),
        **dict.fromkeys(_TPU, functools.partial(_constructor, _never)),
        **dict.fromkeys(_COORDINATOR, _coordinator),
        "Server": _server,
        "cluster_resolver.TFConfigClusterResolver": _resolver,
        "experimental_set_strategy": _set_strategy,
    }
    result = []
    for title in ("tf.distribute", "tf.compat.v2.distribute", "tf.compat.v1.distribute"):
        for path, make in makers.items():
            if ".v1." in title and path in _NOT_IN_V1:
                continue
            *modules, name = f"{title}.{path}".split(".")[1:]
            owner = functools.reduce(getattr, modules, tf)
            result.append(Hook(owner, name, functools.partial(make, f"{title}.{path}")))
    v1 = functools.partial(_server, "tf.compat.v1.train.Server")
    return [*result, Hook(tf.compat.v1.train, "Server", v1)]


_hooks = HookSet(hooks, PROGRAM)


class _StandIn(type):
    """The type of stand-ins, and of the classes that a program derives from them.

    Only a stand-in has the two attributes in its own dictionary: a class that is derived from it is
    compared like any other. A strategy of such a class would be a second one of the process, whose
    collectives TensorFlow does not set up, or sets up twice and crashes.
    """

    def __call__(cls, *args: object, **kwargs: object) -> object:
        answer = vars(cls).get("_tfdist_answer")
        if answer is not None:
            return answer(*args, **kwargs)
        current = _current()
        if current is not None and is_of_program(cls) and issubclass(cls, _STRATEGIES):
            advice = "Use TensorFlow's own class, whose call gives the active strategy"
            raise _conflict(f"The class {cls.__name__!r}", current, f"{advice}; or {_INSTEAD}")
        return super().__call__(*args, **kwargs)

    def __instancecheck__(cls, instance: object) -> bool:
        original = vars(cls).get("_tfdist_original")
        if original is None:
            return super().__instancecheck__(instance)
        return isinstance(instance, original)

    def __subclasscheck__(cls, subclass: type) -> bool:
        original = vars(cls).get("_tfdist_original")
        if original is None:
            return super().__subclasscheck__(subclass)
        return issubclass(subclass, original)


def _stand_in(original: type, answer: Callable[..., Any]) -> type:
    """A type that equals `original`, and whose call is `answer`."""
    own = type(original)
    kind = _StandIn if own is type else type(own.__name__, (_StandIn, own), {})
    names = ("__module__", "__qualname__", "__doc__")
    attributes = {name: getattr(original, name) for name in names}
    attributes.update(_tfdist_answer=answer, _tfdist_original=original)
    return kind(original.__name__, (original,), attributes)


def _current() -> Strategy | None:
    """The open strategy: this thread's, or else the outermost; None if none is open.

    A program may keep a stand-in and call it when all scopes are closed.
    """
    own = tf.distribute.get_strategy()
    return own if own in _open else next(iter(_open), None)


def _constructor(refusal: Callable[[Any], str | None], path: str, original: type) -> type:
    """A stand-in that gives the open strategy, unless `refusal` has advice to do something else."""

    def answer(*args: object, **kwargs: object) -> object:
        current = _current()
        if current is None:
            return original(*args, **kwargs)
        advice = refusal(current)
        if advice is not None:
            raise _conflict(path, current, f"{advice}; or {_INSTEAD}")
        _notify(path, current, bool(args or kwargs))
        return current

    return _stand_in(original, answer)


def _refuse_servers(current: Strategy) -> str | None:
    if not isinstance(current, _ServerStrategy):
        return None
    return "Its replicas train in lockstep: use --strategy mirrored, multi_worker or horovod"


def _require_servers(current: Strategy) -> str | None:
    if isinstance(current, _ServerStrategy):
        return None
    return "Its weights are on servers: use --strategy parameter_server"


def _never(current: Strategy) -> str | None:
    del current
    return "tfdist trains on CPUs and GPUs, not on TPUs: take it out of the program"


def _coordinator(path: str, original: type) -> type:
    """A stand-in that coordinates parameter servers only, as the original, with words for it."""

    def answer(strategy: Strategy) -> object:
        if strategy in _open and not isinstance(strategy, _ServerStrategy):
            raise _conflict(path, strategy, "It needs servers: use --strategy parameter_server")
        return original(strategy)

    return _stand_in(original, answer)


def _server(path: str, original: type) -> type:
    """A stand-in that starts no server in a task that trains: it would wait without an end."""

    def answer(*args: object, **kwargs: object) -> object:
        current = _current()
        if current is not None and not isinstance(current, _ServerStrategy):
            advice = (
                "It serves a chief: use --strategy parameter_server, whose tasks are servers, or "
                "--every-task if all tasks run the program by themselves"
            )
            raise _conflict(path, current, advice)
        return original(*args, **kwargs)

    return _stand_in(original, answer)


def _resolver(path: str, original: type) -> type:
    """A stand-in that gives the cluster of the open strategy, which may not be in TF_CONFIG."""
    del path

    def answer(*args: object, **kwargs: object) -> object:
        known = getattr(_current(), "cluster_resolver", None)
        if args or kwargs or known is None or not known.cluster_spec().as_dict():
            return original(*args, **kwargs)
        return known

    return _stand_in(original, answer)


def _set_strategy(path: str, original: Callable[[Any], None]) -> Callable[[Any], None]:
    """The open strategy is set already, and stays set as long as its scope is open."""

    @functools.wraps(original)
    def set_strategy(strategy: Strategy) -> None:
        own = tf.distribute.get_strategy()
        if own not in _open:
            original(strategy)
        elif strategy is not None and strategy is not own:
            problem = f"A process has one strategy, not {type(strategy).__name__} besides"
            raise _conflict(path, own, f"{problem}: {_INSTEAD}")

    return set_strategy


_INSTEAD = "call tfdist.strategy() in its place, which gives the active strategy"


def _conflict(path: str, current: Strategy, advice: str) -> ConfigError:
    return ConfigError(
        f"{path} of the program conflicts with the active strategy {current.name!r}. {advice}."
    )


def _notify(path: str, current: Strategy, arguments: bool) -> None:
    """Shows the user, once, that the strategy is the job's and not the program's own."""
    replicas = current.num_replicas_in_sync
    text = f"{path} of the program is the active strategy {current.name!r}"
    text += f" ({replicas} replica{'s' * (replicas != 1)} in sync)"
    if arguments:
        text += "; its arguments have no effect"
    if text not in _notices and current.is_chief:
        _notices.add(text)
        logger.info(text)
