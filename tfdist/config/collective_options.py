"""The option of the collectives by which TensorFlow's own processes exchange tensors."""

from __future__ import annotations

import dataclasses
from typing import Annotated, ClassVar, Literal

from tfdist.config.option import About, Options

__all__ = ["CollectiveOptions", "Communication"]

#: The carriers of tensors between processes.
Communication = Literal["auto", "ring", "nccl"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CollectiveOptions(Options):
    """The implementation of TensorFlow's collectives between processes."""

    lacking: ClassVar[str] = ": it chooses among TensorFlow's collectives between processes."

    communication: Annotated[
        Communication,
        About("With multi_worker: what carries tensors between processes: auto, ring, nccl."),
    ] = "auto"
