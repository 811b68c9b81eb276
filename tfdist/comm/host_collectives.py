"""Host-side barrier, broadcast and all-gather of JSON values among the workers of a job.

Built on the strategy's own all-reduce, so it works wherever the strategy trains, and a peer that
died ends the wait as it ends a training step: with TensorFlow's error. With one worker nothing is
sent.

Every exchange carries a name. Workers that meet under different names are at different places of
the program; they all get an error that names these places, instead of a hang later.
"""

from __future__ import annotations

import builtins
import contextlib
import json
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist._tf.collectives import SAY_AFTER_SECONDS, met
from tfdist._tf.sessions import eagerly
from tfdist.errors import TfdistError
from tfdist.types import AnyStrategy, Array, Json, Strategy, Tensor
from tfdist.utils.watchdog import hard_deadline

__all__ = [
    "all_gather_json",
    "any_worker",
    "barrier",
    "from_chief",
    "on_chief",
    "rank",
    "together",
    "worker_count",
]

#: Bytes of a message that travel with its length.
_HEAD = 255

#: The advice if the workers are at different places.
_ALIKE = (
    "Every worker must run the same script on the same arguments and see the same files. Look for "
    "code that only some workers run, such as `if rank == 0`, and for a directory that is not "
    "shared."
)

#: Marks an exception that every worker raises.
_SHARED = "_tfdist_shared"


def worker_count(strategy: AnyStrategy) -> int:
    """Number of processes that train together; 1 for a strategy that is not tfdist's."""
    world = getattr(strategy, "world", None)
    return 1 if world is None else int(world.workers)


def rank(strategy: AnyStrategy) -> int:
    """This process's number among those that train together; 0 for a strategy not tfdist's."""
    world = getattr(strategy, "world", None)
    return 0 if world is None else int(world.worker)


def barrier(strategy: Strategy, name: str, seconds: float | None = None) -> None:
    """Waits until all workers have come here.

    Args:
        strategy: the strategy; must be called in its cross-replica context, by every worker.
        name: the place in the program, for the error when a worker is somewhere else.
        seconds: the deadline: then the process ends and names this place. None if other
            workers may be busy for any time.

    Raises:
        TfdistError: if a worker has come to another meeting.
        tensorflow.errors.OpError: if a worker died.
    """
    message = (
        f"worker {rank(strategy)} has waited for {seconds} s at {name!r}, and gives up: not all "
        f"other workers have come there. {_ALIKE}"
    )
    alone = seconds is None or worker_count(strategy) == 1
    deadline = contextlib.nullcontext() if alone else hard_deadline(seconds or 0, message, 1)
    with deadline:
        all_gather_json(strategy, None, name)


def from_chief(strategy: Strategy, value: Json, name: str = "from_chief") -> Any:
    """The chief's value, on every worker.

    Args:
        strategy: the strategy; must be called in its cross-replica context, by every worker.
        value: a small JSON value; that of the other workers is not looked at.
        name: the place in the program.

    Raises:
        TfdistError: if a worker has come to another meeting.
        tensorflow.errors.OpError: if a worker died.
    """
    own = value if getattr(strategy, "is_chief", True) else None
    return all_gather_json(strategy, own, name)[0]


def all_gather_json(strategy: Strategy, value: Json, name: str = "all_gather_json") -> list[Any]:
    """Every worker's value, by worker number, on every worker.

    Args:
        strategy: the strategy; must be called in its cross-replica context, by every worker.
        value: a small JSON value, up to some kilobytes.
        name: the place in the program.

    Raises:
        TfdistError: if a worker has come to another meeting.
        tensorflow.errors.OpError: if a worker died.
    """
    if worker_count(strategy) == 1:
        return [json.loads(json.dumps(value))]
    return [message["value"] for message in _exchange(strategy, name, value)]


def any_worker(strategy: Strategy, flag: bool) -> bool:
    """Whether a flag is up on any worker at the end of a batch: an all-reduce of one number.

    Args:
        strategy: the strategy; must be called in its cross-replica context, by every worker.
        flag: this worker's flag.

    Raises:
        tensorflow.errors.OpError: if a worker died.
    """
    if worker_count(strategy) == 1:
        return flag
    with _saying_what_for(strategy, "the end of a batch"):
        return bool(_total(strategy, np.asarray(flag, np.float32)) > 0)


_totals: weakref.WeakKeyDictionary[Any, Callable[[Any], Any]] = weakref.WeakKeyDictionary()


def _total(strategy: Strategy, numbers: Array) -> Array:
    """The sum of an array of float32 over all workers; the first replica of each speaks for it.

    Every collective of TensorFlow, NCCL and Horovod can add float32 on every device; whole numbers
    below 2^24 are exact. The function is compiled once, and kept as long as the strategy.
    """
    if strategy not in _totals:
        alive: Callable[[], Any] = weakref.ref(strategy)

        def add(value: Tensor) -> Tensor:
            context = tf.distribute.get_replica_context()
            speaks = tf.equal(context.replica_id_in_sync_group, rank(alive()) * alive().world.local)
            spoken = tf.where(speaks, value, tf.zeros_like(value))
            return context.all_reduce(tf.distribute.ReduceOp.SUM, spoken)

        def total(numbers: Tensor) -> Tensor:
            sums = alive().run(add, args=(numbers,))
            return alive().experimental_local_results(sums)[0]

        spec = tf.TensorSpec(None, tf.float32)
        _totals[strategy] = tf.function(total, input_signature=[spec], autograph=False)
    with eagerly(strategy), strategy.among_all():
        return np.asarray(_totals[strategy](tf.constant(numbers)))


