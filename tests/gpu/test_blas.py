"""matmul against float64: NumPy arrays, our use of cuBLASLt on host memory, and the GPU."""

import numpy as np
import pytest
from numba import cuda

from numbagpt.errors import UserError
from numbagpt.gpu import blas, cublaslt
from numbagpt.gpu.vec import bf16_to_float32, float32_to_bf16
from numbagpt.modes import PRECISIONS
from tests.gpu.matmul_case import Case

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
    {"add": True},
    {"alpha": -0.5, "add": True, "bias": True},
]


# With a GELU N is a multiple of 8 on a device.
GELU_SHAPES = [(0, 1, 8, 1), (0, 37, 144, 36), (0, 5, 40, 37), (3, 37, 24, 36)]
GELU_OPTIONS = [
    {"gelu": True, "bias": True},
    {"gelu": True},
    {"gelu": True, "bias": True, "alpha": 0.5, "beta": -0.25},
]
STORAGES = ["float32", "bfloat16", "bfloat16 to float32"]
# A bfloat16 has 8 bits; half a unit of the last, spread evenly, is 1.1e-3.
TOLERANCES = {"float32": 1e-6, "float64": 1e-14, "bfloat16": 4e-3, "bfloat16 to float32": 1e-6}


@pytest.fixture(autouse=True)
def _as_at_the_start(monkeypatch, tmp_path):
    monkeypatch.setenv("NUMBAGPT_CACHE", str(tmp_path))
    yield
    blas.set_precision("fp32")
    blas.set_autotune(True)


