"""Linear layers: the products, what is added to and what is overwritten, and the sum over rows."""

import numpy as np
import pytest
from check import Place, finite_difference, poisoned, relative_error

from numbagpt.gpu.vec import bf16_to_float32, float32_to_bf16
from numbagpt.ops.matmul import (
    matmul_backward,
    matmul_backward_bias,
    matmul_backward_bias_reference,
    matmul_backward_bias_scratch,
    matmul_backward_reference,
    matmul_backward_weight,
    matmul_forward,
    matmul_forward_reference,
    matmul_gelu_forward,
    matmul_gelu_forward_reference,
    transpose_pays,
)

BF16 = pytest.param(np.uint16, marks=pytest.mark.ampere, id="bf16")
FLOAT32 = pytest.param(np.float32, id="float32")
# Relative error of a product that is rounded to its storage.
TOLERANCE = {np.float32: 1e-5, np.uint16: 4e-3}

# B, T, C, OC
SHAPES = [(1, 1, 4, 4), (2, 37, 36, 108), (3, 5, 36, 144)]
# N, OC: one row; a column block that is not full; several of them and several chunks of rows
SUMS = [(1, 4), (37, 36), (37, 128), (301, 264)]


@pytest.fixture
def rng():
    return np.random.default_rng(42)


def random(rng, *shape):
    return rng.standard_normal(shape).astype(np.float32)


def as_stored(array, storage):
    return float32_to_bf16(array) if storage is np.uint16 else array


def values(array):
    """In float64, of float32 or bf16."""
    return (bf16_to_float32(array) if array.dtype == np.uint16 else array).astype(np.float64)


def poisoned_as(storage, shape):
    return as_stored(poisoned(shape), storage)


@pytest.mark.parametrize("with_bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_forward(place, rng, shape, with_bias):
    B, T, C, OC = shape
    inp, weight = random(rng, B, T, C), random(rng, OC, C)
    bias = random(rng, OC) if with_bias else None
    expected = np.einsum("btc,oc->bto", inp.astype(np.float64), weight.astype(np.float64))
    if with_bias:
        expected += bias
    out = poisoned((B, T, OC))
    place.run(matmul_forward, out, inp, weight, bias)
    assert relative_error(out, expected) <= 1e-5
    matmul_forward_reference(out := poisoned((B, T, OC)), inp, weight, bias)
    assert relative_error(out, expected) <= 1e-5


@pytest.mark.parametrize("with_bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_forward_into_the_residual_stream(place, rng, shape, with_bias):
    B, T, C, OC = shape
    inp, weight, residual = random(rng, B, T, C), random(rng, OC, C), random(rng, B, T, OC)
    bias = random(rng, OC) if with_bias else None
    expected = np.einsum("btc,oc->bto", inp.astype(np.float64), weight.astype(np.float64))
    expected += residual
    if with_bias:
        expected += bias
    for forward in (lambda *arrays: place.run(matmul_forward, *arrays), matmul_forward_reference):
        out = poisoned((B, T, OC))
        forward(out, inp, weight, bias, residual)
        assert relative_error(out, expected) <= 1e-5


@pytest.mark.ampere
@pytest.mark.parametrize("shape", [(1, 1, 8, 8), (2, 37, 40, 72)], ids=str)
def test_bf16_forward_into_the_residual_stream(place, rng, shape):
    B, T, C, OC = shape
    arrays = random(rng, B, T, C), random(rng, OC, C), random(rng, OC), random(rng, B, T, OC)
    stored = [float32_to_bf16(array) for array in arrays]
    wide = [bf16_to_float32(array).astype(np.float64) for array in stored]
    matmul_forward_reference(expected := poisoned((B, T, OC), np.float64), *wide)
    out = np.full((B, T, OC), 0x7FC0, np.uint16)  # NaN
    place.run(matmul_forward, out, *stored)
    assert relative_error(bf16_to_float32(out), expected) <= 4e-3


def gelu(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


@pytest.mark.parametrize("storage", [FLOAT32, BF16])
@pytest.mark.parametrize("shape", [(1, 1, 8, 8), (2, 37, 40, 144)], ids=str)
def test_gelu_forward(place, rng, shape, storage):
    """Both the sum and its GELU are kept."""
    B, T, C, OC = shape
    arrays = random(rng, B, T, C), random(rng, OC, C) / 3, random(rng, OC)
    inp, weight, bias = (as_stored(a, storage) for a in arrays)
    out, pre = poisoned_as(storage, (B, T, OC)), poisoned_as(storage, (B, T, OC))
    place.run(matmul_gelu_forward, out, pre, inp, weight, bias)
    expected = values(inp) @ values(weight).T + values(bias)
    assert relative_error(values(pre), expected) <= TOLERANCE[storage]
    assert relative_error(values(out), gelu(expected)) <= TOLERANCE[storage]


@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float32, 1e-6), (np.float64, 1e-14)])
def test_gelu_forward_reference(rng, dtype, tolerance):
    B, T, C, OC = 2, 3, 4, 5
    inp, weight = rng.standard_normal((B, T, C)), rng.standard_normal((OC, C))
    bias = rng.standard_normal(OC)
    out, pre = poisoned((B, T, OC), dtype), poisoned((B, T, OC), dtype)
    matmul_gelu_forward_reference(out, pre, *(a.astype(dtype) for a in (inp, weight, bias)))
    expected = inp @ weight.T + bias
    assert relative_error(pre, expected) <= tolerance
    assert relative_error(out, gelu(expected)) <= tolerance


