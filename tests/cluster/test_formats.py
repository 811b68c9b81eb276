"""TF_CONFIG as text to paste: each form gives the text back."""

from __future__ import annotations

import shlex
import subprocess

import pytest
from hypothesis import given

from tests.cluster.test_tf_config import clusters
from tfdist.cluster import tf_config
from tfdist.cluster.spec import Address, ClusterSpec, Task
from tfdist.cluster.tf_config import parse_tf_config


@given(clusters())
def test_texts_are_those_of_the_cluster(case: tuple[ClusterSpec, Task]) -> None:
    cluster, _ = case
    written = list(tf_config.texts(cluster))
    assert written == [(task, cluster.tf_config(task)) for task, _ in cluster.tasks()]
    assert all(parse_tf_config(text) == (cluster, task) for task, text in written)


@given(clusters())
def test_a_shell_gets_the_text_back(case: tuple[ClusterSpec, Task]) -> None:
    cluster, _ = case
    for task, text in tf_config.texts(cluster):
        comment, line = tf_config.written(task, text, "export").split("\n")
        assert comment == f"# {task}"
        assert shlex.split(line) == ["export", f"TF_CONFIG={text}"]


@given(clusters())
def test_kubernetes_gets_the_text_back(case: tuple[ClusterSpec, Task]) -> None:
    yaml = pytest.importorskip("yaml")
    cluster, _ = case
    texts = list(tf_config.texts(cluster))
    blocks = "\n".join(tf_config.written(task, text, "kubernetes") for task, text in texts)
    assert list(yaml.safe_load_all(blocks)) == [
        {"env": [{"name": "TF_CONFIG", "value": text}]} for _, text in texts
    ]


@pytest.mark.parametrize(("more", "starts"), [(0, True), (1, False)])
def test_the_longest_variable_that_linux_passes_on(more: int, starts: bool) -> None:
    environ = {"TF_CONFIG": "x" * (tf_config.LONGEST_VARIABLE + more)}
    try:
        subprocess.run(["/bin/true"], env=environ, check=True)
    except OSError:
        assert not starts
    else:
        assert starts


def test_the_cluster_is_written_once() -> None:
    """Counted, not timed: n tasks make n texts, but n addresses are written, not n²."""
    written = []

    class Counted(Address):
        def __str__(self) -> str:
            written.append(self)
            return super().__str__()

    cluster = ClusterSpec({"worker": tuple(Counted("h", port) for port in range(1, 301))})
    assert len(list(tf_config.texts(cluster))) == 300
    assert len(written) == 300
