"""The devices a process trains on: the one place that distinguishes GPUs and CPUs."""

from __future__ import annotations

import tensorflow as tf

from tfdist import environment
from tfdist._tf.distribute import has_started
from tfdist.cluster import resources as gpu_lists
from tfdist.cluster.spec import ClusterSpec, Task
from tfdist.errors import ConfigError


def check_gpus() -> None:
    """Compares the GPUs that the launcher counts for this process with those of TensorFlow.

    A program that `tfdist run` has not started may see more: nobody has shown it a plan.

    Raises:
        ConfigError: if the numbers differ, with the cause.
    """
    counted, seen = gpu_lists.visible(), len(tf.config.list_physical_devices("GPU"))
    launched = environment.read("TFDIST_LAUNCHED") is not None
    if seen > len(counted) and not launched:
        return
    cuda = bool(tf.sysconfig.get_build_info()["is_cuda_build"])
    listed = environment.read("CUDA_VISIBLE_DEVICES")
    result = gpu_lists.disagreement(counted, seen, cuda=cuda, listed=listed, launched=launched)
    if result is not None:
        raise ConfigError(" ".join(result))


def prepare_devices(count: int | None) -> list[str]:
    """Sets up this process's devices and names those to train on.

    GPUs get memory growth. If there is no GPU, the CPU is split into logical devices.

    Args:
        count: how many; None means all GPUs, or one CPU device.

    Returns:
        Device names, such as `["GPU:0", "GPU:1"]`.

    Raises:
        ConfigError: if there are fewer GPUs, or TensorFlow has started with other devices.
    """
    gpus = tf.config.list_physical_devices("GPU")
    if gpus:
        return _prepare_gpus(gpus, count)
    wanted = count or 1
    if len(tf.config.list_logical_devices("CPU") if has_started() else []) == wanted:
        return _names("CPU", wanted)
    try:
        _split_cpu(wanted)
    except RuntimeError as error:
        raise ConfigError(
            f"devices={wanted} cannot be set up, since TensorFlow has started already: something "
            "has made a tensor or read data before. Make the strategy first in the program, or "
            f"start it with `tfdist run --devices {wanted}` and the strategy, which sets up the "
            "devices before the script begins."
        ) from error
    return _names("CPU", wanted)


def prepare_one_of(local_rank: int, local_size: int) -> str:
    """Sets up the one device of a process that shares its host with others like it.

    Args:
        local_rank: the process's number on this host.
        local_size: processes on this host.

    Returns:
        `"GPU:0"`, the GPU of that number made the only one that is visible, with memory growth; or
        `"CPU:0"` if there is none. A process that sees one GPU takes that: whoever started it
        has chosen.

    Raises:
        ConfigError: if there are several GPUs, but fewer than processes.
    """
    gpus = tf.config.list_physical_devices("GPU")
    if not gpus:
        return "CPU:0"
    if 1 < len(gpus) < local_size:
        raise ConfigError(
            f"{local_size} processes on this host conflict with its {len(gpus)} GPUs: each process "
            f"trains on one. Start {len(gpus)} processes on it."
        )
    own = gpus[0] if len(gpus) == 1 else gpus[local_rank]
    try:
        tf.config.set_visible_devices(own, "GPU")
    except RuntimeError as error:
        raise ConfigError(
            "The GPU of this process cannot be chosen, since TensorFlow has started already: "
            "something has made a tensor or read data before. Make the strategy first in the "
            "program, or start it with `tfdist run`, which chooses before the script begins."
        ) from error
    return _prepare_gpus([own], 1)[0]


def connect_tasks(cluster: ClusterSpec, own: Task) -> list[str]:
    """Connects to the servers of other tasks and names the devices of all.

    Args:
        cluster: all tasks, this one too.
        own: this task.

    Returns:
        For each task, chief first, its GPUs, or its CPU if it has none.
    """
    for gpu in tf.config.list_physical_devices("GPU"):
        tf.config.experimental.set_memory_growth(gpu, True)
    tf.config.experimental_connect_to_cluster(
        tf.train.ClusterSpec(cluster.as_dict()), job_name=own.type, task_index=own.index
    )
    result: list[str] = []
    for task, _ in cluster.tasks():
        prefix = f"/job:{task.type}/replica:0/task:{task.index}/"
        names = [d.name for d in tf.config.list_logical_devices() if d.name.startswith(prefix)]
        gpus = [name for name in names if "GPU" in name]
        result += gpus or names[:1]
    return result


def communication_for(gpus: int, choice: str) -> str:
    """The collective implementation: NCCL between GPUs, a ring otherwise.

    Args:
        gpus: GPUs that each process trains on.
        choice: `"auto"`, `"ring"` or `"nccl"`.

    Returns:
        `"NCCL"` or `"RING"`.

    Raises:
        ConfigError: if NCCL is asked for and there is no GPU.
    """
    if choice == "nccl" and not gpus:
        raise ConfigError(
            "communication='nccl' needs GPUs, and this process sees none. Choose 'ring' or 'auto'."
        )
    if choice == "auto":
        return "NCCL" if gpus else "RING"
    return choice.upper()


def _prepare_gpus(gpus: list[object], count: int | None) -> list[str]:
    if count is not None and count > len(gpus):
        raise ConfigError(
            f"devices={count} is more than the {len(gpus)} GPUs that this process sees. Lower it, "
            "or make more visible in CUDA_VISIBLE_DEVICES."
        )
    for gpu in gpus:
        try:
            tf.config.experimental.set_memory_growth(gpu, True)
        except RuntimeError:  # TensorFlow has started; what it chose then stays.
            break
    return _names("GPU", count or len(gpus))


def _split_cpu(count: int) -> None:
    cpu = tf.config.list_physical_devices("CPU")[0]
    parts = [tf.config.LogicalDeviceConfiguration() for _ in range(count)]
    tf.config.set_logical_device_configuration(cpu, parts)


def _names(kind: str, count: int) -> list[str]:
    return [f"{kind}:{i}" for i in range(count)]