def stored(shape, transposes, options, storage) -> Case:
    return Case(shape, transposes, options, *storage.split(" to "))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("transposes", TRANSPOSES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("storage", [*STORAGES, "float64"])
def test_numpy_arrays(shape, transposes, options, storage):
    case = stored(shape, transposes, options, storage)
    assert case.error(case.run()) <= TOLERANCES[storage]


@pytest.mark.parametrize("options", GELU_OPTIONS, ids=str)
@pytest.mark.parametrize("shape", [*GELU_SHAPES, (2, 3, 7, 5)])
@pytest.mark.parametrize("storage", [*STORAGES, "float64"])
def test_gelu_of_numpy_arrays(shape, options, storage):
    case = stored(shape, (False, True), options, storage)
    assert case.error(case.run()) <= TOLERANCES[storage]


def sum_that_bfloat16_rounds_to_258(size, with_bias, to_device, to_host) -> None:
    """256 + 2 where the 2 is two ones: a bfloat16 of 256 + 1 is 256, whose neighbour is 258."""
    a = np.zeros((size, size), np.float32)
    a[:, 0] = 16.0
    a[:, 1] = 0.0 if with_bias else 1.0  # the product is 256 or 257
    b, ones = np.where(a == 16.0, 16.0, a).astype(np.float32), np.ones((size, size), np.float32)
    out = to_device(np.full((size, size), 0x7FC0, np.uint16))
    a, b, ones = (to_device(float32_to_bf16(x)) for x in (a, b, ones))
    bias = to_device(float32_to_bf16(np.ones(size, np.float32))) if with_bias else None
    blas.matmul(out, a, b, transpose_b=True, bias=bias, add=ones)
    np.testing.assert_array_equal(bf16_to_float32(to_host(out)), 258.0)


@pytest.mark.parametrize("with_bias", [True, False])
def test_a_bfloat16_sum_with_add_is_rounded_once(with_bias):
    sum_that_bfloat16_rounds_to_258(5, with_bias, lambda array: array, lambda array: array)


def test_large_values_on_numpy_arrays():
    """GELU is 0 or x, and nothing overflows on the way."""
    x = np.array([[-1e4, -50.0, 50.0, 1e4]], np.float32)
    out, aux = np.full_like(x, np.nan), np.full_like(x, np.nan)
    with np.errstate(all="raise", under="ignore"):
        blas.matmul(out, np.ones((1, 1), np.float32), x, gelu_aux=aux)
    np.testing.assert_array_equal(out, np.maximum(x, 0))
    np.testing.assert_array_equal(aux, x)


@pytest.fixture
def library(monkeypatch, tmp_path):
    """cuBLASLt on host memory."""
    with fake().library(monkeypatch, tmp_path) as library:
        yield library


def fake():
    pytest.importorskip("nvmath")
    from tests.gpu import fake_cublaslt

    return fake_cublaslt


def host_array(array):
    return fake().host_array(array)


def to_host(array):
    return array.array


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("transposes", TRANSPOSES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("storage", STORAGES)
def test_descriptors_describe_the_product(shape, transposes, options, storage):
    case = stored(shape, transposes, options, storage)
    assert case.error(case.run(host_array, to_host)) <= TOLERANCES[storage]


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("options", GELU_OPTIONS, ids=str)
@pytest.mark.parametrize("transposes", TRANSPOSES)
@pytest.mark.parametrize("shape", GELU_SHAPES)
@pytest.mark.parametrize("storage", STORAGES)
def test_descriptors_describe_the_gelu(shape, transposes, options, storage):
    case = stored(shape, transposes, options, storage)
    assert case.error(case.run(host_array, to_host)) <= TOLERANCES[storage]


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("storage", STORAGES)
def test_descriptors_describe_the_gelu_of_a_batch(storage):
    case = stored((3, 5, 8, 3), (False, True), {"gelu": True}, storage)
    assert case.error(case.run(host_array, to_host)) <= TOLERANCES[storage]


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
def test_the_precision_is_that_of_float32_arrays_alone(library, monkeypatch, precision):
    """bf16 arrays are multiplied as they are, in one plan whatever the precision."""
    computed = []
    create = library.lt.matmul_desc_create
    monkeypatch.setattr(
        library.lt,
        "matmul_desc_create",
        lambda compute, scale: computed.append(compute) or create(compute, scale),
    )
    try:
        for name in ("fp32", precision):
            blas.set_precision(name)
            Case((0, 5, 8, 3), storage="bfloat16").run(host_array)
        Case((0, 5, 8, 3)).run(host_array)
    finally:
        blas.set_precision("fp32")
    assert computed == [library.compute["fp32"], library.compute[precision]]


def test_alignments_reach_the_heuristic(library):
    out, a, b = (host_array(np.zeros(n, np.float32)) for n in (64, 64, 64))

    def view(x, start, shape):
        return type(x)(x.array[start : start + np.prod(shape)].reshape(shape))

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


def test_an_added_array_is_c_with_an_alignment_of_its_own(library):
    out, a, b = (host_array(np.zeros((8, 8), np.float32)) for _ in range(3))
    add = fake().HostArray(fake().aligned(np.ones(66, np.float32))[2:].reshape(8, 8))
    blas.matmul(out, a, b, add=add)
    blas.matmul(out, a, b, beta=1.0)  # C is out: another plan
    found = [
        (p["MIN_ALIGNMENT_C_BYTES"], p["MIN_ALIGNMENT_D_BYTES"]) for p in library.lt.preferences
    ]
    assert found == [(8, 256), (256, 256)]
    np.testing.assert_array_equal(out.array, 1.0)


def test_sums_are_float32_and_reproducible(library):
    Case((0, 5, 8, 3)).run(host_array)
    (preferences,) = library.lt.preferences
    schemes = library.lt.ReductionScheme
    assert preferences["REDUCTION_SCHEME_MASK"] == schemes.COMPUTE_TYPE


def test_plans_are_made_once(library):
    cases = [Case((0, 5, 8, 3), options={"bias": True}) for _ in range(3)]
    for case in cases:
        assert case.error(case.run(host_array, to_host)) <= 1e-6
    assert len(library.lt.preferences) == 1
    blas.set_precision("tf32")
    cases[0].run(host_array)
    assert len(library.lt.preferences) == 2
    computes = [o["compute"] for o in library.lt.objects.values() if "compute" in o]
    assert computes == [library.compute["fp32"], library.compute["tf32"]]


def test_layers_share_a_plan_but_not_their_arrays(library):
    options = {"gelu": True, "bias": True}
    cases = [Case((0, 5, 8, 3), options=options) for _ in range(2)]
    cases[1].arrays["bias"] += 1.0
    for case in cases:
        case.result = case.run(host_array, to_host)
    np.testing.assert_allclose(cases[1].aux, cases[0].aux + 1.0, atol=1e-5)
    assert cases[0].error(cases[0].result) <= 1e-6
    assert len(library.lt.preferences) == 1


def test_no_algorithm_names_the_product(library):
    library.lt.seconds = []
    with pytest.raises(blas.BlasError) as error:
        Case((3, 5, 8, 7), (True, False)).run(host_array)
    for part in ("out (5, 8) float32", "a^T (5, 7)", "b (7, 8)", "batch of 3", "fp32"):
        assert part in str(error.value)


def test_a_failing_product_is_named(library):
    library.lt.refused = {0}
    with pytest.raises(blas.BlasError, match=r"failed in out \(5, 8\).*gelu.*not supported"):
        Case((0, 5, 8, 7), options={"gelu": True}).run(host_array)


def test_tensor_core_precision_needs_ampere(monkeypatch, tmp_path):
    with fake().library(monkeypatch, tmp_path, capability=(7, 5)):
        assert Case((0, 5, 8, 3)).run(host_array) is not None
        blas.set_precision("tf32")
        with pytest.raises(UserError, match=r"tf32 needs compute capability 8\.0.*has 7\.5"):
            Case((0, 5, 8, 3)).run(host_array)


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize(
    ("name", "message"),
    [("bias", "bias starts at"), ("gelu_aux", "gelu_aux starts at")],
)
def test_unaligned_vectors_are_refused(name, message):
    shapes = (4, 8), (4, 2), (2, 8)
    out, a, b = (host_array(np.zeros(s, np.float32)) for s in shapes)
    shape = (8,) if name == "bias" else (4, 8)
    array = host_array(np.zeros(np.prod(shape) + 1, np.float32)).array[1:].reshape(shape)
    with pytest.raises(ValueError, match=message + r".*multiple of 16 bytes"):
        blas.matmul(out, a, b, **{name: fake().HostArray(array)})


@pytest.mark.usefixtures("library")
def test_columns_that_cublaslt_has_no_gelu_for():
    with pytest.raises(ValueError, match=r"out has 12 columns; expected.* a multiple of 8"):
        Case((0, 5, 12, 3), options={"gelu": True}).run(host_array)


@pytest.mark.parametrize("other", [{"beta": 1.0}, {"gelu_aux": None}])
def test_add_excludes_what_else_reads_or_writes_a_matrix(other):
    x = np.zeros((8, 8), np.float32)
    with pytest.raises(ValueError, match="add goes with neither beta nor gelu_aux"):
        blas.matmul(x, x, x, add=x, **{k: x if v is None else v for k, v in other.items()})


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("start", [0, 63, 64])
def test_add_is_apart_from_out(start, on_device):
    memory, x = np.zeros(128, np.float32), np.ones((8, 8), np.float32)
    arrays = memory[:64].reshape(8, 8), x, x, memory[start : start + 64].reshape(8, 8)
    out, a, b, add = (fake().HostArray(y) if on_device else y for y in arrays)
    if start < 64:
        with pytest.raises(ValueError, match="add overlaps out; expected arrays of their own"):
            blas.matmul(out, a, b, add=add)
    else:
        blas.matmul(out, a, b, add=add)
        np.testing.assert_array_equal(memory, [8.0] * 64 + [0.0] * 64)


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


@pytest.mark.parametrize("name", ["add", "gelu_aux"])
def test_add_and_aux_have_the_shape_of_out(name):
    x = np.zeros((8, 8), np.float32)
    with pytest.raises(ValueError, match=name + r" \(8, 4\); expected.* add and gelu_aux like out"):
        blas.matmul(x, x, x, **{name: np.zeros((8, 4), np.float32)})


# Type characters of out, a, b, bias and gelu_aux: float32, float64, int32, bfloat16 (H).
WRONG_TYPES = [
    ("ffd", "a and b alike"),
    ("fdd", "of bfloat16 inputs"),
    ("dff", "of bfloat16 inputs"),
    ("Hff", "a bfloat16 out only of bfloat16 inputs"),
    ("fHf", "a and b alike"),
    ("HHHf", "a bfloat16 out takes a bfloat16 bias"),
    ("fHHH", "bias, add and gelu_aux like out"),
    ("HHHHf", "bias, add and gelu_aux like out"),
]


def arrays_of(types, make):
    shapes = (8, 8), (8, 8), (8, 8), (8,), (8, 8)
    arrays = [make(np.zeros(s, t)) for s, t in zip(shapes, types, strict=False)]
    return arrays[:3], dict(zip(("bias", "gelu_aux"), arrays[3:], strict=False))


@pytest.mark.parametrize(("types", "message"), [*WRONG_TYPES, ("iii", "one of float32, float64")])
def test_numpy_types_that_do_not_go_together(types, message):
    arrays, keywords = arrays_of(types, lambda array: array)
    with pytest.raises(TypeError, match=message):
        blas.matmul(*arrays, **keywords)


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize(
    ("types", "message"),
    [x for x in WRONG_TYPES if "d" not in x[0]]
    + [("iii", "a C-contiguous device array"), ("ddd", "a C-contiguous device array")],
)
def test_device_types_that_do_not_go_together(types, message):
    arrays, keywords = arrays_of(types, host_array)
    with pytest.raises(TypeError, match=message):
        blas.matmul(*arrays, **keywords)


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("make", [lambda array: array, host_array], ids=["NumPy", "device"])
def test_an_added_array_has_the_type_of_out(make):
    x = make(np.zeros((8, 8), np.uint16))
    with pytest.raises(TypeError, match="bias, add and gelu_aux like out"):
        blas.matmul(x, x, x, add=make(np.zeros((8, 8), np.float32)))


@pytest.mark.usefixtures("library")
def test_arrays_of_two_places():
    zeros = np.zeros((8, 8), np.float32)
    device = host_array(zeros)
    with pytest.raises(TypeError, match="a is a ndarray"):
        blas.matmul(device, zeros, device)
    with pytest.raises(TypeError, match="b is a HostArray"):
        blas.matmul(zeros, zeros, device)
    with pytest.raises(TypeError, match="gelu_aux is a ndarray"):
        blas.matmul(device, device, device, gelu_aux=zeros)


def test_precision_names():
    assert blas.precision() == "fp32"
    for name in PRECISIONS:
        blas.set_precision(name)
        assert blas.precision() == name
    with pytest.raises(UserError, match="'fp16'; expected one of fp32, tf32, bf16"):
        blas.set_precision("fp16")


# --- on the GPU ---


def from_gpu(array):
    return array.copy_to_host()


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
    assert case.error(case.run(cuda.to_device, from_gpu)) <= 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("transposes", TRANSPOSES)
@pytest.mark.parametrize("shape", SHAPES + LARGE_SHAPES)
def test_tf32_on_the_gpu(shape, transposes):
    blas.set_precision("tf32")
    case = Case(shape, transposes, {"beta": 1.0})
    assert case.error(case.run(cuda.to_device, from_gpu)) <= 2e-3


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "tf32"])
@pytest.mark.parametrize("transposes", TRANSPOSES)
@pytest.mark.parametrize("shape", [(0, 37, 36, 36), (3, 37, 12, 37), (0, 128, 256, 128)])
def test_unaligned_arrays_on_the_gpu(shape, transposes, precision):
    blas.set_precision(precision)
    case = Case(shape, transposes, {"beta": 1.0})
    result = case.run(offset_copy, from_gpu)
    assert case.error(result) <= (1e-5 if precision == "fp32" else 2e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("transposes", TRANSPOSES)
@pytest.mark.parametrize("storage", ["bfloat16", "bfloat16 to float32"])
@pytest.mark.parametrize("shape", [(0, 40, 64, 36), (3, 64, 32, 64), (0, 768, 768, 512)])
def test_bfloat16_on_the_gpu(shape, storage, transposes, options):
    """The gradient of a weight is the case of bfloat16 to float32 with a^T and beta = 1."""
    case = stored(shape, transposes, options, storage)
    tolerance = 4e-3 if storage == "bfloat16" else 1e-5
    assert case.error(case.run(cuda.to_device, from_gpu)) <= tolerance


GPU_TOLERANCES = {"fp32": 1e-5, "tf32": 2e-3, "bf16": 1e-2}


@pytest.mark.gpu
@pytest.mark.parametrize("options", GELU_OPTIONS, ids=str)
@pytest.mark.parametrize("transposes", [(False, True), (False, False)])
@pytest.mark.parametrize(
    "shape",
    [(0, 1, 8, 8), (0, 37, 144, 40), (3, 37, 24, 40), (0, 256, 3072, 768), (0, 999, 768, 3072)],
)
@pytest.mark.parametrize("precision", GPU_TOLERANCES)
def test_gelu_on_the_gpu(shape, transposes, options, precision):
    """Rows are vectors, as a model's are."""
    blas.set_precision(precision)
    case = stored(shape, transposes, options, "bfloat16" if precision == "bf16" else "float32")
    assert case.error(case.run(cuda.to_device, from_gpu)) <= GPU_TOLERANCES[precision]


@pytest.mark.gpu
@pytest.mark.parametrize("precision", GPU_TOLERANCES)
def test_gelu_of_offset_vectors_on_the_gpu(precision):
    """bias and aux on 16 bytes and no more, as a layer's slice may be."""
    blas.set_precision(precision)
    case = stored(
        (0, 64, 72, 64),
        (False, True),
        {"gelu": True, "bias": True},
        "bfloat16" if precision == "bf16" else "float32",
    )
    elements = 16 // case.out.itemsize

    def to_device(array):
        if not any(array is x for x in case.arrays.values()):
            return cuda.to_device(array)
        view = cuda.device_array(array.size + elements, array.dtype)[elements:]
        view = view.reshape(array.shape)
        view.copy_to_device(array)
        return view

    assert case.error(case.run(to_device, from_gpu)) <= GPU_TOLERANCES[precision]


ADD_SHAPES = [(0, 1, 1, 1), (0, 37, 36, 37), (0, 37, 144, 40), (3, 37, 12, 37), (0, 999, 768, 3072)]


@pytest.mark.gpu
@pytest.mark.parametrize("tuned", [True, False])
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("shape", ADD_SHAPES)
@pytest.mark.parametrize("precision", GPU_TOLERANCES)
def test_add_on_the_gpu(shape, with_bias, tuned, precision):
    """Also of an array that is aligned to one element and no more."""
    blas.set_precision(precision)
    blas.set_autotune(tuned)
    storage = "bfloat16" if precision == "bf16" else "float32"
    case = stored(shape, (False, True), {"add": True, "bias": with_bias}, storage)
    first, again = (case.run(cuda.to_device, from_gpu) for _ in range(2))
    assert case.error(first) <= GPU_TOLERANCES[precision]
    np.testing.assert_array_equal(first, again)

    def offset_add(array):
        if array is not case.arrays["add"]:
            return cuda.to_device(array)
        view = cuda.device_array(array.size + 1, array.dtype)[1:].reshape(array.shape)
        view.copy_to_device(array)
        return view

    assert case.error(case.run(offset_add, from_gpu)) <= GPU_TOLERANCES[precision]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("size", "with_bias"), [(8, True), (40, True), (768, True), (37, False), (64, False)]
)
def test_a_bfloat16_sum_with_add_is_rounded_once_on_the_gpu(size, with_bias):
    sum_that_bfloat16_rounds_to_258(size, with_bias, cuda.to_device, from_gpu)


@pytest.mark.gpu
def test_layers_share_a_plan_on_the_gpu():
    cases = [Case((0, 37, 36, 36), options={"bias": True}) for _ in range(2)]
    cases[1].arrays["bias"] += 1.0
    cases[1].expected += 1.0
    cases[0].run(cuda.to_device)
    before = cublaslt.plan_for.cache_info()
    for case in cases:
        assert case.error(case.run(cuda.to_device, from_gpu)) <= 1e-5
    after = cublaslt.plan_for.cache_info()
    assert (after.misses, after.hits) == (before.misses, before.hits + 2)


@pytest.mark.gpu
def test_repeats_are_bit_identical_on_the_gpu():
    results = [Case((0, 300, 96, 5000)).run(cuda.to_device, from_gpu) for _ in range(2)]
    np.testing.assert_array_equal(*results)
