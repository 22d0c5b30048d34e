"""Batches against windows cut by hand from the tokens that were written."""

import errno
import os
import resource
import threading
import weakref
from types import SimpleNamespace

import numpy as np
import pytest

from numbagpt.errors import DataError, UserError
from numbagpt.loader import Prefetcher, TokenLoader, find_shards
from numbagpt.shards import write_shard

V = 50257


def random_shards(folder, *sizes):
    """Write shards s0.bin, s1.bin … of random tokens; the tokens."""
    rng = np.random.default_rng(sum(sizes))
    shards = [rng.integers(0, V, size) for size in sizes]
    for i, tokens in enumerate(shards):
        write_shard(folder / f"s{i}.bin", tokens)
    return shards


def windows(shards, B, T):
    """Every window of one pass, by plain slicing."""
    for tokens in shards:
        start = 0
        while start + B * T + 1 <= len(tokens):
            yield (
                [tokens[start + b * T : start + b * T + T] for b in range(B)],
                [tokens[start + b * T + 1 : start + b * T + T + 1] for b in range(B)],
            )
            start += B * T


def assert_batch(batch, window):
    for array, rows in zip(batch, window, strict=True):
        assert array.dtype == np.int32
        assert array.flags.c_contiguous
        np.testing.assert_array_equal(array, np.stack(rows))


# The last shape leaves s1 (20 tokens) without a window; 13 · 3 + 1 = 40 fits exactly once in s2.
@pytest.mark.parametrize(("B", "T"), [(1, 1), (2, 4), (3, 5), (1, 19), (4, 7), (13, 3)])
def test_windows_in_order_across_shards_and_round_again(tmp_path, B, T):
    shards = random_shards(tmp_path, 97, 20, 40)
    loader = TokenLoader(str(tmp_path / "*.bin"), B, T, V)
    expected = list(windows(shards, B, T))
    assert loader.num_batches == len(expected)
    assert loader.num_tokens == 157
    for _ in range(2):
        for window in expected:
            assert_batch(loader.next_batch(), window)


def test_a_window_that_ends_with_the_shard_is_read(tmp_path):
    shards = random_shards(tmp_path, 9)
    loader = TokenLoader(str(tmp_path / "s0.bin"), 2, 4, V)
    assert_batch(loader.next_batch(), next(windows(shards, 2, 4)))
    with pytest.raises(UserError):
        TokenLoader(str(tmp_path / "s0.bin"), 3, 3, V)


def test_batches_do_not_share_memory(tmp_path):
    shards = random_shards(tmp_path, 100)
    loader = TokenLoader(str(tmp_path / "s0.bin"), 2, 4, V)
    inputs, targets = loader.next_batch()
    inputs[:] = -1
    assert_batch((targets,), next(windows(shards, 2, 4))[1:])
    loader.reset()
    assert_batch(loader.next_batch(), next(windows(shards, 2, 4)))


def test_reset_goes_back_to_the_first_window_from_any_shard(tmp_path):
    shards = random_shards(tmp_path, 30, 20)
    loader = TokenLoader(str(tmp_path / "*.bin"), 2, 4, V)
    for count in range(2 * loader.num_batches):
        for _ in range(count):
            loader.next_batch()
        loader.reset()
        assert_batch(loader.next_batch(), next(windows(shards, 2, 4)))


def test_patterns(tmp_path, monkeypatch):
    random_shards(tmp_path, 10, 10)
    (tmp_path / "deep").mkdir()
    random_shards(tmp_path / "deep", 10)
    (tmp_path / "[1].bin").write_bytes(b"")
    both = [str(tmp_path / "s0.bin"), str(tmp_path / "s1.bin")]
    assert find_shards(str(tmp_path / "s*.bin")) == both
    monkeypatch.chdir(tmp_path)
    assert find_shards("s?.bin") == ["s0.bin", "s1.bin"]
    assert find_shards(str(tmp_path / "**/s0.bin")) == [
        str(tmp_path / "deep/s0.bin"),
        str(tmp_path / "s0.bin"),
    ]
    # A path that exists is that file, whatever its characters would mean in a pattern.
    assert find_shards(str(tmp_path / "[1].bin")) == [str(tmp_path / "[1].bin")]


