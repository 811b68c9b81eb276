"""Sharded checkpoints without TensorFlow: regions, files, damage, and consolidation."""

from __future__ import annotations

import json
import math
import os
import zipfile
from pathlib import Path
from typing import Any

import h5py
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from tfdist.cli.main import app
from tfdist.config.mesh import DATA, MODEL, Mesh
from tfdist.sharding import checkpoint
from tfdist.sharding.checkpoint import Checkpoint, Entry, Index, LoadError, Slice
from tfdist.sharding.consolidation import consolidate
from tfdist.sharding.layout import Cut, Layout, Region, writers

SIZES = st.integers(1, 4)


@st.composite
def _meshes(draw: Any) -> Mesh:
    names = draw(st.permutations([DATA, MODEL]))
    return Mesh(tuple((name, draw(SIZES)) for name in names))


def _layout(draw: Any, shape: tuple[int, ...], mesh: Mesh) -> Layout | None:
    """Any cuts along axes whose sizes divide what the cuts before leave."""
    cuts: list[Cut] = []
    for name in draw(st.permutations([DATA, MODEL])):
        left = cuts[-1].shard_shape if cuts else shape
        possible = [d for d, size in enumerate(left) if size % mesh.size(name) == 0]
        dimension = draw(st.sampled_from([None, *possible]))
        if dimension is not None and mesh.size(name) > 1:
            cuts.append(Cut(left, dimension, mesh.axis(name, 0)))
    return Layout(tuple(cuts)) if cuts else None


def _regions(layout: Layout | None, shape: tuple[int, ...], mesh: Mesh) -> list[Region]:
    ranks = range(mesh.processes)
    if layout is None:
        return [Region.whole(shape) for _ in ranks]
    return [layout.at(mesh, rank).region for rank in ranks]


@given(st.data(), st.lists(st.sampled_from([1, 2, 3, 4, 6, 8, 12]), max_size=3).map(tuple))
def test_any_layout_is_read_as_any_other_each_element_once(
    data: Any, shape: tuple[int, ...]
) -> None:
    draw = data.draw
    ours, theirs = draw(_meshes()), draw(_meshes())
    loads = [0] * ours.processes
    written = writers(_regions(_layout(draw, shape, ours), shape, ours), loads)
    assert sum(loads) == math.prod(shape)
    for needed in _regions(_layout(draw, shape, theirs), shape, theirs):
        read = np.zeros(needed.shape, int)
        for rank, region in written.items():
            common = region.overlap(needed)
            if common is not None:
                assert rank < ours.processes
                read[common.within(needed)] += 1
                assert np.zeros(region.shape)[common.within(region)].shape == common.shape
        assert (read == 1).all()


def test_copies_are_written_once_and_by_turns() -> None:
    """Two replicas have two parts each: of two weights each of the four writes one part."""
    mesh = Mesh.parse("data=2,model=2")
    layout = Layout((Cut((6, 4), 1, mesh.axis(MODEL, 0)),))
    loads = [0] * 4
    first, second = (writers(_regions(layout, (6, 4), mesh), loads) for _ in range(2))
    assert [sorted(first), sorted(second), loads] == [[0, 1], [2, 3], [12] * 4]
    assert (
        {first[0], first[1]}
        == {second[2], second[3]}
        == {
            Region((0, 0), (6, 2)),
            Region((0, 2), (6, 2)),
        }
    )


def test_a_layout_in_words() -> None:
    mesh = Mesh.parse("data=2,model=2")
    cuts = (Cut((8, 4), 0, mesh.axis(MODEL, 0)), Cut((4, 4), 0, mesh.axis(DATA, 0)))
    assert str(Layout(cuts)) == "model+data -"
    assert [Layout(cuts).at(mesh, rank).region.start for rank in range(4)] == [
        *((0, 0), (4, 0), (2, 0), (6, 0)),
    ]


VALUES = {
    "layers/dense/vars/0": np.arange(48, dtype="float32").reshape(6, 8),
    "layers/dense/vars/1": np.linspace(-3, 3, 8).astype(ml_dtypes.bfloat16),
    "optimizer/vars/0": np.asarray(7),
    "optimizer/vars/1": np.zeros((0, 3), "float32"),
}


