"""A kernel is written once; its arguments decide where it runs.

    @kernel(void(float32[::1], float32[::1], int64), max_threads=256)
    def scale_kernel(out, inp, N): ...

    scale_kernel[grid, block](out, inp, N)

`grid` and `block` are what CUDA C++ puts between <<< and >>>. With device arrays the kernel is
compiled for the GPU and queued on the current stream; with NumPy arrays the simulator runs the same
Python function thread by thread. Signatures are written out, not inferred, for three reasons: a
Python float passed as a scalar would make the kernel compute in float64; a kernel can be compiled
and inspected on a machine with no GPU; and the reader sees what the arguments are.
"""

import hashlib
import math
import shutil
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from cuda.bindings import driver
from numba import cuda
from numba.core import config, types
from numba.core.typing.templates import Signature

from numbagpt.errors import UserError
from numbagpt.gpu import runtime, simulator, stream

if config.ENABLE_CUDASIM:  # it has neither a compiler nor warps: no kernel could be declared
    raise UserError(runtime.NUMBAS_SIMULATOR)

# The compute capability that the conversion of float32 to bf16 came with.
BF16_MINIMUM = (8, 0)

_registry: list["Kernel"] = []

# Called with a kernel's name and the seconds it took, when one is compiled that the cache on disk
# did not hold. A program sets it, so that its first start does not seem to hang.
on_compile: Callable[[str, float], None] | None = None


