"""Manifests of Kubernetes, Kubeflow and Compose, against the schemas that their makers publish.

- Kubernetes: the JSON schemas of the package kubernetes-validate, in their strict form.
- TFJob: the models of the package kubeflow-training, which are made from the operator's own API;
  the pods in it against the schemas of Kubernetes.
- Compose: the models of the package compose-pydantic, made from the schema of the Compose
  Specification.

All three refuse fields that they do not know; a test makes sure of that.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import compose_pydantic
import kubeflow.training
import kubernetes_validate
import pytest
import yaml
from typer.testing import CliRunner

from tests.cluster.environments.helpers import found, listed
from tfdist.cli.main import app
from tfdist.cluster.environments.base import Roles
from tfdist.launcher.backends import kubernetes
from tfdist.launcher.backends.kubernetes import ContainerJob

SHIPPED = Path(__file__).parents[2] / "cluster"
#: The oldest and the newest version of Kubernetes whose schemas the manifests are checked by.
VERSIONS = ("1.26", "1.37")
PS = ("--strategy", "parameter_server", "-n", "2", "--ps", "2")
WORKERS = ("--strategy", "multi_worker", "-n", "3")
ALONE = ("--strategy", "single")
GPUS = ("--gpus-per-task", "2")


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TF_CONFIG", raising=False)
    monkeypatch.setenv("PATH", "")  # No test may find a kubectl that reaches a cluster.
    (tmp_path / "train.py").touch()


def output(*words: str) -> str:
    """What `tfdist run --on kubernetes … --dry-run` prints."""
    command = ["run", "--on", "kubernetes", "--image", "my/image", *words, "--dry-run", "train.py"]
    result = CliRunner().invoke(app, command, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def written(*words: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(output(*words)))


def refused(*words: str, image: tuple[str, ...] = ("--image", "i")) -> str:
    """The message of a call that is a mistake."""
    result = CliRunner().invoke(app, ["run", "--on", "kubernetes", *image, *words, "train.py"])
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    return result.stderr


# --- The published schemas ------------------------------------------------------------------------


def check(document: dict[str, Any], versions: tuple[str, ...] = VERSIONS) -> None:
    """Refuses what the makers' schemas do not allow."""
    if "services" in document:
        compose_pydantic.ComposeSpecification.model_validate(document)
    elif document["kind"] == "TFJob":
        check_model("KubeflowOrgV1TFJob", document, versions)
    else:
        for version in versions:
            kubernetes_validate.validate(document, version, strict=True)


def check_model(name: str, value: Any, versions: tuple[str, ...]) -> None:
    """Compares a value with a type of Kubeflow's API, and the pods in it with Kubernetes'."""
    inside = re.fullmatch(r"dict\(str, (\w+)\)", name)
    if inside is not None:
        for each in value.values():
            check_model(inside[1], each, versions)
    elif name in ("V1PodTemplateSpec", "V1ObjectMeta"):
        # In a manifest of its own, that stands as the part of a PodTemplate.
        part = "template" if name == "V1PodTemplateSpec" else "metadata"
        template = {"apiVersion": "v1", "kind": "PodTemplate", "template": {}, part: value}
        for version in versions:
            kubernetes_validate.validate(template, version, strict=True)
    elif name.startswith("Kubeflow"):
        model = getattr(kubeflow.training, name)
        fields = {written: own for own, written in model.attribute_map.items()}
        assert set(value) <= set(fields), f"{name} has no {sorted(set(value) - set(fields))}"
        model(**{fields[field]: each for field, each in value.items()})  # Requires what it needs.
        for field, each in value.items():
            check_model(model.openapi_types[fields[field]], each, versions)
    else:
        assert type(value).__name__ == name, f"{value!r} is no {name}"


