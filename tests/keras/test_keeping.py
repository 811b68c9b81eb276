"""The state of an elastic training as a file."""

from __future__ import annotations

import io
import pickle

import ml_dtypes
import numpy as np
import pytest

from tfdist.keras.elastic import State, packed, unpacked
from tfdist.launcher.elastic_directory import Position

ARRAYS = [
    np.arange(6, dtype="float32").reshape(2, 3),
    np.array(3, "int64"),
    np.array([1.5, -2.5], ml_dtypes.bfloat16),
    np.array([True, False]),
    np.zeros((0, 4), "float16"),
    np.array([b"a", b"\xff\x00"], object),
]
ATTRIBUTES = {
    "best": np.float32(0.5),
    "wait": 2,
    "worst": np.inf,
    "best_weights": [np.ones((2, 3), "float32"), np.zeros(3)],
    "seen": {1: (2, None)},
}


def state(**changes):
    return State(
        **{
            "position": Position(1, 2, 3),
            "arrays": ARRAYS,
            "callbacks": [("EarlyStopping", ATTRIBUTES)],
            "history": ({"loss": [0.5, np.float32(0.25)], "odd": [np.arange(2)]}, [0, 1]),
            "finished": [{"history": {"loss": [1.0]}, "epoch": [0]}],
            "last_end": None,
            **changes,
        }
    )


def test_a_state_comes_back_as_it_was():
    found = unpacked(packed(state()))
    assert found.position == Position(1, 2, 3)
    for before, after in zip(ARRAYS, found.arrays, strict=True):
        assert (before.dtype, before.shape) == (after.dtype, after.shape)
        assert before.tolist() == after.tolist()
    [(name, attributes)] = found.callbacks
    assert name == "EarlyStopping"
    best_weights = attributes.pop("best_weights")
    np.testing.assert_equal(best_weights, [np.ones((2, 3), "float32"), np.zeros(3)])
    assert [weight.dtype for weight in best_weights] == ["float32", "float64"]
    assert attributes == {"best": 0.5, "wait": 2, "worst": np.inf, "seen": {1: (2, None)}}
    logs, epochs = found.history
    np.testing.assert_equal(logs, {"loss": [0.5, 0.25], "odd": [np.arange(2)]})
    assert epochs == [0, 1]
    assert found.finished == [{"history": {"loss": [1.0]}, "epoch": [0]}]
    assert found.last_end is None


def test_between_two_fits():
    found = unpacked(packed(state(arrays=None, last_end=ARRAYS[:1])))
    assert found.arrays is None
    assert found.last_end[0].tolist() == ARRAYS[0].tolist()


class Attack:
    """What is executed where a file of it is unpickled."""

    executed = False

    def __reduce__(self):
        return (setattr, (Attack, "executed", True))


def archive(**arrays):
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


@pytest.mark.parametrize(
    "data",
    [
        pickle.dumps(Attack()),
        archive(header=np.array([Attack()], object)),
        archive(header=np.frombuffer(b"{}", np.uint8)),
        archive(header=np.frombuffer(b"no json", np.uint8)),
        archive(header=np.frombuffer(b"[" * 100_000, np.uint8)),
        packed(state())[:-60],
        b"",
    ],
    ids=["pickle", "pickle in an archive", "empty", "no json", "deep json", "cut off", "nothing"],
)
def test_nothing_of_a_file_is_executed(data):
    with pytest.raises(ValueError, match=r"."):
        unpacked(data)
    assert not Attack.executed
