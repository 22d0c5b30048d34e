"""Many shards written as one: all of them appear when the last is whole, or none of them."""

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np

from numbagpt.errors import UserError
from numbagpt.files import explained, output_folder
from numbagpt.shards import TOKEN, write_header

MAX_SHARDS = 10**6  # their number has six digits
MAX_NAME_BYTES = 255  # of a file, on nearly every file system

_SHARD = r"_(train|val)_\d{6}\.bin"  # after the name of a data set
_HIDDEN = re.compile(r"\.(?P<name>.+)\.[a-z0-9_]{8}\.tmp")  # as tempfile makes it


class ShardWriter:
    """Appends tokens to splits; a split is a row of files NAME_SPLIT_000000.bin, …000001.bin, ….

    cannot_write   how the error begins where the system refuses something

    Attributes: num_tokens, {split: tokens written so far}.
    """

    def __init__(self, folder: Path, name: str, shard_tokens: int, cannot_write: str) -> None:
        self.num_tokens: dict[str, int] = {}
        self._folder, self._name, self._shard_tokens = folder, name, shard_tokens
        self._cannot_write = cannot_write
        self._files: dict[str, BinaryIO] = {}

    def write(self, split: str, tokens: np.ndarray) -> None:
        """Append token ids, (n,) uint16, to a split; a shard that is full is finished.

        Raises UserError if they cannot be written, or there would be too many shards.
        """
        with explained(self._cannot_write):
            while tokens.size:
                written = self.num_tokens.get(split, 0)
                index, held = divmod(written, self._shard_tokens)
                if held == 0:
                    self._begin(split, index)
                part = tokens[: self._shard_tokens - held]
                self._files[split].write(np.ascontiguousarray(part, TOKEN).data)
                self.num_tokens[split] = written + part.size
                if held + part.size == self._shard_tokens:
                    self._finish(split, self._shard_tokens)
                tokens = tokens[part.size :]

    def finish(self) -> None:
        """Finish the shards that are not full. Raises UserError if that cannot be written."""
        with explained(self._cannot_write):
            for split in list(self._files):
                self._finish(split, self.num_tokens[split] % self._shard_tokens)

    def close(self) -> None:
        """Close what is open without finishing it."""
        for file in self._files.values():
            with contextlib.suppress(OSError):
                file.close()

    def _begin(self, split: str, index: int) -> None:
        if index == MAX_SHARDS:
            raise UserError(
                f"more than {MAX_SHARDS:,} shards; expected at most that many, for their "
                "names to be in order; take a larger --shard_tokens"
            )
        path = self._folder / f"{self._name}_{split}_{index:06d}.bin"
        self._files[split] = open(path, "xb")  # noqa: SIM115  (finish or close)
        write_header(self._files[split], 0)

    def _finish(self, split: str, held: int) -> None:
        file = self._files[split]
        file.seek(0)
        write_header(file, held)
        file.flush()
        os.fsync(file.fileno())
        file.close()
        del self._files[split]


@contextlib.contextmanager
def open_shards(
    folder: Path, name: str, shard_tokens: int, overwrite: bool = False
) -> Iterator[ShardWriter]:
    """Yield a ShardWriter whose files appear in `folder` when the block ends, all of them.

    shard_tokens   tokens of a shard; the last of a split has what is left
    overwrite      replace the shards of that name that are there, instead of refusing

    The shards grow in a hidden folder inside `folder`, which is made if it is missing. If the block
    raises or the shards cannot take their places, KeyboardInterrupt included, everything is as it
    was. What earlier programs that were killed left of theirs is removed.

    Raises UserError if the name is too long, shards of that name exist, something else has the name
    of one, the folder cannot be written or another program writes there, the disk is full. What the
    block raises stays what it is.
    """
    size = len(os.fsencode(f"{name}_train_000000.bin"))
    if size > MAX_NAME_BYTES:
        raise UserError(
            f"the name of a shard would have {size} bytes; expected at most {MAX_NAME_BYTES}; "
            "choose a shorter one with --name"
        )
    cannot_write = f"cannot write to folder {folder}"
    with output_folder(folder) as alone:
        with explained(cannot_write):
            if alone:
                _remove_leftovers(folder)
            _find_old(name, folder, overwrite)
            temporary = tempfile.TemporaryDirectory(".tmp", f".{name}.", folder)
        with temporary as hidden:
            writer = ShardWriter(Path(hidden), name, shard_tokens, cannot_write)
            try:
                yield writer
                writer.finish()
            finally:
                writer.close()
            with explained(cannot_write):
                # Once more: another program may have written the same name in the meantime, where
                # there are no locks.
                old = _find_old(name, folder, overwrite)
                _replace(old, Path(hidden), folder)


def _remove_leftovers(folder: Path) -> None:
    """Remove the hidden folders of other programs, which are known to have ended.

    One with the old shards of a run that was killed while it replaced them stays: they may be all
    that is left of that data.
    """
    for path in folder.iterdir():
        found = _HIDDEN.fullmatch(path.name)
        if found and path.is_dir() and not path.is_symlink():
            shard = re.compile(re.escape(found["name"]) + _SHARD)
            if all(shard.fullmatch(file.name) for file in path.iterdir()):
                shutil.rmtree(path)


def _find_old(name: str, folder: Path, overwrite: bool) -> list[Path]:
    """The shards of that name in the folder.

    Raises UserError if there are some and they are to stay, or one is not a file.
    """
    ours = re.compile(re.escape(name) + _SHARD)
    old = sorted(path for path in folder.iterdir() if ours.fullmatch(path.name))
    if old and not overwrite:
        raise UserError(
            f"{folder} already has {old[0].name}; expected no shards of that name; "
            "choose another with --name, or replace them with --overwrite"
        )
    for path in old:
        if not path.is_file():
            raise UserError(
                f"cannot overwrite {path}: it is not a regular file; "
                "move it away, or choose another name with --name"
            )
    return old


def _replace(old: list[Path], hidden: Path, folder: Path) -> None:
    """Move the hidden folder's files to `folder`, after the old ones have gone the other way.

    If that is not possible or is interrupted, all moves are undone.
    """
    new = sorted(hidden.iterdir())
    aside = hidden / "old"
    aside.mkdir()
    moves = [(path, aside / path.name) for path in old]
    moves += [(path, folder / path.name) for path in new]
    with contextlib.ExitStack() as undo:
        for source, target in moves:
            # noted before the move, for Ctrl-C may come right after it
            undo.callback(_move_back, target, source)
            os.rename(source, target)
        undo.pop_all()


def _move_back(target: Path, source: Path) -> None:
    if not os.path.lexists(source):
        os.rename(target, source)
