"""A pool's arrays: lent again when they may be, and not before."""

import threading
import time

import numpy as np

from numbagpt.pool import BufferPool


def counting_pool() -> tuple[BufferPool, list[np.ndarray]]:
    made = []

    def make() -> np.ndarray:
        made.append(np.zeros(8, np.int32))
        return made[-1]

    return BufferPool(make), made


def test_an_array_is_lent_again_once_nobody_refers_to_it() -> None:
    pool, made = counting_pool()
    first = pool.take()
    also_first = first
    second = pool.take()
    assert not np.shares_memory(first, second)
    del first
    third = pool.take()
    assert not np.shares_memory(also_first, third)
    assert len(made) == 3
    address = also_first.ctypes.data
    del also_first
    assert pool.take().ctypes.data == address
    assert pool.take().ctypes.data == address
    assert len(made) == 3


def test_threads_never_hold_the_same_array() -> None:
    pool, made = counting_pool()
    clashes = []

    def work(number: int) -> None:
        for _ in range(300):
            array = pool.take()
            array[:] = number
            time.sleep(0)
            if (array != number).any():
                clashes.append(number)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not clashes
    # of each thread the array at hand, and the one taken before the last name for it is gone
    assert len(made) <= 8
