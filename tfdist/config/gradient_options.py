"""The gradient rule: what happens to gradients between their computation and the optimizer."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Literal

import msgspec

from tfdist.config.option import About, NonNegative, Positive, Size, listed
from tfdist.config.update_options import UpdateOptions
from tfdist.errors import ConfigError

__all__ = [
    "CLIPPINGS",
    "COMPRESSIONS",
    "LR_RULES",
    "OF_EXCHANGE",
    "PLAIN",
    "Clipping",
    "Compression",
    "GradientOptions",
    "LrRule",
]

#: The forms in which gradients travel.
Compression = Literal["none", "fp16", "bf16", "int8", "topk", "randomk", "powersgd"]
COMPRESSIONS: dict[Compression, str] = {
    "none": "as they are",
    "fp16": "as float16, scaled, added up in float32",
    "bf16": "as bfloat16, added up in float32",
    "int8": "as 8 bits, in blocks with a scale each",
    "topk": "the largest ones only (--ratio)",
    "randomk": "some that are drawn in each step (--ratio)",
    "powersgd": "as products of thin matrices (--rank)",
}

#: The places where the optimizer's `clipnorm`, `global_clipnorm` and `clipvalue` act.
Clipping = Literal["after", "before"]
CLIPPINGS: dict[Clipping, str] = {
    "after": "on the average of all replicas, as on one device",
    "before": "on each replica's own gradients",
}

#: The ways in which the learning rate follows a larger global batch.
LrRule = Literal["none", "linear", "sqrt"]
LR_RULES: dict[LrRule, str] = {
    "none": "not at all",
    "linear": "in proportion (Goyal et al. 2017)",
    "sqrt": "with the square root (Krizhevsky 2014)",
}

#: Options of strategies whose replicas exchange gradients.
OF_EXCHANGE = (
    *("compression", "ratio", "rank", "bucket_mb", "clip"),
    *("period", "sync_steps", "outer_momentum", "outer_lr", "average_state"),
)

_PANEL = "Gradient updates (mirrored, multi_worker, horovod)"
_LOCAL = "Options of --mode local"


@dataclasses.dataclass(frozen=True, kw_only=True)
class GradientOptions(UpdateOptions):
    """The treatment of gradients between their computation and the optimizer."""

    accumulate: Annotated[
        Positive,
        About(
            "Batches whose gradients are added up for one update.",
            _PANEL,
            why="It counts batches of one update.",
        ),
    ] = 1
    compression: Annotated[
        Compression, About(f"How gradients travel. {listed(COMPRESSIONS)}", _PANEL)
    ] = "none"
    ratio: Annotated[
        Annotated[float, msgspec.Meta(gt=0, le=1)],
        About(
            "With topk and randomk: the part of the gradients that is sent.",
            _PANEL,
            why="It is the part of the gradients that is sent.",
        ),
    ] = 0.01
    rank: Annotated[Positive, About("With powersgd: the width of the thin matrices.", _PANEL)] = 4
    bucket_mb: Annotated[
        Size | None,
        About(
            "MiB of gradients that are exchanged together, while others are computed.",
            _PANEL,
            shown="all at once",
            why="It is a size in MiB.",
        ),
    ] = None
    clip: Annotated[
        Clipping, About(f"Where the optimizer's clipping acts. {listed(CLIPPINGS)}", _PANEL)
    ] = "after"
    lr_rule: Annotated[
        LrRule,
        About(
            f"How the learning rate follows the examples of an update. {listed(LR_RULES)}", _PANEL
        ),
    ] = "none"
    base_batch: Annotated[
        Positive | None,
        About(
            "With --lr-rule: examples of an update for which the rate was chosen.",
            _PANEL,
            why="It counts examples.",
        ),
    ] = None
    lr_warmup: Annotated[
        NonNegative,
        About(
            "With --lr-rule: updates in which the factor grows from 1.",
            _PANEL,
            why="It counts updates.",
        ),
    ] = 0
    report: Annotated[
        bool, About("Measure where the time of a step goes, and what it sends.", _PANEL)
    ] = False
    period: Annotated[
        Positive,
        About(
            "Steps of a replica between two averages.",
            _LOCAL,
            why="It counts steps between two averages.",
            mode="local",
        ),
    ] = 8
    sync_steps: Annotated[
        NonNegative, About("Synchronous steps at the beginning.", _LOCAL, mode="local")
    ] = 0
    outer_momentum: Annotated[
        Annotated[float, msgspec.Meta(ge=0, lt=1)],
        About("Nesterov momentum of the averaged change, as in DiLoCo.", _LOCAL, mode="local"),
    ] = 0.0
    outer_lr: Annotated[
        Annotated[float, msgspec.Meta(gt=0)],
        About(
            "Factor of the averaged change.",
            _LOCAL,
            why="1 takes the average itself.",
            mode="local",
        ),
    ] = 1.0
    average_state: Annotated[
        bool, About("Average the optimizer's state with the weights.", _LOCAL, mode="local")
    ] = False

    @property
    def delay(self) -> int:
        """Updates between a gradient's step and its application."""
        if self.mode != "stale":
            return 0
        return 1 if self.staleness is None else self.staleness

    @property
    def damp(self) -> bool:
        """Whether the step of a late gradient is divided by its staleness."""
        return self.on_stale == "damp"

    @property
    def bucket_bytes(self) -> int | None:
        """Bytes of gradients that are exchanged together; None means all."""
        return None if self.bucket_mb is None else round(self.bucket_mb * 2**20)

    @property
    def periodic(self) -> bool:
        """Whether the replicas' weights differ between two averages."""
        return self.mode == "local"

    @property
    def is_plain(self) -> bool:
        """Whether gradients are averaged as they are and applied at once."""
        if self.periodic or self.delay:
            return False
        return dataclasses.replace(self, mode="sync", staleness=None, on_stale="wait") == PLAIN

    @property
    def is_exact(self) -> bool:
        """Whether updates are those of one device: buckets and a report do not change them."""
        return dataclasses.replace(self, bucket_mb=None, report=False).is_plain

    @property
    def remembers(self) -> bool:
        """Whether gradients of one step have an effect in later ones."""
        own = ("none", "bf16", "fp16")
        late = self.periodic or self.delay > 0
        return late or self.accumulate > 1 or self.compression not in own

    @property
    def in_words(self) -> str:
        """The rule in a line, for the user."""
        late = "" if self.delay == 1 else "s"
        words = {
            "sync": "sync",
            "stale": f"stale (gradients are applied {self.delay} update{late} late)",
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
        parts: list[str] = [self.mode]
        if self.accumulate > 1:
            parts.append(f"accumulate={self.accumulate}")
        if self.compression != "none":
            parts.append(f"compression={self.compression}")
        if self.compression == "powersgd":
            parts.append(f"rank={self.rank}")
        return " ".join(parts)

    def check(self) -> None:
        """Refuses options that conflict; see `Options.check`."""
        super().check()
        if self.mode == "async":
            raise ConfigError(
                "mode='async' needs parameter servers, and replicas that exchange gradients have "
                "none. Choose mode='sync', 'stale' or 'local'."
            )
        if self.on_stale == "drop":
            raise ConfigError(
                "on_stale='drop' needs parameter servers: gradients that replicas exchange are "
                "all equally late, so none is dropped. Choose 'wait', or 'damp' for smaller steps."
            )
        self._check_compression()
        self._check_learning_rate()

    def _check_compression(self) -> None:
        for name, kinds in (("ratio", ("topk", "randomk")), ("rank", ("powersgd",))):
            if self.is_set(name) and self.compression not in kinds:
                raise ConfigError(
                    f"{name}={getattr(self, name)!r} conflicts with "
                    f"compression={self.compression!r}: it is an option of {' and '.join(kinds)}. "
                    f"Choose compression={kinds[0]!r}, or leave {name} out."
                )
        if self.bucket_mb is not None and self.compression != "none":
            raise ConfigError(
                f"bucket_mb={self.bucket_mb:g} conflicts with compression={self.compression!r}, "
                "which sends all gradients together. Leave one of them out."
            )

    def _check_learning_rate(self) -> None:
        if self.lr_rule != "none" and self.base_batch is None:
            raise ConfigError(
                f"lr_rule={self.lr_rule!r} needs base_batch, the number of examples of an update "
                "for which the learning rate was chosen."
            )
        if self.lr_rule == "none" and (self.base_batch is not None or self.lr_warmup):
            raise ConfigError(
                "base_batch and lr_warmup are options of lr_rule, which is 'none'. Choose "
                "lr_rule='linear' or 'sqrt', or leave them out."
            )


#: The rule by which gradients are averaged as they are and applied at once.
PLAIN = GradientOptions()
