"""How a global batch is divided among replicas."""

from __future__ import annotations

import pytest

from tfdist.comm import batch_sharding


@pytest.mark.parametrize(
    ("batch", "replicas", "text"),
    [
        (64, 3, "22 + 21 + 21"),
        (1, 2, "1 + 0"),
        (64, 16, "4 on each of 16"),
        (64, 9, "7 or 8 on each"),
    ],
)
def test_how_a_batch_is_split_in_words(batch: int, replicas: int, text: str) -> None:
    assert batch_sharding.split_in_words(batch, replicas) == text
    if " + " in text:
        bounds = [batch_sharding.slice_bounds(batch, place, replicas) for place in range(replicas)]
        assert " + ".join(str(end - start) for start, end in bounds) == text
