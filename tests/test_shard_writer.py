"""Rows of shards: exact contents, and all of them or none."""

import errno
import itertools
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
from programs import ROOT
from shard_files import read_shard

from numbagpt import shard_writer
from numbagpt.errors import UserError
from numbagpt.shard_writer import open_shards


def tree(folder):
    """Everything in a folder, hidden files too."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
    }


def write_and_raise(folder, error, overwrite=False):
    """Get two and a half shards far, then fail."""
    with open_shards(folder, "set", 10, overwrite) as writer:
        writer.write("train", np.zeros(25, np.uint16))
        assert len(list(folder.glob(".*/set_train_*.bin"))) == 3
        raise error("stop")


@pytest.mark.parametrize("shard_tokens", [1, 7, 50, 99, 100, 101])
@pytest.mark.parametrize("step", [1, 9, 100])
def test_shards_hold_the_tokens_in_order(tmp_path, shard_tokens, step):
    tokens = np.arange(100, dtype=np.uint16)
    with open_shards(tmp_path, "set", shard_tokens) as writer:
        for start in range(0, 100, step):
            writer.write("train", tokens[start : start + step])
            writer.write("val", 2 * tokens[start : start + step][:1])
            writer.write("val", tokens[:0])
    assert writer.num_tokens == {"train": 100, "val": -(-100 // step)}
    train = [tokens[start : start + shard_tokens] for start in range(0, 100, shard_tokens)]
    for i, expected in enumerate(train):
        path = tmp_path / f"set_train_{i:06d}.bin"
        np.testing.assert_array_equal(read_shard(path), expected)
        path.unlink()
    val = np.concatenate([read_shard(path) for path in sorted(tmp_path.glob("set_val_*.bin"))])
    np.testing.assert_array_equal(val, 2 * tokens[::step])
    assert not list(tmp_path.glob("*train*"))
    assert all(path.name.startswith("set_val_") for path in tmp_path.iterdir())


@pytest.mark.parametrize("error", [ValueError, OSError, KeyboardInterrupt])
@pytest.mark.parametrize("folder", ["there", "a/b/c"])
def test_an_error_leaves_everything_as_it_was(tmp_path, error, folder):
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "other_train_000000.bin").write_bytes(b"other")
    before = tree(tmp_path)
    with pytest.raises(error):
        write_and_raise(tmp_path / folder, error)
    assert tree(tmp_path) == before


def test_shards_of_that_name_are_replaced_only_when_asked(tmp_path):
    old = [f"set_train_{i:06d}.bin" for i in range(3)]
    kept = [
        "set_train_0.bin",
        "set_test_000000.bin",
        "reset_train_000000.bin",
        "set_train_000000.bin~",
    ]
    for name in old + kept:
        (tmp_path / name).write_bytes(b"old")
    before = tree(tmp_path)
    with (
        pytest.raises(UserError, match=r"already has set_train_000000\.bin; .*--overwrite"),
        open_shards(tmp_path, "set", 10),
    ):
        pytest.fail("it must be refused before the work begins")
    assert tree(tmp_path) == before
    with pytest.raises(ValueError, match="stop"):
        write_and_raise(tmp_path, ValueError, overwrite=True)
    assert tree(tmp_path) == before
    with open_shards(tmp_path, "set", 10, overwrite=True) as writer:
        writer.write("train", np.arange(15, dtype=np.uint16))
    # The third shard of before would be read as a part of the new data.
    assert sorted(tree(tmp_path)) == sorted([*old[:2], *kept])
    assert read_shard(tmp_path / old[1]).tolist() == [10, 11, 12, 13, 14]


def test_a_folder_takes_one_writer_at_a_time(tmp_path):
    (tmp_path / "set_train_000000.bin").write_bytes(b"old")
    with open_shards(tmp_path, "set", 10, overwrite=True) as writer:
        writer.write("train", np.ones(25, np.uint16))
        before = tree(tmp_path)
        with (
            pytest.raises(UserError, match=r"another program writes to folder .*; expected one at"),
            open_shards(tmp_path, "set", 10, overwrite=True),
        ):
            pytest.fail("it must be refused before the work begins")
        assert tree(tmp_path) == before
    assert sorted(tree(tmp_path)) == [f"set_train_{i:06d}.bin" for i in range(3)]


def without_locks(monkeypatch):
    """As on some network file systems."""

    def flock(descriptor, operation):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(pytest.importorskip("fcntl"), "flock", flock)


# Is killed with two and a half shards written, or after so many moves that replace old ones.
KILLED = """
import os, signal, sys
from pathlib import Path
import numpy as np
from numbagpt.shard_writer import open_shards

