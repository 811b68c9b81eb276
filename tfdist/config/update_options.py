"""The options that decide when a gradient becomes a change of the weights."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Literal

from tfdist.config.option import About, NonNegative, Options, listed, options_of
from tfdist.errors import ConfigError

__all__ = ["ON_STALE", "Mode", "OnStale", "UpdateOptions"]

#: The update modes of all strategies.
Mode = Literal["sync", "stale", "local", "async"]

#: The ways to treat a gradient that would be staler than `staleness`.
OnStale = Literal["wait", "drop", "damp"]
ON_STALE: dict[OnStale, str] = {
    "wait": "fast workers wait, so that no gradient is staler than --staleness",
    "drop": "a gradient staler than --staleness is discarded and counted",
    "damp": "each gradient's step is divided by its staleness; no bound",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class UpdateOptions(Options):
    """The time at which a gradient changes the weights: on collectives and on parameter servers."""

    mode: Annotated[
        Mode, About("When a gradient becomes an update: sync, stale, local, async.")
    ] = "sync"
    staleness: Annotated[
        NonNegative | None,
        About(
            "With --mode stale: updates that come between a gradient's read of the weights and "
            "its own; on parameter servers at most.",
            shown="1, on parameter servers none",
            why="It counts updates.",
            mode="stale",
        ),
    ] = None
    on_stale: Annotated[
        OnStale,
        About(
            f"With --mode stale: {listed(ON_STALE)} Only parameter servers drop gradients.",
            mode="stale",
        ),
    ] = "wait"

    def check(self) -> None:
        """Refuses options of one mode under another; see `Options.check`."""
        for name, option in options_of(type(self)).items():
            mode = option.about.mode
            if mode not in (None, self.mode) and self.is_set(name):
                raise ConfigError(
                    f"{name}={getattr(self, name)!r} conflicts with mode={self.mode!r}: it is an "
                    f"option of mode={mode!r}. Choose mode={mode!r}, or leave {name} out."
                )
