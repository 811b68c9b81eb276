"""Lists of hosts."""

from __future__ import annotations

import pytest

from tfdist.cluster.hosts import Host, assign, parse_hostfile, parse_hosts, read_hostfile
from tfdist.errors import ConfigError


def test_lists():
    assert parse_hosts("a:2,b") == (Host("a", 2), Host("b", 1))
    assert parse_hosts("10.0.0.1:4, [fd00::1]:2") == (Host("10.0.0.1", 4), Host("fd00::1", 2))
    assert str(Host("fd00::1", 2)) == "[fd00::1]:2"


def test_files():
    text = "# ours\nnode1 slots=2\nnode2 slots=4 max_slots=8  # big\n\nnode3:3\nnode4\n"
    slots = [(host.name, host.slots) for host in parse_hostfile(text, "file")]
    assert slots == [("node1", 2), ("node2", 4), ("node3", 3), ("node4", 1)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a:x", "'a:x' is no host"),
        ("a,,b", "'' is no host"),
        ("a,a:2", "twice"),
        ("a:0", "no slot"),
    ],
)
def test_bad_lists(text, words):
    with pytest.raises(ConfigError, match=words):
        parse_hosts(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "names no host"),
        ("a slots=two", "line 1"),
        ("a\nb cores=2", "line 2"),
        ("a\na", "twice"),
    ],
)
def test_bad_files(text, words):
    with pytest.raises(ConfigError, match=words):
        parse_hostfile(text, "The hostfile")


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        read_hostfile(tmp_path / "none")


def test_each_host_is_filled_before_the_next():
    hosts = (Host("a", 2), Host("b", 1), Host("c", 2))
    assert assign(hosts, 4) == ("a", "a", "b", "c")
    with pytest.raises(ConfigError, match="-n 6 is more than the 5 slots of the hosts a:2, b:1"):
        assign(hosts, 6)
