"""The update rule of parameter servers, and how weights lie and travel there."""

from __future__ import annotations

import dataclasses
from typing import Annotated, ClassVar, Literal

import msgspec

from tfdist.config.option import About, NonNegative, Positive
from tfdist.config.update_options import UpdateOptions
from tfdist.errors import ConfigError

__all__ = ["WIRE_DTYPES", "ServerOptions", "WireDtype"]

#: The types in which floating-point tensors may cross the network.
WireDtype = Literal["float32", "bfloat16", "float16"]
WIRE_DTYPES: tuple[WireDtype, ...] = ("float32", "bfloat16", "float16")

_PANEL = "Options of parameter_server"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerOptions(UpdateOptions):
    """The update of weights on servers by gradients, and the transport of both."""

    lacking: ClassVar[str] = ", which has no parameter servers."

    ps: Annotated[
        Positive,
        About(
            "Parameter servers, besides -n workers and a chief.",
            _PANEL,
            why="There must be a parameter server to hold the weights.",
        ),
    ] = 1
    backup_workers: Annotated[
        NonNegative,
        About("With --mode sync: gradients of an update that need not be waited for.", _PANEL),
    ] = 0
    wire_dtype: Annotated[
        WireDtype,
        About(f"Type in which weights and gradients are sent: {', '.join(WIRE_DTYPES)}.", _PANEL),
    ] = "float32"
    min_shard_bytes: Annotated[
        Positive, About("Least size of a part of a split variable.", _PANEL, shown="1 MiB")
    ] = 1 << 20
    max_shards: Annotated[
        Positive | None,
        About(
            "Most parts of a variable.",
            _PANEL,
            shown="as many as servers",
            why="1 splits no variable.",
        ),
    ] = None
    step_timeout: Annotated[
        Annotated[float, msgspec.Meta(gt=0)],
        About(
            "Seconds after which a step is taken from a worker that has not ended it.",
            _PANEL,
            why="It is in seconds.",
        ),
    ] = 600.0

    def parts(self, workers: int) -> int:
        """Into how many parts a global batch is split."""
        return workers if self.mode == "sync" else 1

    def needed(self, workers: int) -> int:
        """Parts whose gradients make an update."""
        return self.parts(workers) - self.backup_workers

    def check(self) -> None:
        """Refuses options that conflict; see `Options.check`."""
        super().check()
        if self.mode == "stale" and self.staleness is None and self.on_stale != "damp":
            raise ConfigError(
                f"mode='stale' with on_stale={self.on_stale!r} needs a bound. Give staleness, the "
                "number of updates that may come between the read of the weights and their "
                "gradient's own, such as 4."
            )
        if self.on_stale == "damp" and self.staleness is not None:
            raise ConfigError(
                f"staleness={self.staleness} conflicts with on_stale='damp', which bounds no "
                "gradient but divides its step by its staleness. Leave staleness out, or choose "
                "on_stale='wait' or 'drop'."
            )
        if self.backup_workers and self.mode != "sync":
            raise ConfigError(
                f"backup_workers={self.backup_workers} conflicts with mode={self.mode!r}: only "
                "mode='sync' waits for several gradients before an update."
            )
