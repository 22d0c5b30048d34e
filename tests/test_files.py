"""numbagpt.files: whole files or none, and one clear line for everything the system refuses."""

import contextlib
import errno
import os
import re
import resource
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from numbagpt import files
from numbagpt.errors import UserError
from numbagpt.files import (
    atomic_write,
    check_room,
    check_writable_file,
    check_writable_folder,
    exists,
    file_size,
    locked,
    no_empty_folders,
    output_folder,
    read_bytes,
    read_floats,
    shell_path,
)


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def one_line(error: pytest.ExceptionInfo) -> str:
    message = str(error.value)
    assert "\n" not in message
    return message


def test_atomic_write_creates_and_replaces(tmp_path):
    path = tmp_path / "a.bin"
    for content in (b"first", b"second and longer", b""):
        with atomic_write(path) as file:
            file.write(content)
        assert path.read_bytes() == content
        assert names(tmp_path) == ["a.bin"]


def test_target_is_untouched_until_the_block_ends(tmp_path):
    path = tmp_path / "a.bin"
    path.write_bytes(b"old")
    with atomic_write(path) as file:
        file.write(b"new" * 100_000)
        file.flush()
        assert path.read_bytes() == b"old"
        # The temporary file is a neighbour: a rename across file systems would not be atomic.
        assert len(names(tmp_path)) == 2
    assert path.read_bytes() == b"new" * 100_000