def on_chief(strategy: Strategy, action: Callable[[], Any], name: str = "on_chief") -> Any:
    """Runs an action on the chief; every worker gets its result or its error.

    Args:
        strategy: the strategy; must be called in its cross-replica context, by every worker.
        action: returns a small JSON value; must not communicate.
        name: the place in the program.
    """
    chief = getattr(strategy, "is_chief", True)
    return together(strategy, action if chief else None, name)[0]


def together(strategy: Strategy, action: Callable[[], Any] | None, name: str) -> list[Any]:
    """Runs an action on the workers that have one; if one fails, all raise.

    Args:
        strategy: the strategy; must be called in its cross-replica context, by every worker.
        action: returns a small JSON value or None; None if this worker has nothing to do.
        name: the place in the program.

    Returns:
        Each worker's result, by worker number.

    Raises:
        Exception: that of the first worker that failed, on every worker: the same type if it is
            one of Python's or tfdist's own, with the same message.
    """
    if worker_count(strategy) == 1:
        return [action() if action else None]
    result, error = None, None
    try:
        result = action() if action else None
    except Exception as caught:
        if getattr(caught, _SHARED, False):
            raise  # the others have it already, and do not come to the exchange below
        error = caught
    return [message["value"] for message in _exchange(strategy, name, result, error)]


def _exchange(
    strategy: Strategy, name: str, value: Json, error: Exception | None = None
) -> list[dict[str, Any]]:
    """The values of all workers, under one name; raises if one has failed or is elsewhere."""
    own = {"name": name, "value": value, "failed": error and _error_to_json(error)}
    with _saying_what_for(strategy, name):
        texts = _all_gather_bytes(strategy, json.dumps(own).encode())
    messages = [json.loads(text) for text in texts]
    problem = _first_failure(messages, error) or _mismatch(messages)
    if problem is not None:
        setattr(problem, _SHARED, True)
        raise problem
    return messages


def _saying_what_for(strategy: Strategy, name: str) -> contextlib.AbstractContextManager[None]:
    """Shows the user, after a while, which workers this one waits for.

    Raises:
        TfdistError: if another worker has come to an exchange that is not one of this module's.
    """
    message = (
        f"worker {rank(strategy)} has waited for {SAY_AFTER_SECONDS:g} s at "
        f"{name!r} for the other workers. If only some workers come here, as under "
        "`if rank == 0`, remove the condition: tfdist itself lets one worker write."
    )
    elsewhere = TfdistError(
        f"The workers are at different places of the program: worker {rank(strategy)} at "
        f"{name!r}, another one in a step, at the end of one, or at a variable that it makes. "
        f"{_ALIKE}"
    )
    setattr(elsewhere, _SHARED, True)  # No worker can come to any exchange any more.
    return met(message, elsewhere)


def _first_failure(messages: list[dict[str, Any]], own: Exception | None) -> Exception | None:
    for worker, message in enumerate(messages):
        if message["failed"]:
            return _error_from_json(worker, message["failed"], own)
    return None


def _error_to_json(error: Exception) -> dict[str, Any]:
    """An error in JSON; the types from its own to the most general."""
    kinds = [kind.__name__ for kind in type(error).__mro__]
    return {"kinds": kinds, "message": str(error), "errno": getattr(error, "errno", None)}


def _error_from_json(worker: int, failure: dict[str, Any], own: Exception | None) -> Exception:
    """Another worker's error as an exception; this worker's own if it had the same."""
    if own is not None and type(own).__name__ == failure["kinds"][0]:
        return own
    error = next(_made(failure["kinds"], failure["message"]))
    if isinstance(error, OSError):
        error.errno = failure["errno"]
    error.add_note(f"Raised by worker {worker}.")
    error.__cause__ = own
    return error


def _made(kinds: list[str], message: str) -> Iterator[Exception]:
    """Exceptions of the first of some types that can be made from a message alone."""
    known: dict[str, Any] = {**vars(builtins), **_types(TfdistError)}
    for name in kinds:
        kind: Any = known.get(name)
        if kind in (None, Exception, BaseException, object):
            continue
        try:
            yield kind(message)
        except TypeError:
            continue
    yield TfdistError(f"{kinds[0]}: {message}")


def _types(base: type[Any]) -> dict[str, type[Any]]:
    """A class and all its subclasses by name."""
    result = {base.__name__: base}
    for subclass in base.__subclasses__():
        result.update(_types(subclass))
    return result


def _mismatch(messages: list[dict[str, Any]]) -> Exception | None:
    names = [message["name"] for message in messages]
    if len(set(names)) == 1:
        return None
    where = "; ".join(f"worker {worker} at {name!r}" for worker, name in enumerate(names))
    return TfdistError(f"The workers are at different places of the program: {where}. {_ALIKE}")


def _all_gather_bytes(strategy: Strategy, message: bytes) -> list[bytes]:
    """Each worker's bytes: lengths and beginnings in one exchange, the rest in another."""
    head = [len(message), *message[:_HEAD].ljust(_HEAD, b"\0")]
    table = _rows_of_all(strategy, np.asarray(head, np.int64))
    lengths, rows = table[:, 0], table[:, 1:]
    if lengths.max() > _HEAD:
        rest = message[_HEAD:].ljust(int(lengths.max()) - _HEAD, b"\0")
        more = _rows_of_all(strategy, np.frombuffer(rest, np.uint8))
        rows = np.concatenate([rows, more], axis=1)
    cut = zip(rows.astype(np.uint8), lengths, strict=True)
    return [row[:length].tobytes() for row, length in cut]


def _rows_of_all(strategy: Strategy, row: Array) -> Array:
    """Every worker's row of small numbers, as a table with one row a worker."""
    table = np.zeros((worker_count(strategy), len(row)), np.float32)
    table[rank(strategy)] = row
    return np.rint(_total(strategy, table)).astype(np.int64)
