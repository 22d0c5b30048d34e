"""cuBLASLt's matmul in NumPy, on host memory: what our descriptors mean, without a GPU.

Follows cuBLASLt's documentation: matrices are column-major with a leading dimension, batches have
a stride in elements, the bias has one value per row of D, the epilogue's aux matrix is laid out
like D. Enumerations and attribute types are those of the real bindings.

Algorithms are numbers here. Each takes the time that a test gives it, by a clock of their own.
"""

import contextlib
import ctypes
import itertools
from types import SimpleNamespace

import numpy as np
from nvmath.bindings import cublasLt as real

from numbagpt.gpu import autotune, cublaslt, stream
from numbagpt.gpu.choices import Choices
from numbagpt.gpu.vec import float32_to_bf16
from tests.gpu.matmul_case import gelu, values

FLOAT32, BFLOAT16 = 0, 14  # CUDA_R_32F, CUDA_R_16BF
TYPES = {FLOAT32: np.dtype(np.float32), BFLOAT16: np.dtype(np.uint16)}
FIRST_ALGORITHM = 1000


class FakeError(Exception):
    """Stands in for cuBLASLtError, which asks the library for its message."""


def memory(address: int, dtype: np.dtype, count: int) -> np.ndarray:
    return np.frombuffer((ctypes.c_byte * (count * dtype.itemsize)).from_address(address), dtype)


def store(target: np.ndarray, result: np.ndarray) -> None:
    target[...] = float32_to_bf16(result) if target.dtype == np.uint16 else result


class FakeCuBLASLt:
    """Stands in for the module nvmath.bindings.cublasLt."""

    cuBLASLtError = FakeError
    MatmulDescAttribute = real.MatmulDescAttribute
    MatrixLayoutAttribute = real.MatrixLayoutAttribute
    MatmulPreferenceAttribute = real.MatmulPreferenceAttribute
    ReductionScheme = real.ReductionScheme
    Epilogue = real.Epilogue
    matmul_heuristic_result_dtype = real.matmul_heuristic_result_dtype
    get_matmul_desc_attribute_dtype = staticmethod(real.get_matmul_desc_attribute_dtype)
    get_matrix_layout_attribute_dtype = staticmethod(real.get_matrix_layout_attribute_dtype)
    get_matmul_preference_attribute_dtype = staticmethod(real.get_matmul_preference_attribute_dtype)

    def __init__(self) -> None:
        self.objects = {}
        self.handles = itertools.count(1)
        self.preferences = []
        self.seconds = [1.0]  # of each algorithm that the heuristic proposes
        self.refused = set()  # algorithms that fail when run
        self.unknown = set()  # algorithms that fail when checked
        self.workspace = 0  # bytes that they need
        self.clock = 0.0
        self.runs = []  # (algorithm, address of D)

    def _create(self, **fields) -> int:
        handle = next(self.handles)
        self.objects[handle] = fields | {"attributes": {}}
        return handle

    def _set(self, enumeration, dtype_of, handle, attribute, address, size) -> None:
        dtype = np.dtype(dtype_of(attribute))
        assert size == dtype.itemsize
        value = np.frombuffer(ctypes.string_at(address, size), dtype)[0]
        self.objects[handle]["attributes"][enumeration(attribute).name] = int(value)

    def matmul_desc_create(self, compute, scale) -> int:
        assert scale == FLOAT32  # alpha and beta are float32
        return self._create(compute=compute)

    def matmul_desc_set_attribute(self, *arguments) -> None:
        self._set(real.MatmulDescAttribute, real.get_matmul_desc_attribute_dtype, *arguments)

    def matrix_layout_create(self, dtype, rows, columns, leading) -> int:
        return self._create(dtype=TYPES[dtype], rows=rows, columns=columns, leading=leading)

    def matrix_layout_set_attribute(self, *arguments) -> None:
        self._set(real.MatrixLayoutAttribute, real.get_matrix_layout_attribute_dtype, *arguments)

    def matmul_preference_create(self) -> int:
        return self._create()

    def matmul_preference_set_attribute(self, *arguments) -> None:
        self._set(
            real.MatmulPreferenceAttribute, real.get_matmul_preference_attribute_dtype, *arguments
        )

    def matmul_preference_destroy(self, handle) -> None:
        self.preferences.append(self.objects.pop(handle)["attributes"])

    def _results(self, address, count) -> np.ndarray:
        return memory(address, np.dtype(real.matmul_heuristic_result_dtype), count)

    def matmul_algo_get_heuristic(self, *arguments) -> None:
        wanted, results, found = arguments[-3:]
        described = self.objects[arguments[1]]["attributes"]
        # of a multiple of 16 and no better, since a call promises no more
        assert described.get("BIAS_POINTER", 16) % 32 == 16
        count = min(wanted, len(self.seconds))
        ctypes.c_int32.from_address(found).value = count
        for i, result in enumerate(self._results(results, wanted)[:count]):
            result["algo"]["data_"] = FIRST_ALGORITHM + i
            result["workspace_size"] = self.workspace

    def matmul_algo_check(self, *arguments) -> None:
        algorithm, result = arguments[-2:]
        if self._number(algorithm) in self.unknown:
            raise FakeError("not supported")
        self._results(result, 1)[0]["workspace_size"] = self.workspace

    def _number(self, algorithm) -> int:
        """Which algorithm it is; all of its 64 bytes have to be there."""
        words = memory(algorithm, np.dtype(np.uint64), 8)
        assert (words == words[0]).all()
        return int(words[0]) - FIRST_ALGORITHM

    def _matrices(self, layout, address) -> list[np.ndarray]:
        """The column-major matrices of a batch, as views of the memory at an address."""
        attributes, dtype = layout["attributes"], layout["dtype"]
        rows, columns, leading = layout["rows"], layout["columns"], layout["leading"]
        assert leading >= rows
        result = []
        for i in range(attributes.get("BATCH_COUNT", 1)):
            start = address + i * attributes.get("STRIDED_BATCH_OFFSET", 0) * dtype.itemsize
            matrix = memory(start, dtype, leading * columns).reshape(columns, leading)
            result.append(matrix[:, :rows].T)
        return result

    def _aux(self, operation, layout) -> list[np.ndarray]:
        attributes = operation["attributes"]
        leading = attributes["EPILOGUE_AUX_LD"]
        stride = attributes.get("EPILOGUE_AUX_BATCH_STRIDE", 0)
        assert leading % 8 == 0
        assert stride % 8 == 0
        batch = layout["attributes"].get("BATCH_COUNT", 1)
        described = layout | {
            "leading": leading,
            "attributes": {"BATCH_COUNT": batch, "STRIDED_BATCH_OFFSET": stride},
        }
        return self._matrices(described, attributes["EPILOGUE_AUX_POINTER"])

    def matmul(self, _handle, operation, alpha, a, a_layout, b, b_layout, beta, *rest) -> None:
        c, c_layout, d, d_layout, algorithm = rest[:5]
        number = self._number(algorithm)
        if number in self.refused:
            raise FakeError("not supported")
        self.clock += self.seconds[number]
        self.runs.append((number, d))
        operation, a_layout, b_layout, c_layout, d_layout = (
            self.objects[x] for x in (operation, a_layout, b_layout, c_layout, d_layout)
        )
        attributes = operation["attributes"]
        epilogue = real.Epilogue(attributes["EPILOGUE"]).name
        alpha, beta = (ctypes.c_float.from_address(x).value for x in (alpha, beta))
        aux = self._aux(operation, d_layout) if "GELU" in epilogue else itertools.repeat(None)
        for A, B, C, D, X in zip(
            self._matrices(a_layout, a),
            self._matrices(b_layout, b),
            self._matrices(c_layout, c),
            self._matrices(d_layout, d),
            aux,
            strict=False,
        ):
            op_a = values(A.T if attributes["TRANSA"] else A)
            op_b = values(B.T if attributes["TRANSB"] else B)
            result = alpha * (op_a @ op_b)
            if beta:
                result += beta * values(C)
            if epilogue.endswith("BIAS"):
                assert TYPES[attributes["BIAS_DATA_TYPE"]] == D.dtype
                bias = memory(attributes["BIAS_POINTER"], D.dtype, D.shape[0])
                result = result + values(bias)[:, None]
            if epilogue.startswith("GELU_AUX"):
                store(X, result)
                result = gelu(result)
            store(D, result)


