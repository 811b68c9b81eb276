"""How many GPUs each task of a Slurm step has for itself."""

from __future__ import annotations

import re
from collections.abc import Mapping

from tfdist.cluster.environments.places import seen
from tfdist.errors import ConfigError

__all__ = ["for_each"]

#: Lists of the GPUs of this node, such as 0,1,2,3; then their number, such as 4 or a100:4.
_LISTS = ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS")
_NUMBERS = ("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE")
_PER_TASK = ("SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK")


def for_each(environ: Mapping[str, str], tasks: int) -> int | None:
    """GPUs of each task that computes.

    Collectives need the same number everywhere, so it is that of the node with the most tasks.

    Args:
        environ: environment variables.
        tasks: the most tasks that compute on one node.

    Returns:
        Their number; None where the job has asked for no GPUs, or Slurm does not say.

    Raises:
        ConfigError: if a variable is not of Slurm's form, or there are fewer GPUs than tasks.
    """
    for name in _PER_TASK:
        if environ.get(name):
            each = _counted(environ, name)
            if each:
                return each
    found = _on_this_node(environ)
    if not found:
        return None
    name, gpus = found
    if gpus < tasks:
        raise ConfigError(
            f"{seen(environ, [name])} gives {gpus} GPUs to a node, but {tasks} tasks that compute "
            "are on one. Start fewer tasks on a node, such as srun "
            f"--ntasks-per-node={gpus}, or ask for more GPUs."
        )
    return gpus // tasks


def _on_this_node(environ: Mapping[str, str]) -> tuple[str, int] | None:
    for name in _LISTS:
        if environ.get(name):
            return name, len(_listed(environ, name))
    for name in _NUMBERS:
        if environ.get(name):
            number = _counted(environ, name)
            return (name, number) if number else None
    return None


def _listed(environ: Mapping[str, str], name: str) -> list[int]:
    """GPUs by number; Slurm also writes ranges, such as 0-3."""
    gpus: list[int] = []
    for part in environ[name].split(","):
        found = re.fullmatch(r"(?:[\w.]+:)*([0-9]{1,4})(?:-([0-9]{1,4}))?", part.strip())
        if found is None:
            raise _mistake(environ, name, "a list of GPUs such as 0,1")
        gpus += range(int(found[1]), int(found[2] or found[1]) + 1)
    return gpus


def _counted(environ: Mapping[str, str], name: str) -> int:
    """The GPUs of `2`, `a100:2`, `a100:1,v100:1`, `cpu:4,gres/gpu:a100:2` or `gres/gpu=2`."""
    total = 0
    for part in environ[name].split(","):
        words = re.split("[:=]", part.strip())
        resource = name == "SLURM_TRES_PER_TASK"
        if resource and words[0] not in ("gres/gpu", "gres:gpu", "gpu"):
            continue
        if not re.fullmatch("[0-9]{1,6}", words[-1]):
            raise _mistake(environ, name, "a number of GPUs such as 2 or a100:2")
        total += int(words[-1])
    return total


def _mistake(environ: Mapping[str, str], name: str, form: str) -> ConfigError:
    return ConfigError(
        f"{name}={environ[name]!r} is not {form}, as Slurm sets it. Unset it, or start the tasks "
        "with srun."
    )