@pytest.mark.parametrize("pattern", ["", "none.bin", "none/*.bin"])
def test_a_pattern_that_matches_nothing_is_refused(tmp_path, monkeypatch, pattern):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"no file matches '.*'; .*numbagpt\.data"):
        TokenLoader(pattern, 1, 1, V)


@pytest.mark.parametrize("pattern", ["data/s0.bin", "data/*.bin", "*.bin"])
def test_a_folder_that_refuses_to_be_read_is_not_taken_for_empty(tmp_path, monkeypatch, pattern):
    """Root may read any: the refusals are made up."""

    def refuse(path="."):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    monkeypatch.setattr(os, "listdir", refuse)
    if "*" not in pattern:
        monkeypatch.setattr(os, "stat", refuse)
    folder = os.path.dirname(pattern) or "."
    what = f"folder {folder}" if "*" in pattern else pattern
    with pytest.raises(UserError) as error:
        TokenLoader(pattern, 1, 1, V)
    assert str(error.value) == f"cannot read {what}: Permission denied; check the permissions"


@pytest.mark.parametrize(
    ("folder", "quoted"),
    [
        ("data", "'data/*_train_??????.bin'"),
        ("-x", "'./-x/*_train_??????.bin'"),
        ("[1]", "'[[]1]/*_train_??????.bin'"),
    ],
)
def test_a_folder_is_refused_with_a_pattern(tmp_path, monkeypatch, folder, quoted):
    monkeypatch.chdir(tmp_path)
    (tmp_path / folder).mkdir()
    with pytest.raises(UserError) as error:
        TokenLoader(folder, 1, 1, V)
    expected = "is a folder; expected a .bin file or a pattern; quote a pattern such as"
    assert str(error.value) == f"{folder} {expected} {quoted}"


@pytest.mark.parametrize(
    ("sizes", "B", "T", "message"),
    [
        ((100,), 4, 64, "s0.bin has 100 tokens; .*needs 257 .*batch size that fits is 1; for more"),
        ((100,), 4, 30, "needs 121 .*largest batch size that fits is 3"),
        ((100,), 1, 100, "needs 101 .*largest sequence length that fits is 99, with batch size 1"),
        ((1,), 1, 1, "has 1 token; .*needs 2 .*use more text"),
        ((30, 100, 20), 4, 30, r"longest of the 3 shards '.*/\*\.bin' has 100 tok.*needs 121"),
    ],
)
def test_too_few_tokens(tmp_path, sizes, B, T, message):
    random_shards(tmp_path, *sizes)
    with pytest.raises(UserError, match=message) as error:
        TokenLoader(str(tmp_path / "*.bin"), B, T, V)
    assert "\n" not in str(error.value)


def test_the_batch_size_proposed_fits_and_one_more_does_not(tmp_path):
    random_shards(tmp_path, 121)
    TokenLoader(str(tmp_path / "s0.bin"), 4, 30, V)
    with pytest.raises(UserError, match="that fits is 4;"):
        TokenLoader(str(tmp_path / "s0.bin"), 5, 30, V)


@pytest.mark.parametrize(("B", "T"), [(0, 4), (4, 0), (-1, 4)])
def test_an_empty_batch_is_refused(tmp_path, B, T):
    random_shards(tmp_path, 10)
    with pytest.raises(UserError, match="expected both to be at least 1"):
        TokenLoader(str(tmp_path / "*.bin"), B, T, V)


