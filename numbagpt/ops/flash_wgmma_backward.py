"""The backward pass of flash attention on Hopper; flash_wgmma.py says how the blocks work.

flash_mma_backward.py has the maths, and says why there are two kernels and why the second works
with transposed scores. Their 7 products are still faster than 5 with atomics.
"""

from numba import cuda, float32, int32, int64, uint16, void

from numbagpt.gpu.kernel import Kernel, kernel
from numbagpt.gpu.ptx import (
    LOG2_E,
    copy_async_commit,
    copy_async_wait,
    copy_word_async_or_zero,
    exp2,
    fence_async_proxy,
    keep_address,
    load_pair,
)
from numbagpt.gpu.vec import MAX_WIDTH, load
from numbagpt.gpu.wgmma import wgmma_ab, wgmma_abt, wgmma_wait
from numbagpt.ops.flash_tile import (
    ROWS,
    THREADS,
    column_sum_weights,
    fragment_corner,
    fragment_to_shared,
    load_tile_async,
    mask_above,
    mask_below,
    pack_rows,
    quad_sum,
    shared_to_global,
    store_column_sums,
    store_fragment,
    thread_offset,
)
from numbagpt.ops.flash_wgmma import HEAD_SIZES


def make_dq_kernel(HS: int) -> Kernel:
    """The kernel that computes dq, for one head size."""
    CHUNKS = HS // 8  # of 16 bytes in a row
    TILE = ROWS * HS  # elements
    STAGE = 2 * TILE  # a tile of K and one of V; there are two stages
    ACC = HS // 2  # registers of a thread for 64 x HS
    QUARTER = HS // 4  # columns of a row for each lane of a quad
    bf16, f32 = uint16[::1], float32[::1]

    @kernel(
        void(bf16, f32, f32, bf16, bf16, bf16, f32, int32, int32, float32, float32, int32),
        max_threads=THREADS,
        min_blocks=4 if HS == 64 else 2,
        exactly=(9, 0),
    )
    def flash_wgmma_dq_kernel(
        dqkv, tile_sums, lse_delta, dout, qkv, out, lse, T, NH, scale2, scale, with_sums
    ):
        """One block per 64 queries of a head: dq, and lse_delta for the dkv kernel.

        lse_delta  (B, NH, 2, T)          lse2 = lse * log2(e) and delta; P = 2 ** (scale2 S - lse2)
        tile_sums  (B, ceil(T / 64), 3C)  each tile's share of the bias's gradient, if with_sums

        Grid as by tile_grid(B * NH, ceil(T / 64)). scale2 = scale * log2(e).

        Reads q, dout, out and lse once, k and v once per query tile, mostly from the second-level
        cache; writes dq, lse_delta and, for each 64 tokens, three rows of sums: 12 HS + 12 +
        3 HS / 16 bytes per token and head from and to memory.
        """
        # tile:    Q   dO     K        V        K        V
        # index:   0   TILE   2 TILE   3 TILE   4 TILE   5 TILE        STAGE = 2 TILE
        # A turn of the loop uses one K and V, from k_tile on; the copies fill the other two.
        tile = keep_address(cuda.shared.array(0, uint16, alignment=1024))
        s = cuda.local.array(32, float32)
        dp = cuda.local.array(32, float32)
        ds = cuda.local.array(16, int32)
        more_ones = cuda.local.array(16, int32)
        dq = cuda.local.array(ACC, float32)
        lse2 = cuda.local.array(2, float32)
        delta = cuda.local.array(2, float32)
        x = cuda.local.array(MAX_WIDTH, float32)
        y = cuda.local.array(MAX_WIDTH, float32)

        head = int32(cuda.blockIdx.z * cuda.gridDim.x + cuda.blockIdx.x)
        b = int32(head // NH)
        h = int32(head - b * NH)
        tiles = int32(cuda.gridDim.y - cuda.blockIdx.y)  # of keys: up to the diagonal
        q0 = int32(ROWS * (tiles - 1))
        C = int64(NH) * HS
        stride = 3 * C
        q_start = int64(b) * T * stride + h * HS  # of token 0; k follows C behind q, v behind k
        o_start = int64(b) * T * C + h * HS
        offset = thread_offset(stride, 8, CHUNKS)
        load_tile_async(tile, 0, qkv, q_start + q0 * stride + offset, stride, q0, T, ROWS, CHUNKS)
        do_start = o_start + q0 * C + thread_offset(C, 8, CHUNKS)
        load_tile_async(tile, TILE, dout, do_start, C, q0, T, ROWS, CHUNKS)
        k_next = q_start + C + offset
        load_tile_async(tile, STAGE, qkv, k_next, stride, 0, T, ROWS, CHUNKS)
        load_tile_async(tile, STAGE + TILE, qkv, k_next + C, stride, 0, T, ROWS, CHUNKS)
        copy_async_commit()

        lane = int32(cuda.threadIdx.x & 31)
        first = int32(q0 + (cuda.threadIdx.x >> 5) * 16 + (lane >> 2))
        for r in range(2):
            row = int32(first + 8 * r)
            there = row < T
            if not there:
                row = int32(T - 1)
            at = o_start + row * C + (lane & 3) * QUARTER
            total = float32(0)
            for i in range(0, QUARTER, 8):
                load(x, out, at + i)
                load(y, dout, at + i)
                for e in range(8):
                    total += x[e] * y[e]
            delta[r] = quad_sum(total)
            lse2[r] = lse[int64(head) * T + row] * float32(LOG2_E)
            if there and (lane & 3) == 0:
                lse_delta[2 * int64(head) * T + row] = lse2[r]
                lse_delta[(2 * int64(head) + 1) * T + row] = delta[r]
            if not there:  # then P = 1, dP = 0 and dS = 0: nothing is added to the sums of columns
                lse2[r] = float32(0)
                delta[r] = float32(0)
        for i in range(ACC):
            dq[i] = float32(0)
        corner = fragment_corner()

        k_tile = int32(STAGE)
        for j in range(tiles):
            copy_async_wait(0)
            fence_async_proxy()
            cuda.syncthreads()  # the copies have arrived, and nobody reads the other stage any more
            next_k_tile = int32(k_tile ^ (3 * STAGE))  # STAGE and 2 * STAGE take turns
            if int32(j + 1) < tiles:
                k1 = int32(ROWS * (j + 1))
                k_next += ROWS * stride
                load_tile_async(tile, next_k_tile, qkv, k_next, stride, k1, T, ROWS, CHUNKS)
                next_v_tile = next_k_tile + TILE
                load_tile_async(tile, next_v_tile, qkv, k_next + C, stride, k1, T, ROWS, CHUNKS)
                copy_async_commit()
            wgmma_abt(s, tile, 0, tile, k_tile, ROWS, HS)
            wgmma_abt(dp, tile, TILE, tile, k_tile + TILE, ROWS, HS)
            wgmma_wait(s, 32, 1)
            if int32(j + 1) == tiles:
                mask_above(s, corner, 8)
            for n in range(8):
                for r in range(2):
                    for c in range(2):
                        i = 4 * n + 2 * r + c
                        s[i] = exp2(s[i] * scale2 - lse2[r])
            wgmma_wait(dp, 32, 0)
            for n in range(8):
                for r in range(2):
                    for c in range(2):
                        i = 4 * n + 2 * r + c
                        s[i] *= dp[i] - delta[r]
            pack_rows(s, ds, 8)
            wgmma_ab(dq, ds, tile, k_tile, ROWS, HS)
            wgmma_wait(dq, ACC, 0)
            k_tile = next_k_tile
        cuda.syncthreads()
        fragment_to_shared(tile, 0, dq, scale, CHUNKS)
        fence_async_proxy()
        cuda.syncthreads()
        shared_to_global(tile, 0, dqkv, q_start + q0 * stride, stride, q0, T, CHUNKS)
        if with_sums != 0:
            for i in range(ACC):
                dq[i] = float32(0)
            column_sum_weights(s, 0, 8)
            pack_rows(s, ds, 8)
            wgmma_ab(dq, ds, tile, 0, ROWS, HS)
            column_sum_weights(s, 1, 8)
            pack_rows(s, more_ones, 8)  # not ds, which the product before still reads
            wgmma_ab(dq, more_ones, tile, TILE, ROWS, HS)
            wgmma_wait(dq, ACC, 0)
            store_column_sums(tile_sums, int32(tiles - 1), tile, dq, NH, HS)

    flash_wgmma_dq_kernel.__name__ += f"_{HS}"
    return flash_wgmma_dq_kernel


def make_dkv_kernel(HS: int) -> Kernel:
    """The kernel that computes dk and dv, for one head size."""
    CHUNKS = HS // 8  # of 16 bytes in a row
    QUERIES = query_rows(HS)  # of a tile that streams past
    TILE = ROWS * HS  # elements
    QTILE = QUERIES * HS
    STAGE = 2 * QTILE  # a tile of Q and one of dO; there are two stages
    LSE_DELTA = (2 * TILE + 2 * STAGE) // 2  # where lse2 and delta begin, in float32
    ACC = HS // 2  # registers of a thread for 64 x HS
    SCORES = QUERIES // 2  # and for 64 x QUERIES,
    PACKED = QUERIES // 4  # and for these in bf16
    BLOCKS = QUERIES // 8
    DIAGONAL = ROWS // QUERIES  # tiles that the diagonal crosses
    bf16, f32 = uint16[::1], float32[::1]

    @kernel(
        void(bf16, bf16, bf16, f32, int32, int32, float32, float32),
        max_threads=THREADS,
        min_blocks=3 if HS == 64 else 2,
        exactly=(9, 0),
    )
    def flash_wgmma_dkv_kernel(dqkv, dout, qkv, lse_delta, T, NH, scale2, scale):
        """One block per 64 keys of a head: dk and dv, from the tiles of queries that see them.

        lse_delta (B, NH, 2, T): lse2 and delta, as flash_wgmma_dq_kernel left them.
        Grid as by tile_grid(B * NH, ceil(T / 64)). scale2 = scale * log2(e).

        Reads k and v once, q, dout and lse_delta once per key tile, mostly from the second-level
        cache; writes dk and dv: 12 HS + 8 bytes per token and head from and to memory.
        """
        # tile:    K   V      Q        dO               Q                dO
        # index:   0   TILE   2 TILE   2 TILE + QTILE   2 TILE + STAGE   2 TILE + STAGE + QTILE
        #                     stage 0                   stage 1
        # Behind these, from LSE_DELTA on, float32: lse2 and delta of stage 0, then of stage 1.
        tile = keep_address(cuda.shared.array(0, uint16, alignment=1024))
        shared_lse_delta = keep_address(cuda.shared.array(0, float32, alignment=1024))
        s = cuda.local.array(SCORES, float32)
        dp = cuda.local.array(SCORES, float32)
        p = cuda.local.array(PACKED, int32)
        ds = cuda.local.array(PACKED, int32)
        dk = cuda.local.array(ACC, float32)
        dv = cuda.local.array(ACC, float32)
        lse2 = cuda.local.array(2, float32)
        delta = cuda.local.array(2, float32)

        head = int32(cuda.blockIdx.z * cuda.gridDim.x + cuda.blockIdx.x)
        b = int32(head // NH)
        h = int32(head - b * NH)
        k0 = int32(cuda.blockIdx.y * ROWS)
        tiles = int32((T - k0 + (QUERIES - 1)) // QUERIES)  # of queries: from the diagonal on
        C = int64(NH) * HS
        stride = 3 * C
        token = int64(b) * T + k0
        k_start = token * stride + h * HS + C
        v_start = k_start + C
        q_next = k_start - C + thread_offset(stride, 8, CHUNKS)
        do_next = token * C + h * HS + thread_offset(C, 8, CHUNKS)
        load_tile_async(tile, 0, qkv, q_next + C, stride, k0, T, ROWS, CHUNKS)
        load_tile_async(tile, TILE, qkv, q_next + 2 * C, stride, k0, T, ROWS, CHUNKS)
        load_tile_async(tile, 2 * TILE, qkv, q_next, stride, k0, T, QUERIES, CHUNKS)
        load_tile_async(tile, 2 * TILE + QTILE, dout, do_next, C, k0, T, QUERIES, CHUNKS)
        # A thread copies one float of a tile's lse_delta. The first QUERIES threads copy lse2, the
        # next QUERIES delta.
        thread = int32(cuda.threadIdx.x)
        query = int32(k0 + (thread & (QUERIES - 1)))
        lse_delta_next = 2 * int64(head) * T + query
        if thread >= QUERIES:
            lse_delta_next += T
        if 2 * QUERIES == THREADS or thread < 2 * QUERIES:
            copy_word_async_or_zero(
                shared_lse_delta, LSE_DELTA + thread, lse_delta, lse_delta_next, query < T
            )
        copy_async_commit()
        for i in range(ACC):
            dk[i] = float32(0)
            dv[i] = float32(0)
        corner = fragment_corner()
        pair_start = int32(LSE_DELTA + 2 * (thread & 3))  # of this lane's columns, in stage 0

        stage = int32(0)
        q1 = int32(k0 + QUERIES)  # first query of the next tile
        for j in range(tiles):
            copy_async_wait(0)
            fence_async_proxy()
            cuda.syncthreads()  # the copies have arrived, and nobody reads the other stage any more
            other = int32(1 - stage)
            if int32(j + 1) < tiles:
                q_next += QUERIES * stride
                do_next += QUERIES * C
                lse_delta_next += QUERIES
                query = int32(query + QUERIES)
                next_q_tile = int32(2 * TILE + other * STAGE)
                load_tile_async(tile, next_q_tile, qkv, q_next, stride, q1, T, QUERIES, CHUNKS)
                next_do_tile = next_q_tile + QTILE
                load_tile_async(tile, next_do_tile, dout, do_next, C, q1, T, QUERIES, CHUNKS)
                if 2 * QUERIES == THREADS or thread < 2 * QUERIES:
                    to = int32(LSE_DELTA + other * (2 * QUERIES) + thread)
                    copy_word_async_or_zero(
                        shared_lse_delta, to, lse_delta, lse_delta_next, query < T
                    )
                copy_async_commit()
                q1 = int32(q1 + QUERIES)
            q_tile = int32(2 * TILE + stage * STAGE)
            do_tile = int32(q_tile + QTILE)
            wgmma_abt(s, tile, 0, tile, q_tile, QUERIES, HS)
            wgmma_abt(dp, tile, TILE, tile, do_tile, QUERIES, HS)
            pair_at = int32(pair_start + stage * (2 * QUERIES))
            wgmma_wait(s, SCORES, 1)
            if j < DIAGONAL:
                mask_below(s, int32(corner - j * QUERIES), BLOCKS)
            for n in range(BLOCKS):
                load_pair(lse2, shared_lse_delta, int32(pair_at + 8 * n))
                for r in range(2):
                    for c in range(2):
                        i = 4 * n + 2 * r + c
                        s[i] = exp2(s[i] * scale2 - lse2[c])
            pack_rows(s, p, BLOCKS)
            wgmma_ab(dv, p, tile, do_tile, QUERIES, HS)
            wgmma_wait(dp, SCORES, 1)
            for n in range(BLOCKS):
                load_pair(delta, shared_lse_delta, int32(pair_at + QUERIES + 8 * n))
                for r in range(2):
                    for c in range(2):
                        i = 4 * n + 2 * r + c
                        s[i] *= dp[i] - delta[c]
            pack_rows(s, ds, BLOCKS)
            wgmma_ab(dk, ds, tile, q_tile, QUERIES, HS)
            wgmma_wait(dv, ACC, 0)
            wgmma_wait(dk, ACC, 0)
            stage = other
        cuda.syncthreads()
        store_fragment(tile, 0, dk, scale, dqkv, k_start, stride, k0, T, CHUNKS)
        store_fragment(tile, TILE, dv, float32(1), dqkv, v_start, stride, k0, T, CHUNKS)

    flash_wgmma_dkv_kernel.__name__ += f"_{HS}"
    return flash_wgmma_dkv_kernel


def query_rows(HS: int) -> int:
    """Queries in a tile of the dk, dv kernel: half as many where accumulators are twice as big."""
    return 64 if HS == 64 else 32


# By head size and bytes of a number.
dq_kernels = {(HS, 2): make_dq_kernel(HS) for HS in HEAD_SIZES}
dkv_kernels = {(HS, 2): make_dkv_kernel(HS) for HS in HEAD_SIZES}
# Bytes of shared memory: Q and dO, and twice K and V,
DQ_SHARED = {(HS, 2): 6 * ROWS * HS * 2 for HS in HEAD_SIZES}
# or K and V, and twice Q, dO, lse2 and delta.
DKV_SHARED = {
    (HS, 2): (2 * ROWS + 4 * query_rows(HS)) * HS * 2 + 4 * query_rows(HS) * 4 for HS in HEAD_SIZES
}
