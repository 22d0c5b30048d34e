"""Names for stretches of a timeline: NVTX ranges, which Nsight Systems and Nsight Compute show.

They cost host time, so they are off until `enable()`. Ranges are marked by the host as it queues
work: run with --graph 0, since a replayed graph is queued in one call and shows none of them.
"""

import contextlib

from numbagpt.errors import UserError

_nvtx = None


def enable() -> None:
    """Mark ranges from now on. Raises UserError if the nvtx package is not installed."""
    global _nvtx
    try:
        import nvtx
    except ImportError:
        raise UserError(
            "profiling needs the nvtx package, which is not installed; pip install nvtx"
        ) from None
    _nvtx = nvtx


def annotate(name: str) -> contextlib.AbstractContextManager:
    """A named range around the work that is queued inside the with block."""
    return contextlib.nullcontext() if _nvtx is None else _nvtx.annotate(name)
