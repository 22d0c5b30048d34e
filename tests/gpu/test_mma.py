"""Tensor-core products and ldmatrix against NumPy: operands laid out by hand, results gathered."""

import numpy as np
import pytest
from check import poisoned
from numba import cuda, float32, int32, uint16, void

from numbagpt.gpu.kernel import kernel
from numbagpt.gpu.mma import (
    ldmatrix,
    ldmatrix_transposed,
    mma_bf16,
    mma_tf32,
    round_to_tf32,
    round_word_to_tf32,
)
from numbagpt.gpu.vec import bf16_to_float32, float32_to_bf16

pytestmark = pytest.mark.ampere


@pytest.fixture
def rng():
    return np.random.default_rng(5)


@kernel(void(float32[::1], int32[::1], int32[::1]), max_threads=32, minimum=(8, 0))
def bf16_product_kernel(c, a, b):
    """c += a b, from and to registers that are neither the first nor the last of their arrays."""
    acc = cuda.local.array(12, float32)
    left = cuda.local.array(12, int32)
    right = cuda.local.array(6, int32)
    lane = int32(cuda.threadIdx.x)
    for i in range(4):
        acc[4 + i] = c[4 * lane + i]
        left[4 + i] = a[4 * lane + i]
    for i in range(2):
        right[2 + i] = b[2 * lane + i]
    mma_bf16(acc, 4, left, 4, right, 2)
    for i in range(4):
        c[4 * lane + i] = acc[4 + i]


@kernel(void(float32[::1], int32[::1], int32[::1]), max_threads=32, minimum=(8, 0))
def tf32_product_kernel(c, a, b):
    acc = cuda.local.array(4, float32)
    left = cuda.local.array(4, int32)
    right = cuda.local.array(2, int32)
    lane = int32(cuda.threadIdx.x)
    for i in range(4):
        acc[i] = c[4 * lane + i]
        left[i] = a[4 * lane + i]
    for i in range(2):
        right[i] = b[2 * lane + i]
    mma_tf32(acc, 0, left, 0, right, 0)
    for i in range(4):
        c[4 * lane + i] = acc[i]


def lane_of(g, q):
    return 4 * g + q


def left_words(rows):
    """(32, 4) registers for A, from its rows (16, 8) as words."""
    registers = np.empty((32, 4), np.int32)
    for g, q, r, h in np.ndindex(8, 4, 2, 2):
        registers[lane_of(g, q), r + 2 * h] = rows[g + 8 * r, q + 4 * h]
    return registers


def right_words(columns):
    """(32, 2) registers for B, from its columns (8, 8) as words."""
    registers = np.empty((32, 2), np.int32)
    for g, q, h in np.ndindex(8, 4, 2):
        registers[lane_of(g, q), h] = columns[g, q + 4 * h]
    return registers


def gathered(acc):
    """The 16 x 8 matrix of the registers (32, 4)."""
    matrix = np.empty((16, 8), np.float32)
    for g, q, r, c in np.ndindex(8, 4, 2, 2):
        matrix[g + 8 * r, 2 * q + c] = acc[lane_of(g, q), 2 * r + c]
    return matrix


def test_bf16_product(place, rng):
    a = float32_to_bf16(rng.standard_normal((16, 16)))
    columns = float32_to_bf16(rng.standard_normal((8, 16)))
    c = rng.standard_normal((32, 4)).astype(np.float32)
    before = gathered(c)
    left, right = left_words(a.view(np.int32)), right_words(columns.view(np.int32))
    place.run(bf16_product_kernel[1, 32], c, left, right)
    product = bf16_to_float32(a).astype(np.float64) @ bf16_to_float32(columns).T
    np.testing.assert_allclose(gathered(c), before + product, atol=2e-6)


def test_tf32_product(place, rng):
    """The lower 13 bits of the operands count for nothing."""
    a, columns = rng.standard_normal((2, 16, 8)).astype(np.float32)
    columns = np.ascontiguousarray(columns[:8])
    c = rng.standard_normal((32, 4)).astype(np.float32)
    before = gathered(c)
    left, right = left_words(a.view(np.int32)), right_words(columns.view(np.int32))
    place.run(tf32_product_kernel[1, 32], c, left, right)
    truncated = [(x.view(np.int32) & ~0x1FFF).view(np.float32) for x in (a, columns)]
    product = truncated[0].astype(np.float64) @ truncated[1].T
    np.testing.assert_allclose(gathered(c), before + product, atol=2e-6)


