"""The error of an export that could not be done, as opposed to a mistake in its call."""

from __future__ import annotations

from tfdist.errors import TfdistError

__all__ = ["ExportError"]


class ExportError(TfdistError):
    """A model could not be converted, or what was written does not compute the same.

    Attributes:
        layer: the path of the layer that is to blame, such as `encoder/dense`; empty if none
            can be named.
    """

    def __init__(self, message: str, layer: str = "") -> None:
        super().__init__(message)
        self.layer = layer
