"""The keyword arguments of `tfdist.strategy`, for type checkers and editors.

A type checker cannot read descriptions of options, so their names and types stand here again. A
test compares the two.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TypedDict

from tfdist.config.collective_options import Communication
from tfdist.config.gradient_options import Clipping, Compression, LrRule
from tfdist.config.horovod_options import Reduction
from tfdist.config.pipeline_options import Schedule
from tfdist.config.server_options import WireDtype
from tfdist.config.sharding_options import Checkpoints
from tfdist.config.update_options import Mode, OnStale

__all__ = ["StrategyKeywords"]


class StrategyKeywords(TypedDict, total=False):
    """The options of all strategies; docs/options.md describes each."""

    processes: int
    devices: int
    communication: Communication
    mode: Mode
    staleness: int
    on_stale: OnStale
    accumulate: int
    compression: Compression
    ratio: float
    rank: int
    bucket_mb: float
    clip: Clipping
    lr_rule: LrRule
    base_batch: int
    lr_warmup: int
    report: bool
    period: int
    sync_steps: int
    outer_momentum: float
    outer_lr: float
    average_state: bool
    zero: int
    checkpoints: Checkpoints
    mesh: str | Mapping[str, int]
    layouts: str | Mapping[str, str | Sequence[str | None]]
    timeline: str | os.PathLike[str]
    reduction: Reduction
    groups: int
    fusion_mb: float
    cycle_ms: float
    hierarchical: bool
    autotune: bool
    stall_timeout: float
    ps: int
    backup_workers: int
    wire_dtype: WireDtype
    min_shard_bytes: int
    max_shards: int
    step_timeout: float
    stages: int
    microbatches: int
    schedule: Schedule
    virtual: int
    cuts: str
    recompute: bool
    vertical_sync: bool
    stage_timeout: float
    seed: int
    start_timeout: float
