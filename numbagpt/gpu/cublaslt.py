"""Plans for cuBLASLt: a kind of matrix product, described once and run many times.

Describing a product to cuBLASLt and asking it for an algorithm takes far longer than starting one,
so both are kept in a `Plan`, found again by the `Problem` it was made for.

cuBLASLt counts in columns: memory that holds a row-major (R, S) matrix holds, to cuBLASLt, the
column-major (S, R) one, its transpose. Transposing

    out = alpha * op(a) @ op(b) + beta * out + bias      (row-major, bias one value per column)
    out^T = alpha * op(b)^T @ op(a)^T + beta * out^T + bias   (bias one value per row of out^T)

gives a product of what cuBLASLt sees: b comes first, a second, each keeps its own transpose flag,
and nothing is moved in memory. One value per row is just what its bias epilogue adds.
"""

import functools
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from numbagpt.errors import UserError
from numbagpt.gpu import runtime

_CANDIDATES = 1  # algorithms asked of the heuristic; the first is taken


class BlasError(RuntimeError):
    """cuBLASLt refused or failed; the message names the shapes, types and transposes."""


class Problem(NamedTuple):
    """Everything that cuBLASLt's choice of an algorithm depends on: the key of a plan."""

    batch: int
    M: int
    N: int
    K: int
    transpose_a: bool
    transpose_b: bool
    storage: str  # of a and b: float32 or bfloat16
    out_storage: str  # of out and bias
    has_bias: bool
    accumulates: bool  # beta is not 0
    precision: str  # fp32, tf32 or bf16
    alignments: tuple[int, int, int]  # of out, a, b, in bytes

    def __str__(self) -> str:
        a = f"a{'^T' * self.transpose_a} ({self.M}, {self.K}) {self.storage}"
        b = f"b{'^T' * self.transpose_b} ({self.K}, {self.N}) {self.storage}"
        return (
            f"out ({self.M}, {self.N}) {self.out_storage} {'+=' if self.accumulates else '='} "
            f"{a} @ {b}{' + bias' * self.has_bias}"
            f"{f', batch of {self.batch}' * (self.batch > 1)}, {self.precision}, "
            f"out, a, b aligned to {', '.join(map(str, self.alignments))} bytes"
        )


class _Library:
    """cuBLASLt's handle and workspace, one of each in a process.

    They are never given back: at exit the driver may already be gone when Python would do it, and
    the operating system frees both in any case. The same goes for the plans. One workspace is
    enough, since products on one stream run one after the other; captured graphs refer to it too.
    """

    def __init__(self) -> None:
        info = runtime.gpu_info()
        from numba import cuda
        from nvmath import CudaDataType
        from nvmath.bindings import cublas, cublasLt

        self.capability = info.compute_capability
        self.lt = cublasLt
        self.types = {
            "float32": int(CudaDataType.CUDA_R_32F),
            "bfloat16": int(CudaDataType.CUDA_R_16BF),
        }
        # COMPUTE_32F neither rounds inputs nor emulates float32 unless the user's environment asks.
        self.compute = {
            "fp32": int(cublas.ComputeType.COMPUTE_32F),
            "tf32": int(cublas.ComputeType.COMPUTE_32F_FAST_TF32),
            "bf16": int(cublas.ComputeType.COMPUTE_32F_FAST_16BF),
        }
        self.handle = cublasLt.create()
        # NVIDIA's advice: algorithms for Hopper want 32 MiB, older ones 4 MiB.
        self.workspace_bytes = (32 if self.capability >= (9, 0) else 4) * 1024**2
        self._workspace = cuda.device_array(self.workspace_bytes, np.uint8)
        self.workspace = self._workspace.device_ctypes_pointer.value


library = functools.cache(_Library)


@functools.cache
def plan_for(problem: Problem) -> "Plan":
    """The plan for a kind of product, made at its first use and kept to the end of the process.

    Raises BlasError, naming the product, if cuBLASLt has no algorithm for it; UserError if CUDA
    cannot be used or the GPU lacks the precision.
    """
    return Plan(library(), problem)


