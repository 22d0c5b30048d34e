"""Where numbagpt keeps what it can make again: compiled kernels, the default corpus."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from numbagpt.errors import UserError


def cache_dir() -> Path:
    """The folder for numbagpt's files that can be made again; created if it is not there.

    $NUMBAGPT_CACHE if that is set, else $XDG_CACHE_HOME/numbagpt, else ~/.cache/numbagpt.
    Everything in it may be deleted at any time.

    Raises UserError if there is no home folder or the folder cannot be made.
    """
    if chosen := os.environ.get("NUMBAGPT_CACHE"):
        folder = Path(os.path.expanduser(chosen))
    else:
        # The XDG specification says to ignore a relative path.
        base = os.environ.get("XDG_CACHE_HOME") or ""
        if not os.path.isabs(base):
            base = os.path.expanduser("~/.cache")
        if not os.path.isabs(base):  # as in a container, for a user it does not know
            raise UserError(
                "no home folder found for the cache; set NUMBAGPT_CACHE to a folder that can be "
                "written to"
            )
        folder = Path(base, "numbagpt")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"cannot make the cache folder {folder}: {error.strerror}; expected a folder that "
            "can be written to; set NUMBAGPT_CACHE to one"
        ) from error
    return folder


@contextlib.contextmanager
def writing() -> Iterator[None]:
    """Inside the block, which writes to the cache, a UserError also says how to name its folder."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{error}; NUMBAGPT_CACHE names the cache's folder") from error
