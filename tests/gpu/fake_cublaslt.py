"""cuBLASLt's matmul in NumPy, on host memory: what our descriptors mean, without a GPU.

Follows cuBLASLt's documentation: matrices are column-major with a leading dimension, batches have
a stride in elements, the bias has one value per row of D. Enumerations and attribute types are
those of the real bindings.
"""

import ctypes
import itertools
from types import SimpleNamespace

import numpy as np
from nvmath.bindings import cublasLt as real

TYPES = {0: np.float32}  # CUDA_R_32F


class FakeCuBLASLt:
    """Stands in for the module nvmath.bindings.cublasLt."""

    cuBLASLtError = real.cuBLASLtError
    MatmulDescAttribute = real.MatmulDescAttribute
    MatrixLayoutAttribute = real.MatrixLayoutAttribute
    MatmulPreferenceAttribute = real.MatmulPreferenceAttribute
    Epilogue = real.Epilogue
    MatmulHeuristicResult = real.MatmulHeuristicResult
    get_matmul_desc_attribute_dtype = staticmethod(real.get_matmul_desc_attribute_dtype)
    get_matrix_layout_attribute_dtype = staticmethod(real.get_matrix_layout_attribute_dtype)
    get_matmul_preference_attribute_dtype = staticmethod(real.get_matmul_preference_attribute_dtype)

    def __init__(self) -> None:
        self.objects = {}
        self.handles = itertools.count(1)
        self.algorithms = 1
        self.preferences = []

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
        assert scale == 0  # alpha and beta are float32
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

    def matmul_algo_get_heuristic(self, *arguments) -> None:
        ctypes.c_int32.from_address(arguments[-1]).value = self.algorithms

    def _matrices(self, handle, address) -> list[np.ndarray]:
        """The column-major matrices of a batch, as views of the memory at an address."""
        layout = self.objects[handle]
        attributes = layout["attributes"]
        rows, columns, leading = layout["rows"], layout["columns"], layout["leading"]
        itemsize = np.dtype(layout["dtype"]).itemsize
        result = []
        for i in range(attributes.get("BATCH_COUNT", 1)):
            start = address + i * attributes.get("STRIDED_BATCH_OFFSET", 0) * itemsize
            memory = (ctypes.c_float * (leading * columns)).from_address(start)
            matrix = np.ctypeslib.as_array(memory).reshape(columns, leading)
            result.append(matrix[:, :rows].T)
        return result

    def matmul(self, _handle, operation, alpha, a, a_layout, b, b_layout, beta, *rest) -> None:
        c, c_layout, d, d_layout = rest[:4]
        attributes = self.objects[operation]["attributes"]
        alpha, beta = (ctypes.c_float.from_address(x).value for x in (alpha, beta))
        for A, B, C, D in zip(
            self._matrices(a_layout, a),
            self._matrices(b_layout, b),
            self._matrices(c_layout, c),
            self._matrices(d_layout, d),
            strict=True,
        ):
            op_a = A.T if attributes["TRANSA"] else A
            op_b = B.T if attributes["TRANSB"] else B
            result = alpha * (op_a @ op_b) + (beta * C if beta else 0.0)
            if attributes.get("EPILOGUE") == real.Epilogue.BIAS:
                memory = (ctypes.c_float * D.shape[0]).from_address(attributes["BIAS_POINTER"])
                result = result + np.ctypeslib.as_array(memory)[:, None]
            D[...] = result


class HostArray:
    """A NumPy array with a device array's manners."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        self.shape, self.ndim, self.dtype = array.shape, array.ndim, array.dtype

    def is_c_contiguous(self) -> bool:
        return self.array.flags.c_contiguous

    @property
    def device_ctypes_pointer(self) -> ctypes.c_void_p:
        return ctypes.c_void_p(self.array.ctypes.data)


def library(capability: tuple[int, int] = (9, 0)) -> SimpleNamespace:
    """What gpu/cublaslt.py's library() returns where there is a GPU."""
    return SimpleNamespace(
        lt=FakeCuBLASLt(),
        capability=capability,
        types={"float32": 0, "bfloat16": 14},
        compute={"fp32": 68, "tf32": 77, "bf16": 75},
        handle=0,
        workspace=0x1000,
        workspace_bytes=32 << 20,
    )
