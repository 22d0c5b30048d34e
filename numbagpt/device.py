"""Where a model lives: its memory, and the operations that work on it.

    cuda   device arrays, the compiled kernels, cuBLAS
    cpu    NumPy arrays, the NumPy reference of every operation
    sim    NumPy arrays, the same kernels run thread by thread by the simulator

A model asks its device for buffers and calls `device.ops.layernorm_forward(...)`; it does not know
which of the three it is on.
"""

import gc
from collections.abc import Callable
from importlib import import_module
from types import SimpleNamespace

import numpy as np

from numbagpt import host_memory
from numbagpt.errors import OutOfMemory, UserError
from numbagpt.modes import PRECISIONS

# Operation → the module that holds it.
OPERATIONS = {
    "encoder_forward": "encoder",
    "encoder_backward": "encoder",
    "layernorm_forward": "layernorm",
    "layernorm_backward": "layernorm",
    "matmul_forward": "matmul",
    "matmul_backward": "matmul",
    "attention_forward": "attention",
    "attention_backward": "attention",
    "gelu_forward": "gelu",
    "gelu_backward": "gelu",
    "matmul_gelu_forward": "matmul",
    "flash_attention_forward": "flash_attention",
    "flash_attention_backward": "flash_attention",
    "fused_classifier": "classifier",
    "mean_loss": "mean_loss",
    "global_norm": "global_norm",
    "adamw_update": "adamw",
}

# GPU memory left for what no plan lists: the kernels' code, cuBLAS and its workspace, graphs.
RESERVED_BYTES = 512 << 20


def _operations(suffix: str) -> SimpleNamespace:
    functions = {}
    for name, module in OPERATIONS.items():
        functions[name] = getattr(import_module(f"numbagpt.ops.{module}"), name + suffix)
    return SimpleNamespace(**functions)


class HostDevice:
    """NumPy arrays in main memory: `cpu` computes with the references, `sim` with the kernels."""

    def __init__(self, name: str, real: type = np.float32) -> None:
        """real: type of parameters and activations; float64 makes `cpu` an oracle for tests."""
        self.name = name
        self.real = real
        self.precisions = ("fp32",) if name == "cpu" else ("fp32", "bf16")
        self.ops = _operations("_reference" if name == "cpu" else "")

    # The simulator runs what every tensor-core GPU runs; the references need no such choice.
    compute_capability = (8, 0)

    def check_precision(self, precision: str) -> None:
        """Raises UserError for what this device does not compute."""
        if precision not in self.precisions:
            raise UserError(
                f"--precision {precision} needs a GPU; --device {self.name} computes in "
                f"{' and '.join(self.precisions)}"
            )

    def set_precision(self, precision: str) -> None:
        """Multiply matrices in this precision from now on; NumPy multiplies as the arrays are."""

    def zeros(self, n: int, dtype: type | None = None) -> np.ndarray:
        """A new 1-D buffer of n zeros, float32 unless told otherwise."""
        return np.zeros(n, dtype or self.real)

    def clear(self, array: np.ndarray) -> None:
        """Set every element to zero."""
        array.fill(0)

    def staging(self, n: int, dtype: type) -> np.ndarray:
        """A host buffer that uploads and downloads go through."""
        return np.empty(n, dtype)

    def upload(self, target: np.ndarray, source: np.ndarray) -> None:
        """Copy host memory into a buffer of the device."""
        target[...] = source

    def download(self, target: np.ndarray, source: np.ndarray) -> None:
        """Copy a buffer of the device into host memory."""
        target[...] = source

    def marker(self) -> tuple[Callable[[], None], Callable[[], None]]:
        """Two functions: one marks what was done so far, the other waits for what was marked."""
        return (lambda: None), (lambda: None)

    def replayable(self, enqueue: Callable[[], None]) -> Callable[[], None]:
        """A function that does what `enqueue` does, cheaper from the third call on where it can."""
        return enqueue

    def to_host(self, array: np.ndarray) -> np.ndarray:
        """A copy of the array as NumPy."""
        return array.copy()

    def synchronize(self) -> None:
        """Wait until all queued work is done."""

    def free_memory(self) -> int | None:
        """Bytes that can still be had, or None where that is not known."""
        gc.collect()  # a model that is no longer used may be garbage: its functions refer to it
        return host_memory.free_memory()