class Plan:
    """One kind of product: cuBLASLt's descriptors of it and the algorithm it chose."""

    def __init__(self, library: _Library, problem: Problem) -> None:
        if problem.precision != "fp32" and library.capability < (8, 0):
            raise UserError(
                f"precision {problem.precision} needs compute capability 8.0 (Ampere) or newer; "
                f"this GPU has {'.'.join(map(str, library.capability))}; use --precision fp32"
            )
        self.problem = problem
        self._library = library
        # What cuBLASLt reads from host memory during a call.
        self._scalars = np.zeros(2, np.float32)
        self._alpha = self._scalars.ctypes.data
        self._beta = self._alpha + self._scalars.itemsize
        try:
            self._describe()
            self._choose_algorithm()
        except library.lt.cuBLASLtError as error:
            raise BlasError(f"cuBLASLt cannot do {problem}: {error}") from error

    def _describe(self) -> None:
        p, library, lt = self.problem, self._library, self._library.lt
        # Inputs stored as bfloat16 need no rounding: plain products with float32 sums.
        compute = library.compute["fp32" if p.storage == "bfloat16" else p.precision]
        self._operation = lt.matmul_desc_create(compute, library.types["float32"])
        attribute = lt.MatmulDescAttribute
        settings = [(attribute.TRANSA, p.transpose_b), (attribute.TRANSB, p.transpose_a)]
        if p.has_bias:
            settings += [
                (attribute.EPILOGUE, lt.Epilogue.BIAS),
                (attribute.BIAS_DATA_TYPE, library.types[p.out_storage]),
                # Any aligned address does for choosing an algorithm; calls put in their own.
                (attribute.BIAS_POINTER, library.workspace),
            ]
        self._set_operation(settings)
        self._a = self._layout(p.storage, (p.K, p.M) if p.transpose_a else (p.M, p.K))
        self._b = self._layout(p.storage, (p.N, p.K) if p.transpose_b else (p.K, p.N))
        self._out = self._layout(p.out_storage, (p.M, p.N))

    def _set_operation(self, settings: Iterable[tuple[int, int]]) -> None:
        lt = self._library.lt
        _set(
            lt.matmul_desc_set_attribute,
            lt.get_matmul_desc_attribute_dtype,
            self._operation,
            settings,
        )

    def _layout(self, storage: str, shape: tuple[int, int]) -> int:
        """A row-major matrix, described by its column-major transpose."""
        lt = self._library.lt
        rows, columns = shape
        layout = lt.matrix_layout_create(self._library.types[storage], columns, rows, columns)
        if self.problem.batch > 1:
            _set(
                lt.matrix_layout_set_attribute,
                lt.get_matrix_layout_attribute_dtype,
                layout,
                [
                    (lt.MatrixLayoutAttribute.BATCH_COUNT, self.problem.batch),
                    (lt.MatrixLayoutAttribute.STRIDED_BATCH_OFFSET, rows * columns),
                ],
            )
        return layout

    def _choose_algorithm(self) -> None:
        """Take the algorithm that cuBLASLt's heuristic puts first."""
        library, lt = self._library, self._library.lt
        out, a, b = self.problem.alignments
        attribute = lt.MatmulPreferenceAttribute
        preference = lt.matmul_preference_create()
        self._results = lt.MatmulHeuristicResult(_CANDIDATES)
        found = np.zeros(1, np.int32)
        try:
            _set(
                lt.matmul_preference_set_attribute,
                lt.get_matmul_preference_attribute_dtype,
                preference,
                [
                    (attribute.MAX_WORKSPACE_BYTES, library.workspace_bytes),
                    (attribute.MIN_ALIGNMENT_A_BYTES, b),
                    (attribute.MIN_ALIGNMENT_B_BYTES, a),
                    (attribute.MIN_ALIGNMENT_C_BYTES, out),
                    (attribute.MIN_ALIGNMENT_D_BYTES, out),
                ],
            )
            lt.matmul_algo_get_heuristic(
                library.handle,
                self._operation,
                self._b,
                self._a,
                self._out,
                self._out,
                preference,
                _CANDIDATES,
                self._results.ptr,
                found.ctypes.data,
            )
        finally:
            lt.matmul_preference_destroy(preference)
        if found[0] == 0:
            raise BlasError(f"cuBLASLt has no algorithm for {self.problem}")
        self._algorithm = self._results.ptr  # the algorithm is the result's first member

    def __call__(
        self, out: int, a: int, b: int, bias: int, alpha: float, beta: float, stream: int
    ) -> None:
        """Queue the product on a stream (a CUstream). out, a, b and bias are device addresses.

        Raises BlasError, naming the product, if cuBLASLt fails.
        """
        library, lt = self._library, self._library.lt
        self._scalars[:] = alpha, beta
        try:
            if self.problem.has_bias:
                # Set at each call, so that all layers share a plan; it costs a microsecond or two.
                # cuBLASLt copies the address into the launch, so a graph keeps the captured one.
                self._set_operation([(lt.MatmulDescAttribute.BIAS_POINTER, bias)])
            lt.matmul(
                library.handle,
                self._operation,
                self._alpha,
                b,
                self._b,
                a,
                self._a,
                self._beta,
                out,
                self._out,
                out,
                self._out,
                self._algorithm,
                library.workspace,
                library.workspace_bytes,
                stream,
            )
        except lt.cuBLASLtError as error:
            raise BlasError(f"cuBLASLt failed in {self.problem}: {error}") from error


def _set(
    setter: Callable, dtype_of: Callable, target: int, settings: Iterable[tuple[int, int]]
) -> None:
    """Set attributes of a descriptor; cuBLASLt takes each by address and size, and copies it."""
    for attribute, value in settings:
        data = np.array([value], dtype_of(attribute))
        setter(target, int(attribute), data.ctypes.data, data.nbytes)
