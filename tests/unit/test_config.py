"""Flags, files and the environment become one configuration."""

from __future__ import annotations

import pytest

from tfdist.config.gradient_options import GradientOptions
from tfdist.config.resolution import resolve
from tfdist.config.strategy_config import STRATEGIES, StrategyConfig
from tfdist.config.strategy_file import load_file
from tfdist.errors import ConfigError

WITH_SERVERS = '{"cluster": {"chief": ["c:1"], "worker": ["a:1", "b:1"], "ps": ["p:1"]}}'
WITHOUT_SERVERS = '{"cluster": {"worker": ["a:1", "b:1"]}}'


def test_json_is_read_back():
    config = StrategyConfig.of(strategy="multi_worker", processes=3, seed=7, start_timeout=5)
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
        ({"strategy": "multi_worker", "communication": "gloo"}, ["'gloo'", "ring"]),
        (
            {"strategy": "mirrored", "communication": "ring"},
            ["communication='ring'", "'mirrored': it chooses among TensorFlow's collectives"],
        ),
        ({"strategy": "single", "devices": 2}, ["devices=2", "'single'", "mirrored"]),
        ({"strategy": "mirrored", "processes": 2}, ["processes=2", "'mirrored'", "multi_worker"]),
        ({"strategy": "pipeline", "cuts": ""}, ["cuts=''", "an empty name", "leave it out"]),
        ({"strategy": "pipeline", "cuts": "dense2,"}, ["cuts='dense2,'", "an empty name"]),
        (
            {"strategy": "mirrored", "mode": "async"},
            ["mode='async'", "'mirrored'", "which has sync, stale, local.", "parameter_server"],
        ),
    ],
)
def test_a_mistake_says_what_was_set_and_what_to_do(options, words):
    with pytest.raises(ConfigError) as caught:
        StrategyConfig.of(**options)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"ps": 0}, ["ps=0", "1 or more"]),
        ({"mode": "local"}, ["mode='local'", "sync, async, stale"]),
        ({"mode": "stale", "staleness": -1}, ["staleness=-1", "0 or more"]),
        ({"mode": "stale", "staleness": 1.5}, ["staleness=1.5", "whole number"]),
        ({"mode": "stale"}, ["mode='stale'", "on_stale='wait'", "Give staleness"]),
        ({"mode": "stale", "on_stale": "drop"}, ["on_stale='drop'", "Give staleness"]),
        ({"staleness": 4}, ["staleness=4", "mode='sync'", "Choose mode='stale'"]),
        ({"mode": "async", "on_stale": "damp"}, ["on_stale='damp'", "mode='async'"]),
        (
            {"mode": "stale", "on_stale": "damp", "staleness": 4},
            ["staleness=4", "on_stale='damp'", "Leave staleness out"],
        ),
        ({"mode": "stale", "on_stale": "skip"}, ["on_stale 'skip'", "wait, drop, damp"]),
        ({"processes": 3, "backup_workers": 3}, ["backup_workers=3", "3 workers", "-n"]),
        ({"processes": 3, "backup_workers": 4}, ["backup_workers=4"]),
        ({"backup_workers": -1}, ["backup_workers=-1", "0 or more"]),
        (
            {"processes": 3, "backup_workers": 1, "mode": "async"},
            ["backup_workers=1", "mode='async'", "mode='sync'"],
        ),
        ({"wire_dtype": "int8"}, ["wire_dtype 'int8'", "float32, bfloat16, float16"]),
        ({"min_shard_bytes": 0}, ["min_shard_bytes=0"]),
        ({"max_shards": 0}, ["max_shards=0", "1 splits no variable"]),
        ({"step_timeout": 0}, ["step_timeout=0", "seconds"]),
        ({"devices": 2}, ["devices=2", "one device each", "-n"]),
    ],
)
def test_a_mistake_in_the_options_of_parameter_servers(options, words):
    with pytest.raises(ConfigError) as caught:
        StrategyConfig.of(strategy="parameter_server", **options)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        {"ps": 2},
        {"wire_dtype": "bfloat16"},
        {"min_shard_bytes": 1 << 10},
        {"max_shards": 1},
        {"step_timeout": 5.0},
        {"backup_workers": 1},
        {"ps": 1},  # Its default, which is a mistake too if it is set.
        {"step_timeout": 600.0},
    ],
    ids=str,
)
@pytest.mark.parametrize("strategy", ["single", "mirrored", "multi_worker"])
def test_options_of_parameter_servers_with_another_strategy(strategy, options):
    ((name, value),) = options.items()
    with pytest.raises(ConfigError) as caught:
        StrategyConfig.of(strategy=strategy, **options)
    for word in (f"{name}={value!r}", strategy, "strategy='parameter_server'", f"leave {name} out"):
        assert word in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        {"processes": 3, "backup_workers": 2},
        {"mode": "async", "ps": 2, "wire_dtype": "bfloat16"},
        {"mode": "stale", "staleness": 0},
        {"mode": "stale", "staleness": 4, "on_stale": "drop"},
        {"mode": "stale", "on_stale": "damp"},
        {"devices": 1, "max_shards": 1, "min_shard_bytes": 1},
    ],
)
def test_options_of_parameter_servers_that_go_together(options):
    config = StrategyConfig.of(strategy="parameter_server", **options)
    assert StrategyConfig.from_json(config.to_json()) == config


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
        ({"ps": 2}, {}, 0, "parameter_server", "parameter servers were asked for"),
        ({"ps": 2, "processes": 3}, {}, 4, "parameter_server", "were asked for"),
        ({}, {"TF_CONFIG": WITH_SERVERS}, 4, "parameter_server", "TF_CONFIG lists"),
        ({"ps": 1}, {"TF_CONFIG": WITH_SERVERS}, 0, "parameter_server", "TF_CONFIG lists"),
        ({"processes": 2}, {"TF_CONFIG": WITH_SERVERS}, 0, "parameter_server", "TF_CONFIG lists"),
        ({}, {"TF_CONFIG": WITHOUT_SERVERS}, 0, "multi_worker", "TF_CONFIG is set"),
    ],
)
def test_auto_picks_by_what_is_there_and_says_why(flags, environ, gpus, picked, why):
    resolved = resolve(flags, environ=environ, gpus=gpus)
    assert resolved.config.strategy == picked
    assert why in resolved.reasons["strategy"]


