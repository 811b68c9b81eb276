"""A model in stages, each on a device of its own."""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Mapping, Sequence

import tensorflow as tf

from tfdist.cluster.tf_config import own_tf_config
from tfdist.config.gradient_options import PLAIN, GradientOptions
from tfdist.config.pipeline_options import PipelineOptions, replicas_of
from tfdist.config.strategy_config import StrategyConfig
from tfdist.config.timeline_options import check_ending, is_picture
from tfdist.errors import ConfigError
from tfdist.keras.hooks import STRATEGY, HookSet
from tfdist.placement.devices import existing
from tfdist.strategies.base import StrategyMixin
from tfdist.strategies.connection import connecting, join_own_cluster, seed_from
from tfdist.strategies.devices import connect_tasks, prepare_devices
from tfdist.strategies.membership import Member
from tfdist.strategies.pipeline import hooks
from tfdist.strategies.pipeline.schedules import Box, Shape, check, ideal_bubble
from tfdist.strategies.pipeline.trace import check_installed, draw, write_trace
from tfdist.strategies.pipeline.train_function import PipelineFunction
from tfdist.strategies.scope import Scope
from tfdist.types import Dataset, Model
from tfdist.utils.atomic_io import check_writable
from tfdist.utils.messages import logger


class Pipeline(StrategyMixin, tf.distribute.OneDeviceStrategy):  # type: ignore[misc]
    """Trains a model in stages: each device computes its stage of one microbatch after the other.

    A Functional or Sequential model is cut into contiguous chunks when `fit` sees the first batch.
    `evaluate` and `predict` run the stages one after the other.

    Args:
        devices: names of devices: those of the stages, in their order; those of a second replica of
            the pipeline after them, and so on.
        stages: devices of a replica; all by default.
        microbatches: parts of a batch, over all replicas; by default one without a flush
            (`"pipedream"`), else four for each device.
        schedule: a key of `tfdist.strategies.pipeline.schedules.SCHEDULES`.
        virtual: with `"interleaved"`, chunks on each device.
        cuts: the paths of the layers that the second chunk and those after it begin with, or rules
            and chunks as a mapping; planned by measurement if it is left out.
        recompute: run forward passes again in backward passes, instead of keeping activations: of
            all stages, or those of some numbers.
        vertical_sync: with `"pipedream"`, let all stages use the first stage's version of weights.
        timeout: seconds that a stage may wait for another.
        timeline: see the attribute.
        rule: the treatment of gradients before the optimizer applies them.

    Raises:
        ConfigError: if the options conflict, or a device does not exist.
    """

    name = "pipeline"

    def __init__(
        self,
        devices: Sequence[str],
        *,
        stages: int | None = None,
        microbatches: int | None = None,
        schedule: str = "1f1b",
        virtual: int = 1,
        cuts: Sequence[str] | Mapping[str, int] | None = None,
        recompute: bool | Sequence[int] = False,
        vertical_sync: bool = False,
        timeout: float = 600.0,
        timeline: str | None = None,
        rule: GradientOptions = PLAIN,
    ) -> None:
        self.rule = rule
        stages = stages or len(devices)
        replicas = replicas_of(len(devices), stages)
        if microbatches is None:
            microbatches = 1 if schedule == "pipedream" else 4 * len(devices)
        check(schedule, stages, microbatches, virtual)
        _check_replicas(replicas, microbatches, schedule)
        chunks = range(stages * virtual)
        again = chunks if recompute is True else recompute or ()
        self.shape = Shape(
            schedule=schedule,
            stages=stages,
            microbatches=microbatches,
            virtual=virtual,
            replicas=replicas,
            recompute=frozenset(again),
            vertical_sync=vertical_sync,
            timeout=timeout,
        )
        names = [existing(device) for device in devices]
        self._names = [names[i : i + stages] for i in range(0, len(names), stages)]
        self._cuts = cuts
        self.timeline = timeline
        super().__init__("/CPU:0")
        self._functions: weakref.WeakSet[PipelineFunction] = weakref.WeakSet()
        self._hooks = HookSet(
            lambda: hooks.hooks(self._function, self._report, self._flush_all), STRATEGY
        )

    def scope(self) -> contextlib.AbstractContextManager[object]:
        """The strategy's scope, in which Keras is hooked; see `tf.distribute.Strategy.scope`."""
        return Scope(self, lambda: tf.distribute.OneDeviceStrategy.scope(self), self._hooks)

    def experimental_distribute_dataset(self, dataset: Dataset, options: object = None) -> Dataset:
        """The data set itself: batches are read in this process, and go to the stages from here.

        TensorFlow's iterator over one device takes seconds to end if other tasks are connected.
        """
        del options
        return dataset

    def flush(self, model: Model) -> None:
        """Ends all batches under way, so that the weights are those of all batches given.

        `fit`, `evaluate`, `predict` and Keras's savers do it by themselves; a loop of
        `train_on_batch` does it before it looks at weights.

        Args:
            model: the Keras model.
        """
        hooks.flush(model)

    def boxes(self, model: Model) -> list[Box]:
        """The last steps of a model's stages, with their times; see `trace`."""
        engine = model.train_function.engine
        return [] if engine is None else engine.boxes()

    @property
    def timeline(self) -> str | None:
        """The file in which `fit` writes the timeline of its last batches; None writes none.

        A name that ends in `.png`, `.svg` or `.pdf` makes it a picture, one in `.json` or without
        an ending a trace for chrome://tracing.

        Raises:
            ConfigError: for another ending, a file that cannot be written, or a picture if
                Matplotlib is not installed.
        """
        return self._timeline

    @timeline.setter
    def timeline(self, path: str | None) -> None:
        if path is not None:
            check_ending(path)
            check_writable(path, f"timeline={path!r}")
            if is_picture(path):
                check_installed()
        self._timeline = path

    def _report(self, function: PipelineFunction) -> None:
        if self.timeline is None or function.engine is None:
            return
        try:
            self._write_timeline(self.timeline, function.engine.last_batch())
        except Exception as error:
            # The training is complete: what follows it, such as `save`, must not be lost.
            warnings.warn(f"The timeline {self.timeline!r} could not be written: {error}")
            return
        logger.info(f"the timeline of a step is in {self.timeline}")

    def _write_timeline(self, path: str, boxes: Sequence[Box]) -> None:
        shape = self.shape
        names = [name for row in self._names for name in row]
        ideal = ideal_bubble(
            shape.schedule, shape.stages, shape.microbatches, virtual=shape.virtual
        )
        if is_picture(path):
            draw(path, boxes, title=shape.in_words, names=_short(names), ideal=ideal)
        else:
            write_trace(path, boxes, _short(names))

    def _function(self, model: Model) -> PipelineFunction:
        function = PipelineFunction(model, self.shape, self._names, self._cuts)
        self._functions.add(function)
        return function

    def _flush_all(self) -> None:
        for function in list(self._functions):
            function.flush()


