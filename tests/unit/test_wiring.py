"""Each option, by its flag, its key in a file and `tfdist.strategy`, reaches what uses it.

No process is started: constructors are replaced by functions that note what they are given.
"""

from __future__ import annotations

import collections
import contextlib
import json
import re
import shlex
import tomllib
import types
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

from tfdist.cli.main import app
from tfdist.cli.planning import check_runnable
from tfdist.cluster.spec import Address, ClusterSpec, Task
from tfdist.config.strategy_config import StrategyConfig, all_options
from tfdist.strategies import connection, factory
from tfdist.strategies.horovod import rendezvous
from tfdist.strategies.horovod import strategy as horovod
from tfdist.strategies.membership import Member
from tfdist.strategies.mirrored import strategy as mirrored
from tfdist.strategies.multi_worker import strategy as multi_worker
from tfdist.strategies.parameter_server import strategy as parameter_server
from tfdist.strategies.pipeline import strategy as pipeline
from tfdist.strategies.single import strategy as single

MIB = 2**20
SCALED = {"lr_rule": "linear", "base_batch": 8}

#: For each strategy: options that go together, none of them a default; and what is made of them.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "one device": ("single", {"accumulate": 4}, {"rule.accumulate": 4}),
    "devices": ("mirrored", {"devices": 3}, {"devices": 3}),
    "exchange": (
        "mirrored",
        {
            "accumulate": 3,
            "compression": "topk",
            "ratio": 0.3,
            "clip": "before",
            "lr_rule": "sqrt",
            "base_batch": 48,
            "lr_warmup": 5,
            "report": True,
        },
        {
            "rule.accumulate": 3,
            "rule.compression": "topk",
            "rule.ratio": 0.3,
            "rule.clip": "before",
            "rule.lr_rule": "sqrt",
            "rule.base_batch": 48,
            "rule.lr_warmup": 5,
            "rule.report": True,
        },
    ),
    "low rank": (
        "multi_worker",
        {"processes": 2, "compression": "powersgd", "rank": 2},
        {"rule.compression": "powersgd", "rule.rank": 2},
    ),
    "buckets": ("multi_worker", {"bucket_mb": 0.5}, {"rule.bucket_bytes": MIB // 2}),
    "ZeRO": (
        "multi_worker",
        {"processes": 2, "zero": 2, "checkpoints": "sharded"},
        {"zero": 2, "checkpoints": "sharded"},
    ),
    "mesh": (
        "multi_worker",
        {"processes": 2, "mesh": "model=2", "layouts": "kernel=- model"},
        {"mesh": "model=2", "layouts": "kernel=- model"},
    ),
    "ZeRO on Horovod": (
        "horovod",
        {"processes": 2, "zero": 1, "checkpoints": "sharded"},
        {"zero": 1, "checkpoints": "sharded"},
    ),
    "mesh on Horovod": (
        "horovod",
        {"processes": 4, "mesh": "data=2,model=2", "layouts": "kernel=- model", "zero": 3},
        {
            "mesh": "data=2,model=2",
            "layouts": "kernel=- model",
            "zero": 3,
            "process_sets": [(0, 1), (0, 2), (1, 3), (2, 3)],
            "initialized": [(0, 1), (0, 2), (1, 3), (2, 3)],
        },
    ),
    "late": (
        "multi_worker",
        {"mode": "stale", "staleness": 3, "on_stale": "damp"},
        {"rule.mode": "stale", "rule.staleness": 3, "rule.delay": 3, "rule.damp": True},
    ),
    "local": (
        "multi_worker",
        {
            "mode": "local",
            "period": 5,
            "sync_steps": 7,
            "outer_momentum": 0.6,
            "outer_lr": 0.7,
            "average_state": True,
        },
        {
            "rule.mode": "local",
            "rule.period": 5,
            "rule.sync_steps": 7,
            "rule.outer_momentum": 0.6,
            "rule.outer_lr": 0.7,
            "rule.average_state": True,
        },
    ),
    "several processes": (
        "multi_worker",
        {"processes": 3, "devices": 2, "communication": "nccl", "start_timeout": 9.0, "seed": 8},
        {"devices": 2, "cpu_devices": 2, "communication": "nccl", "deadline": 9.0},
    ),
    "Horovod": (
        "horovod",
        {
            "processes": 2,
            "reduction": "adasum",
            "groups": 3,
            "fusion_mb": 2.5,
            "cycle_ms": 4.5,
            "hierarchical": True,
            "autotune": True,
            "timeline": "line.json",
            "stall_timeout": 40.0,
            "start_timeout": 9.0,
        },
        {
            "reduction": "adasum",
            "groups": 3,
            "HOROVOD_FUSION_THRESHOLD": str(5 * MIB // 2),
            "HOROVOD_CYCLE_TIME": "4.5",
            "HOROVOD_HIERARCHICAL_ALLREDUCE": "1",
            "HOROVOD_AUTOTUNE": "1",
            "HOROVOD_TIMELINE": "line.json",
            "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "40",
            "deadline": 9.0,
        },
    ),
    "Horovod's exchange": (
        "horovod",
        {"compression": "int8", "accumulate": 2},
        {"rule.compression": "int8", "rule.accumulate": 2},
    ),
    "servers": (
        "parameter_server",
        {
            "processes": 3,
            "ps": 2,
            "backup_workers": 1,
            "wire_dtype": "bfloat16",
            "min_shard_bytes": 77,
            "max_shards": 5,
            "step_timeout": 33.0,
            "start_timeout": 9.0,
        },
        {
            "update.mode": "sync",
            "update.backup_workers": 1,
            "update.wire_dtype": "bfloat16",
            "update.min_shard_bytes": 77,
            "update.max_shards": 5,
            "update.step_timeout": 33.0,
            "deadline": 9.0,
        },
    ),
    "late on servers": (
        "parameter_server",
        {"processes": 3, "mode": "stale", "staleness": 4, "on_stale": "drop"},
        {"update.mode": "stale", "update.staleness": 4, "update.on_stale": "drop"},
    ),
    "stages": (
        "pipeline",
        {
            "devices": 4,
            "stages": 2,
            "microbatches": 12,
            "schedule": "interleaved",
            "virtual": 3,
            "cuts": "a,b",
            "recompute": True,
            "stage_timeout": 11.0,
            "timeline": "line.png",
        },
        {
            "devices": 4,
            "stages": 2,
            "microbatches": 12,
            "schedule": "interleaved",
            "virtual": 3,
            "cuts": ["a", "b"],
            "recompute": True,
            "timeout": 11.0,
            "timeline": "line.png",
        },
    ),
    "versions": (
        "pipeline",
        {"devices": 2, "schedule": "pipedream", "vertical_sync": True, **SCALED},
        {"schedule": "pipedream", "vertical_sync": True, "rule.lr_rule": "linear"},
    ),
}

#: Options of a flag of another name than their own.
SHORT = {"processes": "-n"}


def of_case(case: str) -> tuple[StrategyConfig, dict[str, Any]]:
    strategy, given, _ = CASES[case]
    return StrategyConfig.of(strategy=strategy, **given), given


def test_every_option_is_in_a_case_with_a_value_that_is_not_its_default() -> None:
    defaults = {name: option.default for name, option in all_options().items()}
    covered = {name for _, given, _ in CASES.values() for name in given}
    assert covered | {"strategy"} == set(defaults)
    for case, (_, given, _) in CASES.items():
        for name, value in given.items():
            assert value != defaults[name], (case, name)


# --- From the user to the configuration -----------------------------------------------------------


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("TF_CONFIG", "HOROVOD_RANK", "TFDIST_LAUNCHED"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(check_runnable.__module__ + ".check_runnable", lambda config: None)
    (tmp_path / "train.py").write_text("import keras\n")
    return tmp_path


def planned(*words: str) -> dict[str, str]:
    """The variables that `tfdist run` gives its first task."""
    done = CliRunner().invoke(app, ["run", "--dry-run", *words, "train.py"])
    assert done.exit_code == 0, done.output
    task = shlex.split(done.stdout.replace("\\\n", ""), comments=True)
    return dict(word.split("=", 1) for word in task if word.startswith("TFDIST_"))


def flags_of(given: dict[str, Any]) -> list[str]:
    words = []
    for name, value in given.items():
        flag = SHORT.get(name, f"--{name.replace('_', '-')}")
        words += [flag] if value is True else [flag, str(value)]
    return words


@pytest.mark.parametrize("case", CASES)
def test_flags_reach_the_tasks(here: Path, case: str) -> None:
    config, given = of_case(case)
    told = planned("-s", config.strategy, *flags_of(given))
    assert StrategyConfig.from_json(told["TFDIST_CONFIG"]) == config
    assert "TFDIST_WRITTEN" not in told
    if config.seed is not None:
        assert told["TFDIST_SEED"] == str(config.seed)


@pytest.mark.parametrize("case", CASES)
def test_keys_of_a_file_reach_the_tasks(here: Path, case: str) -> None:
    config, given = of_case(case)
    lines = [f"{name} = {json.dumps(value)}" for name, value in given.items()]
    (here / "s.toml").write_text("\n".join([f'strategy = "{config.strategy}"', *lines]))
    told = planned("-s", "s.toml")
    assert StrategyConfig.from_json(told["TFDIST_CONFIG"]) == config
    assert told["TFDIST_WRITTEN"].split(",") == sorted({"strategy", *given})


def test_a_strategy_file_is_read_once(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    parse = tomllib.loads

    def noted(text: str) -> dict[str, Any]:
        read.append(text)
        return parse(text)

    monkeypatch.setattr(tomllib, "loads", noted)
    (here / "s.toml").write_text('strategy = "parameter_server"')
    planned("-s", "s.toml", "--mode", "async")
    assert read == ['strategy = "parameter_server"']


@pytest.mark.parametrize("case", CASES)
def test_arguments_of_the_function_reach_the_strategy(
    here: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    config, given = of_case(case)
    monkeypatch.setattr(factory, "_active", [])
    monkeypatch.setattr(factory, "create", lambda resolved: resolved)
    assert factory.strategy(config.strategy, **given) == config


# --- From the configuration to what uses it -------------------------------------------------------


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What constructors and TensorFlow's set-up are given, by name."""
    found: dict[str, Any] = {}

    def prepared(count: int | None) -> tuple[str, ...]:
        found["devices"] = count
        return tuple(f"CPU:{i}" for i in range(count or 1))

    def made(*names: str) -> Any:
        def make(*given: Any, **named: Any) -> Any:
            found.update(zip(names, given, strict=False), **named)
            return types.SimpleNamespace(rule=found.get("rule"))

        return make

    def communicating(gpus: int, choice: str) -> str:
        found["communication"] = choice
        return "RING"

    def deadline(seconds: float, *_: Any) -> Any:
        found["deadline"] = seconds
        return contextlib.nullcontext()

    monkeypatch.setattr(factory, "_active", [])
    for start in (single, mirrored, multi_worker, pipeline):
        monkeypatch.setattr(start, "prepare_devices", prepared)
    monkeypatch.setattr(single, "Single", made("name", "rule"))
    monkeypatch.setattr(mirrored, "Mirrored", made("names", "rule"))
    monkeypatch.setattr(connection, "hard_deadline", deadline)
    for start in (multi_worker, horovod, parameter_server, pipeline):
        monkeypatch.setattr(start, "seed_from", lambda member: None)
    monkeypatch.setattr(multi_worker, "communication_for", communicating)
    names = ("resolver", "options", "cpu_devices", "rule", "zero", "mesh", "layouts", "checkpoints")
    monkeypatch.setattr(multi_worker, "MultiWorker", made(*names))
    monkeypatch.setattr(parameter_server, "ParameterServer", made("resolver", "update"))
    monkeypatch.setattr(pipeline, "Pipeline", made())
    ring = types.SimpleNamespace(
        init=lambda process_sets: found.update(initialized=process_sets),
        local_rank=lambda: 0,
        local_size=lambda: 1,
        ProcessSet=tuple,
    )
    monkeypatch.setattr(horovod.library, "load", lambda: ring)
    monkeypatch.setattr(horovod.library, "shut_down_at_exit", lambda hvd: None)
    monkeypatch.setattr(horovod, "prepare_one_of", lambda rank, size: "CPU:0")
    names = ("device", "gradients", "place", "rule", "zero", "mesh", "layouts", "checkpoints")
    monkeypatch.setattr(horovod, "Horovod", made(*names, "process_sets"))
    monkeypatch.setattr(rendezvous, "meeting", lambda *_: {})
    monkeypatch.setattr(rendezvous.environment, "set_for_good", found.update)
    monkeypatch.setattr(rendezvous.environment, "snapshot", dict)
    return found


def member_of(config: StrategyConfig) -> Member | None:
    """The first task of a job of a configuration."""
    tasks = {kind: count for kind, count in config.counts.items() if count}
    if sum(tasks.values()) == 1 and config.strategy == "pipeline":
        return None
    addresses = {
        kind: tuple(Address("127.0.0.1", 1000 + i) for i in range(count))
        for kind, count in tasks.items()
    }
    cluster = ClusterSpec(addresses)
    return Member(cluster=cluster, task=Task(next(iter(tasks)), 0), seed=1, offer={})


@pytest.mark.parametrize("case", CASES)
def test_the_configuration_reaches_the_constructors(noted: dict[str, Any], case: str) -> None:
    config, _ = of_case(case)
    expected = CASES[case][2]
    strategy = factory.create(config, member_of(config))
    assert strategy.config is config
    if (gradients := noted.pop("gradients", None)) is not None:
        noted.update(reduction=gradients.reduction, groups=gradients.groups)
    for name, value in expected.items():
        part, _, attribute = name.partition(".")
        whole = {"rule": strategy.rule, "update": noted.get("update")}.get(part, noted)
        found = getattr(whole, attribute) if attribute else noted[name]
        assert found == value, name


#: What options are called where they arrive under another name; and those of the job's size.
RENAMED = {
    "autotune": "HOROVOD_AUTOTUNE",
    "bucket_mb": "bucket_bytes",
    "cycle_ms": "HOROVOD_CYCLE_TIME",
    "fusion_mb": "HOROVOD_FUSION_THRESHOLD",
    "hierarchical": "HOROVOD_HIERARCHICAL_ALLREDUCE",
    "stage_timeout": "timeout",
    "stall_timeout": "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
    "start_timeout": "deadline",
}


def test_every_option_is_looked_for_where_it_arrives() -> None:
    arrived = {key.rpartition(".")[2] for *_, expected in CASES.values() for key in expected}
    names = set(all_options()) - {"strategy", "processes", "seed", "ps"}
    missing = {name for name in names if RENAMED.get(name, name) not in arrived}
    assert missing == set()


def test_tasks_of_a_job(here: Path) -> None:
    """As many as are asked for, of each type."""
    done = CliRunner().invoke(
        app, ["run", "--dry-run", "--json", *flags_of(of_case("servers")[1]), "train.py"]
    )
    counts = collections.Counter(task["type"] for task in json.loads(done.stdout)["tasks"])
    assert counts == {"chief": 1, "worker": 3, "ps": 2}


# --- The list of flags ----------------------------------------------------------------------------

#: The flags of `tfdist run`. One that is renamed or dropped breaks its users' scripts.
FLAGS = """
--accumulate
--autotune
--average-state
--backup-workers
--base-batch
--bucket-mb
--checkpoints
--clip
--communication
--compression
--cuts
--cycle-ms
--detach
--devices
--dry-run
--elastic-timeout
--engine-args
--env-only
--environment
--evaluator
--every-task
--fusion-mb
--gpus-per-task
--grace
--groups
--hierarchical
--host-discovery-script
--hostfile
--hosts
--image
--job-name
--json
--layouts
--log-dir
--lr-rule
--lr-warmup
--manifest
--max-np
--max-restarts
--max-shards
--mesh
--microbatches
--min-np
--module -m
--min-shard-bytes
--mode
--namespace
--on
--on-stale
--outer-lr
--outer-momentum
--period
--ps
--rank
--ratio
--recompute
--reduction
--remote-python
--report
--schedule
--seed
--ssh-args
--stage-timeout
--stages
--staleness
--stall-timeout
--start-timeout
--step-timeout
--strategy -s
--sync-steps
--task-flags
--timeline
--vertical-sync
--virtual
--wire-dtype
--zero
-n --processes
"""


def test_every_flag_is_in_the_documentation() -> None:
    root = Path(__file__).parents[2]
    text = "".join(path.read_text() for path in [*root.glob("docs/*.md"), root / "README.md"])
    flags = [line.split()[0] for line in FLAGS.splitlines() if line]
    missing = [flag for flag in flags if not re.search(rf"{flag}(?![\w-])", text)]
    assert missing == []


def test_the_flags_of_run_are_these() -> None:
    command = typer.main.get_command(app).commands["run"]  # type: ignore[attr-defined]
    flags = [" ".join(p.opts) for p in command.params if p.param_type_name == "option"]
    assert sorted(flags) == sorted(line for line in FLAGS.splitlines() if line)
