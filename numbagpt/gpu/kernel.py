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

import time
from collections.abc import Callable, Sequence

import numpy as np
from cuda.bindings import driver
from numba import cuda
from numba.core import types
from numba.core.typing.templates import Signature

from numbagpt.gpu import runtime, simulator, stream

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
    minimum      compute capability that the kernel's instructions came with
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
        """Bind grid, block and, where the kernel has it, bytes of dynamic shared memory."""
        grid, block, shared_bytes = (*configuration, 0)[:3]

        def launch(*arguments) -> None:
            arrays = [a for a in arguments if hasattr(a, "dtype") and getattr(a, "ndim", 0) > 0]
            flat = [a.reshape(-1) if getattr(a, "ndim", 0) > 1 else a for a in arguments]
            signature = self.signature_for(arguments)
            if isinstance(arrays[0], np.ndarray):
                flat = [_cast(a, t) for a, t in zip(flat, signature.args, strict=True)]
                simulator.run_kernel(self.function, grid, block, shared_bytes, flat)
            else:
                dispatcher = self.compiled(signature)
                if shared_bytes > self._dynamic_shared.get(signature, 0):
                    _allow_dynamic_shared(dispatcher, shared_bytes)
                    self._dynamic_shared[signature] = shared_bytes
                dispatcher[grid, block, stream.current(), shared_bytes](*flat)

        return launch

    def runs_on(self, compute_capability: tuple[int, int]) -> bool:
        """Whether GPUs of this compute capability have the kernel's instructions."""
        if self.exactly:
            return compute_capability == self.exactly
        return compute_capability >= self.minimum

    def signature_for(self, arguments: Sequence) -> Signature:
        """The signature whose array types the arguments have; TypeError if there is none."""
        for signature in self.signatures:
            if len(signature.args) == len(arguments) and all(
                _accepts(t, a) for t, a in zip(signature.args, arguments, strict=True)
            ):
                return signature
        found = ", ".join(str(getattr(a, "dtype", type(a).__name__)) for a in arguments)
        raise TypeError(f"{self.__name__} takes {self.signatures}, not ({found})")

    def compiled(self, signature: Signature):
        """The Numba dispatcher for one signature, compiled for the current GPU at first use."""
        if signature not in self._dispatchers:
            runtime.configure()
            compiler = cuda.jit(signature, cache=True, **self.options)
            start = time.perf_counter()
            dispatcher = compiler(self.function)
            if on_compile and not dispatcher.stats.cache_hits:
                on_compile(self.__name__, time.perf_counter() - start)
            self._dispatchers[signature] = dispatcher
        return self._dispatchers[signature]

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


def _accepts(numba_type: types.Type, argument: object) -> bool:
    if not isinstance(numba_type, types.Array):
        return getattr(argument, "ndim", 0) == 0
    return getattr(argument, "dtype", None) == np.dtype(str(numba_type.dtype))


def _cast(argument: object, numba_type: types.Type) -> object:
    """What passing the argument to a compiled kernel would do: scalars take the declared type."""
    if isinstance(numba_type, types.Array):
        return argument
    return np.dtype(str(numba_type)).type(argument)
