"""Which environment answers where several match, and how large clusters may be."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cluster import texts
from tests.cluster.environments.helpers import found, refused
from tests.cluster.environments.test_slurm import task as slurm_task
from tfdist.cluster.environments import detection
from tfdist.cluster.environments.base import Absent, ProcessContext, Roles, TaskAssignment
from tfdist.cluster.spec import TASK_TYPES, Address, Task
from tfdist.cluster.tf_config import parse_tf_config
from tfdist.errors import ConfigError

SLURM = slurm_task(1)
MPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"}


def tf_config(count: int, index: int, kind: str = "worker", **more: Any) -> dict[str, str]:
    cluster = {"worker": [f"h{i}:1" for i in range(count)], **more}
    content = {"cluster": cluster, "task": {"type": kind, "index": index}}
    return {"TF_CONFIG": json.dumps(content)}


def test_without_variables_a_process_is_alone() -> None:
    place = found({"PATH": "/bin"})
    assert (place.environment, place.task, place.cluster) == ("local", Task("worker", 0), None)
    assert not place.gathers


def test_every_environment_says_what_it_lacks() -> None:
    sightings = detection.survey(ProcessContext(environ={}))
    assert tuple(each.detector.name for each in sightings) == detection.ENVIRONMENTS
    assert all(isinstance(each.answer, Absent) and each.answer.reason for each in sightings[:-1])
    assert isinstance(sightings[-1].answer, TaskAssignment)
    (mistake,) = [
        each.answer
        for each in detection.survey(ProcessContext(environ={"PMI_RANK": "x", "PMI_SIZE": "1"}))
        if isinstance(each.answer, ConfigError)
    ]
    assert "PMI_RANK='x'" in str(mistake)


@pytest.mark.parametrize(
    ("environ", "environment"),
    [
        ({**SLURM, **MPI}, "slurm"),  # srun with an MPI plugin: Slurm knows the addresses
        ({**SLURM, **tf_config(4, 1)}, "tf_config"),
        ({**MPI, **tf_config(4, 1)}, "tf_config"),
        ({**tf_config(3, 1, ps=["p:1"]), **SLURM}, "tf_config"),  # other roles, as many tasks
        ({**tf_config(4, 1), "RAY_JOB_ID": "1", "KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "ray"),
    ],
)
def test_those_that_agree(environ: dict[str, str], environment: str) -> None:
    assert found(environ).environment == environment


@pytest.mark.parametrize(
    ("environ", "first", "second"),
    [
        ({**SLURM, **tf_config(2, 1)}, "tf_config", "slurm"),
        ({**SLURM, **tf_config(4, 2)}, "tf_config", "slurm"),
        ({**SLURM, **tf_config(1, 0)}, "tf_config", "slurm"),
        ({**MPI, **tf_config(4, 0)}, "tf_config", "mpi"),
        ({**tf_config(2, 0), "HOROVOD_RANK": "0", "HOROVOD_SIZE": "3"}, "tf_config", "horovod"),
        (
            {
                **tf_config(2, 0),
                "TFDIST_REPLICAS": "3",
                "TFDIST_SERVICE": "s",
                "HOSTNAME": "p-0",
            },
            "kubernetes",
            "tf_config",
        ),
    ],
)
def test_those_that_disagree(environ: dict[str, str], first: str, second: str) -> None:
    message = refused(environ)
    assert "Two environments disagree" in message
    assert f"by {first} (" in message
    assert f"by {second} (" in message
    assert f"environment={first!r} or environment={second!r}" in message
    for name in (first, second):
        assert found(environ, name).environment == name


def test_a_disagreement_names_tasks_and_variables() -> None:
    message = refused({**SLURM, **tf_config(2, 0)})
    assert "worker 0 of 2 workers by tf_config (TF_CONFIG=" in message
    assert "worker 1 of 4 workers by slurm (SLURM_JOB_ID=42, SLURM_STEP_ID=0" in message


@pytest.mark.parametrize(
    ("environ", "environment"),
    [
        # mpirun in a batch script: srun has started its daemons, one on each node.
        ({**SLURM, "OMPI_COMM_WORLD_RANK": "7", "OMPI_COMM_WORLD_SIZE": "16"}, "mpi"),
        ({**SLURM, "HOROVOD_RANK": "7", "HOROVOD_SIZE": "16"}, "horovod"),
        ({**MPI, "HOROVOD_RANK": "0", "HOROVOD_SIZE": "2"}, "horovod"),
        ({"SM_HOSTS": '["a"]', "SM_CURRENT_HOST": "a", **MPI}, "mpi"),
        # A shell in a job of one task.
        (
            {
                **slurm_task(
                    0,
                    SLURM_STEP_NUM_TASKS=1,
                    SLURM_STEP_NODELIST="n1",
                    SLURM_STEP_TASKS_PER_NODE=1,
                ),
                **tf_config(2, 1),
            },
            "tf_config",
        ),
        ({**tf_config(2, 1), "PMI_RANK": "0", "PMI_SIZE": "1"}, "tf_config"),
    ],
)
def test_a_launcher_within_another(environ: dict[str, str], environment: str) -> None:
    assert found(environ).environment == environment


def test_the_name_chooses_and_no_other_is_asked() -> None:
    broken = {**tf_config(2, 1), "PMI_RANK": "x", "PMI_SIZE": "2"}
    assert found(broken, "tf_config").task == Task("worker", 1)
    assert found({**SLURM, **MPI}, "mpi").gathers
    assert found({**SLURM, **MPI}, "local").size == 1
    assert "environment='slrum' does not exist. There are: hostfile, ray" in refused({}, "slrum")


@pytest.mark.parametrize("name", [n for n in detection.ENVIRONMENTS if n != "local"])
def test_an_environment_that_is_not_there(name: str) -> None:
    message = refused({}, name)
    assert message.startswith(f"environment={name!r} was asked for, but ")
    assert "Leave environment out" in message


# --- Roles ----------------------------------------------------------------------------------------


@given(st.integers(1, 12), st.booleans(), st.integers(0, 5), st.integers(0, 1))
def test_ranks_become_the_tasks_of_the_cluster(size, chief, ps, evaluator) -> None:
    roles = Roles(chief=chief, ps=ps, evaluator=evaluator)
    if size - ps - evaluator < 1:
        with pytest.raises(ConfigError, match="leave none that computes"):
            roles.counts(size, "N=1")
        return
    cluster = roles.cluster([Address("h", 1 + i) for i in range(size)], "N=1")
    assert [task for task, _ in cluster.tasks()] == [
        roles.task(i, size, "N=1") for i in range(size)
    ]
    assert [address.port for _, address in cluster.tasks()] == list(range(1, size + 1))
    assert tuple(cluster.addresses) == tuple(k for k in TASK_TYPES if k in cluster.addresses)


@pytest.mark.parametrize(
    ("numbers", "words"), [({"ps": -1}, "ps=-1"), ({"evaluator": 2}, "allows")]
)
def test_roles_that_do_not_exist(numbers: dict[str, int], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Roles(**numbers)


# --- Ten thousand tasks ---------------------------------------------------------------------------


def test_ten_thousand_tasks_of_slurm() -> None:
    environ = slurm_task(
        9999,
        node=1249,
        local=7,
        SLURM_STEP_NUM_TASKS=10000,
        SLURM_STEP_NODELIST="gpu-[0001-1250]",
        SLURM_STEP_TASKS_PER_NODE="8(x1250)",
        SLURM_GPUS_ON_NODE=8,
    )
    begin = time.monotonic()
    place = found(environ, roles=Roles(ps=16))
    assert place.cluster is not None
    assert place.task is not None
    text = place.cluster.tf_config(place.task)
    assert time.monotonic() - begin < 30
    assert (place.task, place.size, place.devices) == (Task("ps", 15), 10000, 1)
    assert 180_000 < len(text) < 200_000
    assert parse_tf_config(text)[1] == place.task


@pytest.mark.parametrize("distribution", ["cyclic", "plane=3"])
def test_ten_thousand_tasks_dealt_out_in_turn(distribution: str) -> None:
    environ = slurm_task(
        0,
        SLURM_STEP_NUM_TASKS=10000,
        SLURM_STEP_NODELIST="n[0-99]",
        SLURM_STEP_TASKS_PER_NODE="100(x100)",
        SLURM_DISTRIBUTION=distribution,
    )
    begin = time.monotonic()
    assert found(environ).size == 10000
    assert time.monotonic() - begin < 30


def test_what_kubeflow_writes_for_many_is_read_in_time() -> None:
    cluster = {"worker": [f"big-worker-{i}.default.svc:2222" for i in range(10000)]}
    text = json.dumps({"cluster": cluster, "task": {"type": "worker", "index": 9999}})
    begin = time.monotonic()
    assert found({"KUBERNETES_SERVICE_HOST": "10.0.0.1", "TF_CONFIG": text}).size == 10000
    assert time.monotonic() - begin < 30
    assert texts.RAY