@pytest.mark.parametrize("interruption", [ValueError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("existed", [True, False])
def test_an_interrupted_write_leaves_what_was_there(tmp_path, interruption, existed):
    path = tmp_path / "a.bin"
    if existed:
        path.write_bytes(b"old")

    def write_half():
        with atomic_write(path) as file:
            file.write(b"half")
            raise interruption

    with pytest.raises(interruption):
        write_half()
    assert names(tmp_path) == (["a.bin"] if existed else [])
    assert not existed or path.read_bytes() == b"old"


def killed_while_writing(path):
    program = (
        "import os, signal, sys\n"
        "from numbagpt.files import atomic_write\n"
        "with atomic_write(sys.argv[1]) as file:\n"
        "    file.write(b'half' * 100_000)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    status = subprocess.run([sys.executable, "-c", program, str(path)], check=False).returncode
    assert status == -9


def test_a_killed_process_leaves_the_old_file(tmp_path):
    path = tmp_path / "a.bin"
    path.write_bytes(b"old")
    killed_while_writing(path)
    assert path.read_bytes() == b"old"
    with atomic_write(path) as file:
        file.write(b"new")
    assert path.read_bytes() == b"new"


def test_data_reaches_the_disk_before_the_rename(tmp_path, monkeypatch):
    path = tmp_path / "a.bin"
    events = []
    fsync, replace = os.fsync, os.replace

    def record_fsync(descriptor):
        mode = os.fstat(descriptor)
        events.append(("fsync", "folder" if stat.S_ISDIR(mode.st_mode) else mode.st_size))
        fsync(descriptor)

    def record_replace(source, target):
        events.append(("replace", os.path.basename(target)))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(os, "replace", record_replace)
    with atomic_write(path) as file:
        file.write(b"12345")
    assert events == [("fsync", 5), ("replace", "a.bin"), ("fsync", "folder")]


ROOM = "; make room or name another folder"


@pytest.mark.parametrize(
    ("code", "fix"), [(errno.ENOSPC, ROOM), (errno.EIO, ""), (errno.EDQUOT, ROOM)]
)
def test_a_failing_disk_is_reported_and_the_old_file_stays(tmp_path, monkeypatch, code, fix):
    path = tmp_path / "a.bin"
    path.write_bytes(b"old")

    def refuse(descriptor):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(UserError) as error, atomic_write(path) as file:
        file.write(b"new")
    assert one_line(error) == f"cannot write {path}: {os.strerror(code)}{fix}"
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["a.bin"]


def test_a_file_system_without_fsync_is_no_failure(tmp_path, monkeypatch):
    def refuse(descriptor):
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(os, "fsync", refuse)
    with atomic_write(tmp_path / "a.bin") as file:
        file.write(b"new")
    assert (tmp_path / "a.bin").read_bytes() == b"new"


@pytest.fixture
def limit_file_size():
    """Sets the size past which the system refuses to write, half-way, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_write_refused_half_way(tmp_path, limit_file_size):
    path = tmp_path / "a.bin"
    limit_file_size(4096)
    with pytest.raises(UserError) as error, atomic_write(path) as file:
        file.write(b"x" * 100_000)
    assert one_line(error) == f"cannot write {path}: {os.strerror(errno.EFBIG)}"
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    ("where", "reason"),
    [
        ("missing/a.bin", f"{os.strerror(errno.ENOENT)}; check the path"),
        ("file/a.bin", f"{os.strerror(errno.ENOTDIR)}; check the path"),
        ("folder", "it exists and is not a regular file; move it or name another"),
        ("x" * 300, f"{os.strerror(errno.ENAMETOOLONG)}; choose a shorter one"),
    ],
)
def test_unwritable_targets(tmp_path, where, reason):
    (tmp_path / "file").write_bytes(b"old")
    (tmp_path / "folder").mkdir()
    path = tmp_path / where
    with pytest.raises(UserError) as error, atomic_write(path):
        pytest.fail("the block must not run")
    assert one_line(error) == f"cannot write {path}: {reason}"
    assert names(tmp_path) == ["file", "folder"]
    assert (tmp_path / "file").read_bytes() == b"old"


def test_a_device_is_never_replaced():
    with pytest.raises(UserError, match="not a regular file"), atomic_write("/dev/null"):
        pytest.fail("the block must not run")
    assert Path("/dev/null").is_char_device()


def test_a_symbolic_link_stays(tmp_path):
    (tmp_path / "disk").mkdir()
    real, link = tmp_path / "disk" / "real.bin", tmp_path / "link.bin"
    real.write_bytes(b"old")
    link.symlink_to(real)
    with atomic_write(link) as file:
        file.write(b"new")
    assert link.is_symlink()
    assert real.read_bytes() == b"new"


def test_new_files_follow_the_umask(tmp_path):
    old = os.umask(0o027)
    try:
        with atomic_write(tmp_path / "a.bin") as file:
            file.write(b"x")
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "a.bin").stat().st_mode) == 0o640


def test_check_writable_folder_makes_it_and_leaves_it_empty(tmp_path):
    folder = tmp_path / "a" / "b"
    check_writable_folder(folder)
    check_writable_folder(folder)
    assert names(folder) == []


def test_check_writable_folder_refusals(tmp_path, monkeypatch):
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "to file").symlink_to("file")
    link = tmp_path / "link"
    link.symlink_to("/gone/folder")
    file = "a file of that name exists; name another folder"
    nowhere = f"{link} is a link to /gone/folder, which is not there; name another folder"
    for path, reason in [
        (tmp_path / "file", file),
        (tmp_path / "to file", file),
        (tmp_path / "file" / "below", f"{os.strerror(errno.ENOTDIR)}; check the path"),
        (link, nowhere),
        (link / "below", nowhere),
    ]:
        with pytest.raises(UserError) as error:
            check_writable_folder(path)
        assert one_line(error) == f"cannot write to folder {path}: {reason}"

    def refuse(**_):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(files.tempfile, "NamedTemporaryFile", refuse)
    with pytest.raises(UserError, match=r"cannot write to folder .*: Permission denied; check the"):
        check_writable_folder(tmp_path)


@pytest.mark.parametrize("path", ["/proc", "/proc/numbagpt"])
def test_check_writable_folder_where_even_root_cannot_write(path):
    with pytest.raises(UserError, match=f"^cannot write to folder {path}: "):
        check_writable_folder(path)


def test_check_writable_folder_sees_a_full_disk(tmp_path, limit_file_size):
    limit_file_size(0)
    with pytest.raises(UserError, match=os.strerror(errno.EFBIG)):
        check_writable_folder(tmp_path)
    assert names(tmp_path) == []


def test_a_full_disk_leaves_no_new_folder(tmp_path, limit_file_size):
    folder = tmp_path / "a" / "b"
    limit_file_size(0)
    with pytest.raises(UserError) as error, output_folder(folder):
        pytest.fail("the block must not run")
    assert one_line(error) == f"cannot write to folder {folder}: {os.strerror(errno.EFBIG)}"
    assert names(tmp_path) == []


def test_check_writable_file_changes_nothing(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "old.bin").write_bytes(b"old")
    (tmp_path / "link.bin").symlink_to("disk/not yet.bin")
    for name in ("old.bin", "new.bin", "link.bin"):
        check_writable_file(tmp_path / name)
    assert names(tmp_path) == ["disk", "link.bin", "old.bin"]
    assert names(tmp_path / "disk") == []
    assert (tmp_path / "old.bin").read_bytes() == b"old"


def test_check_writable_file_refusals(tmp_path):
    missing = f"{os.strerror(errno.ENOENT)}; check the path"
    gone = tmp_path / "gone" / "a.bin"
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(gone)
    (tmp_path / "proc").symlink_to("/proc/a.bin")
    for path, reason in [
        (tmp_path / "folder", ": it exists and is not a regular file; move it or name another"),
        (gone, f": {missing}"),
        (tmp_path / "link", f", a link to {gone}: {missing}"),
        (tmp_path / "proc", f", a link to /proc/a.bin: {missing}"),
    ]:
        with pytest.raises(UserError) as error:
            check_writable_file(path)
        assert one_line(error) == f"cannot write {path}{reason}"


def test_check_room(tmp_path, monkeypatch):
    disk = shutil.disk_usage(tmp_path)._replace(total=5000, free=1234)
    monkeypatch.setattr(files.shutil, "disk_usage", lambda folder: disk)
    check_room(tmp_path, "a model", 1234)
    with pytest.raises(UserError) as error:
        check_room(tmp_path, "a model", 1235)
    assert one_line(error) == (
        f"cannot write to folder {tmp_path}: a model takes 1,235 bytes and 1,234 are free there; "
        "make room or name another folder"
    )


def test_a_file_system_that_does_not_know_its_size_has_room(tmp_path, monkeypatch):
    disk = shutil.disk_usage(tmp_path)._replace(total=0, free=0)
    monkeypatch.setattr(files.shutil, "disk_usage", lambda folder: disk)
    check_room(tmp_path, "a model", 1)


def test_no_empty_folders(tmp_path):
    """Only what the block made is removed, and of that only what is empty."""
    (tmp_path / "a").mkdir()
    deep = tmp_path / "a" / "b" / "c"
    for file, left in [
        (None, []),
        (deep.parent / "file", [deep.parent, deep.parent / "file"]),
        (deep / "file", [deep.parent, deep, deep.parent / "file", deep / "file"]),
    ]:
        with contextlib.suppress(KeyboardInterrupt), no_empty_folders(deep):
            deep.mkdir(parents=True)
            if file:
                file.touch()
            raise KeyboardInterrupt
        assert sorted(tmp_path.rglob("*")) == sorted([tmp_path / "a", *left])


def test_a_folder_that_another_has_locked_stays(tmp_path):
    """Of two programs that began at once, both found it missing, and one was refused."""
    folder = tmp_path / "a" / "b"
    with contextlib.ExitStack() as other:
        with no_empty_folders(folder):
            folder.mkdir(parents=True)
            other.enter_context(locked(folder))
        assert folder.is_dir()


def test_exists(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    for name, there in [(".", True), ("file", True), ("none", False), ("file/none", False)]:
        assert exists(tmp_path / name) == there
    with pytest.raises(UserError) as error:
        exists(tmp_path / "loop")
    assert one_line(error) == f"cannot read {tmp_path / 'loop'}: {os.strerror(errno.ELOOP)}"


@pytest.mark.parametrize("read", [file_size, read_bytes])
def test_reading_what_is_not_a_file(tmp_path, read):
    os.mkfifo(tmp_path / "pipe")
    for name, reason in [
        ("missing", f"{os.strerror(errno.ENOENT)}; check the path"),
        (".", "it is not a regular file"),
        ("pipe", "it is not a regular file"),
    ]:
        with pytest.raises(UserError) as error:
            read(tmp_path / name)
        assert one_line(error) == f"cannot read {tmp_path / name}: {reason}"


def test_read_bytes(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"12345")
    assert file_size(path) == 5
    assert read_bytes(path) == b"12345"
    assert read_bytes(path, 2) == b"12"
    assert read_bytes(path, 9) == b"12345"


def test_read_floats_converts_exactly(tmp_path):
    # 1.0, -2.5, smallest bfloat16 subnormal, largest finite, infinity, -0.0: sign, exponent and
    # fraction bits written out.
    bf16 = np.array([0x3F80, 0xC020, 0x0001, 0x7F7F, 0x7F80, 0x8000], "<u2")
    expected = np.float32([1, -2.5, 2.0**-133, (2 - 2.0**-7) * 2.0**127, np.inf, -0.0])
    path = tmp_path / "numbers"
    path.write_bytes(b"odd" + bf16.tobytes())
    got = read_floats(path, "bfloat16", (2, 3), 3)
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, expected.reshape(2, 3))
    assert np.signbit(got[1, 2])

    halves = np.array([1.5, -65504, 2.0**-24], "<f2")
    path.write_bytes(halves.tobytes())
    got = read_floats(path, "float16", (3,), 0)
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, np.float32([1.5, -65504, 2.0**-24]))

    path.write_bytes(np.arange(12, dtype="<f4").tobytes())
    got = read_floats(path, "float32", (2, 2), 8)
    np.testing.assert_array_equal(got, np.float32([[2, 3], [4, 5]]))
    got[0, 0] = 7  # ours to change


def test_read_floats_from_a_file_that_ends_too_early(tmp_path):
    path = tmp_path / "numbers"
    path.write_bytes(bytes(19))
    with pytest.raises(UserError, match="ends too early; expected 5 numbers from byte 0"):
        read_floats(path, "float32", (5,), 0)
    with pytest.raises(UserError, match="No such file"):
        read_floats(tmp_path / "missing", "float32", (5,), 0)


@pytest.mark.parametrize(
    "name", ["a.bin", "-x", "~root", "-", "two words", "it's", "./-x", "$HOME"]
)
def test_a_path_in_a_command_is_one_argument_and_that_path(tmp_path, name):
    command = f"printf '%s\n' {shell_path(name)}"
    printed = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True)
    argument = printed.stdout.removesuffix("\n")
    assert os.path.normpath(argument) == os.path.normpath(name)
    assert argument[0] not in "-~"


# Holds the lock of a folder until it is killed.
HOLDER = """
import sys, time
from numbagpt.files import locked
with locked(sys.argv[1]):
    print("locked", flush=True)
    time.sleep(600)
"""


def test_a_folder_is_locked_for_one_at_a_time(tmp_path):
    with locked(tmp_path):
        with pytest.raises(UserError) as error, locked(tmp_path):
            pytest.fail("two hold it")
        assert one_line(error) == (
            f"another program writes to folder {tmp_path}; expected one at a time; wait for its "
            "end or name another folder"
        )
    with pytest.raises(ValueError, match="of the block"), locked(tmp_path):
        raise ValueError("of the block")
    with locked(tmp_path):
        assert names(tmp_path) == []


def test_what_was_left_of_models_is_removed_from_an_output_folder(tmp_path):
    models = ("model_00000001.bin", "model_100000000.bin", "model.safetensors", "config.json")
    for name in (*models, "a_train_000000.bin"):
        killed_while_writing(tmp_path / name)
    kept = [
        *models,
        "notes.tmp",
        ".model.tmp",
        ".model-notes.deadbeef.tmp",
        ".model_last.bin.deadbeef.tmp",
        ".model_00000001.bin.deadbee.tmp",
        ".model_00000001xbin.deadbeef.tmp",
        ".my.model.safetensors.deadbeef.tmp",
    ]
    for name in kept:
        (tmp_path / name).touch()
    assert len(names(tmp_path)) == 5 + len(kept)
    with output_folder(tmp_path):
        # shards are written to folders that others may have locked
        (shard,) = set(names(tmp_path)) - set(kept)
    assert re.fullmatch(r"\.a_train_000000\.bin\.[0-9a-f]{8}\.tmp", shard)


def test_what_was_left_and_cannot_be_removed_keeps_nothing_else(tmp_path, monkeypatch):
    refused = []

    def unlink(path):
        if not refused:
            refused.append(path.name)
            raise PermissionError
        os.unlink(path)

    for name in (".config.json.deadbeef.tmp", ".model.safetensors.deadbeef.tmp"):
        (tmp_path / name).touch()
    monkeypatch.setattr(Path, "unlink", unlink)
    with output_folder(tmp_path):
        assert names(tmp_path) == refused


def test_a_lock_does_not_outlive_a_process_that_is_killed(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, tmp_path],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(Path(files.__file__).parents[1])},
    ) as holder:
        assert holder.stdout.readline() == b"locked\n"
        with pytest.raises(UserError, match="another program writes"), locked(tmp_path):
            pytest.fail("two hold it")
        holder.kill()
    with locked(tmp_path):
        pass


@pytest.mark.parametrize("refusal", [errno.ENOLCK, errno.EBADF, errno.EOPNOTSUPP, errno.EACCES])
def test_without_locks_nobody_is_stopped_and_nothing_removed(tmp_path, monkeypatch, refusal):
    def flock(descriptor, operation):
        raise OSError(refusal, os.strerror(refusal))

    fcntl = pytest.importorskip("fcntl")
    monkeypatch.setattr(fcntl, "flock", flock)
    before = len(os.listdir("/dev/fd"))
    (tmp_path / ".config.json.deadbeef.tmp").touch()  # maybe of a program that still writes it
    with output_folder(tmp_path) as held, locked(tmp_path):
        assert not held
        assert names(tmp_path) == [".config.json.deadbeef.tmp"]
    assert len(os.listdir("/dev/fd")) == before
