from __future__ import annotations

from typing import Any

import pytest

from tests.cluster.environments.helpers import found, listed, refused
from tfdist.cluster.environments.base import Roles
from tfdist.cluster.spec import Task

PORT = 12288 + 16 * (42 % 1024)


def task(rank: int, *, node: int | None = None, local: int | None = None, **more: Any):
    """The variables of a task of `srun` in a job of two nodes with two tasks each."""
    environ = {
        "SLURM_JOB_ID": "42",
        "SLURM_JOB_NODELIST": "n[1-9]",
        "SLURM_NTASKS": "4",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_STEP_NODELIST": "n[1-2]",
        "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
        "SLURM_PROCID": str(rank),
        "SLURM_NODEID": str(rank // 2 if node is None else node),
        "SLURM_LOCALID": str(rank % 2 if local is None else local),
    }
    changed = {name: None if value is None else str(value) for name, value in more.items()}
    return {k: v for k, v in {**environ, **changed}.items() if v is not None}


def test_a_task_knows_itself_and_all_addresses() -> None:
    place = found(task(2))
    assert (place.environment, place.task, place.size) == ("slurm", Task("worker", 2), 4)
    assert listed(place) == [
        f"worker 0 n1:{PORT}",
        f"worker 1 n1:{PORT + 1}",
        f"worker 2 n2:{PORT}",
        f"worker 3 n2:{PORT + 1}",
    ]
    assert "SLURM_PROCID=2" in place.reason
    assert "SLURM_STEP_NODELIST=n[1-2]" in place.reason
    assert not place.gathers
    assert place.devices is None


def test_all_tasks_see_one_cluster() -> None:
    assert len({str(found(task(rank)).cluster) for rank in range(4)}) == 1


def test_the_names_of_older_versions_do_too() -> None:
    environ = task(3, SLURM_STEP_ID=None, SLURM_STEPID=0, SLURM_STEP_NODELIST=None)
    environ |= {"SLURM_NODELIST": "n[1-2]"}
    assert found(environ).task == Task("worker", 3)
    older = {
        "SLURM_JOBID": "42",
        "SLURM_STEPID": "0",
        "SLURM_NPROCS": "2",
        "SLURM_NODELIST": "n7,m3",
        "SLURM_TASKS_PER_NODE": "1(x2)",
        "SLURM_PROCID": "1",
    }
    assert listed(found(older)) == [f"worker 0 n7:{PORT}", f"worker 1 m3:{PORT}"]


@pytest.mark.parametrize(
    ("roles", "tasks"),
    [
        (Roles(ps=1), ["worker 0", "worker 1", "worker 2", "ps 0"]),
        (Roles(chief=True, ps=1), ["chief 0", "worker 0", "worker 1", "ps 0"]),
        (Roles(chief=True, ps=1, evaluator=1), ["chief 0", "worker 0", "ps 0", "evaluator 0"]),
        (Roles(chief=True, ps=3), ["chief 0", "ps 0", "ps 1", "ps 2"]),
    ],
)
def test_the_last_ranks_are_ps(roles: Roles, tasks: list[str]) -> None:
    assert [str(found(task(rank), roles=roles).task) for rank in range(4)] == tasks


def test_too_many_roles() -> None:
    message = refused(task(0), roles=Roles(ps=3, evaluator=1))
    assert "ps=3 and evaluator=1 of SLURM_STEP_NUM_TASKS=4 tasks leave none" in message


@pytest.mark.parametrize(
    ("distribution", "hosts"),
    [
        ("block", "n1 n1 n1 n2 n3 n3"),
        ("block:cyclic", "n1 n1 n1 n2 n3 n3"),
        ("cyclic", "n1 n2 n3 n1 n3 n1"),
        ("cyclic:block,NoPack", "n1 n2 n3 n1 n3 n1"),
        ("plane=2", "n1 n1 n2 n3 n3 n1"),
    ],
)
def test_distributions(distribution: str, hosts: str) -> None:
    more = {
        "SLURM_STEP_NUM_TASKS": 6,
        "SLURM_STEP_NODELIST": "n[1-3]",
        "SLURM_STEP_TASKS_PER_NODE": "3,1,2",
        "SLURM_DISTRIBUTION": distribution,
    }
    place = found(task(0, **more))
    assert [line.split()[2].split(":")[0] for line in listed(place)] == hosts.split()
    last = hosts.split()[5]
    right = found(task(5, node=int(last[1]) - 1, local=hosts.split()[:5].count(last), **more))
    assert right.cluster == place.cluster


def test_a_distribution_that_does_not_tell() -> None:
    message = refused(task(0, SLURM_DISTRIBUTION="arbitrary"))
    assert "SLURM_DISTRIBUTION='arbitrary'" in message
    assert "--distribution=block" in message
    one_each = task(0, SLURM_STEP_TASKS_PER_NODE="1(x2)", SLURM_STEP_NUM_TASKS=2)
    assert found(one_each | {"SLURM_DISTRIBUTION": "arbitrary"}).size == 2


def test_ports_differ_between_jobs_steps_and_the_jobs_of_an_array() -> None:
    def port(**more: object) -> str:
        return listed(found(task(0, **more)))[0].rpartition(":")[2]

    array = {"SLURM_ARRAY_JOB_ID": 42, "SLURM_ARRAY_TASK_ID": 1}
    ports = [port(), port(SLURM_STEP_ID=1), port(SLURM_JOB_ID=43, **array), port(SLURM_JOB_ID=44)]
    assert len(set(ports)) == 4
    place = found(task(0, SLURM_JOB_ID=43, **array))
    assert "SLURM_ARRAY_JOB_ID=42, SLURM_ARRAY_TASK_ID=1" in place.reason


def test_the_port_may_be_given() -> None:
    assert listed(found(task(0), port=5000))[:2] == ["worker 0 n1:5000", "worker 1 n1:5001"]
    assert "port=65535 leaves no ports for the 2 tasks" in refused(task(0), port=65535)
    assert "port=0 is not a port" in refused(task(0), port=0)


@pytest.mark.parametrize("step", [None, "4294967290", "4294967291"])
def test_a_batch_script_is_no_task(step: str | None) -> None:
    environ = task(0, SLURM_STEP_ID=step)
    assert found(environ).environment == "local"
    message = refused(environ, "slurm")
    assert "environment='slurm' was asked for" in message
    assert "SLURM_JOB_ID=42" in message
    assert "srun" in message


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"SLURM_PROCID": None}, ["SLURM_JOB_ID=42", "SLURM_PROCID is not set"]),
        ({"SLURM_PROCID": "x"}, ["SLURM_PROCID='x' is no whole number"]),
        ({"SLURM_PROCID": 4}, ["SLURM_PROCID=4 is not below", "4 by SLURM_STEP_NUM_TASKS=4"]),
        ({"SLURM_STEP_NUM_TASKS": 0}, ["SLURM_STEP_NUM_TASKS='0' is no whole number of 1"]),
        (
            {"SLURM_STEP_NUM_TASKS": 5},
            ["SLURM_STEP_TASKS_PER_NODE='2(x2)' adds up to 4", "SLURM_STEP_NUM_TASKS is 5"],
        ),
        (
            {"SLURM_STEP_NODELIST": "n[1-3]"},
            ["SLURM_STEP_NODELIST='n[1-3]' lists 3 hosts", "counts tasks for 2"],
        ),
        ({"SLURM_STEP_NODELIST": "n[1-"}, ["SLURM_STEP_NODELIST='n[1-'", "not closed"]),
        ({"SLURM_STEP_TASKS_PER_NODE": "2x2"}, ["SLURM_STEP_TASKS_PER_NODE='2x2'", "2(x3),1"]),
        (
            {"SLURM_STEP_TASKS_PER_NODE": None},
            ["none of SLURM_STEP_TASKS_PER_NODE, SLURM_TASKS_PER_NODE is set"],
        ),
        ({"SLURM_NODEID": 1}, ["SLURM_NODEID=1 of task SLURM_PROCID=0 should be 0"]),
        ({"SLURM_LOCALID": 1}, ["SLURM_LOCALID=1 of task SLURM_PROCID=0 should be 0"]),
        ({"SLURM_JOB_ID": "x"}, ["SLURM_JOB_ID='x'"]),
        ({"SLURM_STEP_ID": "x"}, ["SLURM_STEP_ID='x'"]),
        (
            {"SLURM_STEP_TASKS_PER_NODE": "200(x2)", "SLURM_STEP_NUM_TASKS": 400},
            ["200 tasks on one host", "port=20000"],
        ),
    ],
)
def test_a_mistake_names_the_variable_and_its_value(changes: Any, words: list[str]) -> None:
    message = refused(task(0, **changes))
    for word in words:
        assert word in message
    assert "environment 'slurm'" in message


