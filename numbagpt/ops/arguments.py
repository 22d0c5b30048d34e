"""What the launchers check of their arrays before a kernel gets to see them.

A kernel knows addresses and a few sizes. It would read and write outside an array that is smaller
than those sizes say, and a GPU answers a vector that does not start on its own boundary with an
error that ends the process. So each launcher first compares its arrays with one another: a few
integers, next to nothing beside the launch. That their types go together is compared by the launch
itself.
"""

import numpy as np

VECTOR_BYTES = 16
STORED = "fH"  # NumPy's characters for float32, and for uint16, which holds bf16


def check_sizes(operation: str, **arrays: tuple[object, int]) -> None:
    """Raise ValueError unless each array, given as name=(array, n), has n elements."""
    for name, (array, n) in arrays.items():
        if array.size != n:
            raise ValueError(
                f"{operation}: {name} has {array.size} elements, shape {array.shape}; expected {n}"
            )


def check_room(operation: str, **arrays: tuple[object, int]) -> None:
    """Raise ValueError unless each array, given as name=(array, n), has n elements or more."""
    for name, (array, n) in arrays.items():
        if array.size < n:
            raise ValueError(
                f"{operation}: {name} has {array.size} elements, shape {array.shape}; expected at "
                f"least {n}"
            )


def check_vectors(operation: str, row: int, **arrays: object) -> None:
    """Raise ValueError unless the arrays can be accessed 16 bytes at a time.

    Each has to start on a 16-byte boundary, and its rows of `row` elements, too; where a kernel
    takes single elements at the end, row is 0. TypeError unless they hold float32 or bf16, as
    NumPy's float64 does not.
    """
    for name, array in arrays.items():
        if array.dtype.char not in STORED:
            raise TypeError(
                f"{operation}: {name} is an array of {array.dtype}; expected float32, or uint16, "
                "which holds bf16"
            )
        width = VECTOR_BYTES // array.dtype.itemsize
        if row % width:
            raise ValueError(
                f"{operation}: {name} has rows of {row} elements of {array.dtype}; expected a "
                f"multiple of {width}, whole vectors of {VECTOR_BYTES} bytes"
            )
        if (address := _address(array)) % VECTOR_BYTES:
            raise ValueError(
                f"{operation}: {name} starts at {address:#x}; expected a multiple of "
                f"{VECTOR_BYTES} bytes; align the buffer it is cut from"
            )


def _address(array: object) -> int:
    if isinstance(array, np.ndarray):
        return array.ctypes.data
    return array.device_ctypes_pointer.value or 0
