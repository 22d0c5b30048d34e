"""Flash attention with mma.sync: any GPU of compute capability 8.0 or later, bf16 or TF32.

flash_attention.py has the maths, flash_tile.py the layouts and the names, flash_mma_products.py the
products.

A block is four warps of 16 rows each: queries, in the kernels that compute out and dq, or keys, in
the one that computes dk and dv. Tiles of the other kind stream past. Each is brought by
asynchronous copies while the one before it is worked on. The block's own rows and the accumulators
stay in registers. No block writes what another one writes: no atomics, and the same bits at every
run.

The instructions are synchronous: a warp waits for its product. So the tensor cores are kept busy by
other warps. The tables of tiles below leave room for 8 to 16 of them on a multiprocessor.
"""

from numba import cuda, float32, int32, int64, types, uint16, uint32, void

from numbagpt.gpu.kernel import Kernel, kernel
from numbagpt.gpu.ptx import (
    LN_2,
    copy_async_commit,
    copy_async_wait,
    keep_address,
    log2,
    reciprocal,
)
from numbagpt.gpu.reduce import LOWEST
from numbagpt.ops.flash_mma_products import (
    load_left_rows,
    rows_times_rows,
    store_product,
    weights_times_rows,
)
from numbagpt.ops.flash_tile import (
    ROWS,
    THREADS,
    fragment_corner,
    load_tile_async,
    mask_above,
    online_softmax,
    quad_sum,
    scale_rows,
    thread_offset,
)


