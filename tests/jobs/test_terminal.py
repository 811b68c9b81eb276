"""A job as a person sees it, on a terminal of 80 columns."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import termios

import pytest

from tests.harness.tiers import seldom
from tests.jobs.test_jobs import TFDIST
from tfdist import environment

SCRIPT = """
import keras, numpy as np
model = keras.Sequential([keras.layers.Dense(1)])
model.compile("sgd", "mse")
model.fit(np.ones((64, 4)), np.ones((64, 1)), verbose=2)
model.save("line.keras")
"""


def on_terminal(folder, *words):
    """What a command writes to a terminal of 80 columns, and its exit status."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 80, 0, 0))
    process = subprocess.Popen(
        [*map(str, words)],
        cwd=folder,
        env=environment.merged({"TF_CONFIG": None, "COLUMNS": None, "TERM": "xterm"}),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    written = b""
    try:
        while block := os.read(ours, 65536):
            written += block
    except OSError:
        pass  # The last user of the terminal has closed it.
    finally:
        os.close(ours)
        status = process.wait(timeout=60)
    return written.decode(), status


@pytest.mark.parametrize(
    "options",
    [[], *seldom(["--min-np", "1", "--max-np", "2"])],
    ids=["", "elastic"],
)
def test_a_terminal_says_what_is_waited_for_and_what_was_written(tmp_path, options):
    (tmp_path / "train.py").write_text(SCRIPT)
    written, status = on_terminal(tmp_path, *TFDIST, "run", *options, "train.py")
    assert status == 0, written
    drawn = re.findall(r"\r\x1b\[K(waiting [^\r\n]*)", written)
    kinds = [re.sub(r": \d+ s$", "", each) for each in drawn]
    assert "waiting for TensorFlow to start" in kinds
    assert max(map(len, drawn)) < 80
    # Each is taken away again: none stands before a line's end.
    left = re.sub(r"waiting [^\r\n]*(?=\r\x1b\[K)", "", written)
    assert "waiting" not in left
    assert re.search(r"^tfdist: wrote line\.keras\r?$", written, re.MULTILINE)
    assert "examples a second" in written