# --- GPUs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variables", "devices"),
    [
        ({"SLURM_GPUS_ON_NODE": "4"}, 2),
        ({"SLURM_GPUS_ON_NODE": "5"}, 2),
        ({"SLURM_GPUS_ON_NODE": "0"}, None),
        ({"SLURM_STEP_GPUS": "0,1,2,3", "SLURM_GPUS_ON_NODE": "8"}, 2),
        ({"SLURM_STEP_GPUS": "0-3"}, 2),
        ({"SLURM_JOB_GPUS": "4,5"}, 1),
        ({"SLURM_GPUS_PER_NODE": "a100:4"}, 2),
        ({"SLURM_GPUS_PER_TASK": "3", "SLURM_GPUS_ON_NODE": "8"}, 3),
        ({"SLURM_GPUS_PER_TASK": "a100:1,v100:1"}, 2),
        ({"SLURM_TRES_PER_TASK": "cpu:8,gres/gpu:a100:2"}, 2),
        ({"SLURM_TRES_PER_TASK": "cpu=8,gres/gpu=1"}, 1),
        ({"SLURM_TRES_PER_TASK": "cpu:8", "SLURM_GPUS_ON_NODE": "2"}, 1),
    ],
)
def test_tasks_of_a_node_share_its_gpus(variables: dict[str, str], devices: int | None) -> None:
    assert found(task(0, **variables)).devices == devices


