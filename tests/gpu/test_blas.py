"""matmul against float64: NumPy arrays, our use of cuBLASLt on host memory, and the GPU."""

import contextlib

import numpy as np
import pytest
from numba import cuda

from numbagpt.errors import UserError
from numbagpt.gpu import blas, cublaslt, stream

SHAPES = [  # batch (0: none), M, N, K
    (0, 1, 1, 1),
    (0, 37, 36, 1),
    (0, 37, 1, 36),
    (0, 5, 144, 36),
    (3, 37, 12, 37),
    (2, 37, 37, 12),
    (1, 4, 8, 3),
]
LARGE_SHAPES = [(0, 256, 768, 768), (0, 37, 50304, 36), (48, 64, 64, 64), (6, 37, 64, 37)]
TRANSPOSES = [(False, False), (False, True), (True, False), (True, True)]
OPTIONS = [
    {},
    {"beta": 1.0},
    {"bias": True},
    {"alpha": 0.5, "beta": -2.0, "bias": True},
]


@pytest.fixture(autouse=True)
def _precision_restored():
    yield
    blas.set_precision("fp32")


class Case:
    """Random arrays of one product, and its float64 result."""

    def __init__(self, shape, transposes=(False, False), options=None, dtype=np.float32) -> None:
        batch, M, N, K = shape
        lead = (batch,) if batch else ()
        self.options = dict(options or {})
        rng = np.random.default_rng([M, N, K, batch])

        def normal(*dimensions):
            return rng.standard_normal(dimensions).astype(dtype)

        ta, tb = self.transposes = transposes
        self.a = normal(*lead, *((K, M) if ta else (M, K)))
        self.b = normal(*lead, *((N, K) if tb else (K, N)))
        self.out = normal(*lead, M, N)
        self.bias = normal(N) if self.options.pop("bias", False) else None
        a, b = (x.astype(np.float64) for x in (self.a, self.b))
        product = np.einsum(
            f"...{'km' if ta else 'mk'},...{'nk' if tb else 'kn'}->...mn", a, b, optimize=True
        )
        beta = self.options.get("beta", 0.0)
        self.expected = self.options.get("alpha", 1.0) * product + beta * self.out
        if self.bias is not None:
            self.expected += self.bias
        if beta == 0.0:
            self.out[...] = np.nan  # must not be read

    def run(self, to_device=lambda array: array):
        """Call matmul on the arrays as `to_device` makes them; returns what it did with out."""
        arrays = [to_device(x) for x in (self.out, self.a, self.b)]
        keywords = {} if self.bias is None else {"bias": to_device(self.bias)}
        ta, tb = self.transposes
        blas.matmul(*arrays, transpose_a=ta, transpose_b=tb, **keywords, **self.options)
        return arrays[0]

    def error(self, result) -> float:
        difference = np.asarray(result, np.float64) - self.expected
        return np.linalg.norm(difference) / np.linalg.norm(self.expected)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("transposes", TRANSPOSES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_numpy_arrays(shape, transposes, options, dtype):
    case = Case(shape, transposes, options, dtype)
    assert case.error(case.run()) <= (1e-6 if dtype == np.float32 else 1e-14)


@contextlib.contextmanager
def fake_library(monkeypatch, capability=(9, 0)):
    """cuBLASLt on host memory instead of the real one; yields its library object."""
    pytest.importorskip("nvmath")
    from tests.gpu import fake_cublaslt

    library = fake_cublaslt.library(capability)
    with monkeypatch.context() as patch:
        patch.setattr(cublaslt, "library", lambda: library)
        patch.setattr(stream, "handle", lambda: 0)
        cublaslt.plan_for.cache_clear()
        yield library
    cublaslt.plan_for.cache_clear()


def host_array(array):
    """A device array for the fake library; its memory starts on a 256-byte boundary."""
    from tests.gpu import fake_cublaslt

    memory = np.empty(array.nbytes + 256, np.uint8)
    start = -memory.ctypes.data % 256
    copy = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return fake_cublaslt.HostArray(copy)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("transposes", TRANSPOSES)
@pytest.mark.parametrize("shape", SHAPES)
def test_descriptors_describe_the_product(monkeypatch, shape, transposes, options):
    case = Case(shape, transposes, options)
    with fake_library(monkeypatch):
        result = case.run(host_array).array
    assert case.error(result) <= 1e-6


def test_alignments_reach_the_heuristic(monkeypatch):
    out, a, b = (host_array(np.zeros(n, np.float32)) for n in (64, 64, 64))

    def view(x, start, shape):
        return type(x)(x.array[start : start + np.prod(shape)].reshape(shape))

    with fake_library(monkeypatch) as library:
        blas.matmul(view(out, 1, (2, 2)), view(a, 4, (2, 8)), view(b, 0, (8, 2)))
        # A batch is as aligned as its stride: 3 * 3 floats are 36 bytes.
        blas.matmul(*(view(x, 0, (2, 3, 3)) for x in (out, a, b)))
    found = [
        {name[14:15]: p[name] for name in p if name.startswith("MIN_ALIGNMENT")}
        for p in library.lt.preferences
    ]
    # cuBLASLt's A is our b.
    assert found == [
        {"A": 256, "B": 16, "C": 4, "D": 4},
        {"A": 4, "B": 4, "C": 4, "D": 4},
    ]


def test_plans_are_made_once(monkeypatch):
    cases = [Case((0, 5, 8, 3), options={"bias": True}) for _ in range(3)]
    with fake_library(monkeypatch) as library:
        for case in cases:
            assert case.error(case.run(host_array).array) <= 1e-6
        assert len(library.lt.preferences) == 1
        blas.set_precision("tf32")
        cases[0].run(host_array)
        assert len(library.lt.preferences) == 2
        computes = [o["compute"] for o in library.lt.objects.values() if "compute" in o]
        assert computes == [library.compute["fp32"], library.compute["tf32"]]


def test_no_algorithm_names_the_product(monkeypatch):
    with fake_library(monkeypatch) as library:
        library.lt.algorithms = 0
        with pytest.raises(blas.BlasError) as error:
            Case((3, 5, 8, 7), (True, False)).run(host_array)
    for part in ("out (5, 8) float32", "a^T (5, 7)", "b (7, 8)", "batch of 3", "fp32"):
        assert part in str(error.value)


def test_tensor_core_precision_needs_ampere(monkeypatch):
    with fake_library(monkeypatch, capability=(7, 5)):
        assert Case((0, 5, 8, 3)).run(host_array) is not None
        blas.set_precision("tf32")
        with pytest.raises(UserError, match=r"tf32 needs compute capability 8\.0.*has 7\.5"):
            Case((0, 5, 8, 3)).run(host_array)


def test_unaligned_bias_is_refused(monkeypatch):
    bias = host_array(np.zeros(9, np.float32))
    bias = type(bias)(bias.array[1:])
    out, a, b = (host_array(np.zeros(s, np.float32)) for s in ((4, 8), (4, 2), (2, 8)))
    with (
        fake_library(monkeypatch),
        pytest.raises(ValueError, match=r"bias starts at .* multiple of 16"),
    ):
        blas.matmul(out, a, b, bias=bias)


@pytest.mark.parametrize(
    ("out", "a", "b", "bias", "transpose_a"),
    [
        ((3, 4), (3, 5), (6, 4), None, False),
        ((3, 4), (3, 5), (5, 4), None, True),
        ((4, 3), (3, 5), (5, 4), None, False),
        ((3, 4), (3, 5), (5, 4), (3,), False),
        ((2, 3, 4), (3, 5), (2, 5, 4), None, False),
        ((2, 3, 4), (1, 3, 5), (2, 5, 4), None, False),
        ((4,), (5,), (5, 4), None, False),
        ((1, 2, 3, 4), (1, 2, 3, 5), (1, 2, 5, 4), None, False),
    ],
)
def test_shapes_that_do_not_fit(out, a, b, bias, transpose_a):
    arrays = [np.zeros(s, np.float32) for s in (out, a, b)]
    with pytest.raises(ValueError, match="expected out") as error:
        blas.matmul(
            *arrays,
            transpose_a=transpose_a,
            bias=None if bias is None else np.zeros(bias, np.float32),
        )
    assert f"out {out}" in str(error.value)
    assert f"stored as {a}" in str(error.value)


@pytest.mark.parametrize("types", ["ffd", "HHH", "fHH", "iii"])
def test_numpy_types_that_do_not_go_together(types):
    out, a, b = (np.zeros((2, 2), t) for t in types)
    with pytest.raises(TypeError, match="expected NumPy arrays"):
        blas.matmul(out, a, b)


@pytest.mark.parametrize(
    ("types", "message"),
    [("fdd", "a C-contiguous device array"), ("fHf", "a and b alike"), ("Hff", "only of bfloat16")],
)
def test_device_types_that_do_not_go_together(monkeypatch, types, message):
    with fake_library(monkeypatch), pytest.raises(TypeError, match=message):
        blas.matmul(*(host_array(np.zeros((2, 2), t)) for t in types))


def test_numpy_input_with_device_output(monkeypatch):
    zeros = np.zeros((2, 2), np.float32)
    with fake_library(monkeypatch), pytest.raises(TypeError, match="a is a ndarray"):
        blas.matmul(host_array(zeros), zeros, host_array(zeros))


def test_precision_names():
    assert blas.precision() == "fp32"
    for name in blas.PRECISIONS:
        blas.set_precision(name)
        assert blas.precision() == name
    with pytest.raises(UserError, match="'fp16'; expected one of fp32, tf32, bf16"):
        blas.set_precision("fp16")


# --- on the GPU ---


def to_bfloat16(array):
    """float32 to bfloat16 in uint16, rounded to nearest even."""
    bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def from_bfloat16(array):
    return (array.astype(np.uint32) << 16).view(np.float32)


def offset_copy(array):
    """A device copy that starts 4 bytes behind an aligned address."""
    buffer = cuda.device_array(array.size + 1, np.float32)
    view = buffer[1:].reshape(array.shape)
    view.copy_to_device(array)
    return view


@pytest.mark.gpu
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("transposes", TRANSPOSES)
@pytest.mark.parametrize("shape", SHAPES + LARGE_SHAPES)
def test_float32_on_the_gpu(shape, transposes, options):
    case = Case(shape, transposes, options)
    assert case.error(case.run(cuda.to_device).copy_to_host()) <= 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("transposes", TRANSPOSES)
@pytest.mark.parametrize("shape", SHAPES + LARGE_SHAPES)
def test_tf32_on_the_gpu(shape, transposes):
    blas.set_precision("tf32")
    case = Case(shape, transposes, {"beta": 1.0})
    assert case.error(case.run(cuda.to_device).copy_to_host()) <= 2e-3


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "tf32"])
@pytest.mark.parametrize("transposes", TRANSPOSES)
@pytest.mark.parametrize("shape", [(0, 37, 36, 36), (3, 37, 12, 37), (0, 128, 256, 128)])
def test_unaligned_arrays_on_the_gpu(shape, transposes, precision):
    blas.set_precision(precision)
    case = Case(shape, transposes, {"beta": 1.0})
    result = case.run(offset_copy).copy_to_host()
    assert case.error(result) <= (1e-5 if precision == "fp32" else 2e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("out_type", [np.float32, np.uint16])
@pytest.mark.parametrize("shape", [(0, 40, 64, 36), (3, 64, 32, 64)])
def test_bfloat16_on_the_gpu(shape, out_type, options):
    case = Case(shape, (False, True), options)
    rounded = [from_bfloat16(to_bfloat16(x)).astype(np.float64) for x in (case.a, case.b)]
    stored = case.out if out_type == np.float32 else from_bfloat16(to_bfloat16(case.out))
    bias = case.bias
    if bias is not None and out_type == np.uint16:
        bias = from_bfloat16(to_bfloat16(bias))
    beta = case.options.get("beta", 0.0)
    case.expected = case.options.get("alpha", 1.0) * np.einsum("...mk,...nk->...mn", *rounded)
    case.expected += (beta * stored if beta else 0.0) + (0.0 if bias is None else bias)

    def to_device(array):
        keep = out_type == np.float32 and (array is case.out or array is case.bias)
        return cuda.to_device(array if keep else to_bfloat16(array))

    result = case.run(to_device).copy_to_host()
    if out_type == np.uint16:
        assert case.error(from_bfloat16(result)) <= 4e-3  # half a unit of 8 bits, spread evenly
    else:
        assert case.error(result) <= 1e-5


@pytest.mark.gpu
def test_layers_share_a_plan_on_the_gpu():
    cases = [Case((0, 37, 36, 36), options={"bias": True}) for _ in range(2)]
    cases[1].bias += 1.0
    cases[1].expected += 1.0
    cases[0].run(cuda.to_device)
    before = cublaslt.plan_for.cache_info()
    for case in cases:
        assert case.error(case.run(cuda.to_device).copy_to_host()) <= 1e-5
    after = cublaslt.plan_for.cache_info()
    assert (after.misses, after.hits) == (before.misses, before.hits + 2)


@pytest.mark.gpu
def test_repeats_are_bit_identical_on_the_gpu():
    results = [Case((0, 300, 96, 5000)).run(cuda.to_device).copy_to_host() for _ in range(2)]
    np.testing.assert_array_equal(*results)
