"""Arrays as a kernel sees them under the simulator: every index is checked.

NumPy takes a[-1] for the last element; a GPU reads whatever lies in front of the array. So the
simulator hands kernels a thin wrapper that refuses any index outside 0 … size-1 and any misaligned
vector access, and otherwise keeps the element types of the GPU:

* a float element is read as the NumPy scalar of its type, so float32 arithmetic stays float32;
* an integer element is read as a Python int, because Numba widens integer arithmetic to 64 bits
  (int32 * int32 is int64), which a NumPy int32 would not do. uint64 stays NumPy's: it wraps.
"""

from typing import Any

import numpy as np

# The widest access to global memory: what of an argument's address counts for alignment.
VECTOR_BYTES = 16
# The alignment of a local array: registers have no address, and so none that is not aligned.
REGISTERS = 1 << 30


def reads_as_int(dtype: np.dtype) -> bool:
    """True for the element types that a kernel reads as Python ints or bools."""
    return dtype.kind in "iub" and dtype != np.uint64


class CheckedArray:
    """A 1-D NumPy array, `.array`, whose indices are checked. `name` appears in messages."""

    __slots__ = ("_read", "alignment", "array", "dtype", "name", "offset", "shape", "size")

    def __init__(
        self, array: np.ndarray, name: str, offset: int = 0, alignment: int = VECTOR_BYTES
    ):
        self.array = array
        self.name = name
        # For vectors: of element 0 from the start of the allocation, and how many bytes the address
        # of that start is known to be a multiple of.
        self.offset = offset
        self.alignment = alignment
        self.size = array.size
        self.dtype = array.dtype
        self.shape = array.shape
        self._read = array.item if reads_as_int(array.dtype) else array.__getitem__

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        return f"{self.name} = {self.array!r}"

    def __getitem__(self, index: Any) -> Any:
        if index.__class__ is slice:
            start, stop, step = index.indices(self.size)
            if step != 1:
                raise IndexError(f"{self.name} is sliced with step {step}; expected step 1")
            view = self.array[start:stop]
            return CheckedArray(view, self.name, self.offset + start, self.alignment)
        if 0 <= index < self.size:
            return self._read(index)
        raise self._outside(index)

    def __setitem__(self, index: Any, value: Any) -> None:
        if not 0 <= index < self.size:
            raise self._outside(index)
        try:
            self.array[index] = value
        except OverflowError:
            self._write_low_bits(index, value)

    def _write_low_bits(self, index: Any, value: int) -> None:
        """NumPy refuses an int that is too wide; a GPU stores what fits."""
        bits = 8 * self.dtype.itemsize
        self.array.view(f"u{self.dtype.itemsize}")[index] = value & ((1 << bits) - 1)

    def _outside(self, index: Any) -> IndexError:
        return IndexError(
            f"{self.name}[{index}] is out of bounds; {self.name} has {self._extent()}"
        )

    def _extent(self) -> str:
        return f"{self.size} elements"


class CheckedArrayND(CheckedArray):
    """The same for shared and local arrays of more dimensions, indexed by tuples.

    An index that names only the leading dimensions gives a checked view of the rest.
    """

    __slots__ = ()

    def __getitem__(self, index: Any) -> Any:
        index = self._checked(index)
        if len(index) == len(self.shape):
            return self._read(index)
        view = self.array[index]
        row = sum(i * s for i, s in zip(index, self.array.strides, strict=False))
        first = self.offset + row // self.dtype.itemsize
        return checked(view, self.name, first, self.alignment)

    def __setitem__(self, index: Any, value: Any) -> None:
        index = self._checked(index)
        if len(index) != len(self.shape):
            raise IndexError(f"{self.name}{list(index)} is a row; assign one element at a time")
        try:
            self.array[index] = value
        except OverflowError:
            self._write_low_bits(index, value)

    def _checked(self, index: Any) -> tuple:
        if index.__class__ is not tuple:
            index = (index,)
        if len(index) > len(self.shape):
            raise self._outside(index)
        for i, n in zip(index, self.shape, strict=False):
            if not 0 <= i < n:
                raise self._outside(index)
        return index

    def _outside(self, index: Any) -> IndexError:
        return super()._outside(", ".join(map(str, index)))

    def _extent(self) -> str:
        return f"shape {self.shape}"


def checked(
    array: np.ndarray, name: str, offset: int = 0, alignment: int = VECTOR_BYTES
) -> CheckedArray:
    """`array` with its indices checked, whatever its rank."""
    return (CheckedArray if array.ndim == 1 else CheckedArrayND)(array, name, offset, alignment)


def checked_argument(array: np.ndarray, name: str) -> CheckedArray:
    """`array` as an argument of a kernel: its own address counts for the alignment of vectors.

    A view may start anywhere in its buffer; hardware sees the address, not the index.
    """
    return checked(array, name, array.ctypes.data % VECTOR_BYTES // array.dtype.itemsize)


def checked_slice(
    arr: CheckedArray, start: int, count: int, align: int | None = None
) -> np.ndarray:
    """A NumPy view of arr[start : start + count], for the Python meaning of a vector access.

    The view is writable and shares the kernel's memory. `align` is in elements and defaults to
    `count`: hardware faults on a vector access whose address is not a multiple of the vector's
    size. So `start`, counted from the start of the allocation, must be a multiple of it, and that
    allocation be aligned to as many bytes.

    Raises IndexError where any element lies outside the array or the access is misaligned.
    """
    if not 0 <= start <= arr.size - count:
        raise IndexError(
            f"{arr.name}[{start} : {start + count}] is out of bounds; "
            f"{arr.name} has {arr.size} elements"
        )
    align = count if align is None else align
    if align * arr.dtype.itemsize > arr.alignment:
        raise IndexError(
            f"{arr.name}[{start} : {start + count}] may be misaligned; {arr.name} is aligned to "
            f"{arr.alignment} bytes, a vector of {align} elements needs "
            f"alignment={align * arr.dtype.itemsize}"
        )
    if (arr.offset + start) % align:
        raise IndexError(
            f"{arr.name}[{start} : {start + count}] is misaligned; "
            f"a vector of {align} elements must start at a multiple of {align}"
        )
    return arr.array[start : start + count]