class HostArray:
    """A NumPy array with a device array's manners."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        self.shape, self.ndim, self.size = array.shape, array.ndim, array.size
        self.dtype = array.dtype

    def is_c_contiguous(self) -> bool:
        return self.array.flags.c_contiguous

    @property
    def device_ctypes_pointer(self) -> ctypes.c_void_p:
        return ctypes.c_void_p(self.array.ctypes.data)


def aligned(array: np.ndarray) -> np.ndarray:
    """A copy that starts on a 256-byte boundary, as device memory does."""
    buffer = np.empty(array.nbytes + 256, np.uint8)
    start = -buffer.ctypes.data % 256
    copy = buffer[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def host_array(array: np.ndarray) -> HostArray:
    """What cuda.to_device is to the real library."""
    return HostArray(aligned(array))


def make_library(capability: tuple[int, int] = (9, 0)) -> SimpleNamespace:
    """What gpu/cublaslt.py's library() returns where there is a GPU."""
    return SimpleNamespace(
        lt=FakeCuBLASLt(),
        capability=capability,
        types={"float32": FLOAT32, "bfloat16": BFLOAT16},
        compute={"fp32": 68, "tf32": 77, "bf16": 75},
        handle=0,
        workspace=0x1000,
        workspace_bytes=32 << 20,
        choices=Choices("fake.json"),
    )


@contextlib.contextmanager
def library(monkeypatch, cache, capability: tuple[int, int] = (9, 0)):
    """cuBLASLt on host memory instead of the real one, as in a new process; yields its library.

    cache   folder that stands in for the user's cache
    What is set with its lt.patch is reset at the end of the block.
    """
    fake = make_library(capability)

    def elapsed_seconds(enqueue):
        before = fake.lt.clock
        enqueue()
        return fake.lt.clock - before

    @contextlib.contextmanager
    def scratch(nbytes):
        yield aligned(np.full(nbytes, 0xFF, np.uint8)).ctypes.data

    with monkeypatch.context() as patch:
        patch.setenv("NUMBAGPT_CACHE", str(cache))
        patch.setattr(cublaslt, "library", lambda: fake)
        patch.setattr(stream, "handle", lambda: 0)
        patch.setattr(autotune.graph, "capture", lambda fn: SimpleNamespace(launch=fn))
        patch.setattr(autotune, "elapsed_seconds", elapsed_seconds)
        patch.setattr(autotune, "_capturing", lambda: False)
        patch.setattr(autotune, "_scratch", scratch)
        cublaslt.plan_for.cache_clear()
        fake.lt.patch = patch
        yield fake
    cublaslt.plan_for.cache_clear()