def test_more_shards_than_files_may_be_open(tmp_path):
    shards = random_shards(tmp_path, *[9] * 60)
    order = sorted(range(60), key=lambda i: f"s{i}.bin")
    already_open = len(os.listdir("/dev/fd"))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (already_open + 20, limits[1]))
    try:
        loader = TokenLoader(str(tmp_path / "*.bin"), 2, 4, V)
        assert loader.num_batches == 60
        for _ in range(2):
            for window in windows([shards[i] for i in order], 2, 4):
                assert_batch(loader.next_batch(), window)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_shard_that_changes_in_mid_run_is_refused(tmp_path):
    random_shards(tmp_path, 9, 9)
    loader = TokenLoader(str(tmp_path / "*.bin"), 2, 4, V)
    loader.next_batch()
    write_shard(tmp_path / "s1.bin", np.arange(8))
    with pytest.raises(UserError, match=r"s1\.bin has 8 tokens; it had 9 when"):
        loader.next_batch()
    (tmp_path / "s1.bin").unlink()
    with pytest.raises(UserError, match=r"cannot read .*s1\.bin: No such file"):
        loader.next_batch()


def test_every_file_is_checked_before_the_first_batch(tmp_path):
    random_shards(tmp_path, 10, 10)
    (tmp_path / "s2.bin").write_bytes(b"no shard")
    with pytest.raises(UserError, match=r"s2\.bin"):
        TokenLoader(str(tmp_path / "*.bin"), 1, 2, V)


def test_an_id_beyond_the_vocabulary_in_the_first_window_is_refused_at_the_start(tmp_path):
    write_shard(tmp_path / "s0.bin", np.array([1, 2, 3, 100, 4, 5, 6]))
    write_shard(tmp_path / "s1.bin", np.arange(20))
    for T in (3, 5):  # it is the last target, it is in the middle
        with pytest.raises(UserError, match=r"s0\.bin has token id 100 at position 3;"):
            TokenLoader(str(tmp_path / "*.bin"), 1, T, 100)
    TokenLoader(str(tmp_path / "*.bin"), 1, 3, 101)
    TokenLoader(str(tmp_path / "*.bin"), 1, 2, 100)  # in the second window
    TokenLoader(str(tmp_path / "*.bin"), 1, 10, 100)  # in a shard without a window


def test_an_id_beyond_the_vocabulary_further_on_is_refused_when_it_is_read(tmp_path):
    write_shard(tmp_path / "s0.bin", np.arange(9))
    write_shard(tmp_path / "s1.bin", np.array([*range(12), 100, 200, 5, 300]))
    loader = TokenLoader(str(tmp_path / "*.bin"), 2, 2, 100)
    for first in (0, 4, 0, 4):
        inputs, _ = loader.next_batch()
        assert inputs.tolist() == [[first, first + 1], [first + 2, first + 3]]
    for _ in range(2):
        with pytest.raises(UserError, match=r"s1\.bin has token id 100 at position 12;"):
            loader.next_batch()


def test_a_shard_that_is_cut_short_meanwhile(tmp_path):
    shards = random_shards(tmp_path, 100)
    loader = TokenLoader(str(tmp_path / "s0.bin"), 2, 4, V)
    before = windows(shards, 2, 4)
    assert_batch(loader.next_batch(), next(before))
    os.truncate(tmp_path / "s0.bin", 1024 + 2 * 20)
    assert_batch(loader.next_batch(), next(before))
    with pytest.raises(DataError, match=r"s0\.bin ends at token 20; .*leave the shards of a run"):
        loader.next_batch()


# --- Prefetcher ---


def both(tmp_path, **options):
    random_shards(tmp_path, 97, 40)
    plain, ahead = (TokenLoader(str(tmp_path / "*.bin"), 2, 5, V) for _ in range(2))
    return plain, Prefetcher(ahead, **options)


@pytest.mark.parametrize("depth", [1, 2, 7])
def test_prefetched_batches_are_the_loaders(tmp_path, depth):
    plain, prefetcher = both(tmp_path, depth=depth)
    with prefetcher:
        for _ in range(3 * plain.num_batches):
            np.testing.assert_array_equal(prefetcher.next_batch(), plain.next_batch())


