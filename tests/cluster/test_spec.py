import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfdist.cluster.spec import Address, ClusterSpec, Task, is_any_address, is_loopback
from tfdist.errors import ConfigError

A, B, C = (Address(host, 1234) for host in "abc")

names = st.from_regex(r"[a-z][a-z0-9-]{0,6}[a-z0-9](\.[a-z]{1,5})?", fullmatch=True)
hosts = names | st.ip_addresses().map(str)
addresses = st.builds(Address, hosts, st.integers(1, 65535))


@given(addresses)
def test_parse_is_the_inverse_of_str(address: Address) -> None:
    assert Address.parse(str(address)) == address


@pytest.mark.parametrize(
    ("text", "names", "remedy"),
    [
        ("", "empty", "host:port"),
        ("  ", "empty", "host:port"),
        ("hosta", '"hosta" has no port', '"hosta:12345"'),
        ("hosta:", '"" in "hosta:"', '"hosta:12345"'),
        (":12345", '":12345" has no host', '"10.0.0.1:12345"'),
        ("hosta:0", '"0"', "1 to 65535"),
        ("hosta:65536", '"65536"', "1 to 65535"),
        ("hosta:-1", '"-1"', "1 to 65535"),
        ("hosta:http", '"http"', "1 to 65535"),
        ("hosta:²", '"²"', "1 to 65535"),
        ("http://hosta:80", '"http://hosta:80" is a URL', '"hosta:80"'),
        ("a:1,b:2", "several", "string of its own"),
        ("a: 1", "space", '"a:1"'),
        ("::1", "without a port", '"[::1]:12345"'),
        ("[::1]", '"[::1]" has no port', '"[::1]:12345"'),
        ("fe80::1:2:3:12345x", "more than one colon", "in brackets"),
        ("a:1:2", "more than one colon", "one port"),
        ("[hosta]:1", '"hosta"', "brackets"),
        ("[]:1", '"[]:1"', "brackets"),
        ("10.0.0.256:1", '"10.0.0.256"', "four numbers"),
        ("10.0.0:1", '"10.0.0"', "four numbers"),
        ("user@hosta:1", '"user@hosta"', "letters"),
    ],
)
def test_a_bad_address_is_explained(text: str, names: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Address.parse(text)
    assert names in str(caught.value)
    assert remedy in str(caught.value)


def test_an_ipv6_address_is_written_in_brackets() -> None:
    assert str(Address("::1", 80)) == "[::1]:80"


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST", "127.0.0.1", "127.9.9.9", "::1"])
def test_loopback(host: str) -> None:
    assert is_loopback(host)
    assert not is_any_address(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_any_address(host: str) -> None:
    assert is_any_address(host)
    assert not is_loopback(host)


def test_tasks_come_by_type_then_index() -> None:
    spec = ClusterSpec({"ps": (C,), "worker": (A, B)})
    assert [str(task) for task, _ in spec.tasks()] == ["worker 0", "worker 1", "ps 0"]
    assert spec.computing == (Task("worker", 0), Task("worker", 1))
    assert spec.chief == Task("worker", 0)


def test_the_chief_has_rank_0() -> None:
    spec = ClusterSpec({"worker": (A, B), "chief": (C,)})
    assert spec.computing == (Task("chief", 0), Task("worker", 0), Task("worker", 1))
    assert spec.chief == Task("chief", 0)


def test_a_cluster_that_does_not_compute_has_no_chief() -> None:
    with pytest.raises(KeyError, match="no chief and no worker"):
        _ = ClusterSpec({"ps": (A,)}).chief


def test_equal_clusters_are_equal_however_they_are_written() -> None:
    assert ClusterSpec({"ps": (C,), "worker": (A,), "chief": ()}) == ClusterSpec(
        {"worker": (A,), "ps": (C,)}, {"worker": (0,)}
    )


def test_a_cluster_does_not_change_with_the_mapping_it_was_made_from() -> None:
    source = {"worker": (A,)}
    spec = ClusterSpec(source)
    source["worker"] = (B,)
    assert spec.addresses == {"worker": (A,)}


def test_an_address_of_a_missing_task_is_an_error() -> None:
    with pytest.raises(KeyError, match="no task worker 1"):
        ClusterSpec({"worker": (A,)}).address(Task("worker", 1))


def test_numbers_with_gaps() -> None:
    spec = ClusterSpec({"worker": (A, B)}, {"worker": (1, 3)})
    assert [str(task) for task, _ in spec.tasks()] == ["worker 1", "worker 3"]
    assert spec.address(Task("worker", 3)) == B
    assert spec.as_dict() == {"worker": {"1": "a:1234", "3": "b:1234"}}
    with pytest.raises(KeyError, match="worker 0"):
        spec.address(Task("worker", 0))


@pytest.mark.parametrize("indices", [(0,), (0, 0), (1, 0), (-1, 0), (0, 1, 2)])
def test_indices_that_do_not_fit_are_refused(indices: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="worker"):
        ClusterSpec({"worker": (A, B)}, {"worker": indices})


def test_an_unknown_type_of_task_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'wroker'.*chief, worker, ps, evaluator"):
        ClusterSpec({"wroker": (A,)})


def test_tf_config_is_json_of_cluster_and_task() -> None:
    text = ClusterSpec({"worker": (A, B)}).tf_config(Task("worker", 1))
    assert json.loads(text) == {
        "cluster": {"worker": ["a:1234", "b:1234"]},
        "task": {"type": "worker", "index": 1},
    }


def test_tf_config_of_a_missing_task_is_an_error() -> None:
    with pytest.raises(KeyError, match="no task ps 0"):
        ClusterSpec({"worker": (A,)}).tf_config(Task("ps", 0))


def test_an_evaluator_may_be_outside_of_the_cluster_but_not_out_of_its_range() -> None:
    evaluator = Task("evaluator", 1)
    text = ClusterSpec({"worker": (A,)}).tf_config(evaluator)
    assert json.loads(text)["task"] == {"type": "evaluator", "index": 1}
    with pytest.raises(KeyError, match="no task evaluator 1"):
        ClusterSpec({"worker": (A,), "evaluator": (B,)}).tf_config(evaluator)