folder, name, moves = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
kill, move = lambda: os.kill(os.getpid(), signal.SIGKILL), os.rename

def rename(source, target):
    global moves
    move(source, target)
    moves -= 1
    if moves == 0:
        kill()

os.rename = rename
with open_shards(folder, name, 10, overwrite=True) as writer:
    writer.write("train", np.zeros(25, np.uint16))
    if moves == 0:
        kill()
"""


def killed_while_writing(folder, name, moves=0):
    """The hidden folder of a program that was killed."""
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, folder, name, str(moves)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL
    (hidden,) = folder.glob(".*.tmp")
    return hidden


@pytest.mark.parametrize("name", ["set", "another", "it's [x].y"])
def test_what_a_program_that_was_killed_left_is_removed(tmp_path, monkeypatch, name):
    hidden = killed_while_writing(tmp_path, name)
    assert len(list(hidden.iterdir())) == 3
    with monkeypatch.context() as patch:
        without_locks(patch)  # then it may be another program's that still runs
        with open_shards(tmp_path, "first", 10) as writer:
            writer.write("val", np.zeros(5, np.uint16))
        assert len(list(hidden.iterdir())) == 3
    with open_shards(tmp_path, "set", 10) as writer:
        assert not hidden.exists()
        writer.write("train", np.zeros(5, np.uint16))
    assert sorted(tree(tmp_path)) == ["first_val_000000.bin", "set_train_000000.bin"]


def test_the_old_shards_of_a_program_that_was_killed_stay(tmp_path):
    with open_shards(tmp_path, "set", 10) as writer:
        writer.write("train", np.zeros(25, np.uint16))
    before = tree(tmp_path)
    hidden = killed_while_writing(tmp_path, "set", moves=2)
    with open_shards(tmp_path, "set", 10, overwrite=True) as writer:
        writer.write("train", np.ones(5, np.uint16))
    kept = {path.name: path.read_bytes() for path in (hidden / "old").iterdir()}
    assert kept.items() < before.items()
    assert len(kept) == 2


def test_what_only_resembles_a_leftover_stays(tmp_path):
    kept = [".set.notes.tmp", ".set.notes_v2.tmp", ".notes_v2.tmp", ".set.notes_v3.tmp"]
    (tmp_path / "elsewhere").mkdir()
    for name in kept[:3]:
        (tmp_path / name).mkdir()
        (tmp_path / name / "notes.txt").write_bytes(b"notes")
    (tmp_path / kept[3]).symlink_to("elsewhere")
    (tmp_path / ".set.notes_v4.tmp").write_bytes(b"notes")
    before = tree(tmp_path)
    with open_shards(tmp_path, "set", 10):
        assert before.items() <= tree(tmp_path).items()


def write_while_another_does(folder):
    with open_shards(folder, "set", 10) as slow:
        slow.write("train", np.zeros(5, np.uint16))
        with open_shards(folder, "set", 10) as fast:
            fast.write("val", np.ones(3, np.uint16))


def test_shards_that_appear_meanwhile_stay(tmp_path, monkeypatch):
    without_locks(monkeypatch)
    with pytest.raises(UserError, match=r"already has set_val_000000\.bin; .*--overwrite"):
        write_while_another_does(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["set_val_000000.bin"]
    assert read_shard(tmp_path / "set_val_000000.bin").tolist() == [1, 1, 1]


def test_a_full_disk_leaves_everything_as_it_was(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(shard_writer.os, "fsync", full)
    with (
        pytest.raises(UserError, match=r"cannot write to folder .*new: No space left on device"),
        open_shards(tmp_path / "new", "set", 10) as writer,
    ):
        writer.write("train", np.zeros(25, np.uint16))
    assert tree(tmp_path) == {}


def write_and_fail_at_move(folder, monkeypatch, n, error, after):
    """Replace all shards by 1 train and 2 val shards; before or after the n-th move it fails."""
    rename, calls = os.rename, itertools.count(1)

    def fail_once(source, target):
        fails = next(calls) == n
        if not fails or after:
            rename(source, target)
        if fails:
            raise error

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", fail_once)
        with open_shards(folder, "set", 10, overwrite=True) as writer:
            writer.write("train", np.ones(10, np.uint16))
            writer.write("val", np.ones(15, np.uint16))
    return next(calls) - 1


REFUSED = PermissionError(errno.EACCES, os.strerror(errno.EACCES))


@pytest.mark.parametrize("after", [False, True], ids=["before the move", "after the move"])
@pytest.mark.parametrize(
    ("error", "raised"), [(REFUSED, UserError), (KeyboardInterrupt, KeyboardInterrupt)]
)
@pytest.mark.parametrize("folder", ["new", "there"])
def test_moves_are_undone(tmp_path, monkeypatch, error, raised, after, folder):
    there = tmp_path / "there"
    with open_shards(there, "set", 10) as writer:
        writer.write("train", np.zeros(25, np.uint16))
        writer.write("val", np.zeros(5, np.uint16))
    (there / "set_train_000003.bin").symlink_to("set_train_000000.bin")
    before = tree(tmp_path)
    moves = 3 + (5 if folder == "there" else 0)
    for n in range(1, moves + 1):
        with pytest.raises(raised):
            write_and_fail_at_move(tmp_path / folder, monkeypatch, n, error, after)
        assert tree(tmp_path) == before
        assert (there / "set_train_000003.bin").is_symlink()
    assert write_and_fail_at_move(tmp_path / folder, monkeypatch, 0, error, after) == moves
    names = ["set_train_000000.bin", "set_val_000000.bin", "set_val_000001.bin"]
    assert sorted(tree(tmp_path / folder)) == names


def replace_while_a_folder_appears(shard):
    with open_shards(shard.parent, "set", 10, overwrite=True) as writer:
        writer.write("train", np.ones(25, np.uint16))
        shard.unlink()
        shard.mkdir()


def test_what_is_not_a_file_is_not_overwritten(tmp_path):
    with open_shards(tmp_path, "set", 10) as writer:
        writer.write("train", np.zeros(25, np.uint16))
    shard = tmp_path / "set_train_000001.bin"
    expected = rf"cannot overwrite {shard}: it is not a regular file; .*--name"
    after = tree(tmp_path) | {shard.name: None}
    with pytest.raises(UserError, match=expected):
        replace_while_a_folder_appears(shard)
    assert tree(tmp_path) == after
    with (
        pytest.raises(UserError, match=expected),
        open_shards(tmp_path, "set", 10, overwrite=True),
    ):
        pytest.fail("it must be refused before the work begins")
    assert tree(tmp_path) == after


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(UserError, match=r"file: a file of that name exists; name another"):
        open_shards(tmp_path / "file", "set", 10).__enter__()
    with pytest.raises(UserError, match=r"cannot write to folder .*below: Not a directory"):
        open_shards(tmp_path / "file" / "below", "set", 10).__enter__()
    assert tree(tmp_path) == {"file": b""}


def test_no_more_shards_than_their_numbers_have_digits_for(tmp_path, monkeypatch):
    monkeypatch.setattr(shard_writer, "MAX_SHARDS", 3)
    with open_shards(tmp_path / "new", "set", 10) as writer:
        writer.write("train", np.zeros(30, np.uint16))
    before = tree(tmp_path)
    with (
        pytest.raises(UserError, match=r"more than 3 shards; .*take a larger --shard_tokens"),
        open_shards(tmp_path / "another", "set", 10) as writer,
    ):
        writer.write("train", np.zeros(31, np.uint16))
    assert tree(tmp_path) == before


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root writes anywhere")
def test_a_folder_without_permission_is_named(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(UserError, match="Permission denied"):
        open_shards(tmp_path, "set", 10).__enter__()


def test_files_have_the_permissions_of_any_new_file(tmp_path):
    with open_shards(tmp_path, "set", 10) as writer:
        writer.write("train", np.zeros(1, np.uint16))
    (tmp_path / "plain").write_bytes(b"")
    modes = {path.stat().st_mode for path in tmp_path.iterdir()}
    assert len(modes) == 1
