"""`tfdist.strategy()` in a process that has one, and in one that cannot have it."""

from __future__ import annotations

import types

import pytest

from tfdist.config.gradient_options import PLAIN
from tfdist.config.strategy_config import StrategyConfig
from tfdist.errors import ConfigError
from tfdist.strategies import factory


@pytest.fixture
def active(monkeypatch):
    made = types.SimpleNamespace(config=StrategyConfig.of(strategy="mirrored", devices=2))
    monkeypatch.setattr(factory, "_active", [made])
    return made


@pytest.mark.parametrize("name", [None, "auto", "mirrored"])
def test_the_active_strategy_is_returned(active, name):
    assert factory.strategy(name) is active
    assert factory.strategy(name, devices=2) is active
    assert factory.strategy(name, ps=1, start_timeout=60) is active  # Defaults of others.
    assert factory.active() is active


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("single", {}, ["strategy='single'", "'mirrored'"]),
        (None, {"devices": 3}, ["devices=3", "is 2"]),
        (None, {"ps": 2}, ["ps=2", "is 1"]),
        (None, {"devces": 2}, ["'devces'", "Did you mean 'devices'"]),
    ],
)
def test_a_program_that_contradicts_the_flag(active, name, options, words):
    with pytest.raises(ConfigError) as caught:
        factory.strategy(name, **options)
    for word in words:
        assert word in str(caught.value)


def test_multi_worker_without_tf_config(monkeypatch):
    monkeypatch.setattr(factory, "_active", [])
    monkeypatch.delenv("TF_CONFIG", raising=False)
    with pytest.raises(ConfigError, match=r"TF_CONFIG, which is not set.*tfdist run"):
        factory.strategy("multi_worker")


def test_a_rule_that_a_strategy_was_made_without_is_not_lost(monkeypatch):
    made = types.SimpleNamespace(rule=PLAIN)
    monkeypatch.setattr(factory, "_active", [])
    monkeypatch.setattr(factory, "resolve_path", lambda path: lambda config, member: made)
    assert factory.strategy("single") is made
    monkeypatch.setattr(factory, "_active", [])
    with pytest.raises(ConfigError, match=r"'single' was made without .*2 batches an update"):
        factory.strategy("single", accumulate=2)


def test_an_unknown_option(monkeypatch):
    monkeypatch.setattr(factory, "_active", [])
    with pytest.raises(ConfigError, match=r"'devces'.*Did you mean 'devices'"):
        factory.strategy("mirrored", devces=2)
