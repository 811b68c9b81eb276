"""Leaves out lines of TensorFlow's log, and its messages about itself while it is imported.

TensorFlow 2.21 writes lines such as `I0000 … oneDNN custom operations are on` straight to standard
error, before it looks at TF_CPP_MIN_LOG_LEVEL (tensorflow#100442), and complains of a missing CUDA
driver on machines that have no GPU. Everything else that is written meanwhile is passed on.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import tempfile
from collections.abc import Callable, Iterator

_NOISE = (b"I0000 ", b"WARNING: All log messages before absl::InitializeLog()")
_NO_DRIVER = b"failed call to cuInit"


@contextlib.contextmanager
def quiet_import() -> Iterator[None]:
    """Holds standard error back in the block and then passes on the lines worth reading."""
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(kept, 2)
            os.close(kept)
            held.seek(0)
            for line in held:
                if not is_noise(line):
                    os.write(2, line)


def is_noise(line: bytes) -> bool:
    """Whether a line of TensorFlow's start has nothing that the user could act on."""
    return line.startswith(_NOISE) or (_NO_DRIVER in line and not os.path.exists("/dev/nvidiactl"))


@contextlib.contextmanager
def log_without(unwanted: Callable[[logging.LogRecord], bool]) -> Iterator[None]:
    """Keeps messages that TensorFlow's Python code logs within a block out of its log.

    Args:
        unwanted: whether a record is left out.
    """

    def kept(record: logging.LogRecord) -> bool:
        return not unwanted(record)

    logger = logging.getLogger("tensorflow")
    logger.addFilter(kept)
    try:
        yield
    finally:
        logger.removeFilter(kept)