@pytest.mark.parametrize("with_bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_backward(place, rng, shape, with_bias):
    B, T, C, OC = shape
    inp, weight, dout = random(rng, B, T, C), random(rng, OC, C), random(rng, B, T, OC)
    dweight, dbias = random(rng, OC, C), random(rng, OC) if with_bias else None
    wide = [
        None if a is None else a.astype(np.float64) for a in (dweight, dbias, dout, inp, weight)
    ]
    expected_dinp = poisoned((B, T, C), np.float64)
    matmul_backward_reference(expected_dinp, *wide, None)

    dinp, scratch = poisoned((B, T, C)), poisoned(matmul_backward_bias_scratch(B * T, OC))
    place.run(matmul_backward, dinp, dweight, dbias, dout, inp, weight, scratch)
    assert relative_error(dinp, expected_dinp) <= 1e-5
    assert relative_error(dweight, wide[0]) <= 1e-5
    if with_bias:
        assert relative_error(dbias, wide[1]) <= 1e-5


@pytest.mark.parametrize("storage", [FLOAT32, BF16])
@pytest.mark.parametrize("shape", [(1, 1, 8, 8), (2, 37, 40, 144)], ids=str)
def test_backward_overwrites(place, rng, shape, storage):
    """Without accumulate dweight is not read; dbias is added to all the same."""
    B, T, C, OC = shape
    arrays = random(rng, B, T, OC), random(rng, B, T, C), random(rng, OC, C)
    dout, inp, weight = (as_stored(a, storage) for a in arrays)
    dinp, dweight, dbias = poisoned_as(storage, (B, T, C)), poisoned((OC, C)), random(rng, OC)
    expected_dbias = dbias + values(dout).sum(axis=(0, 1))
    scratch = poisoned(matmul_backward_bias_scratch(B * T, OC))
    arrays = (dinp, dweight, dbias, dout, inp, weight, scratch)
    place.run(matmul_backward, *arrays, accumulate=False)
    expected = values(dout).reshape(-1, OC).T @ values(inp).reshape(-1, C)
    assert relative_error(dweight, expected) <= 1e-5
    assert relative_error(values(dinp), values(dout) @ values(weight)) <= TOLERANCE[storage]
    assert relative_error(dbias, expected_dbias) <= 1e-6


@pytest.mark.parametrize("accumulate", [True, False], ids=["add", "overwrite"])
@pytest.mark.parametrize("shape", [(1, 1, 4, 4), (2, 37, 36, 108), (3, 5, 144, 36)], ids=str)
def test_backward_weight_by_a_transpose(place, rng, shape, accumulate):
    """The transpose is that of inp, or of dout where that is narrower."""
    B, T, C, OC = shape
    dout, inp = random(rng, B, T, OC), random(rng, B, T, C)
    dweight = random(rng, OC, C) if accumulate else poisoned((OC, C))
    expected = values(dout).reshape(-1, OC).T @ values(inp).reshape(-1, C)
    if accumulate:
        expected += dweight
    room = poisoned(B * T * min(C, OC) + 1)
    place.run(matmul_backward_weight, dweight, dout, inp, accumulate=accumulate, transposed=room)
    assert relative_error(dweight, expected) <= 1e-5
    narrower = inp.reshape(-1, C) if C <= OC else dout.reshape(-1, OC)
    np.testing.assert_array_equal(room[:-1], narrower.T.ravel())
    assert np.isnan(room[-1])


def test_room_for_a_transpose_must_suffice(rng):
    dout, inp, room = random(rng, 3, 8), random(rng, 3, 4), poisoned(11)
    with pytest.raises(ValueError, match=r"transposed has 11 elements, .* at least 12"):
        matmul_backward_weight(poisoned((8, 4)), dout, inp, transposed=room)


def test_transpose_pays():
    assert transpose_pays("tf32", (9, 0))
    assert not transpose_pays("bf16", (9, 0))
    assert not transpose_pays("tf32", (8, 0))


def test_backward_reference_overwrites(rng):
    dout, inp, weight = (rng.standard_normal(size) for size in ((2, 3, 5), (2, 3, 4), (5, 4)))
    dinp, dweight = poisoned((2, 3, 4), np.float64), poisoned((5, 4), np.float64)
    matmul_backward_reference(dinp, dweight, None, dout, inp, weight, None, accumulate=False)
    np.testing.assert_allclose(dweight, np.einsum("bto,btc->oc", dout, inp), rtol=1e-12)
    np.testing.assert_allclose(dinp, dout @ weight, rtol=1e-12)


@pytest.mark.parametrize("shape", SUMS, ids=str)
def test_backward_bias(place, rng, shape):
    N, OC = shape
    dout, dbias = random(rng, N, OC) + 1, random(rng, OC)
    expected = dbias + dout.sum(axis=0, dtype=np.float64)
    scratch = poisoned(matmul_backward_bias_scratch(N, OC))
    place.run(matmul_backward_bias, dbias, dout, scratch)
    assert relative_error(dbias, expected) <= 1e-6


@pytest.mark.ampere
@pytest.mark.parametrize("shape", [(1, 8), (37, 40), (301, 264)], ids=str)
def test_backward_bias_of_bf16(place, rng, shape):
    N, OC = shape
    dout, dbias = float32_to_bf16(random(rng, N, OC) + 1), random(rng, OC)
    expected = dbias + bf16_to_float32(dout).sum(axis=0, dtype=np.float64)
    scratch = poisoned(matmul_backward_bias_scratch(N, OC))
    place.run(matmul_backward_bias, dbias, dout, scratch)
    assert relative_error(dbias, expected) <= 1e-6


def test_references_against_finite_differences(rng):
    B, T, C, OC = 2, 3, 4, 5
    inp, weight = rng.standard_normal((B, T, C)), rng.standard_normal((OC, C))
    bias, dout = rng.standard_normal(OC), rng.standard_normal((B, T, OC))

    def forward(inp, weight, bias):
        matmul_forward_reference(out := poisoned((B, T, OC), np.float64), inp, weight, bias)
        return out

    dinp, dweight, dbias = poisoned((B, T, C), np.float64), np.ones((OC, C)), np.ones(OC)
    matmul_backward_reference(dinp, dweight, dbias, dout, inp, weight, None)
    numeric = finite_difference(lambda x: forward(x, weight, bias), inp, dout)
    assert relative_error(dinp, numeric) <= 1e-8
    numeric = finite_difference(lambda x: forward(inp, x, bias), weight, dout)
    assert relative_error(dweight - 1, numeric) <= 1e-8
    numeric = finite_difference(lambda x: forward(inp, weight, x), bias, dout)
    assert relative_error(dbias - 1, numeric) <= 1e-8


def test_references_without_bias(rng):
    inp, weight, dout = random(rng, 2, 4), random(rng, 8, 4), random(rng, 2, 8)
    matmul_forward_reference(out := poisoned((2, 8)), inp, weight, None)
    np.testing.assert_allclose(out, inp @ weight.T, rtol=1e-5)
    dinp, dweight = poisoned((2, 4)), np.zeros((8, 4), np.float32)
    matmul_backward_reference(dinp, dweight, None, dout, inp, weight, None)
    np.testing.assert_allclose(dinp, dout @ weight, rtol=1e-5)


def test_bias_reference_sums_leading_axes(rng):
    dout = rng.standard_normal((2, 3, 4))
    dbias = np.arange(4.0)
    matmul_backward_bias_reference(dbias, dout, None)
    np.testing.assert_allclose(dbias, np.arange(4) + np.einsum("btc->c", dout), rtol=1e-12)


@pytest.mark.gpu
def test_reruns_give_the_same_bits(rng):
    N, OC = 4099, 768
    dout, first = random(rng, N, OC), random(rng, OC)
    second = first.copy()
    for dbias in (first, second):
        scratch = poisoned(matmul_backward_bias_scratch(N, OC))
        Place("cuda").run(matmul_backward_bias, dbias, dout, scratch)
    np.testing.assert_array_equal(first, second)


@pytest.mark.gpu
@pytest.mark.slow
def test_bias_offsets_past_two_to_the_31(rng):
    from numbagpt.device import CudaDevice

    device = CudaDevice()
    N, OC = 700_001, 3072
    assert N * OC > 2**31
    dout = device.zeros(N * OC)
    row = random(rng, OC)
    device.upload(dout[(N - 1) * OC :], row)
    dbias, scratch = device.zeros(OC), device.zeros(matmul_backward_bias_scratch(N, OC))
    matmul_backward_bias(dbias, dout.reshape((N, OC)), scratch)
    np.testing.assert_array_equal(device.to_host(dbias), row)