def test_a_ps_needs_no_gpu() -> None:
    place = found(task(3, SLURM_GPUS_ON_NODE="2"), roles=Roles(ps=2))
    assert place.devices == 1
    assert found(task(0, SLURM_GPUS_ON_NODE="2"), roles=Roles(ps=3)).devices == 2


def test_fewer_gpus_than_tasks() -> None:
    message = refused(task(0, SLURM_GPUS_ON_NODE="1"))
    assert "SLURM_GPUS_ON_NODE=1 gives 1 GPUs to a node, but 2 tasks" in message
    assert "--ntasks-per-node=1" in message


@pytest.mark.parametrize(
    "variable",
    [("SLURM_GPUS_ON_NODE", "many"), ("SLURM_STEP_GPUS", "0;1"), ("SLURM_JOB_GPUS", "x")],
)
def test_gpus_that_cannot_be_read(variable: tuple[str, str]) -> None:
    name, value = variable
    assert f"{name}={value!r}" in refused(task(0, **{name: value}))


# --- Heterogeneous jobs ---------------------------------------------------------------------------

GROUPS = {
    "SLURM_HET_SIZE": 2,
    "SLURM_HET_JOB_ID": 40,
    "SLURM_JOB_NODELIST_HET_GROUP_0": "n[1-2]",
    "SLURM_TASKS_PER_NODE_HET_GROUP_0": "2(x2)",
    "SLURM_JOB_NODELIST_HET_GROUP_1": "big1",
    "SLURM_TASKS_PER_NODE_HET_GROUP_1": "3",
}


def test_a_step_over_all_groups() -> None:
    spanning = {**GROUPS, "SLURM_STEP_NUM_TASKS": 7}
    place = found(task(1, **spanning))
    hosts = [line.split()[2].split(":")[0] for line in listed(place)]
    assert hosts == ["n1", "n1", "n2", "n2", "big1", "big1", "big1"]
    last = found(task(6, node=0, local=2, SLURM_JOB_ID=41, **spanning))
    assert last.cluster == place.cluster
    assert last.task == Task("worker", 6)
    assert listed(place)[0] == f"worker 0 n1:{12288 + 16 * 40}"


def test_a_step_in_one_group() -> None:
    assert found(task(3, **GROUPS)).size == 4


def test_a_step_over_groups_that_are_not_told() -> None:
    spanning = {"SLURM_HET_SIZE": 2, "SLURM_STEP_NUM_TASKS": 7}
    message = refused(task(0, **spanning))
    assert "adds up to 4 tasks, but SLURM_STEP_NUM_TASKS is 7" in message
    assert "heterogeneous (SLURM_HET_SIZE=2)" in message
    assert "--het-group=0" in message