@pytest.mark.parametrize(
    ("flags", "machine", "picked"),
    [
        ({"processes": 2}, {}, "horovod"),
        ({"processes": 2, "period": 4, "mode": "local"}, {}, "horovod"),
        ({"processes": 2, "communication": "ring"}, {}, "multi_worker"),
        ({"processes": 2, "ps": 1}, {}, "parameter_server"),
        ({"processes": 2}, {"gpus": 2}, "multi_worker"),
        ({"processes": 2}, {"on_this_machine": False}, "multi_worker"),
        ({"processes": 2}, {"problem": "Horovod is not installed."}, "multi_worker"),
        ({"processes": 2}, {"environ": {"TF_CONFIG": WITHOUT_SERVERS}}, "multi_worker"),
        ({"processes": 1}, {}, "single"),
    ],
)
def test_auto_takes_horovods_ring_between_processes_of_one_machine_without_gpus(
    monkeypatch, flags, machine, picked
):
    machine = {"environ": {}, "on_this_machine": True, **machine}
    problem = machine.pop("problem", None)
    monkeypatch.setattr("tfdist.strategies.horovod.library.problem", lambda: problem)
    resolved = resolve(flags, **machine)
    assert resolved.config.strategy == picked
    assert ("Horovod is built" in resolved.reasons["strategy"]) == (picked == "horovod")


def test_a_flag_wins_over_the_file(tmp_path):
    file = tmp_path / "s.toml"
    file.write_text('strategy = "multi_worker"\nprocesses = 2\nperiod = 4\nmode = "local"\n')
    resolved = resolve({"processes": 3, "period": 4, "seed": None}, load_file(file), {})
    assert (resolved.config.processes, resolved.config.mode) == (3, "local")
    assert resolved.overridden == {"processes": 2}
    assert resolved.as_set("processes") == "-n 3"
    assert resolved.as_set("mode") == f"mode='local' of {file}"


def test_a_mode_of_a_flag_leaves_out_what_the_file_has_for_another(tmp_path):
    file = tmp_path / "s.toml"
    file.write_text('strategy = "multi_worker"\nmode = "stale"\nstaleness = 1\naccumulate = 2\n')
    resolved = resolve({"mode": "sync"}, load_file(file), {})
    assert resolved.left_out == {"staleness": 1}
    assert resolved.overridden == {"mode": "stale"}
    assert resolved.config.value("staleness") is None
    assert resolved.config.value("accumulate") == 2
    with pytest.raises(ConfigError, match="staleness=1 conflicts with mode='sync'"):
        resolve({"mode": "sync", "staleness": 1}, load_file(file), {})


def test_an_option_of_another_strategy_in_a_file(tmp_path):
    file = tmp_path / "s.toml"
    file.write_text('strategy = "multi_worker"\nstep_timeout = 600.0\n')
    with pytest.raises(ConfigError, match=r"step_timeout=600\.0 conflicts with strategy='multi_"):
        resolve({}, load_file(file), {})
    assert StrategyConfig.of(strategy="multi_worker", stages=None).processes == 1  # Is not set.


