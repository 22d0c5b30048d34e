"""Which GPU, driver and CUDA libraries are there, and what to do when one is missing.

`gpu_problem()` answers the one question the programs ask; `report()` is what `python -m numbagpt`
prints and what a bug report needs; `configure()` sets Numba up before the first kernel is compiled.
Whether the GPU has room for one more program shows only when a CUDA context is made, so
`gpu_problem()` makes it, where all else is there.
"""

import atexit
import contextlib
import functools
import gc
import hashlib
import os
import platform
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import numba
import numba_cuda
from cuda.bindings import driver
from numba import cuda
from numba.core import config

from numbagpt.cache import cache_dir
from numbagpt.errors import UserError

MIN_COMPUTE_CAPABILITY = (7, 5)  # the oldest that CUDA 13's compiler still targets
PACKAGES = (
    "numbagpt",
    "numpy",
    "numba",
    "numba-cuda",
    "cuda-bindings",
    "cuda-core",
    "nvmath-python",
    "nvidia-cublas",
    "nvidia-cublas-cu12",
)
NUMBAS_SIMULATOR = "NUMBA_ENABLE_CUDASIM replaces CUDA; unset it (--device sim needs no variable)"
_KEPT_KERNEL_CACHES = 8


@dataclass(frozen=True)
class GPUInfo:
    """The current GPU. Memory is in bytes; free_memory is that of the moment of asking."""

    name: str
    compute_capability: tuple[int, int]
    total_memory: int
    free_memory: int
    multiprocessors: int


def gpu_info() -> GPUInfo:
    """The GPU that kernels run on (the first visible one).

    Raises UserError if there is none that can be used.
    """
    if problem := gpu_problem():
        raise UserError(problem)
    device = cuda.get_current_device()
    memory = cuda.current_context().get_memory_info()
    return GPUInfo(
        device.name, _compute_capability(), memory.total, memory.free, device.MULTIPROCESSOR_COUNT
    )


def free_dropped_memory() -> None:
    """Free the memory of arrays that nothing refers to any more.

    The collector gets to those in reference cycles, as of a model with its graphs, some day. Numba
    then frees when it needs memory itself: too late for PyTorch, and for whoever asks what is free.
    """
    gc.collect()
    cuda.current_context().memory_manager.deallocations.clear()


def gpu_problem() -> str | None:
    """One line that says why CUDA cannot be used here and what to do; None if it can be used.

    Never raises. On a machine with no NVIDIA driver it touches nothing but the library search.
    """
    try:
        _check_gpu()
    except UserError as error:
        return str(error)
    except Exception as error:
        return f"CUDA cannot be used: {type(error).__name__}: {_first_line(error)}"
    return None


@functools.cache
def _check_gpu() -> None:
    """Raise UserError if there is a problem, which the user may mend; that there is none stays."""
    if problem := _find_problem():
        raise UserError(problem)


