"""Launchers that number their processes: LSF, mpirun, horovodrun; and files of hosts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.cluster.environments.helpers import found, listed, refused
from tfdist.cluster.environments import hostfile, mpi
from tfdist.cluster.environments.base import Roles
from tfdist.cluster.spec import Task
from tfdist.errors import ConfigError

PORT = 12288 + 16 * 900


# --- LSF ------------------------------------------------------------------------------------------


def jsrun(rank: int, local: int, local_size: int = 2, size: int = 4, **more: str) -> dict[str, str]:
    return {
        "LSB_JOBID": "900",
        "LSB_MCPU_HOSTS": "batch5 1 h36n01 42 h36n02 42",
        "JSM_NAMESPACE_RANK": str(rank),
        "JSM_NAMESPACE_SIZE": str(size),
        "JSM_NAMESPACE_LOCAL_RANK": str(local),
        "JSM_NAMESPACE_LOCAL_SIZE": str(local_size),
        **more,
    }


def test_a_task_of_jsrun() -> None:
    place = found(jsrun(3, 1), hostname="h36n02.summit.example", roles=Roles(ps=1))
    assert (place.environment, place.task) == ("lsf", Task("ps", 0))
    assert listed(place) == [
        f"worker 0 h36n01:{PORT}",
        f"worker 1 h36n01:{PORT + 1}",
        f"worker 2 h36n02:{PORT}",
        f"ps 0 h36n02:{PORT + 1}",
    ]


def test_jsrun_without_a_launch_node() -> None:
    environ = jsrun(2, 0, LSB_MCPU_HOSTS="h1 42 h2 42")
    assert listed(found(environ, hostname="h2"))[2] == f"worker 2 h2:{PORT}"


@pytest.mark.parametrize(
    ("environ", "hostname"),
    [
        (jsrun(2, 0), "h36n01"),
        (jsrun(2, 1), "h36n02"),
        (jsrun(3, 0, local_size=1), "h36n02"),
        (jsrun(0, 0, local_size=3), "h36n01"),
    ],
)
def test_tasks_of_jsrun_that_have_to_ask(environ: dict[str, str], hostname: str) -> None:
    place = found(environ, hostname=hostname)
    assert place.environment == "lsf"
    assert place.gathers
    assert "do not tell which task is on which host" in place.reason
    with_mpi = {**environ, "OMPI_COMM_WORLD_RANK": environ["JSM_NAMESPACE_RANK"]}
    assert found({**with_mpi, "OMPI_COMM_WORLD_SIZE": "4"}, hostname=hostname).environment == "mpi"


def test_a_task_of_blaunch(tmp_path: Path) -> None:
    path = tmp_path / "rankfile"
    path.write_text("a\na\nb\n")
    environ = {"LSB_JOBID": "900", "LSB_DJOB_RANKFILE": str(path), "LSF_PM_TASKID": "3"}
    place = found(environ, hostname="b.example")
    assert place.task == Task("worker", 2)
    assert listed(place)[2] == f"worker 2 b:{PORT}"
    array = found({**environ, "LSB_JOBINDEX": "7"}, hostname="b")
    assert listed(array)[2] == f"worker 2 b:{12288 + 16 * ((900 + 633 * 7) % 1024)}"
    assert "this host is 'c'" in refused(environ, hostname="c")
    path.unlink()
    assert "cannot be read" in refused(environ, hostname="b")
    assert found({**environ, "LSB_MCPU_HOSTS": "a 2 b 1"}, hostname="b").cluster == place.cluster


def test_a_batch_script_of_lsf_is_no_task() -> None:
    environ = {"LSB_JOBID": "900", "LSB_MCPU_HOSTS": "a 2"}
    assert found(environ).environment == "local"
    message = refused(environ, "lsf")
    assert "LSB_JOBID=900 is set, but neither JSM_NAMESPACE_RANK nor LSF_PM_TASKID" in message


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"JSM_NAMESPACE_SIZE": ""}, "JSM_NAMESPACE_SIZE is not"),
        ({"JSM_NAMESPACE_RANK": "7"}, "JSM_NAMESPACE_RANK=7 is not below"),
        ({"JSM_NAMESPACE_LOCAL_SIZE": "0"}, "JSM_NAMESPACE_LOCAL_SIZE='0'"),
        ({"LSB_MCPU_HOSTS": "a 2 b"}, "LSB_MCPU_HOSTS='a 2 b' is not a list"),
        ({"LSB_MCPU_HOSTS": ""}, "LSB_DJOB_RANKFILE=None lists none"),
        ({"JSM_NAMESPACE_RANK": "", "LSF_PM_TASKID": "0"}, "LSF_PM_TASKID='0'"),
        ({"JSM_NAMESPACE_RANK": "", "LSF_PM_TASKID": "86"}, "LSF_PM_TASKID=86, counted from 1,"),
        ({"LSB_JOBID": "x"}, "LSB_JOBID='x'"),
    ],
)
def test_mistakes_of_lsf(changes: dict[str, str], words: str) -> None:
    assert words in refused({**jsrun(0, 0), **changes}, hostname="h36n01")


# --- mpirun and horovodrun ------------------------------------------------------------------------

OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4"}
HOROVOD = {"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2"}


@pytest.mark.parametrize("environ", [OPEN_MPI, {"PMI_RANK": "3", "PMI_SIZE": "4"}])
def test_mpirun_tells_ranks_and_no_addresses(environ: dict[str, str]) -> None:
    place = found(environ, roles=Roles(ps=1))
    assert (place.environment, place.task, place.size) == ("mpi", Task("ps", 0), 4)
    assert (place.cluster, place.gathers) == (None, True)
    assert place.reason == ", ".join(f"{name}={value}" for name, value in environ.items())


def test_one_process_of_mpirun_has_nobody_to_ask() -> None:
    assert not found({"PMI_RANK": "0", "PMI_SIZE": "1"}).gathers


def test_horovodrun_tells_ranks_and_no_addresses() -> None:
    place = found(HOROVOD)
    assert (place.environment, place.task, place.devices) == ("horovod", Task("worker", 1), 1)
    assert (place.cluster, place.gathers) == (None, True)


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "x"}, "OMPI_COMM_WORLD_RANK='x'"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "4"}, "OMPI_COMM_WORLD_RANK=4 is not below"),
        ({"HOROVOD_RANK": "1"}, "HOROVOD_RANK=1 is set, but HOROVOD_SIZE is not"),
        ({"HOROVOD_SIZE": "2"}, "HOROVOD_SIZE=2 is set, but HOROVOD_RANK is not"),
        ({**HOROVOD, "HOROVOD_SIZE": "two"}, "HOROVOD_SIZE='two'"),
        ({**HOROVOD, "HOROVOD_RANK": "2"}, "HOROVOD_RANK=2 is not below"),
    ],
)
def test_mistakes_of_ranks(environ: dict[str, str], words: str) -> None:
    assert words in refused(environ)


class _World:
    """Stands for mpi4py.MPI: two processes of one machine."""

    COMM_WORLD: Any

    def __init__(self) -> None:
        self.COMM_WORLD = self

    def Is_initialized(self) -> bool:
        return True

    def Get_rank(self) -> int:
        return 1

    def Get_size(self) -> int:
        return 2

    def allgather(self, own: tuple[str, int]) -> list[tuple[str, int]]:
        return [(own[0], 4000), own]

    def Finalize(self) -> None:
        pass


def test_gathered_deals_out_roles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mpi, "_mpi", _World)
    started = mpi.MpiRank("Open MPI", 1, 2)
    with mpi.gathered(started, Roles(ps=1)) as (cluster, task):
        assert task == Task("ps", 0)
        assert [str(each) for each, _ in cluster.tasks()] == ["worker 0", "ps 0"]
    with mpi.gathered(started) as (cluster, task):
        assert (task, len(cluster.addresses["worker"])) == (Task("worker", 1), 2)


# --- Files of hosts -------------------------------------------------------------------------------

FILE = """
# written by hand
hosta slots=2      # Open MPI and DeepSpeed
hostb slots=1 max_slots=4
hostb max-slots=8 slots=1
hostc:2
[fd00::1]:1
fd00::2
"""


def test_forms_of_a_line() -> None:
    assert list(hostfile.parse(FILE).items()) == [
        ("hosta", 2),
        ("hostb", 2),
        ("hostc", 2),
        ("fd00::1", 1),
        ("fd00::2", 1),
    ]
    assert hostfile.parse_list("a:2,b,a:1,[::1]:3") == {"a": 3, "b": 1, "::1": 3}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "lists no host"),
        ("# a", "lists no host"),
        ("a\nb slots=x", "line 2: slots='x' of b is no number of tasks"),
        ("a slots=0", "slots='0' of a"),
        ("a:2222", "If it is a port, give it with --port"),
        ("a:", "slots='' of a"),
        ("a slots=2 max_slots=1", "slots=2 of a is more than its max_slots=1"),
        ("a slots=1 slots=2", "'slots=2' is not slots=N or max_slots=N, or is there twice"),
        ("a:1 slots=1", "'slots=1'"),
        ("a gpus=2", "'gpus=2'"),
        ("a 2", "'2' is not slots=N"),
        ("user@a slots=2", '"user@a" is not a host name'),
        ("-Fevil:1", '"-Fevil" is not a host name. A name begins with a letter or a digit'),
        ("-oProxyCommand slots=2", '"-oProxyCommand" is not a host name'),
    ],
)
def test_mistakes_in_a_file(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        hostfile.parse(text, "hostfile 'h'")
    assert words in str(caught.value)
    assert "hostfile 'h'" in str(caught.value)


@pytest.mark.parametrize("text", ["a,,b", "", "a b", "a:x", "-Fevil:1", "a,-la:2"])
def test_mistakes_in_a_list(text: str) -> None:
    with pytest.raises(ConfigError, match="--hosts"):
        hostfile.parse_list(text)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "hosts"
    path.write_text("a slots=2\nb\n")
    return path


@pytest.mark.parametrize(
    ("environ", "hostname", "task"),
    [
        ({"RANK": "1"}, "a", Task("worker", 1)),
        ({"RANK": "2", "WORLD_SIZE": "3"}, "elsewhere", Task("worker", 2)),
        ({}, "b.example.org", Task("worker", 2)),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "3"}, "a", Task("worker", 1)),
    ],
)
def test_who_tells_the_rank(path: Path, environ: dict[str, str], hostname: str, task: Task) -> None:
    place = found(environ, hostfile=path, hostname=hostname)
    assert (place.environment, place.task) == ("hostfile", task)
    assert listed(place) == ["worker 0 a:2222", "worker 1 a:2223", "worker 2 b:2222"]


def test_fewer_processes_than_slots(path: Path) -> None:
    place = found({"RANK": "0", "WORLD_SIZE": "2"}, hostfile=path, hostname="a")
    assert listed(place) == ["worker 0 a:2222", "worker 1 a:2223"]


@pytest.mark.parametrize(
    ("environ", "hostname", "words"),
    [
        ({}, "a", "lists this machine, 'a', 2 times, and RANK is not set"),
        ({}, "z", "does not list this machine, 'z'"),
        ({"RANK": "3"}, "b", "RANK=3 is not below"),
        ({"RANK": "x"}, "b", "RANK='x'"),
        (
            {"RANK": "0", "WORLD_SIZE": "4"},
            "a",
            "RANK=0, WORLD_SIZE=4 counts 4 tasks, but hostfile",
        ),
        ({"RANK": "1"}, "b", "this task is on 'a', but this machine is 'b'"),
    ],
)
def test_nobody_tells_the_rank(
    path: Path, environ: dict[str, str], hostname: str, words: str
) -> None:
    assert words in refused(environ, hostfile=path, hostname=hostname)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    message = refused({}, hostfile=tmp_path / "none")
    assert "none' cannot be read: No such file" in message
    assert "no host file is named" in refused({}, "hostfile")


def test_a_hostfile_that_begins_with_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("a slots=2\nb\n", encoding="utf-8-sig")
    assert list(hostfile.read(path)) == ["a", "b"]
