"""Environments that write TF_CONFIG, or variables of their own."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.cluster import texts
from tests.cluster.environments.helpers import found, listed, refused
from tfdist.cluster.environments import ray
from tfdist.cluster.environments.base import Roles
from tfdist.cluster.spec import Task
from tfdist.errors import ConfigError

TWO = json.dumps({"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}})

# --- TF_CONFIG ------------------------------------------------------------------------------------


def test_tf_config() -> None:
    place = found({"TF_CONFIG": TWO})
    assert (place.environment, place.task) == ("tf_config", Task("worker", 1))
    assert listed(place) == ["worker 0 a:1", "worker 1 b:1"]
    assert place.reason.startswith('TF_CONFIG={"cluster"')


def test_an_empty_tf_config_is_none() -> None:
    assert found({"TF_CONFIG": ""}).environment == "local"


def test_a_tf_config_with_mistakes() -> None:
    message = refused({"TF_CONFIG": "{'cluster'"})
    assert "TF_CONFIG has 1 mistake" in message
    assert "environment 'tf_config'" in message


def test_a_tf_config_without_a_task_says_who_the_others_are() -> None:
    place = found({"TF_CONFIG": json.dumps({"cluster": {"worker": ["a:1", "b:1"]}})})
    assert (place.task, place.size) == (None, 2)


@pytest.mark.parametrize(
    ("roles", "words"),
    [
        (Roles(ps=1), "ps=1 conflicts with TF_CONFIG, whose cluster has 0 of type ps"),
        (Roles(chief=True), "chief=1 conflicts with TF_CONFIG"),
        (Roles(evaluator=1), "evaluator=1 conflicts with TF_CONFIG"),
    ],
)
def test_roles_that_the_cluster_does_not_have(roles: Roles, words: str) -> None:
    assert words in refused({"TF_CONFIG": TWO}, roles=roles)


def test_roles_that_the_cluster_has() -> None:
    text = texts.TFJOB % ("ps", 1)
    assert found({"TF_CONFIG": text}, roles=Roles(chief=True, ps=2)).task == Task("ps", 1)


def test_an_evaluator_counts_where_it_is() -> None:
    place = found({"TF_CONFIG": texts.TFJOB % ("evaluator", 0)})
    assert place.task == Task("evaluator", 0)
    assert dict(place.counts) == {"chief": 1, "worker": 2, "ps": 2, "evaluator": 1}


# --- Kubernetes -----------------------------------------------------------------------------------

IN_A_POD = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "HOSTNAME": "train-2"}
NUMBERED = {**IN_A_POD, "TFDIST_REPLICAS": "4", "TFDIST_SERVICE": "train"}


def test_a_pod_alone_is_no_cluster() -> None:
    assert found(IN_A_POD).environment == "local"
    assert found({**IN_A_POD, "JOB_COMPLETION_INDEX": "2"}).environment == "local"
    message = refused({**IN_A_POD, "JOB_COMPLETION_INDEX": "2"}, "kubernetes")
    assert "JOB_COMPLETION_INDEX=2 is set, but neither TF_CONFIG nor TFDIST_REPLICAS" in message


def test_a_pod_of_tfjob() -> None:
    place = found({**IN_A_POD, "TF_CONFIG": texts.TFJOB % ("worker", 1)})
    assert (place.environment, place.task) == ("kubernetes", Task("worker", 1))
    assert listed(place)[0] == "chief 0 mnist-chief-0.default.svc:2222"
    assert "KUBERNETES_SERVICE_HOST=10.96.0.1" in place.reason


def test_a_pod_of_tfjob_with_dynamic_workers() -> None:
    place = found({**IN_A_POD, "TF_CONFIG": texts.TFJOB_DYNAMIC})
    assert place.task == Task("worker", 1)
    assert listed(place) == [
        "worker 1 mnist-worker-1.default.svc:2222",
        "ps 0 mnist-ps-0.default.svc:2222",
        "ps 1 mnist-ps-1.default.svc:2222",
    ]


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"HOSTNAME": "train-2.train.default.svc.cluster.local"},
        {"JOB_COMPLETION_INDEX": "2"},
    ],
)
def test_numbered_pods(more: dict[str, str]) -> None:
    place = found({**NUMBERED, **more}, roles=Roles(ps=1))
    assert (place.environment, place.task) == ("kubernetes", Task("worker", 2))
    assert listed(place)[2:] == ["worker 2 train-2.train:2222", "ps 0 train-3.train:2222"]


def test_a_pod_whose_variable_lacks_the_host_name() -> None:
    environ = {"TFDIST_REPLICAS": "2", "TFDIST_SERVICE": "svc.ns.svc.cluster.local"}
    place = found(environ, hostname="my-job-1")
    assert listed(place)[1] == "worker 1 my-job-1.svc.ns.svc.cluster.local:2222"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"TFDIST_SERVICE": ""}, ["TFDIST_REPLICAS=4 is set, but TFDIST_SERVICE is not"]),
        ({"TFDIST_REPLICAS": ""}, ["TFDIST_SERVICE=train is set, but TFDIST_REPLICAS is not"]),
        ({"TFDIST_REPLICAS": "two"}, ["TFDIST_REPLICAS='two' is no whole number of 1 or more"]),
        ({"TFDIST_REPLICAS": "2"}, ["HOSTNAME=train-2 is not below", "TFDIST_REPLICAS=2"]),
        ({"HOSTNAME": "train-7f9c-xkq"}, ["HOSTNAME='train-7f9c-xkq' does not end in a number"]),
        ({"JOB_COMPLETION_INDEX": "1"}, ["JOB_COMPLETION_INDEX=1 conflicts", "'train-2'"]),
        ({"JOB_COMPLETION_INDEX": "x"}, ["JOB_COMPLETION_INDEX='x'"]),
    ],
)
def test_mistakes_of_a_manifest(changes: dict[str, str], words: list[str]) -> None:
    message = refused({**NUMBERED, **changes})
    for word in words:
        assert word in message


SETS = "chief=train-chief:1,worker=train-worker:2,ps=train-ps:2"
IN_SETS = {
    **IN_A_POD,
    "HOSTNAME": "train-worker-1",
    "TFDIST_PODS": SETS,
    "TFDIST_SERVICE": "train",
}


@pytest.mark.parametrize(
    ("hostname", "task"),
    [
        ("train-chief-0", Task("chief", 0)),
        ("train-worker-1.train.ml.svc.cluster.local", Task("worker", 1)),
        ("train-ps-1", Task("ps", 1)),
    ],
)
def test_pods_of_several_sets(hostname: str, task: Task) -> None:
    place = found({**IN_SETS, "HOSTNAME": hostname}, roles=Roles(chief=True, ps=2))
    assert (place.environment, place.task) == ("kubernetes", task)
    assert listed(place) == [
        "chief 0 train-chief-0.train:2222",
        "worker 0 train-worker-0.train:2222",
        "worker 1 train-worker-1.train:2222",
        "ps 0 train-ps-0.train:2222",
        "ps 1 train-ps-1.train:2222",
    ]


def test_sets_in_another_order_at_another_port() -> None:
    pods = " ps=b:1, worker=a:2 "
    environ = {"TFDIST_PODS": pods, "TFDIST_SERVICE": "s.", "JOB_COMPLETION_INDEX": "1"}
    place = found(environ, hostname="a-1", port=3000)
    assert place.task == Task("worker", 1)
    assert listed(place) == ["worker 0 a-0.s:3000", "worker 1 a-1.s:3000", "ps 0 b-0.s:3000"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"TFDIST_SERVICE": ""}, ["is set, but TFDIST_SERVICE is not", "TFDIST_PODS is their"]),
        ({"TFDIST_REPLICAS": "2"}, ["TFDIST_REPLICAS=2 conflicts with TFDIST_PODS=chief"]),
        ({"HOSTNAME": "other-1"}, ["HOSTNAME='other-1' is a pod of 'other'", "does not list"]),
        ({"HOSTNAME": "train-worker"}, ["'train-worker' does not end in a number", "TFDIST_PODS="]),
        ({"HOSTNAME": "train-ps-2"}, ["HOSTNAME=train-ps-2 is not below", "ps=train-ps:2"]),
        ({"JOB_COMPLETION_INDEX": "0"}, ["JOB_COMPLETION_INDEX=0 conflicts"]),
        ({"TFDIST_PODS": "worker=a"}, ["the part 'worker=a'", "TYPE=NAME:NUMBER"]),
        ({"TFDIST_PODS": "worker=a:0"}, ["the part 'worker=a:0'"]),
        ({"TFDIST_PODS": "worker=a:2,"}, ["the part ''"]),
        ({"TFDIST_PODS": "master=a:1"}, ["the part 'master=a:1'", "chief, worker, ps, evaluator"]),
        ({"TFDIST_PODS": "worker=a:1,worker=b:1"}, ["names 'worker' twice"]),
        ({"TFDIST_PODS": "worker=a:1,ps=a:1"}, ["names 'a' twice"]),
        ({"TFDIST_PODS": "chief=a:2,worker=b:1"}, ["2 tasks of type chief", "'chief=a:1'"]),
        ({"TFDIST_PODS": "ps=a:2"}, ["no task that computes"]),
    ],
)
def test_mistakes_of_a_manifest_with_sets(changes: dict[str, str], words: list[str]) -> None:
    message = refused({**IN_SETS, **changes})
    for word in words:
        assert word in message


def test_roles_that_the_sets_do_not_have() -> None:
    message = refused(IN_SETS, roles=Roles(chief=True, ps=1))
    assert "ps=1 conflicts with TFDIST_PODS, whose cluster has 2 of type ps" in message


# --- Vertex AI ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pool", "index", "task"),
    [
        ("workerpool0", 0, Task("chief", 0)),
        ("workerpool1", 1, Task("worker", 1)),
        ("workerpool2", 0, Task("ps", 0)),
    ],
)
def test_worker_pools(pool: str, index: int, task: Task) -> None:
    place = found({"CLUSTER_SPEC": texts.CLUSTER_SPEC % (pool, index)})
    assert (place.environment, place.task) == ("vertex", task)
    assert listed(place)[0] == "chief 0 cmle-training-workerpool0-ab-0:2222"
    assert dict(place.counts) == {"chief": 1, "worker": 2, "ps": 1}


def test_the_same_job_by_both_variables() -> None:
    spec = {"CLUSTER_SPEC": texts.CLUSTER_SPEC % ("workerpool1", 0)}
    both = found({**spec, "TF_CONFIG": texts.VERTEX % (0, "worker")})
    assert (both.environment, both.task) == ("vertex", Task("worker", 0))
    assert both.cluster == found(spec).cluster
    assert "TF_CONFIG=" in both.reason


def test_one_machine() -> None:
    text = '{"cluster":{"workerpool0":["m-0:2222"]},"task":{"type":"workerpool0","index":0}}'
    assert listed(found({"CLUSTER_SPEC": text})) == ["chief 0 m-0:2222"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "CLUSTER_SPEC='{' is not JSON"),
        ("[1]", "CLUSTER_SPEC: [1] is not a JSON object"),
        ('{"cluster":{"workerpool9":["a:1"]}}', "CLUSTER_SPEC.cluster.workerpool9"),
        (texts.CLUSTER_SPEC % ("workerpool1", 7), "CLUSTER_SPEC.task.index: 7 is out of range"),
        (texts.CLUSTER_SPEC % ("workerpool3", 1), ""),
    ],
)
def test_mistakes_in_cluster_spec(text: str, words: str) -> None:
    if not words:  # An evaluator need not be listed.
        assert found({"CLUSTER_SPEC": text}).task == Task("evaluator", 1)
        return
    assert words in refused({"CLUSTER_SPEC": text})


# --- SageMaker ------------------------------------------------------------------------------------

HOSTS = {
    "SM_HOSTS": '["algo-10","algo-1","algo-2"]',
    "SM_CURRENT_HOST": "algo-10",
    "SM_NUM_GPUS": "4",
}


def test_hosts_of_sagemaker() -> None:
    place = found(HOSTS)
    assert (place.environment, place.task, place.devices) == ("sagemaker", Task("worker", 2), 4)
    assert listed(place) == [
        "worker 0 algo-1:2222",
        "worker 1 algo-2:2222",
        "worker 2 algo-10:2222",
    ]
    assert found({**HOSTS, "SM_NUM_GPUS": "0"}, roles=Roles(ps=1)).task == Task("ps", 0)


@pytest.mark.parametrize(
    ("text", "task"),
    [(texts.SAGEMAKER, Task("worker", 0)), (texts.SAGEMAKER_MIRRORED, Task("worker", 1))],
)
def test_tf_config_of_sagemaker(text: str, task: Task) -> None:
    place = found({**HOSTS, "TF_CONFIG": text})
    assert (place.environment, place.task, place.devices) == ("sagemaker", task, 4)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"SM_CURRENT_HOST": "algo-9"},
            "SM_CURRENT_HOST='algo-9' is not one of SM_HOSTS='[\"algo-10",
        ),
        ({"SM_CURRENT_HOST": ""}, "SM_CURRENT_HOST is not set"),
        ({"SM_HOSTS": "algo-1,algo-2"}, "SM_HOSTS='algo-1,algo-2' is not a list"),
        ({"SM_HOSTS": "[]"}, "SM_HOSTS='[]'"),
        ({"SM_HOSTS": '["a","a"]'}, "different hosts"),
        ({"SM_HOSTS": "[[1]]"}, "SM_HOSTS='[[1]]'"),
        ({"SM_NUM_GPUS": "all"}, "SM_NUM_GPUS='all'"),
    ],
)
def test_mistakes_of_sagemaker(changes: dict[str, str], words: str) -> None:
    assert words in refused({**HOSTS, **changes})


# --- Ray ------------------------------------------------------------------------------------------


def test_a_worker_of_ray_train() -> None:
    marks = {"RAY_JOB_ID": "01000000", "RAY_RAYLET_PID": "212"}
    place = found({**marks, "TF_CONFIG": texts.RAY})
    assert (place.environment, place.task) == ("ray", Task("worker", 2))
    assert "RAY_JOB_ID=01000000" in place.reason
    assert found(marks).environment == "local"
    assert "TF_CONFIG is not, as TensorflowTrainer sets it" in refused(marks, "ray")


def test_actors_of_ones_own() -> None:
    hosts = ["10.0.0.1", "10.0.0.2", "10.0.0.1"]
    place = ray.explicit(hosts, 2, roles=Roles(chief=True), port=3000)
    assert place.task == Task("worker", 1)
    assert listed(place) == [
        "chief 0 10.0.0.1:3000",
        "worker 0 10.0.0.2:3000",
        "worker 1 10.0.0.1:3001",
    ]
    assert {str(ray.explicit(hosts, rank).cluster) for rank in range(3)} == {
        str(ray.explicit(hosts, 0).cluster)
    }


@pytest.mark.parametrize("hosts", [[], ["a", "b"]])
def test_an_actor_outside_of_the_list(hosts: list[Any]) -> None:
    with pytest.raises(ConfigError, match="rank=2 is not below the number of tasks"):
        ray.explicit(hosts, 2)
