"""Flash attention on Hopper: bf16, head sizes 64 and 128, products by wgmma.

flash_attention.py has the maths, flash_tile.py the layouts and the names, gpu/wgmma.py the
products.

A block is one warpgroup, 128 threads, and owns 64 rows: queries, in the kernels that compute out
and dq, or keys, in the one that computes dk and dv. Its rows stay in shared memory; tiles of the
other kind stream past them, each brought by asynchronous copies while the one before it is worked
on. The accumulators stay in registers for the whole loop. No block writes what another one writes:
no atomics, and the same bits at every run.

What keeps the tensor cores busy is mostly that 3 or 4 such blocks share a multiprocessor, some in
their products while others are in their exponentials. Therefore registers are counted. A
multiprocessor has 65536. 4 blocks of 128 threads leave 65536 / (4 * 128) = 128 to a thread, 3 leave
168, and 2 leave 255, the most that a thread can have.

Blocks differ in length, since under a causal mask the last queries see all keys and the first only
their own tile. The long ones start first, and the short ones fill the gaps at the end.

Rows from T on are zeros in shared memory and never stored. A key beyond T comes after every query,
so the causal mask covers it. A query beyond T has dO = 0 and adds nothing to dk and dv.

wgmma reads shared memory by a path of its own. So between the arrival of a copy and the barrier
there is always a `fence_async_proxy`. It and `keep_address` are explained in gpu/ptx.py, and in
gpu/wgmma.py why a tile has to begin at a multiple of 1024 bytes (`alignment=1024`).
"""

from numba import cuda, float32, int32, int64, uint16, void

from numbagpt.gpu.kernel import Kernel, kernel
from numbagpt.gpu.ptx import (
    LN_2,
    copy_async_commit,
    copy_async_wait,
    fence_async_proxy,
    keep_address,
    log2,
    reciprocal,
)
from numbagpt.gpu.reduce import LOWEST
from numbagpt.gpu.wgmma import wgmma_ab, wgmma_abt, wgmma_wait
from numbagpt.ops.flash_tile import (
    ROWS,
    THREADS,
    fragment_corner,
    load_tile_async,
    mask_above,
    online_softmax,
    pack_rows,
    quad_sum,
    scale_rows,
    store_fragment,
    thread_offset,
)

HEAD_SIZES = (64, 128)


