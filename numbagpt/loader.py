"""Batches of tokens from shards, in order, as llm.c's DataLoader reads them; and ahead of time.

A batch is a window of B·T+1 consecutive tokens of one shard. The first B·T, as (B, T), are the
inputs; the same window one token later is the targets. The next window starts B·T further on. When
a shard has no whole window left, the next shard follows, and after the last one the first. A tail
shorter than a window is not read.
"""

import glob
import os
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from numbagpt.errors import DataError, UserError
from numbagpt.files import exists, explained, shell_path
from numbagpt.shards import check_unchanged, check_vocabulary, count_tokens, read_tokens
from numbagpt.words import counted


def find_shards(pattern: str) -> list[str]:
    """The files a path or glob pattern names, sorted; ** stands for any folders.

    Raises UserError if there are none.
    """
    if os.path.isdir(pattern):
        example = os.path.join(glob.escape(pattern), "*_train_??????.bin")
        raise UserError(
            f"{pattern} is a folder; expected a .bin file or a pattern; "
            f"quote a pattern such as {shell_path(example)}"
        )
    found = [pattern] if exists(pattern) else sorted(glob.glob(pattern, recursive=True))
    if not found:
        folder = os.path.dirname(pattern) or "."
        if exists(folder):
            with explained(f"cannot read folder {folder}"):
                os.listdir(folder)  # glob takes one that refuses to be read for an empty one
        raise UserError(
            f"no file matches '{pattern}'; expected token shards; "
            "make some with: python -m numbagpt.data INPUT --output_dir DIR"
        )
    return found


class TokenLoader:
    """Windows of B·T+1 tokens from the shards that match a pattern, in order, for ever.

    pattern      a path or a glob pattern
    B, T         rows of a batch, tokens of a row
    vocab_size   V: ids are checked to be below it, those of a window when it is read. The first
                 window is read here, so that the data of another model is refused at the start;
                 reading all of it would take minutes

    Attributes: paths; num_tokens, in all shards; num_batches, whole windows from first to last.
    Raises UserError for a pattern that matches nothing, a file that is not a whole shard, an id
    beyond the vocabulary in the first window, B or T below 1, and shards none of which has a
    window of B·T+1 tokens.
    """

    def __init__(self, pattern: str, B: int, T: int, vocab_size: int) -> None:
        if B < 1 or T < 1:
            raise UserError(f"a batch of B={B} by T={T} tokens; expected both to be at least 1")
        self.B, self.T = B, T
        self.paths = find_shards(pattern)
        self._lengths = [count_tokens(path) for path in self.paths]
        self.num_tokens = sum(self._lengths)
        self.num_batches = sum((length - 1) // (B * T) for length in self._lengths)
        if self.num_batches == 0:
            raise UserError(self._too_short(pattern))
        self._vocab_size = vocab_size
        self.reset()
        self.next_batch()
        self.reset()

    def reset(self) -> None:
        """Go back to the first window."""
        self._shard, self._offset = 0, 0

    def next_batch(self) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and targets, each a new (B, T) int32 array.

        Raises DataError for an id beyond the vocabulary, and for a shard that cannot be read any
        more or is not what it was at the start.
        """
        B, T = self.B, self.T
        try:
            window = self._next_window(B * T)
        except UserError as error:
            raise DataError(str(error)) from error
        inputs = np.array(window[:-1], np.int32).reshape(B, T)
        targets = np.array(window[1:], np.int32).reshape(B, T)
        return inputs, targets

    def _next_window(self, step: int) -> np.ndarray:
        """The next step+1 tokens of one shard, checked; the window after begins `step` further."""
        while self._offset + step + 1 > self._lengths[self._shard]:
            self._shard, self._offset = (self._shard + 1) % len(self.paths), 0
        path, length = self.paths[self._shard], self._lengths[self._shard]
        if self._offset == 0:
            check_unchanged(path, length)
        window = read_tokens(path, self._offset, step + 1)
        check_vocabulary(window, self._vocab_size, path, self._offset)
        self._offset += step
        return window

    def _too_short(self, pattern: str) -> str:
        longest, where = max(self._lengths), self.paths[0]
        if len(self.paths) > 1:
            where = f"the longest of the {len(self.paths)} shards '{pattern}'"
        if longest > self.T:
            fix = (
                f"the largest batch size that fits is {(longest - 1) // self.T}; for more tokens a "
                "step use --total_batch_size, or longer shards"
            )
        elif longest > 1:
            fix = f"the largest sequence length that fits is {longest - 1}, with batch size 1"
        else:
            fix = "use more text"
        return (
            f"{where} has {counted(longest, 'token')}; a batch of B={self.B} by T={self.T} needs "
            f"{self.B * self.T + 1:,} (B*T+1); {fix}"
        )


class Prefetcher:
    """The batches of a loader, made ready by a background thread so that nobody waits for them.

    loader    a TokenLoader; from now on it belongs to the prefetcher
    prepare   applied to (inputs, targets) in the thread; its result is what next_batch returns
    depth     batches kept ready

    The sequence is the loader's. An error in the thread is raised by next_batch, after the batches
    before it. Use it in a with statement, or call close. One that is dropped ends its thread too,
    which therefore does not refer to it; nor then to what prepare does, which may be a model.
    """

    def __init__(
        self,
        loader: TokenLoader,
        prepare: Callable[[np.ndarray, np.ndarray], Any] | None = None,
        depth: int = 2,
    ) -> None:
        self._error: BaseException | None = None
        # Simple queues, since the collector may drop a prefetcher while its thread uses them.
        self._ready: queue.SimpleQueue = queue.SimpleQueue()
        self._wanted: queue.SimpleQueue = queue.SimpleQueue()
        for _ in range(depth + 1):  # one is in the making
            self._wanted.put(True)
        stop = threading.Event()
        self._end = weakref.finalize(self, _end, stop, self._wanted)
        prepare = prepare or (lambda inputs, targets: (inputs, targets))
        self._thread = threading.Thread(
            target=_make_ready,
            args=(loader, prepare, self._wanted, self._ready, stop),
            name="prefetch",
            daemon=True,
        )
        self._thread.start()

    def next_batch(self) -> Any:
        """The next batch, (inputs, targets) or what prepare made of them."""
        if self._error is None:
            self._wanted.put(True)  # first: an interrupted call must not leave one fewer wanted
            batch, self._error = self._ready.get()
        if self._error is not None:
            raise self._error
        return batch

    def close(self) -> None:
        """End the thread. Can be called twice."""
        self._error = self._error or RuntimeError("this Prefetcher is closed")
        self._end()
        self._thread.join()

    def __enter__(self) -> "Prefetcher":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _make_ready(
    loader: TokenLoader,
    prepare: Callable[[np.ndarray, np.ndarray], Any],
    wanted: queue.SimpleQueue,
    ready: queue.SimpleQueue,
    stop: threading.Event,
) -> None:
    """Put a batch into `ready` for each item of `wanted`, until there is a stop or an error."""
    while True:
        wanted.get()
        if stop.is_set():
            return
        try:
            ready.put((prepare(*loader.next_batch()), None))
        except BaseException as error:
            ready.put((None, error))
            return


def _end(stop: threading.Event, wanted: queue.SimpleQueue) -> None:
    stop.set()
    wanted.put(True)  # wakes the thread
