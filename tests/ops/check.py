"""What the tests of the operations share: where an operation runs, and how results are judged."""

from collections.abc import Callable

import numpy as np
from numba import cuda


def relative_error(a: np.ndarray, b: np.ndarray) -> float:
    """||a - b|| / ||b||, both read as float64; ||a|| where b is zero. NaN in either gives NaN."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    assert a.shape == b.shape, f"shapes differ: {a.shape} and {b.shape}"
    norm = np.linalg.norm(b.ravel())
    return float(np.linalg.norm((a - b).ravel()) / (norm if norm else 1.0))


def poisoned(shape: int | tuple[int, ...], dtype: np.typing.DTypeLike = np.float32) -> np.ndarray:
    """An array full of NaN: an output that an operation must write everywhere, or a scratch."""
    return np.full(shape, np.nan, dtype)


def finite_difference(
    f: Callable[[np.ndarray], np.ndarray], x: np.ndarray, dout: np.ndarray, step: float = 1e-5
) -> np.ndarray:
    """Gradient of sum(f(x) * dout) with respect to x, by central differences in float64.

    f     takes a float64 array of x's shape and returns one of dout's shape
    step  how far each element is moved either way; the error is of the order of step²
    """
    x = np.array(x, np.float64)
    gradient = np.empty_like(x)
    for i in np.ndindex(x.shape):
        value = x[i]
        x[i] = value + step
        above = np.sum(f(x) * dout)
        x[i] = value - step
        below = np.sum(f(x) * dout)
        x[i] = value
        gradient[i] = (above - below) / (2 * step)
    return gradient


class Place:
    """Where a launcher runs: 'sim' (the simulator, on NumPy arrays) or 'cuda' (the GPU)."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return self.name

    def run(self, launcher: Callable, *arguments: object, **keywords: object) -> object:
        """Call the launcher; every NumPy array it is given holds what the launcher left in it.

        On the GPU each array is copied there and, when the launcher has finished, back. An array
        that is given twice is one array there too. Views of a common array are not supported.
        """
        if self.name == "sim":
            return launcher(*arguments, **keywords)
        from numbagpt.gpu import stream

        on_host = {id(a): a for a in (*arguments, *keywords.values()) if isinstance(a, np.ndarray)}
        on_device = {key: cuda.to_device(a) for key, a in on_host.items()}
        result = launcher(
            *(on_device.get(id(a), a) for a in arguments),
            **{name: on_device.get(id(a), a) for name, a in keywords.items()},
        )
        stream.synchronize()
        for key, a in on_host.items():
            a[...] = on_device[key].copy_to_host()
        return result
