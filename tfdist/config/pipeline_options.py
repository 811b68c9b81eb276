"""The options of pipelines, and what conflicts with them."""

from __future__ import annotations

from typing import Any

from tfdist.errors import ConfigError
from tfdist.utils.validation import (
    LONGEST_SECONDS,
    check_choice,
    check_number,
    check_range,
)

__all__ = ["SCHEDULES", "STAGE_TIMEOUT", "check", "check_ranges", "replicas_of"]

#: The schedules, in a few words each: GPipe (arXiv:1811.06965), PipeDream-Flush and 2BW
#: (arXiv:2006.09503), Megatron-LM's interleaved 1F1B (arXiv:2104.04473), PipeDream
#: (arXiv:1806.03377).
SCHEDULES: dict[str, str] = {
    "gpipe": "all forwards, then all backwards",
    "1f1b": "one forward, one backward in turn; holds fewer activations",
    "interleaved": "1f1b with several parts of the model a device (--virtual)",
    "pipedream": "no flush, an update for each backward, on late weights",
    "2bw": "no flush between batches, on weights one update late",
}

#: Seconds that a stage waits for another, unless an option says it.
STAGE_TIMEOUT = 600.0


def check_ranges(config: Any) -> None:
    """Checks each option by itself.

    Raises:
        ConfigError: if a value is out of range.
    """
    check_choice("schedule", config.schedule, SCHEDULES)
    for name in ("stages", "microbatches"):
        if getattr(config, name) is not None:
            check_number(name, getattr(config, name), 1)
    check_number("virtual", config.virtual, 1, "It counts the parts of the model on each device.")
    most = LONGEST_SECONDS
    check_range("stage_timeout", config.stage_timeout, above=0, most=most, why="It is in seconds.")


def replicas_of(devices: int, stages: int) -> int:
    """How many replicas of a pipeline there are.

    Raises:
        ConfigError: if the stages do not divide the devices.
    """
    replicas, rest = divmod(devices, stages)
    if rest or not replicas:
        raise ConfigError(
            f"stages={stages} does not divide the {devices} devices of the pipeline. Give a "
            "multiple of devices: each replica of the pipeline has one for each stage."
        )
    return replicas


def check(config: Any) -> None:
    """Checks the options of a `StrategyConfig` that belong to pipelines.

    Raises:
        ConfigError: if one conflicts with another.
    """
    if config.processes > 1 and (config.devices or 1) > 1:
        raise ConfigError(
            f"devices={config.devices} conflicts with processes={config.processes}: each process "
            "of a pipeline gives its GPUs, or its CPU. Leave devices out, or processes."
        )
    count = config.processes if config.processes > 1 else config.devices
    if config.stages is not None and count is not None:
        replicas_of(count, config.stages)
    if config.vertical_sync and config.schedule != "pipedream":
        raise ConfigError(
            f"vertical_sync conflicts with schedule={config.schedule!r}: it is an option of "
            "'pipedream'. Choose that, or leave vertical_sync out."
        )
