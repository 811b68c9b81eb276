"""The GPUs of this machine, and their distribution to its tasks. No TensorFlow."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping

from tfdist import environment
from tfdist.errors import ConfigError

__all__ = [
    *("INSTALL_COMMAND", "check_tensorflow", "disagreement", "failure", "inter_op_threads"),
    *("of_member", "split", "visible"),
]

#: The command that installs the CUDA libraries that TensorFlow needs.
INSTALL_COMMAND = "pip install 'tfdist[cuda]'"

_SECONDS_FOR_NVIDIA_SMI = 10.0
_SECONDS_FOR_TENSORFLOW = 120.0
#: Prints how many GPUs TensorFlow sees, and whether it was built for CUDA. Keras takes 2 s more.
_ASK_TENSORFLOW = """
import sys
sys.modules["keras"] = None
import tensorflow as tf
print(len(tf.config.list_physical_devices("GPU")), tf.sysconfig.get_build_info()["is_cuda_build"])
"""


def visible(environ: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """The GPUs that a process started with this environment may use.

    Args:
        environ: environment variables; by default the process's own.

    Returns:
        The GPUs that CUDA_VISIBLE_DEVICES lists, if it is set; else the numbers of all GPUs that
        `nvidia-smi` lists. Empty if there are none.
    """
    variables = environment.snapshot() if environ is None else environ
    listed = variables.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return tuple(str(number) for number in range(_installed()))
    return _listed(listed)


def disagreement(
    gpus: tuple[str, ...],
    seen: int,
    *,
    cuda: bool,
    listed: str | None = None,
    launched: bool = False,
) -> tuple[str, str] | None:
    """Compares the GPUs that are counted here with those that TensorFlow sees.

    A process that sees fewer would train on the CPU, or on some of them, while the table of the job
    shows all; one that sees more would share them with others by chance.

    Args:
        gpus: the result of `visible`.
        seen: how many TensorFlow sees.
        cuda: whether TensorFlow was built for CUDA.
        listed: CUDA_VISIBLE_DEVICES, if it is set.
        launched: whether `tfdist run` has set it, for one of its tasks.

    Returns:
        The problem with its cause, and what to do; None if both are the same number.
    """
    if len(gpus) == seen:
        return None
    by = "nvidia-smi lists"
    if listed is not None:
        share = " (this task's share of the GPUs here)" if launched else ""
        by = f"CUDA_VISIBLE_DEVICES={listed}{share} names"
    count = f"{len(gpus) or 'no'} GPU{'s' if len(gpus) != 1 else ''}"
    problem = f"{by} {count}, and TensorFlow sees {seen or 'none'}"
    if len(gpus) < seen:
        names = ",".join(map(str, range(seen)))
        return (
            f"{problem}: processes cannot get GPUs of their own.",
            f"Put nvidia-smi on PATH, or name the GPUs: CUDA_VISIBLE_DEVICES={names}.",
        )
    if not cuda:
        cause = "this TensorFlow was built without CUDA"
    elif seen:
        cause = "the others are not there, or are part of one that is divided (MIG)"
    else:
        cause = "its CUDA libraries are missing or do not fit the driver, or there is no such GPU"
    return (
        f"{problem}: {cause}.",
        f"Run: {INSTALL_COMMAND}. To train on the CPU, set CUDA_VISIBLE_DEVICES=-1.",
    )


def check_tensorflow(gpus: tuple[str, ...]) -> None:
    """Compares the GPUs of this process with those that TensorFlow sees, in a process of its own.

    It is for tasks that run a script without tfdist, in which nothing else compares them.

    Args:
        gpus: the result of `visible`.

    Raises:
        ConfigError: if the numbers differ, with the cause.
    """
    if not gpus:
        return
    command = [sys.executable, "-c", _ASK_TENSORFLOW]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_SECONDS_FOR_TENSORFLOW, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return  # The tasks are going to show why.
    seen, cuda = done.stdout.split()[-2:]
    listed = environment.read("CUDA_VISIBLE_DEVICES")
    found = disagreement(gpus, int(seen), cuda=cuda == "True", listed=listed)
    if found is not None:
        raise ConfigError(" ".join(found))


def split(gpus: tuple[str, ...], tasks: int, devices: int | None = None) -> list[tuple[str, ...]]:
    """Gives each task of one machine its own GPUs, the same number to each.

    Collectives need the same number of replicas in each worker, so GPUs that are left over stay
    unused.

    Args:
        gpus: the GPUs to give away, as CUDA_VISIBLE_DEVICES names them.
        tasks: number of tasks on the machine.
        devices: GPUs that each task asks for; by default as many as there are for each.

    Returns:
        For each task its GPUs; empty tuples if the machine has none.

    Raises:
        ConfigError: if there are GPUs, but fewer than the tasks need.
    """
    if not gpus:
        return [()] * tasks
    each = devices or len(gpus) // tasks
    if each == 0 or each * tasks > len(gpus):
        raise ConfigError(_too_few(gpus, tasks, devices))
    return [gpus[task * each : (task + 1) * each] for task in range(tasks)]


def of_member(
    gpus: tuple[str, ...], position: tuple[int, int], each: int | None, *, chosen: bool
) -> tuple[str, ...] | None:
    """The GPUs of a task that a scheduler or launcher has started beside others on its machine.

    Args:
        gpus: the GPUs that the task sees.
        position: the task's number among those that train on this machine, and how many they are.
        each: the number that each has by the scheduler; None if it does not set one.
        chosen: whether CUDA_VISIBLE_DEVICES is set, so that somebody may have chosen them for this
            task alone.

    Returns:
        Its part; None leaves it what it sees: its own already, or too few to give each one.
    """
    part, parts = position
    if parts == 1 or (each is None and chosen):
        return None
    each = each or len(gpus) // parts
    if not each or len(gpus) <= each or len(gpus) < each * parts:
        return None
    return gpus[part * each : (part + 1) * each]


def _too_few(gpus: tuple[str, ...], tasks: int, devices: int | None) -> str:
    each = f"{devices} device{'s' if devices != 1 else ''}"
    asked = f"{tasks} processes" + (f" with {each} each" if devices else "")
    return (
        f"-n {tasks} asks for {asked}, but this machine has {len(gpus)} "
        f"GPU{'s' if len(gpus) != 1 else ''} to give (CUDA_VISIBLE_DEVICES: {','.join(gpus)}). "
        "Ask for fewer, or set CUDA_VISIBLE_DEVICES=-1 to train on CPUs."
    )


def _listed(text: str) -> tuple[str, ...]:
    """CUDA's reading of the variable: the list ends at the first entry that names no GPU."""
    names: list[str] = []
    for entry in text.split(","):
        name = entry.strip()
        if not name or name.startswith("-"):
            break
        names.append(name)
    return tuple(names)


