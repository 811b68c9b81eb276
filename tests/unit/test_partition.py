"""Splits of layers over devices, compared with all splits there are."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdist.errors import ConfigError
from tfdist.placement.plan import Cost, split, split_with_overflow


def costs(*pairs):
    return [
        Cost(path=str(i), seconds=s, parameters=0, weight_bytes=m, activation_bytes=0)
        for i, (s, m) in enumerate(pairs)
    ]


def slowest(row, cuts):
    return max(sum(cost.seconds for cost in row[begin:end]) for begin, end in cuts)


def all_splits(count, parts):
    for inner in itertools.combinations_with_replacement(range(count + 1), parts - 1):
        borders = (0, *inner, count)
        yield tuple(itertools.pairwise(borders))


def fits(row, cuts, budgets):
    return all(
        sum(cost.memory for cost in row[begin:end]) <= budget
        for (begin, end), budget in zip(cuts, budgets, strict=True)
    )


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=7),
    st.lists(st.integers(0, 30), min_size=1, max_size=4),
)
def test_no_split_that_fits_is_faster(pairs, budgets):
    row = costs(*pairs)
    found = split(row, budgets)
    possible = [s for s in all_splits(len(row), len(budgets)) if fits(row, s, budgets)]
    if not possible:
        assert found is None
        return
    assert found in possible
    assert slowest(row, found) == min(slowest(row, each) for each in possible)


def test_equal_layers_are_split_evenly():
    assert split(costs(*[(1, 1)] * 6), [9, 9, 9]) == ((0, 2), (2, 4), (4, 6))
    # The first layer rules, and the others are even all the same.
    assert split(costs((5, 1), *[(1, 1)] * 4), [9, 9, 9]) == ((0, 1), (1, 3), (3, 5))


def test_what_does_not_fit_goes_to_the_host():
    row = costs(*[(1, 4)] * 4)
    assert split_with_overflow(row, ["a", "b"], [8, 8], "cpu") == ["a", "a", "b", "b"]
    assert split_with_overflow(row, ["a", "b"], [8, 4], "cpu") == ["a", "a", "b", "cpu"]
    with pytest.raises(ConfigError, match="no contiguous split of its 4 layers fits 2 devices"):
        split_with_overflow(row, ["a", "b"], [8, 4], None)
    with pytest.raises(ConfigError, match=r"'0' needs .* more than any device has: a has"):
        split_with_overflow(row, ["a", "b"], [3, 2], None)
