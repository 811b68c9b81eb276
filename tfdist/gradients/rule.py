"""When a gradient becomes a change of the weights, and in what form it travels."""

from __future__ import annotations

import dataclasses
from typing import Any

__all__ = ["PLAIN", "GradientRule", "rule_from"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class GradientRule:
    """What happens between "the gradients are computed" and "the optimizer applies them".

    Attributes:
        mode: `"sync"`, `"stale"` or `"local"`.
        staleness: with `"stale"`, by how many updates a gradient is applied late.
        damp: with `"stale"`, divide the step by the staleness.
        period: with `"local"`, updates of a replica between two averages.
        sync_steps: with `"local"`, synchronous updates at the beginning.
        outer_momentum: with `"local"`, Nesterov momentum of the averaged change.
        outer_lr: with `"local"`, factor of the averaged change.
        average_state: with `"local"`, average the optimizer's state too.
        accumulate: batches of one update.
        compression: a key of `update_options.COMPRESSIONS`.
        ratio: the part that `"topk"` and `"randomk"` send.
        rank: the rank of `"powersgd"`.
        bucket_bytes: bytes of gradients that are exchanged together; None means all.
        clip: `"after"` or `"before"` the exchange.
        lr_rule: `"none"`, `"linear"` or `"sqrt"`.
        base_batch: examples of an update for which the learning rate was chosen.
        lr_warmup: updates in which the learning rate's factor grows from 1.
        report: measure the parts of a step.
    """

    mode: str = "sync"
    staleness: int = 1
    damp: bool = False
    period: int = 8
    sync_steps: int = 0
    outer_momentum: float = 0.0
    outer_lr: float = 1.0
    average_state: bool = False
    accumulate: int = 1
    compression: str = "none"
    ratio: float = 0.01
    rank: int = 4
    bucket_bytes: int | None = None
    clip: str = "after"
    lr_rule: str = "none"
    base_batch: int | None = None
    lr_warmup: int = 0
    report: bool = False

    @property
    def delay(self) -> int:
        """Updates between a gradient's step and its application."""
        return self.staleness if self.mode == "stale" else 0

    @property
    def periodic(self) -> bool:
        """Whether the replicas' weights differ between two averages."""
        return self.mode == "local"

    @property
    def is_plain(self) -> bool:
        """Whether gradients are averaged as they are and applied at once."""
        if self.periodic:
            return False
        late = {"mode": "sync", "staleness": 1, "damp": False}
        return self.delay == 0 and dataclasses.replace(self, **late) == PLAIN  # type: ignore[arg-type]

    @property
    def remembers(self) -> bool:
        """Whether gradients of one step have an effect in later ones."""
        own = ("none", "bf16", "fp16")
        late = self.periodic or self.delay > 0
        return late or self.accumulate > 1 or self.compression not in own

    @property
    def in_words(self) -> str:
        """What happens to gradients, for the user, in a line."""
        late = "" if self.staleness == 1 else "s"
        words = {
            "sync": "sync",
            "stale": f"stale (gradients are applied {self.staleness} update{late} late)",
            "local": f"local (each replica's own weights, averaged every {self.period} updates)",
        }
        parts = [words[self.mode]]
        if self.periodic and self.sync_steps:
            parts.append(f"after {self.sync_steps} synchronous updates")
        if self.periodic and self.outer_momentum:
            parts.append(f"outer momentum {self.outer_momentum:g}")
        if self.accumulate > 1:
            parts.append(f"{self.accumulate} batches an update")
        if self.compression != "none":
            parts.append(f"{self.compression} compression")
        if self.clip == "before":
            parts.append("clipped before the exchange")
        return ", ".join(parts)

    @property
    def described(self) -> str:
        """The parts that the state of an exchange depends on, as of a checkpoint."""
        parts = [self.mode]
        if self.accumulate > 1:
            parts.append(f"accumulate={self.accumulate}")
        if self.compression != "none":
            parts.append(f"compression={self.compression}")
        if self.compression == "powersgd":
            parts.append(f"rank={self.rank}")
        return " ".join(parts)


PLAIN = GradientRule()


def rule_from(config: Any) -> GradientRule:
    """The rule that a `StrategyConfig` of a collective strategy describes."""
    staleness = 1 if config.staleness is None else config.staleness
    names = {field.name for field in dataclasses.fields(GradientRule)}
    same = names - {"staleness", "damp", "bucket_bytes"}
    bucket = config.bucket_mb
    return GradientRule(
        **{name: getattr(config, name) for name in same},
        staleness=staleness,
        damp=config.on_stale == "damp",
        bucket_bytes=None if bucket is None else int(bucket * 2**20),
    )
