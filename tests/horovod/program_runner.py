"""Runs a program that was written for Horovod with nothing changed but its import, and a seed.

`python -m tests.horovod.program_runner OUT PROGRAM [ARGS...]`, on each process. What the ranks end
with goes to `OUT/rankN.json`.
"""

from __future__ import annotations

import json
import pathlib
import re
import runpy
import sys

import numpy as np

HOROVOD = re.compile(r"^import horovod\.[\w.]+ as hvd$", re.MULTILINE)

#: Other numbers on each rank, the same in every run.
IMPORT = """import tfdist.horovod as hvd
import os, keras
keras.utils.set_random_seed(int(os.environ["HOROVOD_RANK"]))"""


def main(out: pathlib.Path, program: pathlib.Path, arguments: list[str]) -> None:
    text, changed = HOROVOD.subn(IMPORT, program.read_text())
    assert changed == 1, f"{program} has {changed} imports of Horovod"
    copy = out / f"{program.stem}.{id(text)}.py"
    copy.write_text(text)
    sys.argv = [str(copy), *arguments]
    try:
        names = runpy.run_path(str(copy), run_name="__main__")
    finally:
        copy.unlink()
    hvd, model = names["hvd"], names["model"]
    weights = hvd.allgather_object([np.asarray(weight) for weight in model.trainable_weights])
    result = {
        "apart": max(float(np.abs(a - b).max()) for a, b in zip(*weights, strict=True)),
        "losses": [float(loss) for loss in names["LOSSES"]],
        "lr": [float(rate) for rate in _history(names).get("lr", [])],
        "updates": int((getattr(model, "optimizer", None) or names["opt"]).iterations),
    }
    (out / f"rank{hvd.rank()}.json").write_text(json.dumps(result))


def _history(names):
    return names["history"].history if "history" in names else {}


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), sys.argv[3:])
