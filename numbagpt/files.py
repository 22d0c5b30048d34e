"""Files: written whole or not at all, read with one clear line when something is wrong.

A file that takes seconds to write is a file that can be interrupted: Ctrl-C, a full disk, a crash,
a power cut. `atomic_write` therefore never touches the file it replaces. It writes a temporary file
beside it, pushes that to the disk, and renames it; POSIX makes the rename atomic, so a reader sees
the old file or the new one and nothing in between.
"""

import contextlib
import errno
import math
import os
import re
import secrets
import shlex
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np

from numbagpt.errors import UserError, refusal

# How each floating-point type lies in a file, low byte first. NumPy has no bfloat16: its 16 bits
# are the upper half of a float32 and are read as an integer.
STORED_AS = {"float32": "<f4", "float16": "<f2", "bfloat16": "<u2"}

# Network and FUSE file systems answer fsync with one of these; the write itself has succeeded.
_NO_FSYNC = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}

# What atomic_write leaves of a model's files when its process is killed: of nobody else's.
_MODEL_FILES = r"model_\d{8,}\.bin|model\.safetensors|config\.json"
_LEFTOVER = re.compile(rf"\.({_MODEL_FILES})\.[0-9a-f]{{8}}\.tmp")


@contextlib.contextmanager
def atomic_write(path: str | os.PathLike) -> Iterator[BinaryIO]:
    """Yield a binary file that becomes `path` when the block ends, and never before.

    If the block raises anything, KeyboardInterrupt included, the temporary file is removed and what
    was at `path` stays. A symbolic link is followed: its target is replaced, the link stays.

    Raises UserError where the folder is missing or not writable, the disk is full, or `path` is
    something other than a regular file.
    """
    with explained(f"cannot write {path}"):
        target = _target(path)
        temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
        try:
            with open(temporary, "xb") as file:
                yield file
                file.flush()
                _sync(file.fileno())
            os.replace(temporary, target)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        _sync_folder(target.parent)


def check_writable_folder(path: str | os.PathLike) -> None:
    """Create the folder `path` if it is missing and prove that files can be written there.

    Called before any work, so that a run does not fail at its first checkpoint an hour later.
    Raises UserError if the folder cannot be created or takes no file.
    """
    with explained(f"cannot write to folder {path}"):
        try:
            Path(path).mkdir(parents=True, exist_ok=True)
        except FileExistsError as error:
            there, reason = error.filename, "a file of that name exists"
            if os.path.islink(there) and not os.path.exists(there):  # the folder's or one above
                reason = f"{there} is a link to {os.readlink(there)}, which is not there"
            raise UserError(
                f"cannot write to folder {path}: {reason}; name another folder"
            ) from error
        _probe(path)


def check_writable_file(path: str | os.PathLike) -> None:
    """Prove that atomic_write will find a place for the file `path`; nothing there is changed.

    Raises UserError where its folder, or that of the file a link leads to, is missing or takes no
    file, or `path` is something other than a regular file.
    """
    what = f"cannot write {path}"
    with explained(what):
        target = _target(path)
    if os.path.islink(path):
        what += f", a link to {target}"
    with explained(what):
        _probe(target.parent)


def check_room(folder: str | os.PathLike, what: str, size: int) -> None:
    """Raise UserError where the disk of `folder`, which exists, has no `size` bytes for `what`."""
    with explained(f"cannot write to folder {folder}"):
        disk = shutil.disk_usage(folder)
    # file systems that do not know their size say that it is zero
    if disk.total and disk.free < size:
        raise UserError(
            f"cannot write to folder {folder}: {what} takes {size:,} bytes and {disk.free:,} are "
            "free there; make room or name another folder"
        )


@contextlib.contextmanager
def no_empty_folders(path: str | os.PathLike) -> Iterator[None]:
    """Remove at the end of the block what it made of the folder `path` and left empty.

    Of a/b/c, where there is only a: c, then b. It does not matter how the block ends. What somebody
    else has locked stays.
    """
    path = Path(path)
    missing = [folder for folder in (path, *path.parents) if not os.path.exists(folder)]
    try:
        yield
    finally:
        for folder in missing:
            # it is not empty, was never made, or is another's
            with contextlib.suppress(OSError, UserError), locked(folder):
                folder.rmdir()


@contextlib.contextmanager
def output_folder(path: str | os.PathLike) -> Iterator[bool]:
    """Make the folder, prove it writable, lock it; remove what was made if nothing came to be in.

    If it is locked, what an earlier program was killed while writing, part of a model, is removed.

    Yields whether it is locked, as `locked` does. Raises UserError if it cannot be made or written
    to, or if another program holds it.
    """
    with no_empty_folders(path):
        check_writable_folder(path)
        with locked(path) as held:
            if held:  # else a program that still runs may be writing it
                _remove_leftovers(path)
            yield held


