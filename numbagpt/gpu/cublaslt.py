"""Plans for cuBLASLt: a kind of matrix product, described once and run many times.

Describing a product to cuBLASLt and asking it for an algorithm takes far longer than starting one,
so both are kept in a `Plan`, found again by the `Problem` it was made for.

cuBLASLt counts in columns: memory that holds a row-major (R, S) matrix holds, to cuBLASLt, the
column-major (S, R) one, its transpose. Transposing

    out = alpha * op(a) @ op(b) + beta * out + bias      (row-major, bias one value per column)
    out^T = alpha * op(b)^T @ op(a)^T + beta * out^T + bias   (bias one value per row of out^T)

gives a product of what cuBLASLt sees: b comes first, a second, each keeps its own transpose flag,
and nothing is moved in memory. One value per row is just what its bias epilogue adds.

What cuBLASLt computes is D = alpha A B + beta C, with C and D of one layout. Here D is out; C is
out too, or, with beta = 1, the array that the caller wants added.
"""

import functools
import re
from collections.abc import Callable, Iterable

import numpy as np

from numbagpt.errors import UserError
from numbagpt.gpu import autotune, runtime, stream
from numbagpt.gpu.blas_problem import VECTOR_BYTES, BlasError, Problem
from numbagpt.gpu.choices import Choices

# A cublasLtMatmulAlgo_t, which NVIDIA allows to store, and to restore for the same cuBLASLt.
_ALGORITHM_BYTES = 64


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
        identity = f"{info.name} {info.compute_capability} {info.multiprocessors} multiprocessors"
        identity += f" cuBLASLt {cublasLt.get_version()}"
        self.choices = Choices(re.sub(r"\W+", "-", identity) + ".json")


library = functools.cache(_Library)


@functools.cache
def plan_for(problem: Problem, tuned: bool) -> "Plan":
    """The plan for a kind of product, made at its first use and kept to the end of the process.

    tuned   whether its algorithm is chosen by timing, at the plan's first call, or is the one that
            cuBLASLt puts first
    Raises BlasError, naming the product, if cuBLASLt has no algorithm for it; UserError if CUDA
    cannot be used or the GPU lacks the precision.
    """
    return Plan(library(), problem, tuned)


