"""Slurm's lists of hosts, against an expander that is written in another way."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfdist.cluster.environments.slurm import MOST_HOSTS, expand, expand_counts
from tfdist.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("login", "login"),
        ("a,b.example.org", "a b.example.org"),
        ("n[1-3]", "n1 n2 n3"),
        ("n[1-2]-ib", "n1-ib n2-ib"),
        ("n[08-11]", "n08 n09 n10 n11"),
        ("n[001-003,010]", "n001 n002 n003 n010"),
        ("n[9-11]", "n9 n10 n11"),
        ("n[1,3,1]", "n1 n3 n1"),
        ("rack[1-2]n[1-2,7]", "rack1n1 rack1n2 rack1n7 rack2n1 rack2n2 rack2n7"),
        ("a[1-2]b[3]c[4,5]d", "a1b3c4d a1b3c5d a2b3c4d a2b3c5d"),
        ("gpu-a[1-2],cpu,b[07]", "gpu-a1 gpu-a2 cpu b07"),
        ("[1-2]", "1 2"),
        ("x[0-1][0-1]", "x00 x01 x10 x11"),
    ],
)
def test_lists(text: str, hosts: str) -> None:
    assert expand(text) == hosts.split()


# An item is a list of pieces: a text, or a list of ranges (first, last, digits).
plain = st.text("abz-.", min_size=1, max_size=3)
ranges = st.tuples(st.integers(0, 120), st.integers(0, 12), st.integers(1, 5)).map(
    lambda drawn: (drawn[0], drawn[0] + drawn[1], max(drawn[2], len(str(drawn[0]))))
)
items = st.lists(plain | st.lists(ranges, min_size=1, max_size=3), min_size=1, max_size=4).filter(
    lambda item: sum(isinstance(piece, list) for piece in item) <= 2
)


def text_of(item) -> str:
    def of(first: int, last: int, digits: int) -> str:
        return f"{first:0{digits}d}" + (f"-{last:0{digits}d}" if last > first else "")

    return "".join(
        piece if isinstance(piece, str) else f"[{','.join(of(*part) for part in piece)}]"
        for piece in item
    )


def hosts_of(item) -> list[str]:
    """By recursion from the front; the parser multiplies out what it has split."""
    if not item:
        return [""]
    head, rest = item[0], hosts_of(item[1:])
    if isinstance(head, str):
        heads = [head]
    else:
        heads = []
        for first, last, digits in head:
            value = first
            while value <= last:
                heads.append("0" * (digits - len(str(value))) + str(value))
                value += 1
    return [one + other for one in heads for other in rest]


@given(st.lists(items, min_size=1, max_size=3))
def test_lists_equal_those_of_another_expander(drawn) -> None:
    expected = [host for item in drawn for host in hosts_of(item)]
    assert expand(",".join(map(text_of, drawn))) == expected


@pytest.mark.parametrize(
    ("text", "detail"),
    [
        ("", "no host before character 1"),
        ("a,,b", "no host before character 3"),
        ("a,", "no host before character 3"),
        ("n[1-3", "bracket is not closed"),
        ("n1-3]", "bracket at character 5"),
        ("n[1-[2]]", "bracket at character 5"),
        ("n[3-1]", "'3-1' does not rise"),
        ("n[]", "'' is not a number"),
        ("n[a-c]", "'a-c' is not a number"),
        ("n[1-]", "'1-' is not a number"),
        ("n[1:3]", "'1:3' is not a number"),
        ("a b", "'a b' is not part of a name"),
        ("n[0-99999999]", "longer than"),
        ("n[0-99999][0-99999]", f"longer than {MOST_HOSTS}"),
    ],
)
def test_a_list_with_a_mistake_is_explained(text: str, detail: str) -> None:
    with pytest.raises(ConfigError) as caught:
        expand(text, "SLURM_NODELIST")
    assert f"SLURM_NODELIST={text!r}" in str(caught.value)
    assert detail in str(caught.value)
    assert "srun" in str(caught.value)


@given(st.text("an0-9[],- ", max_size=12))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        hosts = expand(text)
    except ConfigError:
        with pytest.raises(ConfigError, match=re.escape(repr(text))):
            expand(text)
    else:
        assert all(hosts)


@given(st.lists(st.tuples(st.integers(0, 99), st.integers(1, 9)), min_size=1, max_size=5))
def test_counts(drawn) -> None:
    text = ",".join(f"{count}(x{times})" if times > 1 else str(count) for count, times in drawn)
    assert expand_counts(text) == [count for count, times in drawn for _ in range(times)]


@pytest.mark.parametrize("text", ["", "2,", "2(x0)", "2(3)", "x", "-1", "2(x9999999)"])
def test_counts_with_a_mistake_are_explained(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        expand_counts(text, "SLURM_TASKS_PER_NODE")
    assert f"SLURM_TASKS_PER_NODE={text!r}" in str(caught.value)
    assert "2(x3),1" in str(caught.value)
