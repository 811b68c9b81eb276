"""Starts the program of a job by Ray Train: `python ray_start.py PROCESSES TASK JOB RESULT`.

https://docs.ray.io/en/latest/train/distributed-tensorflow-keras.html
"""

from __future__ import annotations

import runpy
import sys
import tempfile


def main(processes: int, script: list[str]) -> None:
    """Runs a script in so many workers of a Ray cluster of this machine.

    Args:
        processes: the number of workers.
        script: the script's path and arguments.
    """
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.tensorflow import TensorflowTrainer

    def work() -> None:
        sys.argv = script
        runpy.run_path(script[0], run_name="__main__")

    with tempfile.TemporaryDirectory() as folder:
        ray.init(num_cpus=processes, include_dashboard=False, log_to_driver=False)
        workers = ScalingConfig(num_workers=processes)
        TensorflowTrainer(
            work, scaling_config=workers, run_config=RunConfig(storage_path=folder)
        ).fit()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
