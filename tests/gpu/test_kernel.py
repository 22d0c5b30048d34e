"""What a launch takes and what it refuses, before anything runs."""

import errno
from types import SimpleNamespace

import numpy as np
import pytest
from check import poisoned
from numba import cuda, float32, int64, uint16, void
from numba.core import config

from numbagpt.errors import UserError
from numbagpt.gpu import kernel as module
from numbagpt.gpu import stream
from numbagpt.gpu.kernel import kernel

BLOCK = 32


@kernel(
    void(float32[::1], float32[::1], float32, int64),
    void(uint16[::1], uint16[::1], float32, int64),
    max_threads=BLOCK,
)
def scale_kernel(out, inp, factor, N):
    i = cuda.grid(1)
    if i < N:
        out[i] = factor * inp[i]


FLOATS, BITS = np.ones(4, np.float32), np.ones(4, np.uint16)


def test_the_signature_is_that_of_the_arrays():
    assert scale_kernel.signature_for((FLOATS, FLOATS, 2.0, 4)) == scale_kernel.signatures[0]
    assert scale_kernel.signature_for((BITS, BITS, np.float32(2), 4)) == scale_kernel.signatures[1]


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ((FLOATS, BITS, 2.0, 4), "float32, uint16, float, int"),
        ((FLOATS.astype(np.float64), FLOATS, 2.0, 4), "float64, float32, float, int"),
        ((FLOATS, FLOATS, FLOATS, 4), "float32, float32, float32, int"),
        ((FLOATS, np.float32(1), 2.0, 4), "float32, float32, float, int"),
        ((FLOATS, None, 2.0, 4), "float32, NoneType, float, int"),
        ((FLOATS, FLOATS, 2.0), "float32, float32, float"),
    ],
    ids=str,
)
def test_arguments_without_a_signature(arguments, found):
    with pytest.raises(TypeError, match=rf"scale_kernel takes .* not \({found}\)"):
        scale_kernel[1, BLOCK](*arguments)


@pytest.mark.parametrize("out", [slice(None, None, 2), slice(None, None, -1)], ids=str)
def test_a_vector_with_gaps_is_refused(out):
    memory = np.zeros(8, np.float32)
    view = memory[out]
    with pytest.raises(TypeError, match=r"scale_kernel: out, of shape .* is not C-contiguous"):
        scale_kernel[1, BLOCK](view, np.ones(view.size, np.float32), 2.0, view.size)
    assert not memory.any()


@pytest.mark.parametrize("view", [lambda a: a[:, :2], lambda a: a.T], ids=["columns", "transpose"])
def test_a_matrix_with_gaps_is_refused(view):
    """Flattening one would make a copy, and the result would be lost with it."""
    memory, ones = np.zeros((3, 4), np.float32), np.ones((3, 4), np.float32)
    with pytest.raises(TypeError, match=r"scale_kernel: out, of shape .* is not C-contiguous"):
        scale_kernel[1, BLOCK](view(memory), ones, 2.0, 6)
    with pytest.raises(TypeError, match=r"scale_kernel: inp, of shape .* is not C-contiguous"):
        scale_kernel[1, BLOCK](memory, view(ones), 2.0, 6)
    assert not memory.any()


@pytest.mark.gpu
def test_device_arrays_with_gaps_are_refused():
    memory, ones = (cuda.to_device(np.zeros((3, 4), np.float32)) for _ in range(2))
    for view in (memory[:, :2], memory.reshape(-1)[::2]):
        with pytest.raises(TypeError, match=r"scale_kernel: out, of shape .* is not C-contiguous"):
            scale_kernel[1, BLOCK](view, ones, 2.0, 6)


def test_a_matrix_without_gaps_is_written(place):
    out, inp = poisoned((3, 4)), np.arange(12, dtype=np.float32).reshape(3, 4)
    place.run(scale_kernel[1, BLOCK], out, inp, 2.0, 12)
    np.testing.assert_array_equal(out, 2 * inp)


class DeviceArray:
    """As much of a device array as a launch looks at."""

    def __init__(self, n, dtype=np.float32):
        self.shape, self.strides, self.ndim, self.dtype = (n,), (4,), 1, np.dtype(dtype)

    def is_c_contiguous(self):
        return self.strides == (4,)


def test_numpy_and_device_arrays_do_not_mix():
    """Numba would copy the array to the GPU and back at each launch."""
    for arrays in ((FLOATS, DeviceArray(4)), (DeviceArray(4), FLOATS)):
        with pytest.raises(TypeError, match="scale_kernel: NumPy arrays and device arrays"):
            scale_kernel[1, BLOCK](*arrays, 2.0, 4)


def test_a_device_array_with_gaps_is_refused_before_it_is_used():
    view = DeviceArray(4)
    view.strides = (8,)
    with pytest.raises(TypeError, match=r"out, of shape \(4,\) and strides \(8,\), is not C-"):
        scale_kernel[1, BLOCK](view, DeviceArray(4), 2.0, 4)


@kernel(void(float32[::1], float32, float32), max_threads=BLOCK)
def difference_kernel(out, x, y):
    out[0] = x - y