def make_forward_kernel(HS: int, itemsize: int, KEYS: int, min_blocks: int) -> Kernel:
    """The forward kernel for one head size and storage; KEYS: rows of the tiles of K and V."""
    WIDTH = 16 // itemsize
    CHUNKS = HS // WIDTH  # of 16 bytes in a row
    TILE = ROWS * HS  # elements
    KTILE = KEYS * HS
    STAGE = 2 * KTILE  # a tile of K and one of V; there are two stages
    # registers of a thread for the block's rows as left operand, for 64 x KEYS, and for 64 x HS
    LEFT, SCORES, ACC = 2 * CHUNKS, KEYS // 2, HS // 2
    array = storage(itemsize)

    @kernel(
        void(array, float32[::1], array, int32, int32, float32),
        max_threads=THREADS,
        min_blocks=min_blocks,
        minimum=(8, 0),
    )
    def flash_mma_forward_kernel(out, lse, qkv, T, NH, scale2):
        """One block per 64 queries of a head: out = softmax(scale q k^T) v, lse = log of its sums.

        Grid as by tile_grid(B * NH, ceil(T / 64)). scale2 = scale * log2(e).

        Reads q once and k, v once per query tile, from the second-level cache but for the first
        time; writes out and lse: 4 HS numbers and 4 bytes per token and head from and to memory.
        """
        # tile:    Q   K      V              K              V
        # index:   0   TILE   TILE + KTILE   TILE + STAGE   TILE + STAGE + KTILE
        # A turn of the loop uses one K and V, from k_tile on; the copies fill the other two.
        tile = keep_address(cuda.shared.array(0, qkv.dtype, alignment=1024))
        q_left = cuda.local.array(LEFT, int32)
        s = cuda.local.array(SCORES, float32)
        o = cuda.local.array(ACC, float32)
        row_max = cuda.local.array(2, float32)
        row_sum = cuda.local.array(2, float32)
        rescale = cuda.local.array(2, float32)

        head = int32(cuda.blockIdx.z * cuda.gridDim.x + cuda.blockIdx.x)
        b = int32(head // NH)
        h = int32(head - b * NH)
        q0 = int32(ROWS * (cuda.gridDim.y - 1 - cuda.blockIdx.y))  # long blocks first
        end = int32(q0 + ROWS)  # of the keys that are seen; those from T on are masked
        C = int64(NH) * HS
        stride = 3 * C
        # Of token 0; k follows C behind q, and v behind k.
        q_start = int64(b) * T * stride + h * HS + thread_offset(stride, WIDTH, CHUNKS)
        load_tile_async(tile, 0, qkv, q_start + q0 * stride, stride, q0, T, ROWS, CHUNKS)
        k_next = q_start + C
        load_tile_async(tile, TILE, qkv, k_next, stride, 0, T, KEYS, CHUNKS)
        load_tile_async(tile, TILE + KTILE, qkv, k_next + C, stride, 0, T, KEYS, CHUNKS)
        copy_async_commit()
        for i in range(ACC):
            o[i] = float32(0)
        for r in range(2):
            row_max[r] = LOWEST
            row_sum[r] = float32(0)
        corner = fragment_corner()

        copy_async_wait(0)
        cuda.syncthreads()
        load_left_rows(q_left, tile, 0, CHUNKS)
        k0 = int32(0)
        while k0 < end:
            copy_async_wait(0)
            cuda.syncthreads()  # the copies have arrived, and nobody reads the other stage any more
            k_tile = int32(TILE + (uint32(k0) // uint32(KEYS) & 1) * STAGE)
            next_k_tile = int32(2 * TILE + STAGE - k_tile)
            k1 = int32(k0 + KEYS)
            if k1 < end:
                k_next += KEYS * stride
                load_tile_async(tile, next_k_tile, qkv, k_next, stride, k1, T, KEYS, CHUNKS)
                next_v_tile = next_k_tile + KTILE
                load_tile_async(tile, next_v_tile, qkv, k_next + C, stride, k1, T, KEYS, CHUNKS)
                copy_async_commit()
            rows_times_rows(s, q_left, tile, k_tile, KEYS, CHUNKS)
            if k1 > q0:
                mask_above(s, int32(corner + q0 - k0), KEYS // 8)
            online_softmax(s, row_max, row_sum, rescale, scale2, KEYS // 8)
            scale_rows(o, rescale, HS // 8)
            weights_times_rows(o, s, tile, k_tile + KTILE, KEYS, CHUNKS)
            k0 = k1

        lane = int32(cuda.threadIdx.x & 31)
        first = int32(q0 + (cuda.threadIdx.x >> 5) * 16 + (lane >> 2))
        for r in range(2):
            total = quad_sum(row_sum[r])
            row_sum[r] = reciprocal(total)
            row = int32(first + 8 * r)
            if (lane & 3) == 0 and row < T:
                lse[int64(head) * T + row] = (row_max[r] * scale2 + log2(total)) * float32(LN_2)
        scale_rows(o, row_sum, HS // 8)
        o_start = (int64(b) * T + q0) * C + h * HS
        store_product(tile, 0, o, float32(1), out, o_start, C, q0, T, CHUNKS)

    flash_mma_forward_kernel.__name__ += f"_{HS}"
    return flash_mma_forward_kernel


def storage(itemsize: int) -> types.Array:
    """Type of the arrays: bf16 is uint16 to Numba."""
    return {2: uint16, 4: float32}[itemsize][::1]


# By head size and bytes of a number: rows of the tiles of K and V, and the blocks that a
# multiprocessor holds together.
FORWARD_TILES = {
    (16, 2): (64, 4),
    (32, 2): (64, 4),
    (64, 2): (64, 3),
    (128, 2): (64, 2),
    (16, 4): (64, 4),
    (32, 4): (64, 4),
    (64, 4): (32, 4),
    (128, 4): (32, 2),
}
forward_kernels = {key: make_forward_kernel(*key, *tiles) for key, tiles in FORWARD_TILES.items()}
# Bytes of shared memory: Q, and twice K and V. At most the 99 KB that every GPU since 8.0 has.
FORWARD_SHARED = {
    (HS, itemsize): (ROWS + 4 * keys) * HS * itemsize
    for (HS, itemsize), (keys, _) in FORWARD_TILES.items()
}