@kernel(void(int32[::1], int32[::1], float32[::1]), max_threads=32, minimum=(8, 0))
def round_kernel(rounded, words, x):
    word = cuda.local.array(2, int32)
    i = int32(cuda.threadIdx.x)
    rounded[i] = round_to_tf32(x[i])
    word[1] = words[i]
    round_word_to_tf32(word, 1)
    words[i] = word[1]


def test_rounding_to_tf32(place):
    step = 2.0**-10  # of TF32 between 1 and 2
    cases = {
        1.0: 1.0,
        1 + 0.49 * step: 1.0,
        1 + 0.5 * step: 1 + step,  # a tie, away from zero
        1 + 0.51 * step: 1 + step,
        1 + 1.5 * step: 1 + 2 * step,
        2 - 0.25 * step: 2.0,
        0.0: 0.0,
        np.inf: np.inf,
        float(np.finfo(np.float32).max): np.inf,
        np.nan: np.nan,
        1e30: None,
        3.14159: None,
        1e-30: None,
    }
    x = np.array([s * v for v in cases for s in (1, -1)], np.float32)
    x = np.resize(x, 32)
    x.view(np.int32)[-1] = 0x7FFFFFFF  # the NaN that GPUs make
    expected = np.array([s * v for v in cases.values() if v is not None for s in (1, -1)])
    rounded, words = poisoned(32).view(np.int32), x.copy().view(np.int32)
    place.run(round_kernel[1, 32], rounded, words, x)
    np.testing.assert_array_equal(rounded, words)
    found = (rounded & ~0x1FFF).view(np.float32)  # as mma_tf32 reads it
    np.testing.assert_array_equal(found[: expected.size], expected)
    assert np.isnan(found[-1])
    finite = np.isfinite(found)
    x, found = x[finite], found[finite]
    assert (np.abs(found - x) <= np.abs(x) * 2.0**-11).all()


@kernel(
    void(int32[::1], int32[::1], uint16[::1], int32[::1]),
    void(int32[::1], int32[::1], float32[::1], int32[::1]),
    max_threads=32,
    minimum=(8, 0),
)
def ldmatrix_kernel(out, transposed, rows, places):
    """Rows of 16 bytes go to places in shared memory; ldmatrix reads them in their order again."""
    tile = cuda.shared.array(0, rows.dtype, alignment=128)
    words = cuda.local.array(8, int32)
    lane = int32(cuda.threadIdx.x)
    n = rows.size // 32
    for i in range(n):
        tile[places[lane] * n + i] = rows[lane * n + i]
    cuda.syncwarp()
    ldmatrix(words, 4, tile, places[lane] * n)
    for i in range(4):
        out[4 * lane + i] = words[4 + i]
    ldmatrix_transposed(words, 0, tile, places[lane] * n)
    for i in range(4):
        transposed[4 * lane + i] = words[i]


@pytest.mark.parametrize("storage", [np.uint16, np.float32])
def test_ldmatrix(place, rng, storage):
    bits = rng.integers(0, 2**15, (4, 8, 8)).astype(np.uint16)  # matrix, row, 16-bit column
    out, transposed = (np.full((32, 4), -1, np.int32) for _ in range(2))
    places = rng.permutation(32).astype(np.int32)
    rows = bits.reshape(32, 8).view(storage)
    place.run(ldmatrix_kernel[1, 32, 512], out, transposed, rows, places)
    for m in range(4):
        for g, q in np.ndindex(8, 4):
            lane = lane_of(g, q)
            low, high = bits[m, g, 2 * q], bits[m, g, 2 * q + 1]
            assert out[lane, m] == int(low) | int(high) << 16
            low, high = bits[m, 2 * q, g], bits[m, 2 * q + 1, g]
            assert transposed[lane, m] == int(low) | int(high) << 16
