"""Hooks into Keras that hold inside a strategy's scope and are undone on exit.

A hook replaces one attribute of a module or class of Keras or TensorFlow. Scopes nest and threads
share them, so the hooks go in with the first scope that is entered and out with the last one that
is left.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import tensorflow as tf

from tfdist.types import Structure
from tfdist.utils.thread_state import Current, Flag

#: Priorities of the sets of hooks of a strategy, of Horovod's API, and of what only observes. These
#: hooks are around those of `tfdist.keras`, whose set has priority 0.
STRATEGY, PROGRAM, OBSERVER = 10, 20, 30


def is_of_program(method: object) -> bool:
    """Whether a method is the program's own, and neither Keras's nor tfdist's."""
    module = getattr(method, "__module__", None) or type(method).__module__
    return str(module).partition(".")[0] not in ("keras", "tfdist")


class Hook(NamedTuple):
    """One attribute to replace: `setattr(owner, name, make(original))`.

    Attributes:
        owner: the class or module that has the attribute.
        name: the attribute.
        make: makes the new attribute from the former one. Its docstring is the reason for the hook.
        priority: the place among the hooks on one seam. The one with the lowest is the innermost:
            it calls the original. No two hooks on a seam have the same.
    """

    owner: type | ModuleType
    name: str
    make: Callable[[Any], Any]
    priority: int = 0

    @property
    def reason(self) -> str:
        """The difference from one device that the hook mends: the docstring of `make`."""
        make = self.make.func if isinstance(self.make, functools.partial) else self.make
        return inspect.getdoc(make) or ""

    @property
    def path(self) -> str:
        """The importable name of the seam."""
        module = getattr(self.owner, "__module__", None)
        own = getattr(self.owner, "__qualname__", self.owner.__name__)
        return f"{module}.{own}.{self.name}" if module else f"{own}.{self.name}"


class _Seam:
    """One attribute and all hooks on it, by priority, whichever set they belong to.

    Sets are not always left in the reverse order of their entry: Horovod may be initialised within
    a scope and shut down after it. Whenever a hook comes or goes, all are made again on the
    original.
    """

    def __init__(self, hook: Hook) -> None:
        self._owner, self._name = hook.owner, hook.name
        self._own = hook.name in vars(hook.owner)
        self._original = getattr(hook.owner, hook.name)
        # A class's dictionary holds what `getattr` unwraps, such as a static method.
        self._kept = vars(hook.owner)[hook.name] if self._own else None
        self.hooks: list[Hook] = []

    def add(self, hook: Hook) -> None:
        for other in self.hooks:
            if other.priority == hook.priority:
                raise ValueError(
                    f"Two hooks on {hook.path} have priority {hook.priority}: {other.make} and "
                    f"{hook.make}. Give one of them another, the outer one the higher."
                )
        wanted = sorted([*self.hooks, hook], key=lambda each: each.priority)
        self._set(wanted)
        self.hooks = wanted

    def remove(self, hook: Hook) -> None:
        self.hooks = [other for other in self.hooks if other is not hook]
        self._set(self.hooks)

    def _set(self, hooks: list[Hook]) -> None:
        made = self._original
        for hook in hooks:
            made = hook.make(made)
        if hooks:
            setattr(self._owner, self._name, made)
        elif self._own:
            setattr(self._owner, self._name, self._kept)
        else:
            delattr(self._owner, self._name)


_lock = threading.RLock()
_seams: dict[tuple[int, str], _Seam] = {}


def _install(hook: Hook) -> None:
    key = id(hook.owner), hook.name
    seam = _seams.get(key) or _Seam(hook)
    seam.add(hook)
    # Kept when it is hooked, so that an attribute that could not be replaced is not restored.
    _seams[key] = seam


def _remove(hook: Hook) -> None:
    key = id(hook.owner), hook.name
    seam = _seams[key]
    try:
        seam.remove(hook)
    finally:
        if not seam.hooks:
            del _seams[key]


class HookSet:
    """Hooks that are installed while at least one scope is open.

    Args:
        hooks: makes the hooks.
        priority: is added to that of each hook.
    """

    def __init__(self, hooks: Callable[[], list[Hook]], priority: int = 0) -> None:
        self._hooks, self._priority = hooks, priority
        self._depth = 0
        self._installed: list[Hook] = []

    @property
    def installed(self) -> bool:
        """Whether Keras is hooked at this moment."""
        return self._depth > 0

    def wanted(self) -> list[Hook]:
        """The hooks, with the priorities that they are installed with."""
        return [each._replace(priority=each.priority + self._priority) for each in self._hooks()]

    def enter(self) -> None:
        """Installs the hooks unless an outer scope has done so.

        Either all of them are installed, or none is and the error of the first one that could not
        be is raised.
        """
        with _lock:
            if self._depth == 0:
                try:
                    for hook in self.wanted():
                        _install(hook)
                        self._installed.append(hook)
                except BaseException:
                    self._restore()
                    raise
            self._depth += 1

    def leave(self) -> None:
        """Restores the former attributes, when the outermost scope closes."""
        with _lock:
            self._depth -= 1
            if self._depth == 0:
                self._restore()

    def _restore(self) -> None:
        """Removes all hooks, last one first; an error of one is raised after the others."""
        installed, self._installed = self._installed, []
        with contextlib.ExitStack() as undoing:
            for hook in installed:
                undoing.callback(_remove, hook)


def on_gradients(make: Callable[[Any], Any], priority: int = 0) -> list[Hook]:
    """Hooks on the two ways to take gradients, a tape's and that of TensorFlow's graphs.

    Args:
        make: makes a method like `tf.GradientTape.gradient` from the original one.
        priority: see `Hook`.
    """

    @functools.wraps(make)
    def of_graph(original: Callable[..., Any]) -> Callable[..., Any]:
        def of_tape(
            _: object,
            target: Structure,
            sources: Structure,
            given: Structure = None,
            **kwargs: object,
        ) -> Structure:
            flat = original(tf.nest.flatten(target), tf.nest.flatten(sources), given, **kwargs)
            return tf.nest.pack_sequence_as(sources, flat)

        taken = make(of_tape)

        @functools.wraps(original)
        def gradients(
            ys: Structure, xs: Structure, grad_ys: Structure = None, **kwargs: object
        ) -> Structure:
            return tf.nest.flatten(taken(None, ys, xs, grad_ys, **kwargs))

        return gradients

    return [
        Hook(tf.GradientTape, "gradient", make, priority),
        Hook(tf, "gradients", of_graph, priority),
    ]


# The activity of a thread, for hooks that act differently meanwhile.

#: Set while gradients are applied that have been exchanged already.
exchanged = Flag()

#: Set while a variable is assigned for which another hook, or an update rule, answers.
accounted = Flag()

#: Set while `fit` runs, in which all workers make the same calls.
fitting = Flag()

#: Set while a loss is computed on the examples of all replicas.
on_whole_batch = Flag()

#: Set while gradients of numbers of single examples are taken, of which a replica has all.
by_example = Flag()

#: Set while a tape computes gradients. The output gradients that a gradient function of the
#: program, or of `tf.recompute_grad`, is given are those of the whole batch's loss already.
within_gradients = Flag()

#: Set while a layer is called, and those that it calls.
in_layer = Flag()

#: Tensors, by `id`, that stand for weights while a tape is asked for their gradients by these.
of_weights: Current[frozenset[int]] = Current(frozenset())
