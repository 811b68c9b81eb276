"""Plans are data: commands, environments and log files of each task."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfdist.cluster import resources
from tfdist.cluster.spec import Address, ClusterSpec, Task
from tfdist.errors import ConfigError
from tfdist.launcher.plan import (
    BETWEEN_GRAPH,
    WITH_SERVERS,
    JobPlan,
    Program,
    Role,
    local_cluster,
    plan_local,
    plan_member,
)

PROGRAM = Program(script="train.py", args=("--epochs", "3"), config='{"a": 1}', seed=7)
LOGS = Path("logs")

#: What is set in each task for its log.
FOR_LOGS = ("PYTHONFAULTHANDLER", "PYTHONUNBUFFERED")


def planned(count: int | None, environ: dict[str, str] | None = None, **more: object) -> JobPlan:
    cluster = local_cluster(range(4000, 4000 + count)) if count else None
    arguments = {"program": PROGRAM, "cluster": cluster, "log_dir": LOGS, **more}
    return plan_local(environ=environ or {}, **arguments)  # type: ignore[arg-type]


def test_each_worker_gets_its_place_and_the_same_program() -> None:
    plan = planned(2)
    assert plan.shown == Task("worker", 0)
    for index, task in enumerate(plan.tasks):
        assert task.command == (
            *(sys.executable, "-m", "tfdist.cli.task", "train.py"),
            *("--epochs", "3"),
        )
        assert task.address == Address("127.0.0.1", 4000 + index)
        assert task.log == LOGS / f"worker-{index}.log"
        assert json.loads(task.environ["TF_CONFIG"] or "") == {
            "cluster": {"worker": ["127.0.0.1:4000", "127.0.0.1:4001"]},
            "task": {"type": "worker", "index": index},
        }


def test_the_environment_of_a_task() -> None:
    environ = dict(planned(2).tasks[0].environ)
    del environ["TF_CONFIG"]
    assert environ == {
        "PYTHONFAULTHANDLER": "1",
        "PYTHONUNBUFFERED": "1",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "TF_FORCE_GPU_ALLOW_GROWTH": "true",
        "TFDIST_CONFIG": '{"a": 1}',
        "TFDIST_LAUNCHED": "1",
        "TFDIST_RECORD": str(LOGS / "worker-0.jsonl"),
        "TFDIST_SEED": "7",
    }


def test_what_the_user_set_is_kept() -> None:
    environ = planned(1, {"TF_CPP_MIN_LOG_LEVEL": "0", "PYTHONUNBUFFERED": ""}).tasks[0].environ
    assert "TF_CPP_MIN_LOG_LEVEL" not in environ
    assert "PYTHONUNBUFFERED" not in environ


def test_one_process_has_no_cluster() -> None:
    plan = planned(None, {"TF_CONFIG": "from elsewhere"})
    assert plan.cluster is None
    assert plan.tasks[0].address is None
    assert plan.tasks[0].environ["TF_CONFIG"] is None
    assert "TF_CONFIG" not in planned(None).tasks[0].environ


def test_env_only_runs_the_script_itself() -> None:
    program = Program(script="train.py", config="{}", seed=7, env_only=True)
    plan = planned(2, program=program)
    assert plan.tasks[1].command == (sys.executable, "train.py")
    assert set(plan.tasks[1].environ) == {"TF_CONFIG", *FOR_LOGS}


def test_gpus_are_spread_over_the_workers() -> None:
    plan = planned(2, gpus=("0", "1", "2", "3"))
    assert [task.environ["CUDA_VISIBLE_DEVICES"] for task in plan.tasks] == ["0,1", "2,3"]
    alone = planned(None, gpus=("0", "1"))
    assert "CUDA_VISIBLE_DEVICES" not in alone.tasks[0].environ


def test_other_task_types_are_planned_too() -> None:
    addresses = {
        kind: (Address("127.0.0.1", 5000 + number),)
        for number, kind in enumerate(("chief", "worker", "ps", "evaluator"))
    }
    plan = planned(None, cluster=ClusterSpec(addresses), gpus=("0", "1"))
    assert [str(task.task) for task in plan.tasks] == ["chief 0", "worker 0", "ps 0", "evaluator 0"]
    assert [task.environ.get("CUDA_VISIBLE_DEVICES") for task in plan.tasks] == [
        *("0", "1"),
        *("", ""),
    ]
    assert plan.shown == Task("chief", 0)
    assert plan.tasks[2].log == LOGS / "ps-0.log"


def test_one_task_of_a_cluster_that_is_started_elsewhere() -> None:
    cluster = ClusterSpec({"worker": (Address("a", 1), Address("b", 1))})
    plan = plan_member(
        PROGRAM, cluster=cluster, task=Task("worker", 1), log_dir=LOGS, environ={"TF_CONFIG": "x"}
    )
    assert [task.task for task in plan.tasks] == [Task("worker", 1)]
    assert plan.shown == Task("worker", 1)
    assert plan.tasks[0].environ["TF_CONFIG"] == "x"
    with pytest.raises(ConfigError, match="'worker 2', but its cluster has: worker 0, worker 1"):
        plan_member(PROGRAM, cluster=cluster, task=Task("worker", 2), log_dir=LOGS, environ={})


@given(count=st.integers(0, 20), tasks=st.integers(1, 8), devices=st.none() | st.integers(1, 5))
def test_gpu_shares_are_equal_and_apart(count: int, tasks: int, devices: int | None) -> None:
    names = tuple(map(str, range(count)))
    wanted = tasks * (devices or 1)
    if 0 < count < wanted:
        with pytest.raises(ConfigError, match=rf"-n {tasks} .*CUDA_VISIBLE_DEVICES=-1"):
            resources.split(names, tasks, devices)
        return
    shares = resources.split(names, tasks, devices)
    given_out = [name for share in shares for name in share]
    assert len(shares) == tasks
    assert len({len(share) for share in shares}) == 1
    assert len(given_out) == len(set(given_out))
    if count and devices:
        assert len(shares[0]) == devices


@pytest.mark.parametrize(
    ("listed", "found"),
    [("0,2", ("0", "2")), ("", ()), ("-1", ()), ("1,-1,2", ("1",)), ("GPU-ab", ("GPU-ab",))],
)
def test_visible_gpus_as_cuda_reads_them(listed: str, found: tuple[str, ...]) -> None:
    assert resources.visible({"CUDA_VISIBLE_DEVICES": listed}) == found


def test_gpus_are_counted_by_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'GPU 0: A (UUID: x)'\necho 'GPU 1: A (UUID: y)'\n")
    program.chmod(0o755)
    monkeypatch.setattr(resources.shutil, "which", lambda name: str(program))
    assert resources.visible({}) == ("0", "1")
    asked = tmp_path / "asked"
    program.write_text(f"#!/bin/sh\necho once >> {asked}\nexit 9\n")
    assert resources.visible({}) == ()
    assert "its exit status is 9" in str(resources.failure({}))
    assert asked.read_text() == "once\n", "a driver that does not answer is waited for once"


@pytest.mark.parametrize(
    ("counted", "seen", "cuda", "listed", "words"),
    [
        (("0", "1"), 2, True, None, []),
        ((), 0, False, None, []),
        (("0", "1"), 0, False, None, ["nvidia-smi lists 2 GPUs", "sees none", "without CUDA"]),
        (("0",), 0, True, "0", ["CUDA_VISIBLE_DEVICES=0 names 1 GPU,", "libraries are missing"]),
        (("0", "1"), 1, True, None, ["TensorFlow sees 1", "MIG", "tfdist[cuda]"]),
        ((), 2, True, None, ["lists no GPUs", "sees 2", "Put nvidia-smi on PATH", "DEVICES=0,1."]),
    ],
)
def test_gpus_of_the_launcher_and_of_tensorflow(
    counted: tuple[str, ...], seen: int, cuda: bool, listed: str | None, words: list[str]
) -> None:
    said = resources.disagreement(counted, seen, cuda=cuda, listed=listed)
    assert (said is None) == (not words)
    assert all(word in " ".join(said or ()) for word in words)


SERVING = Program(script="train.py", args=("-x",), config="{}", seed=7, roles=WITH_SERVERS)
FOUR = local_cluster(range(5000, 5004), chief=True, ps=1)


def test_servers_run_no_script() -> None:
    plan = planned(None, program=SERVING, cluster=FOUR)
    assert [str(task.task) for task in plan.tasks] == ["chief 0", "worker 0", "worker 1", "ps 0"]
    assert [task.role for task in plan.tasks] == [Role.MAIN, Role.SPARE, Role.SPARE, Role.NEEDED]
    chief, *servers = (task.command[1:] for task in plan.tasks)
    assert chief == ("-m", "tfdist.cli.task", "train.py", "-x")
    assert servers == [("-m", "tfdist.cli.server")] * 3
    assert plan.shown == Task("chief", 0)
    assert plan.begins_at == Address("127.0.0.1", 5000)
    assert all(task.environ["GRPC_FAIL_FAST"] == "use_caller" for task in plan.tasks)
    kept = planned(None, {"GRPC_FAIL_FAST": "x"}, program=SERVING, cluster=FOUR)
    assert "GRPC_FAIL_FAST" not in kept.tasks[0].environ


def test_only_workers_get_gpus() -> None:
    plan = planned(None, program=SERVING, cluster=FOUR, gpus=("2", "5", "7"), devices=1)
    assert [t.environ["CUDA_VISIBLE_DEVICES"] for t in plan.tasks] == ["", "2", "5", ""]
    with pytest.raises(ConfigError, match="2 processes with 1 device each, but this machine has 1"):
        planned(None, program=SERVING, cluster=FOUR, gpus=("0",), devices=1)


@pytest.mark.parametrize(
    ("task", "module"),
    [
        (Task("chief", 0), "tfdist.cli.task"),
        (Task("worker", 1), "tfdist.cli.server"),
        (Task("ps", 0), "tfdist.cli.server"),
    ],
)
def test_a_server_that_is_started_by_itself(task: Task, module: str) -> None:
    plan = plan_member(SERVING, cluster=FOUR, task=task, log_dir=LOGS, environ={}, gpus=("0",))
    (only,) = plan.tasks
    assert only.command[2] == module
    assert only.role is Role.MAIN, "it is all that is started here"
    assert only.environ.get("CUDA_VISIBLE_DEVICES") == (None if task.type == "worker" else "")


def test_every_task_runs_the_script_and_may_get_flags() -> None:
    program = Program(
        script="a.py", args=("-x",), config="", seed=None, env_only=True, roles=BETWEEN_GRAPH
    )
    cluster = local_cluster([1, 2, 3], ps=1)
    plan = planned(None, program=program, cluster=cluster)
    assert [task.role for task in plan.tasks] == [Role.MAIN, Role.MAIN, Role.NEEDED]
    assert {task.command[1:] for task in plan.tasks} == {("a.py", "-x")}
    assert all(set(task.environ) == {"TF_CONFIG", *FOR_LOGS} for task in plan.tasks)
    flagged = planned(
        None, program=dataclasses.replace(program, task_flags=True), cluster=cluster
    ).tasks[2]
    assert flagged.command[1:] == (
        *("a.py", "-x", "--job_name=ps", "--task_index=0"),
        *("--ps_hosts=127.0.0.1:3", "--worker_hosts=127.0.0.1:1,127.0.0.1:2"),
    )


@pytest.mark.parametrize(
    ("cluster", "words"),
    [
        (FOUR, "tasks of type chief"),
        (ClusterSpec({"worker": (Address("a", 1),)}, {"worker": (3,)}), "numbers have gaps"),
    ],
)
def test_flags_that_cannot_name_a_cluster(cluster: ClusterSpec, words: str) -> None:
    program = Program(script="a.py", config="", seed=None, env_only=True, task_flags=True)
    with pytest.raises(ConfigError, match=rf"--task-flags conflicts .*{words}"):
        planned(None, program=program, cluster=cluster)


@pytest.mark.parametrize(
    ("seen", "each", "chosen", "own"),
    [
        (("0", "1", "2", "3"), None, False, "2,3"),  # Two tasks on the machine share what it has.
        (("0", "1", "2", "3"), 2, True, "2,3"),  # Slurm says two each, and all are visible.
        (("4", "5"), 2, True, None),  # Slurm has chosen for this task already.
        (("0", "1", "2", "3"), None, True, None),  # Somebody has chosen; who knows for whom.
        (("0",), None, False, None),
        ((), None, False, None),
    ],
)
def test_gpus_of_a_task_beside_another(
    seen: tuple[str, ...], each: int | None, chosen: bool, own: str | None
) -> None:
    cluster = ClusterSpec({"worker": (Address("a", 1), Address("b", 1), Address("b", 2))})
    plan = plan_member(
        PROGRAM,
        cluster=cluster,
        task=Task("worker", 2),
        log_dir=LOGS,
        environ={"CUDA_VISIBLE_DEVICES": ",".join(seen)} if chosen else {},
        gpus=seen,
        gpus_each=each,
    )
    assert plan.tasks[0].environ.get("CUDA_VISIBLE_DEVICES") == own