def test_a_conflict_of_a_flag_with_the_file_names_both(tmp_path):
    file = tmp_path / "s.toml"
    file.write_text('strategy = "multi_worker"\nmode = "stale"\n')
    with pytest.raises(ConfigError, match=r"s\.toml with --period: period=2 conflicts with mode="):
        resolve({"period": 2}, load_file(file), {})


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
        resolve({}, load_file(file), {})
    for word in words:
        assert word in str(caught.value)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match="Cannot read the file"):
        load_file(tmp_path / "none.toml")


def test_shipped_strategy_files_resolve(pytestconfig):
    files = sorted((pytestconfig.rootpath / "strategies").glob("*.toml"))
    assert {resolve({}, load_file(f), {}).config.strategy for f in files} == set(STRATEGIES)
    told = (pytestconfig.rootpath / "strategies" / "README.md").read_text()
    assert [f.name for f in files if f"`{f.name}`" not in told] == []


def test_shipped_strategy_files_take_any_number_of_processes(pytestconfig):
    for file in sorted((pytestconfig.rootpath / "strategies").glob("*.toml")):
        if resolve({}, load_file(file), {}).config.processes > 1:
            assert resolve({"processes": 3}, load_file(file), {}).config.processes == 3


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mode": "local", "period": 0}, ["period=0", "1 or more"]),
        ({"period": 4}, ["period=4", "mode='sync'", "Choose mode='local'"]),
        ({"mode": "stale", "outer_momentum": 0.9}, ["outer_momentum=0.9", "Choose mode='local'"]),
        ({"mode": "local", "outer_momentum": 1.0}, ["outer_momentum=1.0", "below 1"]),
        ({"mode": "local", "outer_lr": 0}, ["outer_lr=0", "above 0"]),
        ({"staleness": 2}, ["staleness=2", "mode='sync'", "Choose mode='stale'"]),
        ({"mode": "stale", "staleness": -1}, ["staleness=-1", "0 or more"]),
        ({"mode": "stale", "on_stale": "drop"}, ["on_stale='drop'", "Choose 'wait', or 'damp'"]),
        ({"accumulate": 0}, ["accumulate=0", "batches"]),
        ({"compression": "zip"}, ["compression 'zip'", "powersgd"]),
        ({"compression": "topk", "ratio": 0}, ["ratio=0", "above 0 and at most 1"]),
        ({"compression": "topk", "ratio": 1.5}, ["ratio=1.5", "at most 1"]),
        ({"compression": "powersgd", "rank": 0}, ["rank=0", "1 or more"]),
        ({"compression": "bf16", "ratio": 0.1}, ["ratio=0.1", "topk and randomk"]),
        ({"rank": 2}, ["rank=2", "compression='none'", "powersgd"]),
        ({"bucket_mb": 0}, ["bucket_mb=0", "MiB"]),
        ({"bucket_mb": 4, "compression": "int8"}, ["bucket_mb=4", "compression='int8'"]),
        ({"clip": "never"}, ["clip 'never'", "after, before"]),
        ({"lr_rule": "linear"}, ["lr_rule='linear'", "needs base_batch"]),
        ({"lr_warmup": 5}, ["lr_warmup", "lr_rule='linear' or 'sqrt'"]),
    ],
    ids=str,
)
@pytest.mark.parametrize("strategy", ["mirrored", "multi_worker", "horovod"])
def test_a_mistake_in_the_options_of_updates(strategy, options, words):
    with pytest.raises(ConfigError) as caught:
        StrategyConfig.of(strategy=strategy, **options)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("strategy", "options", "words"),
    [
        ("single", {"compression": "bf16"}, ["compression='bf16'", "'single'"]),
        ("single", {"mode": "local"}, ["mode='local'", "mirrored, multi_worker, horovod"]),
        ("single", {"mode": "stale"}, ["mode='stale'", "parameter_server"]),
        ("parameter_server", {"accumulate": 2}, ["gradient_accumulation_steps"]),
        ("parameter_server", {"compression": "topk"}, ["exchange no gradients"]),
        ("horovod", {"bucket_mb": 4, "groups": 2}, ["bucket_mb=4", "groups=2"]),
        ("horovod", {"mode": "local", "reduction": "adasum"}, ["mode='local'", "adasum"]),
    ],
    ids=str,
)
def test_options_of_updates_with_another_strategy(strategy, options, words):
    with pytest.raises(ConfigError) as caught:
        StrategyConfig.of(strategy=strategy, **options)
    for word in words:
        assert word in str(caught.value)


def test_the_plain_rule_is_the_default():
    config = StrategyConfig.of(strategy="multi_worker", processes=2)
    assert config.part(GradientOptions).is_plain
    assert GradientOptions(mode="stale", staleness=0).is_plain
    assert not GradientOptions(mode="local").is_plain
    assert not GradientOptions(accumulate=2).is_plain