def test_scalars_take_the_types_of_the_signature(place):
    """0.3 - 0.1 in float64 is another float32."""
    out = np.zeros(1, np.float32)
    place.run(difference_kernel[1, 1], out, 0.3, 0.1)
    assert out[0] == np.float32(0.3) - np.float32(0.1) != np.float32(0.3 - 0.1)


@pytest.mark.parametrize("block", [BLOCK + 1, (BLOCK, 2), (8, 4, 2)])
def test_a_block_larger_than_the_kernel_is_compiled_for(block):
    threads = np.prod(block)
    with pytest.raises(ValueError, match=f"scale_kernel: a block of {threads} .* at most {BLOCK}"):
        scale_kernel[1, block]


@pytest.mark.parametrize("grid", [0, (0, 1), (2, 0, 1)])
def test_a_grid_without_a_block(grid):
    with pytest.raises(ValueError, match=r"^scale_kernel: a grid of .* blocks; expected at least"):
        scale_kernel[grid, BLOCK]


@pytest.mark.parametrize("block", [BLOCK, (BLOCK, 1), (8, 2, 2), 1])
def test_a_block_that_the_kernel_is_compiled_for(place, block):
    out = np.zeros(1, np.float32)
    place.run(scale_kernel[1, block], out, np.ones(1, np.float32), 3.0, 1)
    assert out[0] == 3


# ---- compiled kernels, with a GPU and a compiler that only note what is asked of them ------------


class Gpu:
    """Numba's `cuda` on a GPU of some compute capability.

    compiled   signatures, in the order in which they were compiled
    launched   configurations and arguments of the launches
    allowed    bytes of dynamic shared memory that the driver was told of
    kept_in    where Numba would have kept what it was asked to compile; None for not at all
    faults     of the cache, of which the first is raised when it is used
    errors     of the kernel, likewise when it is compiled
    """

    def __init__(self, compute_capability=(8, 0), cache_hits=0):
        self.compute_capability, self.cache_hits = compute_capability, cache_hits
        self.compiled, self.launched, self.allowed, self.kept_in = [], [], [], []
        self.faults, self.errors = [], []

    def get_current_device(self):
        return SimpleNamespace(compute_capability=self.compute_capability)

    def jit(self, signature, cache=False, **options):
        def compiler(function):
            self.kept_in.append(config.CACHE_DIR if cache else None)
            for fault in self.faults if cache else self.errors:
                raise fault
            self.compiled.append(signature)
            return self

        return compiler

    @property
    def stats(self):
        return SimpleNamespace(cache_hits=self.cache_hits)

    def __getitem__(self, configuration):
        return lambda *arguments: self.launched.append((configuration, arguments))


@pytest.fixture
def use(monkeypatch, tmp_path):
    """A function that puts a Gpu in the place of the real one."""

    def put(gpu):
        monkeypatch.setattr(module, "cuda", gpu)
        monkeypatch.setattr(module.runtime, "configure", lambda: tmp_path)
        monkeypatch.setattr(stream, "current", lambda: "stream")
        monkeypatch.setattr(
            module, "_allow_dynamic_shared", lambda dispatcher, nbytes: gpu.allowed.append(nbytes)
        )
        return gpu

    return put


