"""What tests of other engines and of several machines need; where it is missing, they are skipped.

`pytest --require=slurm,mpi` fails at once instead.
"""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable

from tests.harness import browser, hosts, pods, slurm

__all__ = ["CHECKS", "lacking"]


def _ray() -> str | None:
    found = importlib.util.find_spec("ray")
    return None if found else "ray is not installed: pip install 'tfdist[ray]'"


def _mpi() -> str | None:
    return None if shutil.which("mpirun") else "mpirun is not in PATH: `make test` adds .venv/bin"


#: For each name what the machine lacks, or None.
CHECKS: dict[str, Callable[[], str | None]] = {
    "netns": pods.missing,
    "sshd": hosts.missing,
    "slurm": slurm.missing,
    "ray": _ray,
    "mpi": _mpi,
    "chromium": browser.missing,
    "site": browser.missing_site,
}


def lacking(names: str) -> list[str]:
    """What is missing of what is required, in words.

    Args:
        names: keys of `CHECKS`, separated by commas.
    """
    wanted = [name for name in names.split(",") if name]
    unknown = [f"{name}: is none of {', '.join(CHECKS)}" for name in wanted if name not in CHECKS]
    found = {name: CHECKS[name]() for name in wanted if name in CHECKS}
    return [*unknown, *(f"{name}: {why}" for name, why in found.items() if why is not None)]
