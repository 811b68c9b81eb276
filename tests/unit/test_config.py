"""Flags, files and the environment become one configuration."""

from __future__ import annotations

import pytest

from tfdist.config import MODES, STRATEGIES, StrategyConfig, load_file, resolve
from tfdist.errors import ConfigError


def test_json_is_read_back():
    config = StrategyConfig(strategy="multi_worker", processes=3, seed=7, start_timeout=5)
    assert StrategyConfig.from_json(config.to_json()) == config


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"strategy": "mirored"}, ["'mirored'", "Did you mean 'mirrored'"]),
        ({"processes": 0}, ["processes=0", "1 or more"]),
        ({"processes": True}, ["processes=True"]),
        ({"devices": 0}, ["devices=0"]),
        ({"start_timeout": 0}, ["start_timeout=0", "above 0"]),
        ({"seed": -1}, ["seed=-1"]),
        ({"communication": "gloo"}, ["'gloo'", "ring"]),
        ({"strategy": "single", "devices": 2}, ["devices=2", "'single'", "mirrored"]),
        ({"strategy": "mirrored", "processes": 2}, ["processes=2", "'mirrored'", "multi_worker"]),
        ({"strategy": "mirrored", "mode": "async"}, ["mode='async'", "'mirrored'", "sync"]),
    ],
)
def test_a_mistake_says_what_was_set_and_what_to_do(options, words):
    with pytest.raises(ConfigError) as caught:
        StrategyConfig(**options)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("flags", "environ", "gpus", "picked", "why"),
    [
        ({}, {}, 0, "single", "no GPU"),
        ({}, {}, 1, "single", "1 GPU"),
        ({}, {}, 4, "mirrored", "4 GPUs"),
        ({"devices": 2}, {}, 0, "mirrored", "2 devices"),
        ({"processes": 2}, {}, 4, "multi_worker", "2 processes"),
        ({}, {"TF_CONFIG": "{}"}, 4, "multi_worker", "TF_CONFIG"),
        ({"strategy": "single"}, {"TF_CONFIG": "{}"}, 4, "single", "--strategy"),
    ],
)
def test_auto_picks_by_what_is_there_and_says_why(flags, environ, gpus, picked, why):
    resolved = resolve(flags, environ=environ, gpus=gpus)
    assert resolved.config.strategy == picked
    assert why in resolved.reasons["strategy"]


def test_an_option_given_twice_with_different_values_names_both_places(tmp_path):
    file = tmp_path / "s.toml"
    file.write_text('strategy = "multi_worker"\nprocesses = 2\n')
    with pytest.raises(ConfigError, match=r"3 by --processes and to 2 by .*s\.toml"):
        resolve({"processes": 3}, file, {})
    assert resolve({"processes": 2}, file, {}).config.processes == 2


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('stratgy = "single"', ["'stratgy'", "strategy"]),
        ("strategy = ", ["not valid TOML"]),
        ('strategy = "singel"', ["'singel'", "single"]),
    ],
)
def test_a_file_with_a_typo(tmp_path, content, words):
    file = tmp_path / "s.toml"
    file.write_text(content)
    with pytest.raises(ConfigError) as caught:
        resolve({}, file, {})
    for word in words:
        assert word in str(caught.value)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match="Cannot read the strategy file"):
        load_file(tmp_path / "none.toml")


def test_shipped_strategy_files_resolve(pytestconfig):
    files = sorted((pytestconfig.rootpath / "strategies").glob("*.toml"))
    assert {resolve({}, f, {}).config.strategy for f in files} == set(STRATEGIES)


def test_public_names_are_frozen():
    import tfdist

    assert list(STRATEGIES) == ["single", "mirrored", "multi_worker"]
    assert set(MODES) == set(STRATEGIES)
    assert sorted(tfdist.__all__) == [
        "ConfigError",
        "Mirrored",
        "MultiWorker",
        "Single",
        "StartError",
        "TfdistError",
        "strategy",
    ]