def new_kernel(**options):
    """The same kernel, not compiled yet."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_registry", [])
        return kernel(*scale_kernel.signatures, max_threads=BLOCK, **options)(scale_kernel.function)


def test_a_launch_on_the_gpu(use):
    gpu, k = use(Gpu()), new_kernel()
    out, inp = DeviceArray(4), DeviceArray(4)
    for _ in range(2):
        k[1, BLOCK](out, inp, 2.0, 4)
    assert gpu.compiled == [k.signatures[0]]
    assert gpu.launched == [((1, BLOCK, "stream", 0), (out, inp, 2.0, 4))] * 2


@pytest.mark.parametrize(
    ("options", "dtype", "needed"),
    [
        ({"minimum": (8, 0)}, np.float32, " needs at least compute capability 8.0"),
        ({"minimum": (9, 0)}, np.uint16, " needs at least compute capability 9.0"),
        ({"exactly": (9, 0)}, np.uint16, " needs exactly compute capability 9.0"),
        ({}, np.uint16, " of bf16 arrays needs at least compute capability 8.0"),
    ],
)
def test_a_gpu_that_lacks_the_instructions(use, options, dtype, needed):
    gpu = use(Gpu((7, 5)))
    remedy = "use another GPU" if options else "use float32 arrays or another GPU"
    with pytest.raises(UserError, match=f"^scale_kernel{needed}; this GPU has 7.5; {remedy}$"):
        new_kernel(**options)[1, BLOCK](DeviceArray(4, dtype), DeviceArray(4, dtype), 2.0, 4)
    assert gpu.compiled == gpu.launched == []


@pytest.mark.parametrize(
    ("compute_capability", "options", "dtype"),
    [
        ((7, 5), {}, np.float32),
        ((8, 0), {}, np.uint16),
        ((8, 9), {"minimum": (8, 0)}, np.float32),
        ((9, 0), {"exactly": (9, 0)}, np.uint16),
    ],
)
def test_a_gpu_that_has_the_instructions(use, compute_capability, options, dtype):
    gpu = use(Gpu(compute_capability))
    new_kernel(**options)[1, BLOCK](DeviceArray(4, dtype), DeviceArray(4, dtype), 2.0, 4)
    assert len(gpu.launched) == 1


def test_later_gpus_lack_instructions_that_only_one_has(use):
    use(Gpu((10, 0)))
    with pytest.raises(UserError, match=r"exactly compute capability 9\.0; this GPU has 10\.0; "):
        new_kernel(exactly=(9, 0)).compiled(scale_kernel.signatures[0])


def test_each_version_of_a_kernel_is_kept_in_a_folder_of_its_own(use, tmp_path):
    before = config.CACHE_DIR
    for compute_capability in ((8, 0), (9, 0)):
        gpu, k = use(Gpu(compute_capability)), new_kernel()
        for signature in k.signatures:
            k.compiled(signature)
        again = new_kernel()
        again.compiled(again.signatures[1])
        assert gpu.kept_in[2] == gpu.kept_in[1] != gpu.kept_in[0]
    folders = list(tmp_path.iterdir())
    assert len(folders) == 4
    assert all(folder.name.startswith("scale_kernel-") for folder in folders)
    assert gpu.kept_in[0] in map(str, folders)
    assert config.CACHE_DIR == before


@pytest.mark.parametrize(
    ("fault", "reason"),
    [(OSError(errno.ENOSPC, "No space left"), "No space left"), (EOFError("Ran out"), "EOFError")],
    ids=str,
)
def test_a_cache_that_is_full_or_damaged_is_done_without(use, tmp_path, fault, reason):
    gpu = use(Gpu())
    gpu.faults.append(fault)
    k = new_kernel()
    with pytest.warns(RuntimeWarning, match=f"^compiled kernels are not kept in .*: {reason}$"):
        k[1, BLOCK](DeviceArray(4), DeviceArray(4), 2.0, 4)
    assert gpu.kept_in[1:] == [None]
    assert len(gpu.launched) == 1
    assert list(tmp_path.iterdir()) == []  # the next process begins anew


def test_a_cache_that_cannot_be_written_is_done_without(use, tmp_path):
    gpu = use(Gpu())
    (tmp_path / "file").touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module.runtime, "configure", lambda: tmp_path / "file")
        with pytest.warns(RuntimeWarning, match="Not a directory"):
            new_kernel()[1, BLOCK](DeviceArray(4), DeviceArray(4), 2.0, 4)
    assert gpu.kept_in == [None]
    assert (tmp_path / "file").exists()


def test_an_error_of_the_kernel_is_not_blamed_on_the_cache(use, recwarn):
    gpu = use(Gpu())
    gpu.faults.append(TypeError("no sqrt of uint16"))
    gpu.errors += gpu.faults
    with pytest.raises(TypeError, match="no sqrt of uint16"):
        new_kernel().compiled(scale_kernel.signatures[0])
    assert not recwarn.list


@pytest.mark.parametrize(("cache_hits", "told"), [(0, ["scale_kernel"]), (1, [])])
def test_a_program_hears_of_what_is_compiled_and_not_in_the_cache(
    use, monkeypatch, cache_hits, told
):
    use(Gpu(cache_hits=cache_hits))
    heard = []
    monkeypatch.setattr(module, "on_compile", lambda name, seconds: heard.append((name, seconds)))
    k = new_kernel()
    for _ in range(2):
        k.compiled(k.signatures[0])
    assert [name for name, _ in heard] == told
    assert all(seconds >= 0 for _, seconds in heard)


def test_the_driver_is_told_when_more_shared_memory_is_needed(use):
    gpu, k = use(Gpu()), new_kernel()
    for nbytes in (0, 50_000, 40_000, 50_000, 60_000):
        k[1, BLOCK, nbytes](DeviceArray(4), DeviceArray(4), 2.0, 4)
    assert gpu.allowed == [50_000, 60_000]
    k[1, BLOCK, 50_000](DeviceArray(4, np.uint16), DeviceArray(4, np.uint16), 2.0, 4)
    assert gpu.allowed == [50_000, 60_000, 50_000]  # another signature is another program
    assert [launch[0][3] for launch in gpu.launched] == [0, 50_000, 40_000, 50_000, 60_000, 50_000]


@kernel(void(float32[::1], float32[::1]), max_threads=BLOCK)
def reverse_kernel(out, inp):
    """out = inp backwards, by way of the end of the dynamic shared memory."""
    shared = cuda.shared.array(0, float32)
    i = cuda.threadIdx.x
    end = shared.size - BLOCK
    shared[end + i] = inp[i]
    cuda.syncthreads()
    out[i] = shared[end + BLOCK - 1 - i]


def test_dynamic_shared_memory_of_several_sizes(place):
    inp = np.arange(BLOCK, dtype=np.float32)
    for kilobytes in (1, 52, 50, 60, 4):
        out = poisoned(BLOCK)
        place.run(reverse_kernel[1, BLOCK, 1024 * kilobytes], out, inp)
        np.testing.assert_array_equal(out, inp[::-1])
