"""Hopper's products against NumPy: operands laid out by hand, results gathered by hand."""

import numpy as np
import pytest
from check import poisoned
from numba import cuda, float32, int32, uint16, void

from numbagpt.gpu import offline
from numbagpt.gpu.kernel import Kernel, kernel
from numbagpt.gpu.ptx import fence_async_proxy, pack_bf16_in_order
from numbagpt.gpu.simulator import SimulatorError
from numbagpt.gpu.vec import bf16_to_float32, float32_to_bf16
from numbagpt.gpu.wgmma import wgmma_ab, wgmma_abt, wgmma_wait

pytestmark = pytest.mark.hopper


def make_product_kernel(N: int, K: int, HS: int) -> Kernel:
    """(A B^T) D with A 64 x K, B N x K and D N x HS; A B^T is rounded to bf16 in between."""
    A, B, D = 64 * K, N * K, N * HS
    SCORES, PACKED, ACC = N // 2, N // 4, HS // 2

    @kernel(void(float32[::1], float32[::1], uint16[::1]), max_threads=128, exactly=(9, 0))
    def product_kernel(scores, out, tiles):
        tile = cuda.shared.array(0, uint16, alignment=1024)
        s = cuda.local.array(SCORES, float32)
        p = cuda.local.array(PACKED, int32)
        o = cuda.local.array(ACC, float32)
        thread = int32(cuda.threadIdx.x)
        for i in range(thread, A + B + D, 128):
            tile[i] = tiles[i]
        fence_async_proxy()
        cuda.syncthreads()
        wgmma_abt(s, tile, 0, tile, A, N, K)
        wgmma_wait(s, SCORES, 0)
        for i in range(PACKED):
            p[i] = pack_bf16_in_order(s[2 * i], s[2 * i + 1])
        for i in range(ACC):
            o[i] = float32(i)
        wgmma_ab(o, p, tile, A + B, N, HS)
        wgmma_wait(o, ACC, 0)
        for i in range(SCORES):
            scores[thread * SCORES + i] = s[i]
        for i in range(ACC):
            out[thread * ACC + i] = o[i]

    product_kernel.__name__ += f"_{N}_{K}_{HS}"
    return product_kernel


SHAPES = [(64, 64, 64), (64, 128, 128), (32, 128, 128), (64, 64, 128), (32, 64, 64)]
KERNELS = {shape: make_product_kernel(*shape) for shape in SHAPES}


def swizzled(matrix):
    """A tile: panels of 64 columns, rows of 8 chunks, chunk c of row r at c ^ (r % 8)."""
    rows, columns = matrix.shape
    tile = np.empty((columns // 64, rows, 8, 8), np.uint16)
    for panel, r, c in np.ndindex(columns // 64, rows, 8):
        start = 64 * panel + 8 * c
        tile[panel, r, c ^ (r % 8)] = matrix[r, start : start + 8]
    return tile.reshape(-1)


def gathered(registers):
    """The 64-row matrix whose fragments the 128 threads hold in `registers` (128, columns / 2)."""
    matrix = np.empty((64, 2 * registers.shape[1]), np.float32)
    for thread, i in np.ndindex(*registers.shape):
        warp, lane = divmod(thread, 32)
        n, r, c = i // 4, i // 2 % 2, i % 2
        matrix[16 * warp + lane // 4 + 8 * r, 8 * n + 2 * (lane % 4) + c] = registers[thread, i]
    return matrix


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products(place, shape):
    N, K, HS = shape
    generator = np.random.default_rng(N + K + HS)
    a, b, d = (
        float32_to_bf16(generator.standard_normal(size)) for size in ((64, K), (N, K), (N, HS))
    )
    tiles = np.concatenate([swizzled(m) for m in (a, b, d)])
    scores, out = poisoned((128, N // 2)), poisoned((128, HS // 2))
    place.run(KERNELS[shape][1, 128, 2 * tiles.size], scores, out, tiles)

    a, b, d = (bf16_to_float32(m).astype(np.float64) for m in (a, b, d))
    scores = gathered(scores)
    np.testing.assert_allclose(scores, a @ b.T, atol=1e-4)
    rounded = bf16_to_float32(float32_to_bf16(scores)).astype(np.float64)
    initial = gathered(np.tile(np.arange(HS // 2, dtype=np.float32), (128, 1)))
    np.testing.assert_allclose(gathered(out), initial + rounded @ d, atol=2e-3)


@kernel(void(float32[::1], uint16[::1]), max_threads=128, exactly=(9, 0))
def waiting_kernel(out, tiles):
    """Two scores and a sum of two products: what their registers hold as each is waited for."""
    tile = cuda.shared.array(0, uint16, alignment=1024)
    first = cuda.local.array(32, float32)
    second = cuda.local.array(32, float32)
    p = cuda.local.array(16, int32)
    total = cuda.local.array(32, float32)
    thread = int32(cuda.threadIdx.x)
    for i in range(thread, 4096, 128):
        tile[i] = tiles[i]
    for i in range(16):
        p[i] = pack_bf16_in_order(float32(1), float32(1))
    for i in range(32):
        total[i] = float32(0)
    fence_async_proxy()
    cuda.syncthreads()
    wgmma_abt(first, tile, 0, tile, 0, 64, 64)
    wgmma_abt(second, tile, 0, tile, 0, 64, 64)
    out[thread] = first[0]
    wgmma_wait(second, 32, 1)  # first has finished, but second is named
    out[128 + thread] = first[0] + second[0]
    wgmma_wait(first, 32, 1)
    out[256 + thread] = first[0]
    out[384 + thread] = second[0]
    wgmma_wait(second, 32, 0)
    out[512 + thread] = second[0]
    wgmma_ab(total, p, tile, 0, 64, 64)
    wgmma_ab(total, p, tile, 0, 64, 64)
    wgmma_wait(total, 32, 1)  # the second still adds to it
    out[640 + thread] = total[0]
    wgmma_wait(total, 32, 0)
    out[768 + thread] = total[0]


def test_the_simulator_gives_a_product_when_it_is_waited_for():
    ones = float32_to_bf16(np.ones(4096, np.float32))
    out = poisoned((7, 128))
    waiting_kernel[1, 128, 8192](out, ones)
    found = np.where(np.isnan(out), -1, out)
    expected = [-1, -1, 64, -1, 64, -1, 128]
    np.testing.assert_array_equal(found, np.tile(np.array(expected)[:, None], 128))


@pytest.mark.parametrize("shape", [(64, 32, 64), (64, 64, 32)], ids=str)
def test_tiles_are_whole_panels(shape):
    N, K, HS = shape
    k = make_product_kernel(*shape)
    scores, out = poisoned((128, N // 2)), poisoned((128, HS // 2))
    tiles = np.zeros(64 * K + N * K + N * HS, np.uint16)
    message = "a tile of 32 columns; expected a multiple of 64"
    with pytest.raises(SimulatorError, match=message):
        k[1, 128, 2 * tiles.size](scores, out, tiles)
    with pytest.raises(ValueError, match=message):
        offline.compile_ptx(k, k.signatures[0], (9, 0))
