"""gelu_forward and gelu_backward against NumPy, and NumPy against finite differences."""

import math

import numpy as np
import pytest
from check import Place, finite_difference, poisoned, relative_error

from numbagpt.gpu.vec import bf16_to_float32, float32_to_bf16
from numbagpt.ops.gelu import (
    gelu_backward,
    gelu_backward_reference,
    gelu_backward_scratch,
    gelu_forward,
    gelu_forward_reference,
)

SHAPES = [(1, 1, 4), (2, 37, 36), (3, 5, 128), (1, 2, 3072)]
# One row; strips of columns and chunks of rows that are not full; several of both.
BF16_SHAPES = [(1, 1, 8), (2, 37, 40), (1, 301, 264), (3, 5, 512)]
# Far out in both tails, where exp overflows or vanishes, and around zero.
EXTREMES = np.array([-3e4, -100, -12, -1e-6, 0, 1e-6, 12, 100, 3e4, 1e6, -1e6, 2], np.float32)


def expected_forward(inp: np.ndarray) -> np.ndarray:
    out = poisoned(inp.shape, np.float64)
    gelu_forward_reference(out, inp.astype(np.float64))
    return out


def expected_backward(inp: np.ndarray, dout: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """dinp, and dbias where it was zero."""
    dinp, dbias = poisoned(inp.shape, np.float64), np.zeros(inp.shape[-1])
    gelu_backward_reference(dinp, dbias, dout.astype(np.float64), inp.astype(np.float64), None)
    return dinp, dbias


def scratch_for(inp: np.ndarray) -> np.ndarray:
    C = inp.shape[-1]
    return poisoned(gelu_backward_scratch(inp.size // C, C))


@pytest.mark.parametrize("shape", SHAPES)
def test_forward(place: Place, shape: tuple) -> None:
    inp = np.random.default_rng(1).normal(0, 2, shape).astype(np.float32)
    out = poisoned(shape)
    place.run(gelu_forward, out, inp)
    assert relative_error(out, expected_forward(inp)) <= 1e-6


@pytest.mark.parametrize("shape", [*SHAPES, (1, 301, 264)])
def test_backward(place: Place, shape: tuple) -> None:
    rng = np.random.default_rng(2)
    inp = rng.normal(0, 2, shape).astype(np.float32)
    dout = (rng.standard_normal(shape) + 1).astype(np.float32)
    before = rng.standard_normal(shape[-1]).astype(np.float32)
    dinp, dbias = poisoned(shape), before.copy()
    place.run(gelu_backward, dinp, dbias, dout, inp, scratch_for(inp))
    expected_dinp, sums = expected_backward(inp, dout)
    assert relative_error(dinp, expected_dinp) <= 1e-6
    assert relative_error(dbias, before + sums) <= 1e-6


def test_backward_over_its_own_dout(place: Place) -> None:
    rng = np.random.default_rng(3)
    inp, dout = rng.standard_normal((2, 2, 37, 36)).astype(np.float32)
    expected_dinp, sums = expected_backward(inp, dout)
    dbias = np.zeros(36, np.float32)
    place.run(gelu_backward, dout, dbias, dout, inp, scratch_for(inp))
    assert relative_error(dout, expected_dinp) <= 1e-6
    assert relative_error(dbias, sums) <= 1e-6


def test_extremes(place: Place) -> None:
    out, dinp = poisoned(EXTREMES.shape), poisoned(EXTREMES.shape)
    place.run(gelu_forward, out, EXTREMES)
    dbias = np.zeros_like(EXTREMES)
    place.run(gelu_backward, dinp, dbias, np.ones_like(EXTREMES), EXTREMES, scratch_for(EXTREMES))
    np.testing.assert_array_equal(dbias, dinp)  # sums of one row
    positive, negative = EXTREMES >= 12, EXTREMES <= -12
    np.testing.assert_allclose(out[positive], EXTREMES[positive], rtol=1e-6)
    np.testing.assert_allclose(dinp[positive], 1, rtol=1e-6)
    np.testing.assert_allclose(out[negative] / EXTREMES[negative], 0, atol=1e-30)
    np.testing.assert_allclose(dinp[negative], 0, atol=1e-12)
    small = np.abs(EXTREMES) <= 1e-6
    np.testing.assert_allclose(out[small], EXTREMES[small] / 2, rtol=1e-5)
    np.testing.assert_allclose(dinp[small], 0.5, rtol=1e-5)


def test_negative_tail_keeps_relative_precision(place: Place) -> None:
    inp = np.linspace(-5, -2, 64, dtype=np.float32)
    out = poisoned(inp.shape)
    place.run(gelu_forward, out, inp)
    np.testing.assert_allclose(out, expected_forward(inp), rtol=1e-5)


@pytest.mark.ampere
@pytest.mark.parametrize("shape", BF16_SHAPES)
def test_bf16(place: Place, shape: tuple) -> None:
    rng = np.random.default_rng(4)
    inp = float32_to_bf16(rng.standard_normal(shape))
    dout = float32_to_bf16(rng.standard_normal(shape) + 1)
    before = rng.standard_normal(shape[-1]).astype(np.float32)
    out, dinp = np.full((2, *shape), 0x7FC0, np.uint16)  # NaN
    dbias = before.copy()
    place.run(gelu_forward, out, inp)
    place.run(gelu_backward, dinp, dbias, dout, inp, scratch_for(inp))
    x, d = bf16_to_float32(inp), bf16_to_float32(dout)
    expected_dinp, sums = expected_backward(x, d)
    # bf16 has 8 significant bits: rounding errs by at most 2^-8 of a value.
    assert relative_error(bf16_to_float32(out), expected_forward(x)) <= 2**-8
    assert relative_error(bf16_to_float32(dinp), expected_dinp) <= 2**-8
    assert relative_error(dbias, before + sums) <= 1e-6  # of what is not rounded yet


@pytest.mark.gpu
@pytest.mark.parametrize("N", [4096, 16384 + 37])
@pytest.mark.parametrize("storage", [np.float32, pytest.param(np.uint16, marks=pytest.mark.ampere)])
def test_backward_at_full_size(storage: type, N: int) -> None:
    """Over its own dout, as the model has it; and the same bits again."""
    rng = np.random.default_rng(8)
    arrays = rng.standard_normal((2, N, 3072), np.float32)
    inp, dout = arrays if storage is np.float32 else float32_to_bf16(arrays)
    x, d = arrays if storage is np.float32 else (bf16_to_float32(a) for a in (inp, dout))
    results = []
    for _ in range(2):
        dinp, dbias = dout.copy(), np.zeros(3072, np.float32)
        Place("cuda").run(gelu_backward, dinp, dbias, dinp, inp, scratch_for(inp))
        results.append((dinp, dbias))
    (dinp, dbias), again = results
    expected_dinp, sums = expected_backward(x, d)
    if storage is np.uint16:
        assert relative_error(bf16_to_float32(dinp), expected_dinp) <= 2**-8
    else:
        assert relative_error(dinp, expected_dinp) <= 1e-6
    assert relative_error(dbias, sums) <= 1e-6
    np.testing.assert_array_equal(dinp, again[0])
    np.testing.assert_array_equal(dbias, again[1])


def test_forward_reference_is_the_formula() -> None:
    inp = np.random.default_rng(5).normal(0, 3, 100)
    formula = [x / 2 * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) for x in inp]
    assert relative_error(expected_forward(inp), formula) <= 1e-14


def test_backward_reference_is_the_slope() -> None:
    rng = np.random.default_rng(6)
    inp, dout = rng.normal(0, 2, (2, 2, 5, 12))
    slope = finite_difference(expected_forward, inp, dout)
    dinp, sums = expected_backward(inp, dout)
    assert relative_error(dinp, slope) <= 1e-8
    assert relative_error(sums, slope.sum(axis=(0, 1))) <= 1e-8


def test_references_in_float32() -> None:
    rng = np.random.default_rng(7)
    inp, dout = rng.normal(0, 2, (2, 2, 37, 36)).astype(np.float32)
    out, dinp, dbias = poisoned(inp.shape), poisoned(inp.shape), np.zeros(36, np.float32)
    gelu_forward_reference(out, inp)
    gelu_backward_reference(dinp, dbias, dout, inp, None)
    expected_dinp, sums = expected_backward(inp, dout)
    assert relative_error(out, expected_forward(inp)) <= 1e-6
    assert relative_error(dinp, expected_dinp) <= 1e-6
    assert relative_error(dbias, sums) <= 1e-6