@contextlib.contextmanager
def locked(folder: str | os.PathLike) -> Iterator[bool]:
    """Keep a folder, which exists, to this program for the block; yields whether it is locked.

    The folder itself is locked, no file in it, and by the kernel, which lets go when the process
    ends, however it ends. It stops only those who ask for the lock as well. Where there are no such
    locks, as on Windows and some network file systems, nobody is stopped.

    Raises UserError if somebody else holds it.
    """
    with contextlib.ExitStack() as stack:
        held = False
        with contextlib.suppress(ImportError, OSError):
            import fcntl

            descriptor = os.open(folder, os.O_RDONLY)  # child processes do not inherit it
            stack.callback(os.close, descriptor)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise UserError(
                    f"another program writes to folder {folder}; expected one at a time; wait for "
                    "its end or name another folder"
                ) from error
            held = True
        yield held


@contextlib.contextmanager
def explained(what: str) -> Iterator[None]:
    """Turn the operating system's refusals into one line: `what`, the system's reason, a remedy.

    The block should do only what `what` speaks of: every OSError in it becomes that UserError.
    """
    try:
        yield
    except OSError as error:
        raise UserError(f"{what}: {refusal(error)}") from error


def exists(path: str | os.PathLike) -> bool:
    """Whether there is such a file or folder; UserError if that cannot be told (permissions)."""
    with explained(f"cannot read {path}"):
        try:
            os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
    return True


def file_size(path: str | os.PathLike) -> int:
    """The size in bytes of the regular file `path`.

    Raises UserError if there is none: nothing there, a folder, a pipe, no permission.
    """
    with explained(f"cannot read {path}"):
        size = os.stat(path).st_size
        if not os.path.isfile(path):
            raise UserError(f"cannot read {path}: it is not a regular file")
    return size


def read_bytes(path: str | os.PathLike, count: int = -1) -> bytes:
    """The first `count` bytes of the regular file `path` (fewer if it is shorter), or all of them.

    Raises UserError if the file cannot be read.
    """
    file_size(path)
    with explained(f"cannot read {path}"), open(path, "rb") as file:
        return file.read(count)


def read_floats(
    path: str | os.PathLike, stored: str, shape: tuple[int, ...], offset: int
) -> np.ndarray:
    """Read `shape` numbers from byte `offset` of `path` on, as a new float32 array.

    stored   float32, float16 or bfloat16: how the file holds them; all three convert exactly
    Raises UserError if the file cannot be read or ends too early.
    """
    count = math.prod(shape)
    with explained(f"cannot read {path}"):
        numbers = np.fromfile(path, STORED_AS[stored], count, offset=offset)
    if numbers.size != count:
        raise UserError(f"{path} ends too early; expected {count:,} numbers from byte {offset:,}")
    if stored == "bfloat16":
        numbers = np.left_shift(numbers, 16, dtype=np.uint32).view(np.float32)
    return numbers.astype(np.float32, copy=False).reshape(shape)


def shell_path(path: str | os.PathLike) -> str:
    """A path as it is written in a command for a shell, quoted where it needs to be."""
    text = os.fspath(path)
    if text[0] in "-~":  # a flag to the program, a home folder to the shell
        text = f"./{text}"
    return shlex.quote(text)


def _target(path: str | os.PathLike) -> Path:
    """The file that is written for `path`, links followed; UserError if it is no regular file."""
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        raise UserError(
            f"cannot write {path}: it exists and is not a regular file; move it or name another"
        )
    return target


def _probe(folder: str | os.PathLike) -> None:
    """Write a file to the folder, gone again at once; OSError if that cannot be done."""
    # unbuffered: what a full disk refuses would be tried again when the file is closed, before it
    # is removed
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".writable-", buffering=0) as probe:
        probe.write(b"\0")


def _remove_leftovers(folder: str | os.PathLike) -> None:
    """Remove what _LEFTOVER names, or as much of it as the system lets go: no run depends on it."""
    with contextlib.suppress(OSError):
        for path in Path(folder).iterdir():
            if _LEFTOVER.fullmatch(path.name):
                with contextlib.suppress(OSError):  # another user's; the next may go
                    path.unlink()


def _sync(descriptor: int) -> None:
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_FSYNC:
            raise


def _sync_folder(folder: Path) -> None:
    """Push the rename itself to the disk. Windows cannot open a folder, and journals renames."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        _sync(descriptor)
    finally:
        os.close(descriptor)
