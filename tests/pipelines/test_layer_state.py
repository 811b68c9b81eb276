"""What layers keep between batches is, on a pipeline, what one process keeps; or it is named."""

from __future__ import annotations

import numpy as np
import pytest

from tests.cases.layer_state_cases import KEPT, NAMED, READING
from tests.harness import CallError

CASE = "tests.cases.layer_state_cases:kept"
LOSS = "tests.cases.layer_state_cases:assigns_in_loss"
READS = "tests.cases.layer_state_cases:reads"


def check_equal(found):
    assert found["plain logs"] == found["piped logs"]
    for plain, piped in zip(found["plain"], found["piped"], strict=True):
        np.testing.assert_allclose(piped, plain, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KEPT)
def test_is_that_of_one_process(cluster, kind):
    (found,) = cluster("devices").call(CASE, kind=kind)
    check_equal(found)


@pytest.mark.parametrize("kind", ["calls", "metric"])
def test_is_so_where_the_first_batch_builds_the_model(cluster, kind):
    (found,) = cluster("devices").call(CASE, kind=kind, built=False)
    check_equal(found)


@pytest.mark.parametrize("kind", NAMED)
def test_is_named_where_it_cannot_be(cluster, kind):
    name = r"tf\.Variable '\w*/?keeping\w*/Variable:0'" if "variable" in kind else ""
    with pytest.raises(CallError, match=rf"microbatches=4 conflicts with .*{name}"):
        cluster("devices").call(CASE, kind=kind)


@pytest.mark.parametrize("microbatches", [1, 4])
def test_a_variable_of_no_layer_is_named(cluster, microbatches):
    with pytest.raises(CallError, match=r"strategy='pipeline' conflicts with the assignment"):
        cluster("devices").call(CASE, kind="outside", microbatches=microbatches)


@pytest.mark.parametrize("microbatches", [1, 4])
def test_a_loss_that_keeps_something_is_named(cluster, microbatches):
    with pytest.raises(CallError, match=r"the assignment of 'size' in the loss"):
        cluster("devices").call(LOSS, microbatches=microbatches)


@pytest.mark.parametrize("kind", [*KEPT, *NAMED])
def test_one_microbatch_is_the_whole_batch(cluster, kind):
    (found,) = cluster("devices").call(CASE, kind=kind, microbatches=1)
    check_equal(found)


def test_a_recomputed_stage_assigns_no_variable_twice(cluster):
    # The layer is before the last stage, which keeps its activations.
    options = {"microbatches": 1, "recompute": True, "cuts": ["last"]}
    with pytest.raises(CallError, match=r"recompute=True conflicts with"):
        cluster("devices").call(CASE, kind="steps in a variable", **options)


@pytest.mark.parametrize("kind", READING)
def test_a_weight_that_is_read_by_itself_is_named(cluster, kind):
    with pytest.raises(CallError, match=r"conflicts with a (layer|metric).* reads 'first/kernel'"):
        cluster("devices").call(READS, kind=kind)


def test_layers_of_one_stage_may_share_a_weight(cluster):
    (found,) = cluster("devices").call(READS, kind="layer", cut=False)
    assert max(found) < 1e-6