def ceil_div(n: int, d: int) -> int:
    """Smallest integer not below n / d."""
    return -(-n // d)


def all_kernels() -> list["Kernel"]:
    """Every kernel defined so far, in order of definition: what the compile checks go through."""
    return list(_registry)


def stores_bf16(signature: Signature) -> bool:
    """Whether any of the arrays is one of bf16, which lives in uint16."""
    return any(isinstance(t, types.Array) and t.dtype == types.uint16 for t in signature.args)


def device_function(function: Callable) -> Callable:
    """Mark a function as callable from kernels; it is inlined where it is called.

    Of the calling kernel's fastmath only a part reaches it, though: see `kernel`.
    """
    return cuda.jit(device=True, forceinline=True)(function)


def kernel(
    *signatures: Signature,
    max_threads: int,
    min_blocks: int = 1,
    fastmath: bool = True,
    minimum: tuple[int, int] = (7, 5),
    exactly: tuple[int, int] | None = None,
) -> Callable[[Callable], "Kernel"]:
    """Make a kernel of a Python function.

    signatures   one `void(...)` per set of storage types the kernel is written for; every array is
                 one-dimensional and contiguous (`float32[::1]`)
    max_threads  largest block it is launched with, and
    min_blocks   blocks that should fit on one multiprocessor together: both tell the compiler how
                 many registers a thread may take (CUDA's __launch_bounds__)
    fastmath     division and square root are approximate, and denormals flushed to zero. In the
                 kernel's own body, but not in the device functions it calls, `/` also takes its
                 shortest form (div.approx in place of div.full) and math.exp, math.log and the
                 like take the GPU's approximate instructions. What becomes of NaN and infinity is
                 not promised, although numba-cuda 0.30 assumes nowhere that there are none
    minimum      compute capability that the kernel's instructions came with; 8.0 at the least for
                 a signature with bf16 arrays (uint16)
    exactly      the only compute capability that has them, for instructions such as wgmma that
                 NVIDIA does not promise to keep: the compiler must be told that one is meant
    """

    def wrap(function: Callable) -> Kernel:
        options = {"fastmath": fastmath, "launch_bounds": (max_threads, min_blocks)}
        return Kernel(function, signatures, options, minimum, exactly)

    return wrap


class Kernel:
    """A Python function and the signatures it can be compiled for; k[grid, block](...) runs it."""

    def __init__(
        self,
        function: Callable,
        signatures: Sequence[Signature],
        options: dict,
        minimum: tuple[int, int],
        exactly: tuple[int, int] | None,
    ) -> None:
        self.function = function
        self.signatures = tuple(signatures)
        self._dtypes = [tuple(map(_array_dtype, s.args)) for s in signatures]
        self.options = options
        self.max_threads = options["launch_bounds"][0]
        self.minimum = minimum
        self.exactly = exactly
        self.__name__ = function.__name__
        self.__doc__ = function.__doc__
        self.__module__ = function.__module__
        self._dispatchers: dict[Signature, object] = {}
        self._dynamic_shared: dict[Signature, int] = {}  # bytes that a launch may ask for
        _registry.append(self)

    def __repr__(self) -> str:
        return f"<kernel {self.__module__}.{self.__name__}>"

    def __getitem__(self, configuration: tuple) -> Callable[..., None]:
        """Bind grid, block and, where the kernel has it, bytes of dynamic shared memory.

        Raises ValueError for a block of more than max_threads, and for a grid without a block,
        which is what an array without an element asks for. The launch raises TypeError for
        arguments that no signature has, for arrays that are not C-contiguous, and where NumPy
        arrays and device arrays are mixed; UserError where the GPU lacks the instructions.
        """
        grid, block, shared_bytes = (*configuration, 0)[:3]
        threads = math.prod(block) if isinstance(block, tuple) else block
        if threads > self.max_threads:
            raise ValueError(
                f"{self.__name__}: a block of {threads} threads; expected at most "
                f"{self.max_threads}, the max_threads that the kernel is compiled for"
            )
        if (math.prod(grid) if isinstance(grid, tuple) else grid) < 1:
            raise ValueError(
                f"{self.__name__}: a grid of {grid} blocks; expected at least one; pass arrays "
                "that are not empty"
            )

        def launch(*arguments) -> None:
            signature = self.signature_for(arguments)
            on_host = self._on_host(arguments)
            flat = [a.reshape(-1) if getattr(a, "ndim", 0) > 1 else a for a in arguments]
            if on_host:
                flat = [_cast(a, t) for a, t in zip(flat, signature.args, strict=True)]
                simulator.run_kernel(self.function, grid, block, shared_bytes, flat)
            else:
                dispatcher = self.compiled(signature)
                if shared_bytes > self._dynamic_shared.get(signature, 0):
                    _allow_dynamic_shared(dispatcher, shared_bytes)
                    self._dynamic_shared[signature] = shared_bytes
                dispatcher[grid, block, stream.current(), shared_bytes](*flat)

        return launch

    def _on_host(self, arguments: Sequence) -> bool:
        """Whether the arrays are NumPy's. TypeError where only some are, or one has gaps."""
        on_host = set()
        for position, a in enumerate(arguments):
            if getattr(a, "ndim", 0) == 0:
                continue
            on_host.add(isinstance(a, np.ndarray))
            if not (a.flags.c_contiguous if isinstance(a, np.ndarray) else a.is_c_contiguous()):
                name = self.function.__code__.co_varnames[position]
                raise TypeError(
                    f"{self.__name__}: {name}, of shape {a.shape} and strides {a.strides}, is not "
                    "C-contiguous; expected an array without gaps; pass a contiguous copy of it"
                )
        if len(on_host) > 1:
            raise TypeError(
                f"{self.__name__}: NumPy arrays and device arrays are mixed; expected either all "
                "on the host or all on the GPU; copy some with cuda.to_device or copy_to_host"
            )
        return on_host.pop()

    def runs_on(
        self, compute_capability: tuple[int, int], signature: Signature | None = None
    ) -> bool:
        """Whether GPUs of this compute capability have the instructions of the kernel, and those
        of one signature where it is given.
        """
        if self.exactly:
            return compute_capability == self.exactly
        return compute_capability >= self._oldest(signature)

    def _oldest(self, signature: Signature | None) -> tuple[int, int]:
        bf16 = signature is not None and stores_bf16(signature)
        return max(self.minimum, BF16_MINIMUM) if bf16 else self.minimum

    def signature_for(self, arguments: Sequence) -> Signature:
        """The signature whose array types the arguments have; TypeError if there is none."""
        for signature, dtypes in zip(self.signatures, self._dtypes, strict=True):
            if len(dtypes) == len(arguments) and all(map(_accepts, dtypes, arguments)):
                return signature
        found = ", ".join(str(getattr(a, "dtype", type(a).__name__)) for a in arguments)
        raise TypeError(f"{self.__name__} takes {self.signatures}, not ({found})")

    def compiled(self, signature: Signature):
        """The Numba dispatcher for one signature, compiled for the current GPU at first use.

        Raises UserError where the GPU lacks the kernel's instructions.
        """
        if signature not in self._dispatchers:
            cache = runtime.configure()
            self._check_gpu(signature)
            start = time.perf_counter()
            dispatcher = self._compile(signature, cache)
            if on_compile and not dispatcher.stats.cache_hits:
                on_compile(self.__name__, time.perf_counter() - start)
            self._dispatchers[signature] = dispatcher
        return self._dispatchers[signature]

    def _compile(self, signature: Signature, cache: Path):
        """The dispatcher, from the cache on disk if that holds it; warns if the cache is no use."""
        version = f"{signature} {cuda.get_current_device().compute_capability}"
        folder = cache / f"{self.__name__}-{hashlib.sha256(version.encode()).hexdigest()[:8]}"
        try:
            with runtime.kept_in(folder):
                return cuda.jit(signature, cache=True, **self.options)(self.function)
        except Exception as error:  # a damaged file may raise anything, a full disk OSError
            failure = error
        dispatcher = cuda.jit(signature, **self.options)(self.function)
        # So the kernel is all right, and the next process may start with an empty folder.
        shutil.rmtree(folder, ignore_errors=True)
        reason = getattr(failure, "strerror", None) or type(failure).__name__
        warnings.warn(
            f"compiled kernels are not kept in {cache}, or cannot be read there: {reason}",
            RuntimeWarning,
            stacklevel=2,
        )
        return dispatcher

    def _check_gpu(self, signature: Signature) -> None:
        found = tuple(cuda.get_current_device().compute_capability)
        if self.runs_on(found, signature):
            return
        storage, remedy = "", "use another GPU"
        if self.runs_on(found):  # with the other signatures
            storage, remedy = " of bf16 arrays", "use float32 arrays or another GPU"
        needed = self.exactly or self._oldest(signature)
        raise UserError(
            f"{self.__name__}{storage} needs {'exactly' if self.exactly else 'at least'} compute "
            f"capability {needed[0]}.{needed[1]}; this GPU has {found[0]}.{found[1]}; {remedy}"
        )

    def ptx(self, signature: Signature, compute_capability: tuple) -> str:
        """PTX text for a compute capability such as (9, 0). Needs no GPU."""
        if compute_capability == self.exactly:
            compute_capability = (*compute_capability, "a")
        text, _ = cuda.compile_ptx(
            self.function, signature.args, cc=compute_capability, **self.options
        )
        return text


def _allow_dynamic_shared(dispatcher, nbytes: int) -> None:
    """Let a compiled kernel be launched with so much dynamic shared memory.

    Without being told, the driver allows 48 KB for static and dynamic shared memory together.
    """
    compiled = next(iter(dispatcher.overloads.values()))._codelibrary.get_cufunc()
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    (status,) = driver.cuKernelSetAttribute(attribute, nbytes, compiled.handle, compiled.device.id)
    if status != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"{nbytes} bytes of dynamic shared memory refused: {status.name}")


def _array_dtype(numba_type: types.Type) -> np.dtype | None:
    """NumPy's dtype of an array type; None for a scalar."""
    return np.dtype(str(numba_type.dtype)) if isinstance(numba_type, types.Array) else None


def _accepts(dtype: np.dtype | None, argument: object) -> bool:
    """Whether the argument is an array of that dtype or, where that is None, a scalar."""
    if dtype is None:
        return getattr(argument, "ndim", 0) == 0
    return getattr(argument, "dtype", None) == dtype and argument.ndim > 0


def _cast(argument: object, numba_type: types.Type) -> object:
    """What passing the argument to a compiled kernel would do: scalars take the declared type."""
    if isinstance(numba_type, types.Array):
        return argument
    return np.dtype(str(numba_type)).type(argument)