def _find_problem() -> str | None:
    """gpu_problem() without its memory; the first thing that is wrong, from the bottom up."""
    if config.DISABLE_CUDA:
        return "CUDA is switched off by NUMBA_DISABLE_CUDA; unset it to use the GPU"
    if config.ENABLE_CUDASIM:
        return NUMBAS_SIMULATOR
    driver_cuda = _driver_cuda_version()
    if driver_cuda is None:
        return "no NVIDIA driver found; install one from https://www.nvidia.com/drivers"
    if (status := _initialize()) != "CUDA_SUCCESS":
        if status == "CUDA_ERROR_NO_DEVICE":
            return f"the NVIDIA driver finds no GPU{_visibility()}"
        return f"the NVIDIA driver does not start ({status}); reboot, or reinstall the driver"
    capability = _compute_capability()
    if capability < MIN_COMPUTE_CAPABILITY:
        return (
            f"the GPU has compute capability {_dotted(capability)}; "
            f"numbagpt needs at least {_dotted(MIN_COMPUTE_CAPABILITY)} (Turing, 2018)"
        )
    extra = "cu12" if driver_cuda < (13, 0) else "cu13"
    if missing := _missing_library():
        return f"{missing}; pip install 'numbagpt[{extra}]'"
    toolkit = _toolkit_version()
    # Within one major version any driver runs any toolkit's code, since nvJitLink links it for the
    # GPU; code of a newer major version does not load.
    if driver_cuda[0] < toolkit[0]:
        fix = "update the driver"
        if driver_cuda >= (12, 0):
            fix += f", or pip install 'numbagpt[{extra}]'"
        return (
            f"the NVIDIA driver supports CUDA {_dotted(driver_cuda)}, "
            f"older than the installed toolkit, CUDA {_dotted(toolkit)}; {fix}"
        )
    if (status := _retain_context()) != "CUDA_SUCCESS":
        return (
            f"the GPU takes no further program ({status}): its memory is full, or another program "
            "has it to itself; end other programs (nvidia-smi lists them)"
        )
    return None


def _driver_cuda_version() -> tuple[int, int] | None:
    """The newest CUDA the driver supports; None where there is no driver. Starts nothing."""
    try:
        status, version = driver.cuDriverGetVersion()
    except RuntimeError:  # libcuda is not there
        return None
    if status != driver.CUresult.CUDA_SUCCESS or version == 0:
        return None
    return version // 1000, version % 1000 // 10


def _initialize() -> str:
    """Start the driver; the name of its status."""
    (status,) = driver.cuInit(0)
    return status.name


def _retain_context() -> str:
    """Make the context that Numba will use, of the first visible GPU; the name of the status."""
    status, _ = driver.cuDevicePrimaryCtxRetain(0)
    return status.name


def _visibility() -> str:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return "" if visible is None else f"; CUDA_VISIBLE_DEVICES={visible!r} may hide it, unset it"


def _compute_capability() -> tuple[int, int]:
    """Of the first visible GPU, the one Numba takes."""
    attribute = driver.CUdevice_attribute
    return tuple(
        driver.cuDeviceGetAttribute(code, 0)[1]
        for code in (
            attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
            attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
        )
    )


def _toolkit_version() -> tuple[int, int]:
    """The CUDA version of the compiler libraries that Numba found."""
    return cuda.runtime.get_version()


def _missing_library() -> str | None:
    """The first of the CUDA libraries that cannot be loaded; None if all are there."""
    from numba.cuda.cudadrv import libs, nvvm
    from numba.cuda.cudadrv.driver import _have_nvjitlink

    try:
        _toolkit_version()
    except Exception:
        return "CUDA's NVRTC library is missing"
    if not nvvm.is_available() or libs.get_libdevice() is None:
        return "CUDA's compiler library, libNVVM, is missing"
    if not _have_nvjitlink():
        return "CUDA's linker library, nvJitLink, is missing"
    try:
        from nvmath.bindings import cublasLt
    except ImportError:
        return "nvmath-python is missing"
    try:
        cublasLt.get_version()
    except Exception:
        return "cuBLAS is missing"
    return None


@functools.cache
def configure() -> Path:
    """Set Numba up for our kernels, before the first is compiled; returns the kernels' cache.

    Numba's warning about small grids is switched off: a reduction's last block is alone by design.

    Numba stores compiled kernels on disk and recompiles one when its own source file changes, but
    not when a device function it calls, in another file, does. So the cache folder is named by a
    hash of every file that kernels are made of: an edit starts a new one. NUMBA_CACHE_DIR, where
    the user set it, is left alone.
    """
    config.CUDA_LOW_OCCUPANCY_WARNINGS = 0
    if not config.CACHE_DIR:
        config.CACHE_DIR = str(_kernel_cache())
    return Path(config.CACHE_DIR)