@pytest.mark.parametrize("manifest", ["plain", "tfjob", "compose"])
@pytest.mark.parametrize("strategy", [PS, WORKERS, ALONE], ids=["ps", "workers", "alone"])
@pytest.mark.parametrize("more", [(), GPUS], ids=["cpu", "gpu"])
def test_every_manifest_follows_the_published_schema(
    manifest: str, strategy: tuple[str, ...], more: tuple[str, ...]
) -> None:
    where = () if manifest == "compose" else ("--namespace", "ml")
    documents = written("--manifest", manifest, *strategy, *more, *where)
    for document in documents:
        check(document)
    names = [each.get("metadata", {}).get("namespace") for each in documents]
    assert set(names) == {None if manifest == "compose" else "ml"}


@pytest.mark.parametrize("path", sorted(SHIPPED.glob("*.yaml")), ids=lambda p: p.name)
def test_a_shipped_manifest_is_what_its_comment_writes(path: Path) -> None:
    comment, rest = re.fullmatch(r"((?:#[^\n]*\n)+)(.*)", path.read_text(), re.DOTALL).groups()
    assert re.search(rf"^#     (kubectl|docker compose) .*-f cluster/{path.name}", comment, re.M)
    (command,) = re.findall(r"^#     tfdist (.+)$", comment, re.MULTILINE)
    result = CliRunner().invoke(app, shlex.split(command), catch_exceptions=False)
    assert result.stdout == rest
    for document in yaml.safe_load_all(rest):
        check(document)