def _short(names: Sequence[str]) -> list[str]:
    """Names of devices for people, if they differ by that."""
    result = [name.replace("/replica:0", "").replace("/device:", " ").lstrip("/") for name in names]
    return [name.removeprefix("job:").replace("/task:", " ") for name in result]


def _check_replicas(replicas: int, microbatches: int, schedule: str) -> None:
    if replicas > 1 and schedule in ("pipedream", "2bw"):
        raise ConfigError(
            f"{replicas} replicas of the pipeline conflict with schedule={schedule!r}, whose "
            "stages update their weights by themselves. Choose schedule='1f1b', or as many stages "
            "as devices."
        )
    if microbatches % replicas:
        raise ConfigError(
            f"microbatches={microbatches} cannot be shared out to {replicas} replicas of the "
            "pipeline. Give a multiple."
        )


def create(config: StrategyConfig, member: Member | None) -> Pipeline:
    """Makes the strategy of a process that trains a model in stages.

    Args:
        config: the configuration.
        member: the chief of several tasks, if they have joined already.

    Raises:
        ConfigError: if options conflict, or there are too few devices.
    """
    if member is None and (config.processes > 1 or own_tf_config() is not None):
        member = join_own_cluster(config)
    own = config.part(PipelineOptions)
    if member is None:
        devices = prepare_devices(config.devices or own.stages)
    else:
        seed_from(member)
        with connecting(member, config):
            devices = connect_tasks(member.cluster, member.task)
    return Pipeline(
        devices,
        stages=own.stages,
        microbatches=own.microbatches,
        schedule=own.schedule,
        virtual=own.virtual,
        cuts=None if own.cuts is None else [name.strip() for name in own.cuts.split(",")],
        recompute=own.recompute,
        vertical_sync=own.vertical_sync,
        timeout=own.stage_timeout,
        timeline=own.timeline,
        rule=config.part(GradientOptions),
    )
