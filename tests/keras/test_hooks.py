"""Hooks go in all together or not at all, and out whatever happens."""

from __future__ import annotations

import pytest
import tensorflow as tf

from tests.unit.test_seams import all_seams
from tfdist.keras.hooks import Hook, HookSet
from tfdist.strategies import constructors
from tfdist.strategies.scope import Scope


class Owner:
    """What is hooked: attributes of its own, and one that it inherits."""

    one = "one"
    two = "two"

    @staticmethod
    def three():
        return "three"


class Heir(Owner):
    """Inherits what is hooked on it."""


class Rigid(type):
    """A class whose attribute can be replaced, or put back, only while `soft` is set."""

    soft = True

    def __setattr__(cls, name, value):
        if name == "fixed" and not Rigid.soft:
            raise TypeError("fixed cannot be replaced")
        super().__setattr__(name, value)


class Partly(metaclass=Rigid):
    """Has an attribute that cannot always be replaced."""

    fixed = "fixed"


@pytest.fixture(autouse=True)
def soft():
    Rigid.soft = True
    before = dict(vars(Owner)), dict(vars(Heir))
    yield
    Rigid.soft = True
    assert (dict(vars(Owner)), dict(vars(Heir))) == before


def marked(text):
    return lambda original: f"{text}({original})"


def test_a_hook_that_cannot_be_made_leaves_nothing_replaced():
    def fails(original):
        raise AttributeError("Keras has moved")

    hooks = HookSet(lambda: [Hook(Owner, "one", marked("a")), Hook(Owner, "two", fails)])
    for _ in range(2):
        with pytest.raises(AttributeError, match="Keras has moved"):
            hooks.enter()
        assert not hooks.installed
        assert (Owner.one, Owner.two) == ("one", "two")


def test_an_attribute_that_is_gone_leaves_nothing_replaced_and_the_next_scope_hooks_once():
    wanted = [Hook(Owner, "one", marked("a")), Hook(Owner, "gone", marked("b"))]
    hooks = HookSet(lambda: wanted)
    with pytest.raises(AttributeError):
        hooks.enter()
    wanted.pop()
    hooks.enter()
    assert Owner.one == "a(one)"
    hooks.leave()


def test_a_hook_that_cannot_be_made_beside_one_of_another_set():
    def fails(original):
        raise AttributeError("Keras has moved")

    first = HookSet(lambda: [Hook(Owner, "one", marked("a"))])
    second = HookSet(lambda: [Hook(Owner, "one", fails)], 1)
    first.enter()
    with pytest.raises(AttributeError, match="Keras has moved"):
        second.enter()
    assert Owner.one == "a(one)"
    first.leave()


def test_an_attribute_that_refuses_to_be_replaced():
    hooks = HookSet(lambda: [Hook(Owner, "one", marked("a")), Hook(Partly, "fixed", marked("b"))])
    Rigid.soft = False
    with pytest.raises(TypeError):
        hooks.enter()
    assert (Owner.one, Partly.fixed, hooks.installed) == ("one", "fixed", False)


def test_an_attribute_that_refuses_to_be_put_back_keeps_no_other():
    hooks = HookSet(
        lambda: [
            Hook(Owner, "one", marked("a")),
            Hook(Partly, "fixed", marked("b")),
            Hook(Owner, "two", marked("c")),
        ]
    )
    hooks.enter()
    Rigid.soft = False
    with pytest.raises(TypeError):
        hooks.leave()
    assert (Owner.one, Owner.two, hooks.installed) == ("one", "two", False)
    Rigid.soft = True
    Partly.fixed = "fixed"


@pytest.mark.parametrize("first", [0, 1])
def test_sets_may_be_left_in_any_order(first):
    sets = [
        HookSet(lambda: [Hook(Heir, "three", lambda original: lambda: f"a({original()})")]),
        HookSet(lambda: [Hook(Heir, "three", lambda original: lambda: f"b({original()})")], 1),
    ]
    sets[first].enter()
    sets[1 - first].enter()
    assert Heir.three() == "b(a(three))"
    sets[first].leave()
    assert Heir.three() == ("b(three)" if first == 0 else "a(three)")
    sets[1 - first].leave()
    assert Heir.three() == "three"


def test_two_hooks_of_one_priority_are_refused():
    hooks = HookSet(lambda: [Hook(Owner, "one", marked("a")), Hook(Owner, "one", marked("b"))])
    with pytest.raises(ValueError, match=r"Owner\.one have priority 0"):
        hooks.enter()
    assert Owner.one == "one"


def test_each_hook_says_why_it_is_there():
    stand_ins = {hook.path for hook in constructors.hooks()}  # These have one reason for all.
    silent = [hook.path for hook in all_seams() if not hook.reason]
    assert [path for path in silent if path not in stand_ins] == []


class Failing:
    """A scope or a set of hooks of which some steps fail."""

    def __init__(self, *steps):
        self._steps = steps
        self.open = 0

    def enter(self):
        if "enter" in self._steps:
            raise RuntimeError("enter")
        self.open += 1

    def leave(self):
        self.open -= 1
        if "leave" in self._steps:
            raise RuntimeError("leave")

    def __enter__(self):
        self.enter()

    def __exit__(self, *error):
        self.leave()


@pytest.mark.parametrize("inner", [(), ("enter",), ("leave",)])
@pytest.mark.parametrize("own", [(), ("enter",), ("leave",)])
def test_a_scope_leaves_nothing_behind_whatever_fails(inner, own):
    seams = all_seams()
    before = [vars(seam.owner).get(seam.name) for seam in seams]
    scope, hooks = Failing(*inner), Failing(*own)
    opened = Scope(tf.distribute.OneDeviceStrategy("CPU:0"), lambda: scope, hooks)
    if inner or own:
        with pytest.raises(RuntimeError, match=r"enter|leave"), opened:
            pass
    else:
        with opened:
            pass
    assert (scope.open, hooks.open) == (0, 0)
    assert [vars(seam.owner).get(seam.name) for seam in seams] == before