def test_prepare_runs_in_the_thread_once_per_batch(tmp_path):
    threads = []

    def prepare(inputs, targets):
        threads.append(threading.current_thread())
        return np.sort(inputs, axis=None), targets.sum()

    plain, prefetcher = both(tmp_path, prepare=prepare)
    with prefetcher:
        for _ in range(5):
            inputs, targets = plain.next_batch()
            ready, total = prefetcher.next_batch()
            np.testing.assert_array_equal(ready, np.sort(inputs, axis=None))
            assert total == targets.sum()
    assert threading.current_thread() not in threads
    assert 5 <= len(threads) <= 5 + 2 + 1


def test_batches_are_ready_before_they_are_asked_for(tmp_path):
    made = threading.Semaphore(0)

    def prepare(inputs, targets):
        made.release()
        return inputs, targets

    _, prefetcher = both(tmp_path, prepare=prepare, depth=3)
    with prefetcher:
        # Three wait in the queue and one in the thread's hand; a fifth is not begun.
        for _ in range(4):
            assert made.acquire(timeout=10)
        assert not made.acquire(timeout=0.1)


def test_an_error_in_the_thread_is_raised_after_the_batches_before_it(tmp_path):
    calls = iter([True, True, False])

    def prepare(inputs, targets):
        if not next(calls):
            raise UserError("third batch")
        return inputs, targets

    plain, prefetcher = both(tmp_path, prepare=prepare)
    with prefetcher:
        for _ in range(2):
            np.testing.assert_array_equal(prefetcher.next_batch(), plain.next_batch())
        for _ in range(2):
            with pytest.raises(UserError, match="third batch"):
                prefetcher.next_batch()


def test_close_ends_the_thread(tmp_path):
    _, prefetcher = both(tmp_path, depth=1)
    before = threading.active_count()
    prefetcher.next_batch()
    prefetcher.close()
    prefetcher.close()
    assert threading.active_count() == before - 1
    with pytest.raises(RuntimeError, match="closed"):
        prefetcher.next_batch()


def test_after_interrupted_calls_there_are_more_batches(tmp_path, monkeypatch):
    _, prefetcher = both(tmp_path, depth=1)
    ready = prefetcher._ready

    def interrupted():
        ready.get()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(prefetcher, "_ready", SimpleNamespace(get=interrupted))
        for _ in range(2):  # as many as were wanted at the start
            with pytest.raises(KeyboardInterrupt):
                prefetcher.next_batch()
    assert ready.get(timeout=10)[1] is None
    prefetcher.close()


def test_a_close_that_is_interrupted_has_closed(tmp_path, monkeypatch):
    def interrupt():
        raise KeyboardInterrupt

    _, prefetcher = both(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(prefetcher._thread, "join", interrupt)
        with pytest.raises(KeyboardInterrupt):
            prefetcher.close()
    with pytest.raises(RuntimeError, match="closed"):
        prefetcher.next_batch()
    prefetcher.close()
    assert not prefetcher._thread.is_alive()


def test_a_prefetcher_that_is_dropped_keeps_nothing(tmp_path):
    class Packer:
        def pack(self, inputs, targets):
            return inputs

    packer = Packer()
    dropped = weakref.ref(packer)
    _, prefetcher = both(tmp_path, prepare=packer.pack)
    prefetcher.next_batch()
    thread = prefetcher._thread
    del packer, prefetcher
    thread.join(timeout=10)
    assert not thread.is_alive()
    assert dropped() is None


def test_many_short_lives_leave_no_thread(tmp_path):
    before = threading.active_count()
    random_shards(tmp_path, 97)
    loader = TokenLoader(str(tmp_path / "s0.bin"), 2, 5, V)
    for i in range(50):
        with Prefetcher(loader, depth=1 + i % 3) as prefetcher:
            for _ in range(i % 4):
                prefetcher.next_batch()
    assert threading.active_count() == before