def _write(path: Path, save: str = "aa", processes: int = 2, config: Any = None) -> Index:
    """A checkpoint of `VALUES`, whose arrays are divided along their last dimension."""
    path.mkdir(exist_ok=True)
    mesh = Mesh(((DATA, processes),))
    variables, files = {}, {}
    planned = {}
    for place, value in VALUES.items():
        last, divided = value.ndim - 1, value.size and value.ndim
        layout = Layout((Cut(value.shape, last, mesh.axis(DATA, 0)),)) if divided else None
        planned[place] = writers(_regions(layout, value.shape, mesh), [0] * processes)
        slices = [Slice(checkpoint.file_of(save, r), each) for r, each in planned[place].items()]
        variables[place] = Entry(place, value.shape, value.dtype.name, "-", tuple(slices))
    for rank in range(processes):
        with checkpoint.new_file(str(path), save, rank) as file:
            for place, value in VALUES.items():
                region = planned[place].get(rank)
                if region is not None:
                    part = value[region.within(Region.whole(value.shape))]
                    checkpoint.put(file, place, np.asarray(part))
            if rank == 0:
                file.attrs["training_metadata"] = "{}"
                file["training_metrics/0"] = 0.5
        name = checkpoint.file_of(save, rank)
        files[name] = os.path.getsize(path / name)
    groups = {"layers/dense/vars": "dense", "layers/relu/vars": "relu"}
    index = Index(
        save=save,
        mesh=str(mesh),
        files=files,
        groups=groups,
        variables=variables,
        config=config,
    )
    checkpoint.publish(str(path), index)
    return index


def test_regions_and_wholes_are_read(tmp_path: Path) -> None:
    _write(tmp_path / "c", processes=4)
    with Checkpoint(str(tmp_path / "c")) as saved:
        for place, value in VALUES.items():
            found = np.asarray(saved.saved(place))
            assert found.dtype == value.dtype
            np.testing.assert_array_equal(found, value)
        part = saved.saved("layers/dense/vars/0").read(Region((2, 1), (3, 4)))
        np.testing.assert_array_equal(part, VALUES["layers/dense/vars/0"][2:5, 1:5])


def test_a_save_takes_the_place_of_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / "c"
    _write(path, "aa", 4, ("{}", "{}"))
    assert "config.json" in os.listdir(path)
    (path / "notes.txt").write_text("the user's own")
    with checkpoint.new_file(str(path), "bb", 0):
        pass  # A save that ends here, as by a kill: what was there before is what is read.
    with Checkpoint(str(path)) as saved:
        assert saved.index.save == "aa"
    _write(path, "cc", 2)
    assert sorted(os.listdir(path)) == [
        *("index.json", "notes.txt", "part-00000.cc.h5", "part-00001.cc.h5"),
    ]


def test_a_part_that_the_chief_does_not_see_is_named(tmp_path: Path) -> None:
    index, part = _write(tmp_path / "c"), tmp_path / "c" / "part-00001.aa.h5"
    for damage, found in (
        (lambda: os.truncate(part, 9), r"9 instead of \d+ bytes"),
        (part.unlink, "not there"),
    ):
        damage()
        with pytest.raises(OSError, match=rf"part-00001.aa.h5.* is {found}. Name a directory that"):
            checkpoint.publish(str(tmp_path / "c"), index)


@pytest.mark.parametrize("out", ["w.weights.h5", "m.keras"])
def test_consolidation_gives_what_keras_reads(tmp_path: Path, out: str) -> None:
    config = ('{"a": 1}', '{"keras_version": "3"}')
    _write(tmp_path / "c", "aa", 2, config)
    (tmp_path / "c" / "assets.aa" / "text").mkdir(parents=True)
    (tmp_path / "c" / "assets.aa" / "text" / "words.txt").write_text("a b")
    done = consolidate(str(tmp_path / "c"), str(tmp_path / out))
    assert (done.variables, done.files) == (4, 2)
    assert done.size == os.path.getsize(tmp_path / out)
    weights: Any = tmp_path / out
    if out.endswith(".keras"):
        with zipfile.ZipFile(tmp_path / out) as archive:
            assert (
                archive.read("config.json").decode(),
                archive.read("metadata.json").decode(),
            ) == (config)
            assert archive.read("assets/text/words.txt") == b"a b"
            archive.extract("model.weights.h5", tmp_path)
        weights = tmp_path / "model.weights.h5"
    with h5py.File(weights) as file:
        assert file["layers/dense/vars"].attrs["name"] == "dense"
        assert file["layers/relu/vars"].attrs["name"] == "relu"
        assert file["layers/dense/vars/1"].attrs["dtype"] == "bfloat16"
        assert dict(file.attrs) == {"training_metadata": "{}"}
        assert file["training_metrics/0"][()] == 0.5
        for place, value in VALUES.items():
            assert file[place].chunks is None
            np.testing.assert_array_equal(np.array(file[place], dtype=value.dtype), value)


