"""How many threads a TensorFlow server needs, so that it cannot wait for itself."""

from __future__ import annotations

__all__ = ["inter_op_threads"]

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