def _installed() -> int:
    return sum(line.startswith("GPU ") for line in _asked()[0].splitlines())


def failure(environ: Mapping[str, str]) -> str | None:
    """A sentence on an `nvidia-smi` that fails, as where the driver does not answer.

    Args:
        environ: environment variables. CUDA_VISIBLE_DEVICES names the GPUs that are meant, and then
            nobody is asked.

    Returns:
        None if the GPUs can be listed, or none are expected.
    """
    if "CUDA_VISIBLE_DEVICES" in environ:
        return None
    reason = _asked()[1]
    return reason and f"nvidia-smi is there and fails ({reason}), so the CPU is used"


def _asked() -> tuple[str, str | None]:
    """The list that `nvidia-smi` prints, and the reason if it fails."""
    program = shutil.which("nvidia-smi")
    return ("", None) if program is None else _answer(program, os.stat(program).st_mtime_ns)


@functools.cache
def _answer(program: str, changed: int) -> tuple[str, str | None]:
    """The answer of a program that was changed last at a time: each is asked once."""
    del changed
    try:
        answer = subprocess.run(
            [program, "-L"],
            capture_output=True,
            text=True,
            timeout=_SECONDS_FOR_NVIDIA_SMI,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "", f"it does not answer within {_SECONDS_FOR_NVIDIA_SMI} s"
    except OSError as error:
        return "", str(error)
    if answer.returncode != 0:
        printed = (answer.stdout + answer.stderr).strip().splitlines()
        return "", printed[0] if printed else f"its exit status is {answer.returncode}"
    return answer.stdout, None


# The number of threads that a TensorFlow server needs, so that it cannot wait for itself.

#: A worker runs one step, its transfers and its input pipeline.
_LEAST_OF_A_WORKER = 4


def inter_op_threads(task_type: str, *, workers: int, cores: int) -> int:
    """The size of a server's thread pool for operations.

    A blocking operation (taking from an accumulator, a transfer that waits for its sender) holds a
    thread of the pool. By default the pool has as many threads as the machine has cores. On two
    cores two waiting workers then hold all threads of a parameter server, and what they wait for
    never runs. Each worker may block one thread of a ps, and two more keep it going.

    Args:
        task_type: `"ps"` or `"worker"`.
        workers: the workers of the cluster.
        cores: the cores that the server may use.
    """
    return max(cores, workers + 2 if task_type == "ps" else _LEAST_OF_A_WORKER)