class Plan:
    """One kind of product: cuBLASLt's descriptors of it and an algorithm."""

    def __init__(self, library: _Library, problem: Problem, tuned: bool) -> None:
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
        self._address = np.zeros(1, np.int64)
        self._address_pointer = self._address.ctypes.data
        try:
            self._describe()
            stored = library.choices.get(str(problem)) if tuned else None
            self.algorithm = None if stored is None else self._restored(stored)
            if self.algorithm is None:
                self._candidates = self._proposed(autotune.CANDIDATES if tuned else 1)
                if len(self._candidates) == 1:
                    self.algorithm = self._candidates[0]
        except library.lt.cuBLASLtError as error:
            raise BlasError(f"cuBLASLt cannot do {problem}: {error}") from error

    def _describe(self) -> None:
        p, library, lt = self.problem, self._library, self._library.lt
        # Inputs stored as bfloat16 need no rounding: plain products with float32 sums.
        compute = library.compute["fp32" if p.storage == "bfloat16" else p.precision]
        self._operation = lt.matmul_desc_create(compute, library.types["float32"])
        attribute = lt.MatmulDescAttribute
        parts = ["GELU_AUX"] * p.has_gelu + ["BIAS"] * p.has_bias
        epilogue = "_".join(parts) or "DEFAULT"
        settings = [
            (attribute.TRANSA, p.transpose_b),
            (attribute.TRANSB, p.transpose_a),
            (attribute.EPILOGUE, lt.Epilogue[epilogue]),
        ]
        # Calls put in their own addresses. For choosing an algorithm cuBLASLt looks at nothing but
        # their alignment, so give it addresses that are aligned no better than promised.
        if p.has_bias:
            settings += [
                (attribute.BIAS_DATA_TYPE, library.types[p.out_storage]),
                (attribute.BIAS_POINTER, library.workspace + VECTOR_BYTES),
            ]
        if p.has_gelu:
            # aux has out's type unless told otherwise.
            settings += [
                (attribute.EPILOGUE_AUX_LD, p.N),
                (attribute.EPILOGUE_AUX_POINTER, library.workspace + p.alignments[3]),
            ]
            if p.batch > 1:
                settings += [(attribute.EPILOGUE_AUX_BATCH_STRIDE, p.M * p.N)]
        _set(
            lt.matmul_desc_set_attribute,
            lt.get_matmul_desc_attribute_dtype,
            self._operation,
            settings,
        )
        self._a = self._layout(p.storage, (p.K, p.M) if p.transpose_a else (p.M, p.K))
        self._b = self._layout(p.storage, (p.N, p.K) if p.transpose_b else (p.K, p.N))
        self._out = self._layout(p.out_storage, (p.M, p.N))

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

    def _proposed(self, count: int) -> list[np.ndarray]:
        """Up to `count` algorithms, the one that cuBLASLt thinks fastest first.

        Only such as give the same bits in every run, and sum in float32: a dot product is summed in
        one sequence, or in parts that are kept in float32 and added in a step of their own. Left
        out are those that add the parts in out itself, rounding to out's type each time and in an
        order that is not documented (INPLACE), or that round parts to out's type (OUTPUT_TYPE).
        """
        library, lt = self._library, self._library.lt
        out, a, b = self.problem.alignments[:3]
        c = self.problem.alignments[3] if self.problem.adds else out
        attribute = lt.MatmulPreferenceAttribute
        preference = lt.matmul_preference_create()
        results = np.zeros(count, lt.matmul_heuristic_result_dtype)
        found = np.zeros(1, np.int32)
        try:
            _set(
                lt.matmul_preference_set_attribute,
                lt.get_matmul_preference_attribute_dtype,
                preference,
                [
                    (attribute.MAX_WORKSPACE_BYTES, library.workspace_bytes),
                    (attribute.REDUCTION_SCHEME_MASK, lt.ReductionScheme.COMPUTE_TYPE),
                    (attribute.MIN_ALIGNMENT_A_BYTES, b),
                    (attribute.MIN_ALIGNMENT_B_BYTES, a),
                    (attribute.MIN_ALIGNMENT_C_BYTES, c),
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
                count,
                results.ctypes.data,
                found.ctypes.data,
            )
        finally:
            lt.matmul_preference_destroy(preference)
        results = results[: found[0]]
        usable = [algorithm.copy() for algorithm in results["algo"]["data_"][results["state"] == 0]]
        if not usable:
            raise BlasError(f"cuBLASLt has no algorithm for {self.problem}")
        return usable

    def _restored(self, stored: bytes) -> np.ndarray | None:
        """The algorithm that these bytes are; None if cuBLASLt does not take it for the problem."""
        library, lt = self._library, self._library.lt
        if len(stored) != _ALGORITHM_BYTES:
            return None
        algorithm = np.frombuffer(stored, np.uint64).copy()
        result = np.zeros(1, lt.matmul_heuristic_result_dtype)
        try:
            lt.matmul_algo_check(
                library.handle,
                self._operation,
                self._b,
                self._a,
                self._out,
                self._out,
                algorithm.ctypes.data,
                result.ctypes.data,
            )
        except lt.cuBLASLtError:
            return None
        return algorithm if result["workspace_size"][0] <= library.workspace_bytes else None

    def __call__(
        self, out: int, a: int, b: int, bias: int, extra: int, alpha: float, beta: float
    ) -> None:
        """Queue the product on the current stream.

        out, a, b, bias   device addresses
        extra             that of add or of gelu_aux, whichever the problem has
        Raises BlasError, naming the product, if cuBLASLt fails; GraphError if the algorithm is
        still to be chosen by timing and the stream is being captured.
        """
        attribute = self._library.lt.MatmulDescAttribute
        adds = self.problem.adds
        self._scalars[:] = alpha, 1.0 if adds else beta
        # At each call, so that all layers share a plan. cuBLASLt copies the addresses into the
        # launch, so that a graph keeps the captured ones.
        if self.problem.has_bias:
            self._set_address(attribute.BIAS_POINTER, bias)
        if self.problem.has_gelu:
            self._set_address(attribute.EPILOGUE_AUX_POINTER, extra)
        if self.algorithm is None:
            self._choose(out, a, b, extra)
        self.run(self.algorithm, out, a, b, extra if adds else out)

    def _choose(self, out: int, a: int, b: int, extra: int) -> None:
        algorithm, timed = autotune.choose(self, self._candidates, out, a, b, extra)
        if timed:
            self._library.choices.put(str(self.problem), algorithm.tobytes())
        self.algorithm = algorithm

    def _set_address(self, attribute: int, address: int) -> None:
        self._address[0] = address
        self._library.lt.matmul_desc_set_attribute(
            self._operation, int(attribute), self._address_pointer, self._address.itemsize
        )

    def run(self, algorithm: np.ndarray, out: int, a: int, b: int, c: int) -> None:
        """Queue the product with everything else as in the last call.

        c   address of what beta multiplies: out or the problem's add
        Raises BlasError, naming the product, if cuBLASLt fails.
        """
        library, lt = self._library, self._library.lt
        try:
            lt.matmul(
                library.handle,
                self._operation,
                self._alpha,
                b,
                self._b,
                a,
                self._a,
                self._beta,
                c,
                self._out,
                out,
                self._out,
                algorithm.ctypes.data,
                library.workspace,
                library.workspace_bytes,
                stream.handle(),
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
