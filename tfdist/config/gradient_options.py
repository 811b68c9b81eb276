"""The options of gradient updates on the collectives, and what conflicts with them."""

from __future__ import annotations

from typing import Any

from tfdist.config.strategy_spec import Refusal
from tfdist.errors import ConfigError
from tfdist.utils.validation import check_choice, check_number, check_range

__all__ = [
    "CLIPPINGS",
    "COMPRESSIONS",
    "LR_RULES",
    "NO_EXCHANGE",
    "ON_ONE_REPLICA",
    "check",
    "check_ranges",
]

#: In what gradients are sent.
COMPRESSIONS: dict[str, str] = {
    "none": "as they are",
    "fp16": "as float16, scaled, added up in float32",
    "bf16": "as bfloat16, added up in float32",
    "int8": "as 8 bits, in blocks with a scale each",
    "topk": "the largest ones only (--ratio)",
    "randomk": "some that are drawn in each step (--ratio)",
    "powersgd": "as products of thin matrices (--rank)",
}

#: Where the optimizer's `clipnorm`, `global_clipnorm` and `clipvalue` act.
CLIPPINGS: dict[str, str] = {
    "after": "on the average of all replicas, as on one device",
    "before": "on each replica's own gradients",
}

#: How the learning rate follows a larger global batch.
LR_RULES: dict[str, str] = {
    "none": "not at all",
    "linear": "in proportion (Goyal et al. 2017)",
    "sqrt": "with the square root (Krizhevsky 2014)",
}

#: Options that say something in one mode only.
_OF_LOCAL = ("period", "sync_steps", "outer_momentum", "outer_lr", "average_state")

#: Options of strategies whose replicas exchange gradients.
_OF_EXCHANGE = ("compression", "ratio", "rank", "bucket_mb", "clip", *_OF_LOCAL)

#: Options that make sense on one replica.
ON_ONE_REPLICA = ("accumulate", "lr_rule", "base_batch", "lr_warmup", "report")

#: What strategies without an exchange of gradients do not have.
NO_EXCHANGE = Refusal(
    names=_OF_EXCHANGE,
    instead="multi_worker",
    why=", whose replicas exchange no gradients.",
)


def check(config: Any) -> None:
    """Checks the options of a `StrategyConfig` that say how gradients become updates.

    Raises:
        ConfigError: if one conflicts with another.
    """
    _check_modes(config)
    _check_sizes(config)


def check_ranges(config: Any) -> None:
    """Checks each option by itself.

    Raises:
        ConfigError: if a value is out of range.
    """
    check_choice("compression", config.compression, COMPRESSIONS)
    check_choice("clip", config.clip, CLIPPINGS)
    check_choice("lr_rule", config.lr_rule, LR_RULES)
    check_number("accumulate", config.accumulate, 1, "It counts batches of one update.")
    check_number("period", config.period, 1, "It counts steps between two averages.")
    check_number("sync_steps", config.sync_steps, 0)
    check_number("rank", config.rank, 1)
    check_number("lr_warmup", config.lr_warmup, 0, "It counts updates.")
    if config.base_batch is not None:
        check_number("base_batch", config.base_batch, 1, "It counts examples.")
    part = "It is the part of the gradients that is sent."
    check_range("ratio", config.ratio, above=0, most=1, why=part)
    check_range("outer_lr", config.outer_lr, above=0, why="1 takes the average itself.")
    check_range("outer_momentum", config.outer_momentum, least=0, below=1)
    if config.bucket_mb is not None:
        why = "It is a size in MiB."
        check_range("bucket_mb", config.bucket_mb, above=0, most=2**20, why=why)


def _check_modes(config: Any) -> None:
    """Options of one mode under another say nothing, and two ways to reduce conflict."""
    if config.mode != "local":
        for name in _OF_LOCAL:
            _refuse_unless_default(config, name, "local")
    if config.mode != "stale":
        for name in ("staleness", "on_stale"):
            _refuse_unless_default(config, name, "stale")
    if config.on_stale == "drop":
        raise ConfigError(
            f"on_stale='drop' conflicts with strategy={config.strategy!r}: its gradients are all "
            "equally late, so none is dropped. Choose 'wait', or 'damp' for smaller steps."
        )
    if config.reduction == "adasum" and config.mode != "sync":
        raise ConfigError(
            f"mode={config.mode!r} conflicts with reduction='adasum', which combines the gradients "
            "of one step. Choose reduction='mean' or mode='sync'."
        )


def _refuse_unless_default(config: Any, name: str, mode: str) -> None:
    value, default = getattr(config, name), type(config).__dataclass_fields__[name].default
    if value != default:
        raise ConfigError(
            f"{name}={value!r} conflicts with mode={config.mode!r}: it is an option of "
            f"mode={mode!r}. Choose mode={mode!r}, or leave {name} out."
        )


def _check_sizes(config: Any) -> None:
    for name, kinds in (("ratio", ("topk", "randomk")), ("rank", ("powersgd",))):
        default = type(config).__dataclass_fields__[name].default
        if getattr(config, name) != default and config.compression not in kinds:
            raise ConfigError(
                f"{name}={getattr(config, name)!r} conflicts with "
                f"compression={config.compression!r}: it is an option of {' and '.join(kinds)}. "
                f"Choose compression={kinds[0]!r}, or leave {name} out."
            )
    if config.bucket_mb is not None and config.compression != "none":
        raise ConfigError(
            f"bucket_mb={config.bucket_mb} conflicts with compression={config.compression!r}, "
            "which sends all gradients together. Leave one of them out."
        )
    if config.bucket_mb is not None and config.groups is not None:
        raise ConfigError(
            f"bucket_mb={config.bucket_mb} conflicts with groups={config.groups}: both say how "
            "gradients are divided. Leave one of them out."
        )
    if config.lr_rule != "none" and config.base_batch is None:
        raise ConfigError(
            f"lr_rule={config.lr_rule!r} needs base_batch, the number of examples of an update for "
            "which the learning rate was chosen."
        )
    if config.lr_rule == "none" and (config.base_batch is not None or config.lr_warmup):
        raise ConfigError(
            "base_batch and lr_warmup are options of lr_rule, which is 'none'. Choose "
            "lr_rule='linear' or 'sqrt', or leave them out."
        )