@contextlib.contextmanager
def kept_in(folder: Path) -> Iterator[None]:
    """Inside the block Numba keeps compiled kernels in this folder: one for each version of each.

    Numba lists the versions of a kernel (for float32 and bf16, say) in one file, which it reads and
    writes again without a lock. Two processes that compile different ones at the same time could
    leave an entry that leads to the other's code. What is alone in its folder is not mistaken.

    Raises OSError where nothing can be written. Numba itself would then go elsewhere, to a folder
    beside the sources.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=folder).close()
    before, config.CACHE_DIR = config.CACHE_DIR, str(folder)
    try:
        yield
    finally:
        config.CACHE_DIR = before


def _kernel_cache() -> Path:
    try:
        folder = cache_dir() / "kernels"
        cache = folder / _sources_hash(Path(__file__).parents[1])
        cache.mkdir(parents=True, exist_ok=True)
        cache.touch()  # "last used", for the clean-up
    except (OSError, UserError):
        # A home that cannot be written to. Numba would put the cache beside the sources instead,
        # without the hash: better to compile in every process.
        temporary = tempfile.mkdtemp(prefix="numbagpt-kernels-")
        atexit.register(shutil.rmtree, temporary, ignore_errors=True)
        return Path(temporary)
    with contextlib.suppress(OSError):  # another process cleans up, and removes what was listed
        by_use = sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
        for old in by_use[_KEPT_KERNEL_CACHES:]:
            shutil.rmtree(old, ignore_errors=True)
    return cache


def _sources_hash(package: Path) -> str:
    """Hash of what a compiled kernel depends on: our sources, and the compiler's version."""
    digest = hashlib.sha256(f"{numba.__version__} {numba_cuda.__version__}".encode())
    for path in sorted([*package.glob("gpu/*.py"), *package.glob("ops/*.py")]):
        source = path.read_bytes()
        digest.update(f"\0{path.relative_to(package)} {len(source)}\0".encode() + source)
    return digest.hexdigest()[:16]


def report() -> str:
    """Versions and hardware, one per line: what a bug report needs. Works with no GPU."""
    lines = [("Python", f"{platform.python_version()}, {platform.platform()}")]
    lines += [(name, version) for name in PACKAGES if (version := _package_version(name))]
    lines += [
        ("cuBLASLt", _ask(_cublas_version)),
        ("toolkit", _ask(lambda: f"CUDA {_dotted(_toolkit_version())}")),
        ("driver", _ask(_describe_driver)),
        ("GPU", _ask(_describe_gpu)),
        ("kernel cache", _ask(lambda: str(configure()))),
        ("can use CUDA", "no: " + problem if (problem := gpu_problem()) else "yes"),
    ]
    return "\n".join(f"{name:<20} {value}" for name, value in lines)


def _package_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _cublas_version() -> str:
    if _driver_cuda_version() is None:
        return "not loaded, since there is no driver"
    from nvmath.bindings import cublasLt

    version = cublasLt.get_version()
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


def _describe_driver() -> str:
    supported = _driver_cuda_version()
    if supported is None:
        return "none"
    return f"{_ask(_driver_release)}, supports CUDA {_dotted(supported)}"


def _driver_release() -> str:
    from cuda.core import system

    major, *rest = system.get_kernel_mode_driver_version()
    return ".".join([str(major), *(f"{part:02d}" for part in rest)])


def _describe_gpu() -> str:
    if gpu_problem():
        return "none that can be used"
    gpu = gpu_info()
    gib = 1024**3
    return (
        f"{gpu.name}, compute capability {_dotted(gpu.compute_capability)}, "
        f"{gpu.multiprocessors} multiprocessors, {gpu.total_memory / gib:.1f} GiB "
        f"({gpu.free_memory / gib:.1f} free)"
    )


def _ask(question) -> str:
    """The answer, or why there is none: a report has to come out whatever is broken."""
    try:
        return question()
    except Exception as error:
        return f"unknown ({_first_line(error)})"


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