class CudaDevice:
    """Device arrays on the current GPU; all work is queued on one stream, by one thread at a time.

    All models of a process share that stream, cuBLASLt's plans and the precision of products: a
    second thread may pack batches meanwhile, but not call a model, not even another one.
    """

    name = "cuda"
    real = np.float32

    def __init__(self, use_graphs: bool = True) -> None:
        """use_graphs: replay repeated work as CUDA graphs; without, queue it kernel by kernel."""
        from numbagpt.gpu import runtime

        if problem := runtime.gpu_problem():
            raise UserError(f"--device cuda: {problem}")
        runtime.configure()
        self.use_graphs = use_graphs
        self.compute_capability = runtime.gpu_info().compute_capability
        self.precisions = PRECISIONS if self.compute_capability >= (8, 0) else ("fp32",)
        self.ops = _operations("")

    def check_precision(self, precision: str) -> None:
        """Raises UserError for what this GPU does not compute."""
        if precision not in self.precisions:
            capability = ".".join(map(str, self.compute_capability))
            raise UserError(
                f"--precision {precision} needs compute capability 8.0; this GPU has "
                f"{capability}; use fp32"
            )

    def set_precision(self, precision: str) -> None:
        """Multiply matrices in this precision from now on."""
        from numbagpt.gpu import blas

        blas.set_precision(precision)

    def zeros(self, n: int, dtype: type = np.float32) -> object:
        """A new 1-D buffer of n zeros, float32 unless told otherwise."""
        from numba import cuda
        from numba.cuda.cudadrv.driver import CudaAPIError

        try:
            array = cuda.device_array(n, dtype)
        except (CudaAPIError, MemoryError) as error:
            raise OutOfMemory(
                f"the GPU refused {n * np.dtype(dtype).itemsize / 2**20:,.0f} MiB ({error}); other "
                "programs may have taken its memory meanwhile (nvidia-smi lists them); end them, "
                "or use a smaller --batch_size"
            ) from error
        self.clear(array)
        return array

    def clear(self, array: object) -> None:
        """Queue setting every element to zero."""
        from cuda.bindings import driver

        from numbagpt.gpu import stream

        pointer = array.__cuda_array_interface__["data"][0]
        _check(driver.cuMemsetD8Async(pointer, 0, array.nbytes, stream.handle()))

    def staging(self, n: int, dtype: type) -> np.ndarray:
        """A page-locked host buffer: only such memory is copied while the host goes on."""
        from numba import cuda

        return cuda.pinned_array(n, dtype)

    def upload(self, target: object, source: np.ndarray) -> None:
        """Queue a copy from a staging buffer, which must not change until the copy is done."""
        from cuda.bindings import driver

        from numbagpt.gpu import stream

        pointer = target.device_ctypes_pointer.value
        _check(
            driver.cuMemcpyHtoDAsync(pointer, source.ctypes.data, source.nbytes, stream.handle())
        )

    def download(self, target: np.ndarray, source: object) -> None:
        """Queue a copy into a staging buffer."""
        from cuda.bindings import driver

        from numbagpt.gpu import stream

        pointer = source.device_ctypes_pointer.value
        _check(
            driver.cuMemcpyDtoHAsync(target.ctypes.data, pointer, target.nbytes, stream.handle())
        )

    def marker(self) -> tuple[Callable[[], None], Callable[[], None]]:
        """Two functions: one marks the end of the queue, the other waits for what was marked."""
        from numba import cuda

        from numbagpt.gpu import stream

        event = cuda.event(timing=False)
        return (lambda: event.record(stream.current())), event.synchronize

    def replayable(self, enqueue: Callable[[], None]) -> Callable[[], None]:
        """Run `enqueue` the first time, which compiles its kernels; then replay it as a CUDA graph.

        Queueing a kernel from Python costs about 50 µs of host time, replaying one 1.2 µs.
        """
        from numbagpt.gpu.graph import capture

        if not self.use_graphs:
            return enqueue
        state: list = []

        def replay() -> None:
            if not state:
                enqueue()
                state.append(None)
                return
            if state[0] is None:
                state.pop()  # after a capture that fails, `enqueue` is run once more
                state.append(capture(enqueue))
            state[0].launch()

        return replay

    def to_host(self, array: object) -> np.ndarray:
        """A copy of the array as NumPy, once all queued work is done."""
        self.synchronize()
        return array.copy_to_host()

    def synchronize(self) -> None:
        """Wait until all queued work is done."""
        from numbagpt.gpu import stream

        stream.synchronize()

    def free_memory(self) -> int | None:
        """Bytes of GPU memory that can still be had for a model's buffers."""
        from numba import cuda

        from numbagpt.gpu import runtime

        runtime.free_dropped_memory()
        return max(0, cuda.current_context().get_memory_info().free - RESERVED_BYTES)


def _check(result: tuple) -> tuple:
    """The values of a driver call, or a RuntimeError with the driver's own words."""
    from cuda.bindings import driver

    status, *values = result
    if status != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"CUDA driver: {driver.cuGetErrorString(status)[1].decode()}")
    return tuple(values)


Device = HostDevice | CudaDevice


def select_device(name: str = "auto", use_graphs: bool = True) -> tuple[Device, str | None]:
    """The device of that name; `auto` takes the GPU if it can be used, else the CPU.

    Returns the device and, where `auto` fell back, the reason in one line.
    Raises UserError for an unknown name, or for `cuda` where it can't be used.
    """
    if name == "auto":
        from numbagpt.gpu import runtime

        if problem := runtime.gpu_problem():
            return HostDevice("cpu"), problem
        return CudaDevice(use_graphs), None
    if name == "cuda":
        return CudaDevice(use_graphs), None
    if name in ("cpu", "sim"):
        return HostDevice(name), None
    raise UserError(f"device is {name!r}; expected auto, cuda, cpu or sim")