def test_the_manifest_of_init_follows_the_schema_and_its_pods_find_their_strategy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = CliRunner().invoke(app, ["init", "first", "--kubernetes"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    documents = list(yaml.safe_load_all((tmp_path / "first/kubernetes.yaml").read_text()))
    for document in documents:
        check(document)
    monkeypatch.chdir("first")
    pods = pods_of(documents)
    assert [hostname for hostname, _, _ in pods] == ["first-0", "first-1"]
    for _, environ, command in pods:
        monkeypatch.setattr("socket.gethostname", lambda: environ["HOSTNAME"])  # noqa: B023
        words = [command[1], "--dry-run", *command[2:]]
        shown = CliRunner().invoke(app, words, env=environ, catch_exceptions=False)
        assert shown.exit_code == 0, shown.output
        assert f'"index": {environ["JOB_COMPLETION_INDEX"]}' in shown.stdout


def test_the_four_manifests_are_shipped() -> None:
    names = {path.name for path in SHIPPED.glob("*.yaml")}
    assert names == {"kubernetes.yaml", "kubernetes_ps.yaml", "tfjob.yaml", "compose.yaml"}


#: Fields whose objects have keys of the user's own.
FREE = {"labels", "annotations", "matchLabels", "selector", "limits", "environment"}


def objects(value: Any, field: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every object in a document with the name of its field."""
    if isinstance(value, dict):
        yield field, value
        for name, each in value.items():
            yield from objects(each, name)
    elif isinstance(value, list):
        for each in value:
            yield from objects(each, field)


@pytest.mark.parametrize("manifest", ["plain", "tfjob", "compose"])
def test_the_schemas_refuse_a_strange_field_anywhere(manifest: str) -> None:
    accepted = set()
    for document in written("--manifest", manifest, *PS, *GPUS):
        for field, each in objects(document):
            each["strange"] = {"field": 1}
            try:
                check(document, VERSIONS[-1:])
            except (AssertionError, kubernetes_validate.ValidationError, ValueError):
                pass
            else:
                accepted.add(field)
            del each["strange"]
        check(document)
    assert accepted <= FREE


# --- What the manifests say -----------------------------------------------------------------------


def by_name(documents: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {f"{each['kind']}/{each['metadata']['name']}": each for each in documents}


def container(document: dict[str, Any]) -> dict[str, Any]:
    (only,) = document["spec"]["template"]["spec"]["containers"]
    return only


def pods_of(documents: list[dict[str, Any]]) -> list[tuple[str, dict[str, str], list[str]]]:
    """Each pod's host name, and the environment and command that Kubernetes gives its container."""
    found = []
    for document in documents:
        if document["kind"] not in ("Job", "StatefulSet"):
            continue
        spec, name = document["spec"], document["metadata"]["name"]
        indexed = document["kind"] == "Job"
        for i in range(spec["completions"] if indexed else spec["replicas"]):
            own = {each["name"]: each["value"] for each in container(document).get("env", ())}
            environ = {
                **own,
                "HOSTNAME": f"{name}-{i}",
                "KUBERNETES_SERVICE_HOST": "10.96.0.1",
                **({"JOB_COMPLETION_INDEX": str(i)} if indexed else {}),
            }
            command = [word.replace("$$", "$") for word in container(document)["command"]]
            found.append((f"{name}-{i}", environ, command))
    return found


def test_every_pod_finds_out_which_task_it_is() -> None:
    places = {
        hostname: found(environ, "kubernetes", roles=Roles(chief=True, ps=2))
        for hostname, environ, _ in pods_of(written(*PS))
    }
    assert {hostname: str(place.task) for hostname, place in places.items()} == {
        "train-chief-0": "chief 0",
        "train-worker-0": "worker 0",
        "train-worker-1": "worker 1",
        "train-ps-0": "ps 0",
        "train-ps-1": "ps 1",
    }
    assert {tuple(listed(place)) for place in places.values()} == {
        tuple(f"{p.task} {name}.train:2222" for name, p in places.items())
    }
    tasks = [str(found(environ).task) for _, environ, _ in pods_of(written(*WORKERS))]
    assert tasks == ["worker 0", "worker 1", "worker 2"]


def test_the_command_of_each_pod() -> None:
    (_, job) = written(*WORKERS, "--seed", "3", "--log-dir", "/logs", "--grace", "60")
    assert shlex.join(container(job)["command"]) == (
        "tfdist run --environment kubernetes --strategy multi_worker --seed 3 --grace 60.0 "
        "--start-timeout 900 --log-dir /logs train.py"
    )
    assert job["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] == 70
    (_, own) = written(*WORKERS, "--start-timeout", "5", "--remote-python", "/opt/python")
    words = "/opt/python -m tfdist.cli.main run --environment kubernetes"
    assert shlex.join(container(own)["command"]).startswith(words)
    assert shlex.join(container(own)["command"]).count("--start-timeout") == 1


def test_a_task_that_is_alone_needs_no_others() -> None:
    (job,) = written(*ALONE)
    assert job["kind"] == "Job"
    assert "env" not in container(job)
    assert container(job)["command"][:4] == ["tfdist", "run", "--environment", "local"]


def test_the_strategy_is_chosen_here_and_not_in_the_pods() -> None:
    (_, job) = written("-n", "3")
    assert container(job)["command"][4:6] == ["--strategy", "multi_worker"]


def test_gpus_go_to_the_tasks_that_train() -> None:
    plain = by_name(written(*PS, *GPUS))
    limits = {"limits": {"nvidia.com/gpu": 2}}
    assert container(plain["Job/train-worker"])["resources"] == limits
    assert "resources" not in container(plain["Job/train-chief"])
    assert "resources" not in container(plain["StatefulSet/train-ps"])
    (compose,) = written("--manifest", "compose", *PS, *GPUS)
    assert [name for name, each in compose["services"].items() if "deploy" in each] == [
        *("worker-0", "worker-1")
    ]


def test_one_failure_ends_a_job() -> None:
    for each in written(*PS):
        if each["kind"] == "Job":
            assert each["spec"]["backoffLimit"] == 0
            assert each["spec"]["template"]["spec"]["restartPolicy"] == "Never"
    (tfjob,) = written("--manifest", "tfjob", *PS)
    replicas = tfjob["spec"]["tfReplicaSpecs"]
    assert {kind: each["replicas"] for kind, each in replicas.items()} == {
        **{"Chief": 1, "Worker": 2, "PS": 2}
    }
    assert {each["restartPolicy"] for each in replicas.values()} == {"Never"}


def test_a_dollar_reaches_the_script() -> None:
    """Kubernetes and Compose replace variables in commands."""
    for manifest in ("plain", "compose"):
        options = ("--image", "i", "--manifest", manifest, "--strategy", "single", "--dry-run")
        command = ["run", "--on", "kubernetes", *options, "train.py", "$(HOME)", "${HOME}"]
        only = yaml.safe_load(CliRunner().invoke(app, command).stdout)
        own = only["services"]["worker-0"] if manifest == "compose" else container(only)
        assert own["command"][-2:] == ["$$(HOME)", "$${HOME}"]


def test_without_pyyaml_it_is_json(monkeypatch: pytest.MonkeyPatch) -> None:
    as_yaml = written(*PS)
    monkeypatch.setitem(sys.modules, "yaml", None)
    text = output(*PS)
    assert json.loads(text) == {"apiVersion": "v1", "kind": "List", "items": as_yaml}
    (only,) = [json.loads(output("--manifest", "compose", *PS))]
    assert only["name"] == "train"


def test_the_manifests_need_neither_tensorflow_nor_pyyaml() -> None:
    """What makes them is imported by every `tfdist run`."""
    code = (
        "import sys, tfdist.cli.backends.kubernetes; "
        "print({'yaml', 'tensorflow', 'kubernetes'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "set()\n", done.stderr


# --- Names and mistakes ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "name"),
    [
        ("train.py", "train"),
        ("a/My Model_2.py", "my-model-2"),
        ("3d.py", "job-3d"),
        ("_.py", "job"),
        ("x" * 80 + ".py", "x" * 49),
    ],
)
def test_a_name_from_the_script(script: str, name: str) -> None:
    assert kubernetes.name_of(script) == name
    kubernetes.check_name(name)


def test_the_longest_name_leaves_room_for_what_kubernetes_appends() -> None:
    counts = {"chief": 1, "worker": 99999, "ps": 999}
    job = ContainerJob(name="x" * 49, image="i", command=("a",), counts=counts)
    for document in kubernetes.documents(job):
        if document["kind"] == "Job":
            last = document["spec"]["completions"] - 1
            assert len(f"{document['metadata']['name']}-{last}") <= 63
        if document["kind"] == "StatefulSet":
            assert len(f"{document['metadata']['name']}-{'0' * 10}") <= 63


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--manifest", "helm"], ["'helm'", "plain, tfjob, compose"]),
        (["--job-name", "My_Job"], ["--job-name 'My_Job'", "small letters"]),
        (["--job-name", "1st"], ["--job-name '1st'", "begin with a letter and"]),
        (["--job-name", "a-"], ["--job-name 'a-'", "do not end in a hyphen"]),
        (["--job-name", "x" * 50], ["at most 49"]),
        (["--namespace", "a/b"], ["--namespace 'a/b'"]),
        (["--hosts", "a:2,b:2", "-s", "multi_worker"], ["--hosts", "-n"]),
        (["--max-restarts", "2"], ["--max-restarts 2", "--on kubernetes", "stays so"]),
        (["--manifest", "compose", "--namespace", "a"], ["--namespace", "printed only"]),
        (["--manifest", "compose", "--detach"], ["--detach", "printed only"]),
        (["--manifest", "compose", "--engine-args", "-v"], ["--engine-args", "printed only"]),
        ([], ["kubectl", "not in PATH", "--dry-run"]),
    ],
)
def test_mistakes(words: list[str], said: list[str]) -> None:
    message = refused(*words)
    for each in said:
        assert each in message


def test_an_image_is_needed() -> None:
    message = refused(image=())
    assert "--on kubernetes needs --image" in message
    assert "'train.py'" in message
