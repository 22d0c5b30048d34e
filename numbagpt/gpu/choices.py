"""Choices made by measuring, kept on disk so that later runs make the same ones."""

import json
import warnings
from pathlib import Path

from numbagpt import cache
from numbagpt.errors import UserError
from numbagpt.files import atomic_write


class Choices:
    """A file of the cache that maps names to bytes; unreadable or missing, it is empty."""

    def __init__(self, name: str) -> None:
        """name: that of the file, which has to tell apart whatever makes a choice invalid."""
        self._name = name
        self._known: dict[str, str] | None = None

    def get(self, name: str) -> bytes | None:
        """What was chosen, or None if nothing was."""
        if self._known is None:
            self._known = self._read()
        try:
            return bytes.fromhex(self._known[name])
        except (KeyError, TypeError, ValueError):
            return None

    def put(self, name: str, chosen: bytes) -> None:
        """Remember a choice. Warns if the file cannot be written: it then ends with the process."""
        # Read again, since another process may have added to the file.
        self._known = self._read() | (self._known or {}) | {name: chosen.hex()}
        try:
            path = self._path()
            path.parent.mkdir(exist_ok=True)
            with cache.writing(), atomic_write(path) as file:
                file.write(json.dumps(self._known, indent=1, sort_keys=True).encode())
        except (OSError, UserError) as error:
            warnings.warn(
                f"what was measured is not kept: {error}; the next run measures again, and the "
                "last bits of its results may differ",
                RuntimeWarning,
                stacklevel=2,
            )

    def _path(self) -> Path:
        return cache.cache_dir() / "choices" / self._name

    def _read(self) -> dict[str, str]:
        try:
            known = json.loads(self._path().read_bytes())
        except (OSError, UserError, ValueError):
            return {}
        return known if isinstance(known, dict) else {}