def _read_all(path: Path) -> None:
    with Checkpoint(str(path)) as saved:
        for place in VALUES:
            saved.saved(place).read()


def _delete(path: Path) -> None:
    os.unlink(path / "part-00001.aa.h5")


def _truncate(path: Path) -> None:
    os.truncate(path / "part-00001.aa.h5", 1000)


def _flip(path: Path) -> None:
    file = path / "part-00001.aa.h5"
    data, value = file.read_bytes(), VALUES["layers/dense/vars/0"][:, 4:].tobytes()
    at = data.index(value)
    file.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])


def _swap(path: Path) -> None:
    """A file of the same size that belongs to another checkpoint."""
    _write(path.parent / "other", "bb")
    os.replace(path.parent / "other" / "part-00001.bb.h5", path / "part-00001.aa.h5")


def _without_index(path: Path) -> None:
    os.unlink(path / "index.json")


def _half_an_index(path: Path) -> None:
    text = (path / "index.json").read_text()
    (path / "index.json").write_text(text[: len(text) // 2])


def _change(change: Any) -> Any:
    def damage(path: Path) -> None:
        index = json.loads((path / "index.json").read_text())
        change(index)
        (path / "index.json").write_text(json.dumps(index))

    return damage


def _lose_a_slice(index: Any) -> None:
    index["variables"]["layers/dense/vars/0"]["slices"].pop()


def _repeat_a_slice(index: Any) -> None:
    slices = index["variables"]["layers/dense/vars/0"]["slices"]
    slices[1]["region"] = slices[0]["region"]


def _later_version(index: Any) -> None:
    index["version"] = 2


def _file_elsewhere(index: Any) -> None:
    index["files"]["../" + "part-00001.aa.h5"] = 1


@pytest.mark.parametrize(
    ("damage", "error"),
    [
        (_delete, "part-00001.aa.h5 is missing"),
        (_truncate, r"part-00001.aa.h5 has 1000 bytes, and was written with \d+"),
        (_flip, "part-00001.aa.h5 is damaged .*filter returned failure"),
        (_swap, "part-00001.aa.h5 is damaged .it belongs to the save bb, not aa"),
        (_without_index, "there is no index.json, which is written last"),
        (_half_an_index, "index.json is damaged"),
        (_change(_lose_a_slice), "does not name a file for each element of layers/dense/vars/0"),
        (_change(_repeat_a_slice), "names two files for elements of layers/dense/vars/0"),
        (_change(_later_version), "version 2"),
        (_change(_file_elsewhere), "part-00001.aa.h5 is missing"),
        (_change(lambda index: index["variables"]["optimizer/vars/0"].pop("shape")), "`shape`"),
        (_change(lambda index: index["files"].pop("part-00001.aa.h5")), "is missing in index.json"),
    ],
)
def test_damage_is_refused_by_name(tmp_path: Path, damage: Any, error: str) -> None:
    _write(tmp_path / "c")
    damage(tmp_path / "c")
    (tmp_path / "out.weights.h5").write_text("before")
    with pytest.raises(LoadError, match=error):
        _read_all(tmp_path / "c")
    done = CliRunner().invoke(
        app, ["consolidate", str(tmp_path / "c"), str(tmp_path / "out.weights.h5")]
    )
    assert done.exit_code == (2 if damage is _without_index else 1)
    assert "c'" in done.stderr
    assert (tmp_path / "out.weights.h5").read_text() == "before"
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".partial")]


@pytest.mark.parametrize(
    ("directory", "out", "error"),
    [
        ("nothing", "a.weights.h5", "is not a sharded checkpoint: there is no index.json"),
        ("c", "a.npz", "ends in neither .weights.h5 nor .keras"),
        ("c", "a.keras", "has its weights only. Name a file that ends in .weights.h5"),
        ("c", "d.weights.h5", "is a directory. Name a file"),
    ],
)
def test_calls_that_cannot_be_done(tmp_path: Path, directory: str, out: str, error: str) -> None:
    _write(tmp_path / "c")
    (tmp_path / "d.weights.h5").mkdir()
    done = CliRunner().invoke(app, ["consolidate", *(str(tmp_path / n) for n in (directory, out))])
    assert done.exit_code == 2
    assert error in " ".join(done.stderr.split())


def test_the_command_says_what_it_has_written(tmp_path: Path) -> None:
    _write(tmp_path / "c")
    out = str(tmp_path / "w.weights.h5")
    done = CliRunner().invoke(app, ["consolidate", str(tmp_path / "c"), out])
    assert done.exit_code == 0, done.stderr
    assert done.stdout.startswith(f"{out}: 4 variables of 2 files, 0.0 MB")
