"""Explains errors of TensorFlow and Horovod for a script that runs under a strategy."""

from __future__ import annotations

__all__ = ["explain"]

_DEVICES = (
    "tfdist sets up the devices before the script, with memory growth. Give their number with "
    "--devices, or the GPUs in CUDA_VISIBLE_DEVICES, and leave the call out."
)

#: Parts of a message, all of which it must contain, and what to do.
_HINTS: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        ("tf.distribute.Strategy", "different"),
        "the script makes a strategy of its own inside the one that tfdist made. Take tfdist's, "
        "`strategy = tfdist.strategy()`, or run it with --env-only.",
    ),
    (
        ("cannot be modified after being initialized",),
        _DEVICES,
    ),
    (
        ("parallelism cannot be modified after initialization",),
        "tfdist starts TensorFlow before the script. Set the number of threads in the environment, "
        "TF_NUM_INTRAOP_THREADS and TF_NUM_INTEROP_THREADS, and leave the call out.",
    ),
    (
        ("Horovod has been shut down",),
        "another rank has ended, or a rank did not come to this exchange before --stall-timeout. "
        "The launcher names it; its own log says why.",
    ),
    (
        ("Mismatched", "One rank"),
        "the ranks met with different tensors: they are at different places of the program, or "
        "their models differ. All ranks must run the same steps on models of the same shape; what "
        "only one does must not compute with the strategy.",
    ),
)


def explain(error: BaseException) -> str | None:
    """A hint for the user if an error's message is one of those known, or None."""
    text = str(error)
    for parts, hint in _HINTS:
        if all(part in text for part in parts):
            return hint
    return None