def make_forward_kernel(HS: int) -> Kernel:
    """The forward kernel for one head size."""
    CHUNKS = HS // 8  # of 16 bytes in a row
    TILE = ROWS * HS  # elements
    STAGE = 2 * TILE  # a tile of K and one of V; there are two stages
    ACC = HS // 2  # registers of a thread for 64 x HS

    @kernel(
        void(uint16[::1], float32[::1], uint16[::1], int32, int32, float32),
        max_threads=THREADS,
        min_blocks=4 if HS == 64 else 2,
        exactly=(9, 0),
    )
    def flash_wgmma_forward_kernel(out, lse, qkv, T, NH, scale2):
        """One block per 64 queries of a head: out = softmax(scale q k^T) v, lse = log of its sums.

        Grid as by tile_grid(B * NH, ceil(T / 64)). scale2 = scale * log2(e).

        K runs one tile ahead of V. Each turn of the loop starts two products together: the scores
        of the next tile, and P of the current tile with its V. The softmax of the next tile is
        computed while the tensor cores still work on the second.

        Reads q once and k, v once per query tile, from the second-level cache but for the first
        time; writes out and lse: 8 HS + 4 bytes per token and head from and to memory.
        """
        # tile:    Q   K      V        K        V
        # index:   0   TILE   2 TILE   3 TILE   4 TILE
        #              stage 0         stage STAGE = 2 TILE
        # Of a stage, K is at stage + TILE and V at stage + 2 TILE.
        tile = keep_address(cuda.shared.array(0, uint16, alignment=1024))
        s = cuda.local.array(32, float32)
        p = cuda.local.array(16, int32)
        o = cuda.local.array(ACC, float32)
        row_max = cuda.local.array(2, float32)
        row_sum = cuda.local.array(2, float32)
        rescale = cuda.local.array(2, float32)

        head = int32(cuda.blockIdx.z * cuda.gridDim.x + cuda.blockIdx.x)
        b = int32(head // NH)
        h = int32(head - b * NH)
        tiles = int32(cuda.gridDim.y - cuda.blockIdx.y)  # of keys: up to the diagonal
        q0 = int32(ROWS * (tiles - 1))
        C = int64(NH) * HS
        stride = 3 * C
        # Of token 0; k follows C behind q, and v behind k.
        q_start = int64(b) * T * stride + h * HS + thread_offset(stride, 8, CHUNKS)
        load_tile_async(tile, 0, qkv, q_start + q0 * stride, stride, q0, T, ROWS, CHUNKS)
        k_next = q_start + C
        load_tile_async(tile, TILE, qkv, k_next, stride, 0, T, ROWS, CHUNKS)
        load_tile_async(tile, 2 * TILE, qkv, k_next + C, stride, 0, T, ROWS, CHUNKS)
        copy_async_commit()
        k_next += ROWS * stride
        if tiles > 1:
            load_tile_async(tile, STAGE + TILE, qkv, k_next, stride, ROWS, T, ROWS, CHUNKS)
            copy_async_commit()
        for i in range(ACC):
            o[i] = float32(0)
        for r in range(2):
            row_max[r] = LOWEST
            row_sum[r] = float32(0)
        corner = fragment_corner()

        # For both groups; they might as well be one. The loop's first turn does not wait, and it
        # uses K of tile 1.
        copy_async_wait(0)
        fence_async_proxy()
        cuda.syncthreads()
        wgmma_abt(s, tile, 0, tile, TILE, ROWS, HS)
        wgmma_wait(s, 32, 0)
        if tiles == 1:
            mask_above(s, corner, 8)
        online_softmax(s, row_max, row_sum, rescale, scale2, 8)
        pack_rows(s, p, 8)

        stage = int32(0)
        k1 = int32(ROWS)  # first key of the next tile
        for j in range(int32(tiles - 1)):
            if j > 0:
                copy_async_wait(0)
                fence_async_proxy()
            # K of tile j + 1 and V of tile j are there; K of tile j and V of j - 1 are used up.
            cuda.syncthreads()
            other = int32(stage ^ STAGE)
            load_tile_async(tile, other + 2 * TILE, qkv, k_next + C, stride, k1, T, ROWS, CHUNKS)
            k_next += ROWS * stride
            k2 = int32(k1 + ROWS)
            if int32(j + 2) < tiles:
                load_tile_async(tile, stage + TILE, qkv, k_next, stride, k2, T, ROWS, CHUNKS)
            copy_async_commit()
            wgmma_abt(s, tile, 0, tile, other + TILE, ROWS, HS)
            wgmma_ab(o, p, tile, stage + 2 * TILE, ROWS, HS)
            wgmma_wait(s, 32, 1)
            if int32(j + 2) == tiles:
                mask_above(s, corner, 8)
            online_softmax(s, row_max, row_sum, rescale, scale2, 8)
            wgmma_wait(o, ACC, 0)
            pack_rows(s, p, 8)
            scale_rows(o, rescale, CHUNKS)
            stage = other
            k1 = k2

        copy_async_wait(0)
        fence_async_proxy()
        cuda.syncthreads()
        wgmma_ab(o, p, tile, stage + 2 * TILE, ROWS, HS)
        wgmma_wait(o, ACC, 0)
        lane = int32(cuda.threadIdx.x & 31)
        first = int32((cuda.threadIdx.x >> 5) * 16 + (lane >> 2))
        for r in range(2):
            total = quad_sum(row_sum[r])
            row_sum[r] = reciprocal(total)
            row = int32(q0 + first + 8 * r)
            if (lane & 3) == 0 and row < T:
                lse[int64(head) * T + row] = (row_max[r] * scale2 + log2(total)) * float32(LN_2)
        scale_rows(o, row_sum, CHUNKS)
        o_start = (int64(b) * T + q0) * C + h * HS
        store_fragment(tile, 0, o, float32(1), out, o_start, C, q0, T, CHUNKS)

    flash_wgmma_forward_kernel.__name__ += f"_{HS}"
    return flash_wgmma_forward_kernel


# By head size and bytes of a number.
forward_kernels = {(HS, 2): make_forward_kernel(HS) for HS in HEAD_SIZES}
# Bytes of shared memory: Q, and twice K and V.
FORWARD_SHARED = {(HS, 2): 5 * ROWS * HS * 2 for HS in HEAD_SIZES}
