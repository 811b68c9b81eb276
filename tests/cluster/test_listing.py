"""Clusters that are too large for an environment variable."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tfdist import environment
from tfdist.cli import logs
from tfdist.cluster.spec import Address, ClusterSpec, Task
from tfdist.cluster.tf_config import LONGEST_VARIABLE, own_tf_config, parse_tf_config
from tfdist.errors import ConfigError
from tfdist.launcher import ssh
from tfdist.launcher.plan import Program, plan_local, plan_member
from tfdist.launcher.ssh import Ssh, plan_hosts

PROGRAM = Program(script="train.py", config="{}", seed=1)


def cluster_of(count: int) -> ClusterSpec:
    names = tuple(Address(f"gpu-{i // 8:04d}", 2222 + i % 8) for i in range(count))
    return ClusterSpec({"worker": names})


def test_a_large_cluster_is_planned_with_one_text_for_all(tmp_path: Path) -> None:
    cluster = cluster_of(10_000)
    assert len(cluster.tf_config(Task("worker", 0))) > LONGEST_VARIABLE
    plan = plan_hosts(
        PROGRAM, cluster=cluster, here={"gpu-0007"}, ssh=Ssh(), log_dir=tmp_path, environ={}
    )
    assert len(plan.tasks) == 10_000
    assert len(plan.files) == 1
    here = [each for each in plan.tasks if each.host is None]
    assert [each.task.index for each in here] == list(range(56, 64))
    longest = max(len(v or "") for each in plan.tasks for v in each.environ.values())
    assert longest < 1000


def test_tasks_read_their_place_from_the_file(tmp_path: Path) -> None:
    cluster = cluster_of(8_000)
    plan = plan_local(PROGRAM, cluster=cluster, log_dir=tmp_path / "logs", environ={})
    plan = logs.prepare(plan, chosen=True)
    changes = plan.tasks[7_999].environ
    assert changes["TF_CONFIG"] is None
    environ = {name: value for name, value in changes.items() if value is not None}
    code = "from tfdist.cluster.tf_config import own_tf_config as own; print(own())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment.merged(environ),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert parse_tf_config(done.stdout) == (cluster, Task("worker", 7_999))


def test_a_member_of_a_large_cluster_gets_the_file_too(tmp_path: Path) -> None:
    cluster, task = cluster_of(8_000), Task("worker", 3)
    environ = {"TF_CONFIG": cluster.tf_config(task)}
    plan = plan_member(PROGRAM, cluster=cluster, task=task, log_dir=tmp_path, environ=environ)
    assert plan.tasks[0].environ["TF_CONFIG"] is None
    assert plan.tasks[0].environ["TFDIST_TASK"] == "worker:3"


def test_a_host_gets_the_file_with_its_order(tmp_path: Path) -> None:
    cluster = cluster_of(8_000)
    plan = plan_hosts(
        PROGRAM, cluster=cluster, here=(), ssh=Ssh(), log_dir=tmp_path / "elsewhere", environ={}
    )
    order = plan.tasks[5].order
    assert order is not None
    code = (
        "from tfdist.cluster.tf_config import own_tf_config as own;"
        "print(own()); import os; print(os.environ['TFDIST_CLUSTER'])"
    )
    said = {**json.loads(order()), "command": [sys.executable, "-c", code], "cwd": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-m", ssh.__name__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as host:
        assert host.stdin is not None
        host.stdin.write(json.dumps(said) + "\n")
        host.stdin.flush()
        text = host.stdout.read() if host.stdout else ""
        host.stdin.close()
        assert host.wait(30) == 0
    own, path = text.splitlines()
    assert parse_tf_config(own) == (cluster, Task("worker", 5))
    assert not Path(path).exists()


def test_logs_that_cannot_be_written_take_the_file_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    plan = plan_local(
        PROGRAM, cluster=cluster_of(8_000), log_dir=tmp_path / "file" / "logs", environ={}
    )
    monkeypatch.setattr(logs.tempfile, "tempdir", str(tmp_path))
    moved = logs.prepare(plan, chosen=False)
    path = moved.tasks[0].environ["TFDIST_CLUSTER"]
    assert path is not None
    assert Path(path).parent == moved.log_dir
    environ = {"TFDIST_CLUSTER": path, "TFDIST_TASK": "worker:1"}
    assert parse_tf_config(own_tf_config(environ) or "")[1] == Task("worker", 1)


def test_a_script_that_reads_tf_config_itself_is_refused(tmp_path: Path) -> None:
    program = Program(script="train.py", config="", seed=None, env_only=True)
    with pytest.raises(ConfigError, match="8000 tasks is longer than a variable may be"):
        plan_local(program, cluster=cluster_of(8_000), log_dir=tmp_path, environ={})


@pytest.mark.parametrize(
    ("text", "task", "message"),
    [
        (None, "worker:0", "cannot be read"),
        ("{", "worker:0", "cannot be read"),
        ("{}", "worker:0", "cannot be read"),
        ('{"cluster": {}}', "worker", "does not say which task"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, text: str | None, task: str, message: str) -> None:
    path = tmp_path / "cluster.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        own_tf_config({"TFDIST_CLUSTER": str(path), "TFDIST_TASK": task})
