"""Buffers that are used again and again, without anybody having to hand them back."""

import weakref
from collections import deque
from collections.abc import Callable

import numpy as np


class BufferPool:
    """Lends arrays. One is lent again once nobody refers to it any more.

    make   makes a new array, where all the others are lent

    The pool sees the array that it lent, not the views made of it: hold on to the array itself.
    Any thread may take one.
    """

    def __init__(self, make: Callable[[], np.ndarray]) -> None:
        self._make = make
        self._free: deque[np.ndarray] = deque()

    def take(self) -> np.ndarray:
        """An array with any content, the caller's for as long as he refers to it."""
        try:
            array = self._free.pop()
        except IndexError:
            array = self._make()
        lent = array.view()
        weakref.finalize(lent, self._free.append, array).atexit = False
        return lent
