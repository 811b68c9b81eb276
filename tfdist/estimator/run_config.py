"""The configuration of an Estimator: its task in the cluster, saving, logging, distribution."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfdist.errors import ConfigError
from tfdist.estimator.task_config import TaskConfig, own_task_config
from tfdist.types import ClusterSpec, ConfigProto, Json, Strategy
from tfdist.utils import validation

__all__ = ["RunConfig"]

_Unset: Any = object()

#: Seconds between two checkpoints unless something else is asked for.
_SAVE_SECS = 600


@dataclasses.dataclass(frozen=True, repr=False)
class RunConfig:
    """The configuration of an Estimator.

    Args:
        model_dir: where checkpoints, event files and exports go.
        tf_random_seed: the graphs' seed.
        save_summary_steps: steps between two summaries.
        save_checkpoints_steps: steps between two checkpoints; None for no saving by steps.
        save_checkpoints_secs: seconds between two checkpoints, 600 unless one of both is given.
        session_config: a `tf.compat.v1.ConfigProto`; by default one that suits the task.
        keep_checkpoint_max: how many checkpoints are kept; 0 or None keeps all.
        keep_checkpoint_every_n_hours: one in so many hours is kept for good.
        log_step_count_steps: steps between two logs of the loss and the speed; None for none.
        train_distribute: the strategy to train with: `"mirrored"`, `"multi_worker"`, a strategy of
            tfdist or of TensorFlow. None, under `tfdist run`, means that of the job.
        device_fn: where each op goes; by default variables go to the parameter servers.
        protocol: the servers' protocol; grpc.
        eval_distribute: the strategy to evaluate with; as `train_distribute`.
        experimental_distribute: not supported.
        experimental_max_worker_delay_secs: the longest time that a worker waits to start; workers
            begin as soon as the chief has made the variables, so this has no effect.
        session_creation_timeout_secs: seconds that a task waits for the others.
        checkpoint_save_graph_def: whether the graph is saved with checkpoints.

    Raises:
        ConfigError: for values that do not go together, or mistakes in TF_CONFIG.
    """

    model_dir: str | None = None
    tf_random_seed: int | None = None
    save_summary_steps: int | None = 100
    save_checkpoints_steps: int | None = _Unset
    save_checkpoints_secs: float | None = _Unset
    session_config: ConfigProto | None = None
    keep_checkpoint_max: int | None = 5
    keep_checkpoint_every_n_hours: float = 10000
    log_step_count_steps: int | None = 100
    train_distribute: Strategy | str | None = None
    device_fn: Callable[[Any], str] | None = None
    protocol: str | None = None
    eval_distribute: Strategy | str | None = None
    experimental_distribute: object = None
    experimental_max_worker_delay_secs: float | None = None
    session_creation_timeout_secs: float = 7200
    checkpoint_save_graph_def: bool = True
    _task_config: TaskConfig = dataclasses.field(default_factory=own_task_config, init=False)

    def __post_init__(self) -> None:
        self._settle_saving()
        self._settle_model_dir()
        for name in ("save_summary_steps", "save_checkpoints_steps", "log_step_count_steps"):
            if (steps := getattr(self, name)) is not None:
                validation.check_number(name, steps, 1, "None turns it off.")
        if self.keep_checkpoint_max is not None:
            validation.check_number("keep_checkpoint_max", self.keep_checkpoint_max, 0)
        for name in ("save_checkpoints_secs", "session_creation_timeout_secs"):
            if (seconds := getattr(self, name)) is not None:
                validation.check_range(name, seconds, above=0)
        if self.experimental_distribute is not None:
            raise ConfigError(
                f"experimental_distribute={self.experimental_distribute!r} is not supported. Set "
                "train_distribute and eval_distribute."
            )
        if self.protocol not in (None, "grpc"):
            raise ConfigError(f"protocol={self.protocol!r} is not supported. Leave it out: grpc.")

    def _settle_saving(self) -> None:
        steps, secs = self.save_checkpoints_steps, self.save_checkpoints_secs
        if _Unset not in (steps, secs) and steps is not None and secs is not None:
            raise ConfigError(
                f"save_checkpoints_steps={steps!r} conflicts with save_checkpoints_secs={secs!r}. "
                "Set one of them."
            )
        if secs is _Unset:
            secs = _SAVE_SECS if steps is _Unset else None
        object.__setattr__(self, "save_checkpoints_steps", None if steps is _Unset else steps)
        object.__setattr__(self, "save_checkpoints_secs", secs)

    def _settle_model_dir(self) -> None:
        if self.model_dir is not None and not str(self.model_dir):
            raise ConfigError("model_dir='' is no path. Give one, or None for a new directory.")
        directory = self._task_config.model_dir
        if (
            self.model_dir is not None
            and directory is not None
            and str(self.model_dir) != directory
        ):
            raise ConfigError(
                f"model_dir={str(self.model_dir)!r} conflicts with TF_CONFIG, whose model_dir is "
                f"{directory!r}. Remove one of them."
            )
        chosen = directory if self.model_dir is None else str(self.model_dir)
        object.__setattr__(self, "model_dir", chosen)

    def replace(self, **changes: Any) -> RunConfig:
        """A copy with other values. One of the two ways to save replaces the other.

        Raises:
            ConfigError: for a name that RunConfig does not have, or values that conflict.
        """
        names = [field.name for field in dataclasses.fields(self) if field.init]
        for name in changes:
            validation.check_choice("argument of RunConfig", name, names)
        values = {name: getattr(self, name) for name in names}
        if changes.get("save_checkpoints_steps") is not None:
            values["save_checkpoints_secs"] = None
        elif changes.get("save_checkpoints_secs") is not None:
            values["save_checkpoints_steps"] = None
        return RunConfig(**{**values, **changes})

    @property
    def cluster_spec(self) -> ClusterSpec:
        """The tasks that train, as `tf.train.ClusterSpec`; empty for one process.

        An evaluator that TF_CONFIG lists is left out: no server knows of it, and workers divide the
        data by their numbers in this cluster.
        """
        return tf.train.ClusterSpec({} if self._task_config.apart else self._task_config.cluster)

    @property
    def training_cluster(self) -> Mapping[str, Sequence[str]]:
        """The addresses of the tasks that train, by type; also in an evaluator."""
        return self._task_config.cluster

    @property
    def has_evaluator(self) -> bool:
        """Whether TF_CONFIG lists a task of type evaluator."""
        return self._task_config.evaluated

    @property
    def task_type(self) -> str:
        """This task's type as TF_CONFIG names it; "worker" for one process."""
        return self._task_config.type

    @property
    def task_id(self) -> int:
        """This task's index among those of its type."""
        return self._task_config.index

    @property
    def is_chief(self) -> bool:
        """Whether this task initializes and saves: the chief, or worker 0 if there is none."""
        return self._task_config.is_chief

    @property
    def master(self) -> str:
        """The target of sessions: this task's server, or "" for this process if it is alone."""
        return self._task_config.master

    @property
    def evaluation_master(self) -> str:
        """The target of evaluation's sessions: always this process."""
        return ""

    @property
    def num_ps_replicas(self) -> int:
        """The number of parameter servers."""
        return self._task_config.count("ps")

    @property
    def num_worker_replicas(self) -> int:
        """The number of tasks that train, the chief included."""
        return self._task_config.trainers

    @property
    def global_id_in_cluster(self) -> int | None:
        """This task's number among all of the cluster; None for an evaluator."""
        return self._task_config.global_id

    @property
    def service(self) -> Json:
        """The `service` of TF_CONFIG."""
        return self._task_config.service

    def __repr__(self) -> str:
        values = (f"{f.name}={getattr(self, f.name)!r}" for f in dataclasses.fields(self) if f.init)
        return f"RunConfig({', '.join(values)}, task={self.task_type} {self.task_id})"
