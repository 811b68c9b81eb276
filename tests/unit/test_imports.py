"""The import of TensorFlow by the commands."""

from __future__ import annotations

import gc
import os

import pytest

from tfdist.utils.imports import quiet_import


@pytest.fixture(autouse=True)
def unfreeze():
    yield
    gc.unfreeze()


def test_an_import_is_not_interrupted_by_garbage_collection_and_what_it_made_is_left_alone():
    frozen = gc.get_freeze_count()
    with quiet_import():
        assert not gc.isenabled()
        made = [[] for _ in range(1000)]
    assert gc.isenabled()
    assert gc.get_freeze_count() >= frozen + len(made)


def test_garbage_is_collected_again_after_an_import_that_failed(capfd):
    def fail() -> None:
        with quiet_import():
            os.write(2, b"I0000 00:00:1 port.cc:153] oneDNN custom operations are on.\nread this\n")
            raise ImportError

    with pytest.raises(ImportError):
        fail()
    assert gc.isenabled()
    assert capfd.readouterr().err == "read this\n"
