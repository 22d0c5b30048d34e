"""The backward pass of flash attention with mma.sync; flash_mma.py says how the blocks work.

The maths of flash_attention.py once more, with S = q k^T and dS without the scale, since it is
cheaper to multiply the results with it:

    P  = exp(scale S - lse)            the probabilities again, cheaper than reading them
    dP = dout v^T
    dS = P * (dP - delta)              delta = sum over a row of dout * out
    dq = scale dS k     dk = scale dS^T q     dv = P^T dout

Sums over keys end up in dq, sums over queries in dk and dv. One kernel for both would have to add
up one of the two across blocks, in no fixed order. So there are two, and every number of dq, dk and
dv is summed by one warp, in order. The price is that each kernel computes S and dP for itself: 7
products in place of 5.

    dq    a block per 64 queries, keys stream past:    S = q k^T, dP = dout v^T, dq += dS k
    dkv   a block per 64 keys, queries stream past:    S^T = k q^T, dP^T = v dout^T,
                                                       dv += P^T dout, dk += dS^T q

The second kernel works with transposed scores, since then P^T and dS^T leave a product in just
those registers in which the next, P^T dout and dS^T q, wants its left operand (the fragments of
flash_tile.py). Not transposed, they would be the left operand of nothing and have to go through
shared memory. In the first kernel dS is a left operand as it stands.

A block's own rows are the left operand of the first two products. They stay in registers, as far as
there are registers for them.

Rows from T on are zeros in shared memory, and lse2 and delta of queries from T on are zero, in
registers (dq) or in shared memory (dkv). P may be 1 there, but dO is 0 and so is dP - delta. They
add nothing to anything.
"""

from numba import cuda, float32, int32, int64, uint32, void

from numbagpt.gpu.kernel import Kernel, device_function, kernel
from numbagpt.gpu.ptx import (
    LOG2_E,
    copy_async_commit,
    copy_async_wait,
    copy_word_async_or_zero,
    exp2,
    keep_address,
    load_pair,
)
from numbagpt.gpu.vec import MAX_WIDTH, load, width
from numbagpt.ops.flash_mma import storage
from numbagpt.ops.flash_mma_products import (
    load_left_rows,
    product_to_shared,
    rows_times_rows,
    store_product,
    tile_times_rows,
    weights_times_rows,
)
from numbagpt.ops.flash_tile import (
    ROWS,
    THREADS,
    column_sum_weights,
    fragment_corner,
    head_after_loop,
    load_tile_async,
    mask_above,
    mask_below,
    quad_sum,
    shared_to_global,
    store_column_sums,
    thread_offset,
)


@device_function
def row_product(x, y, start, chunks):
    """Sum over a row of x times y, at `start` in both; the lanes of a quad share the work."""
    a = cuda.local.array(MAX_WIDTH, float32)
    b = cuda.local.array(MAX_WIDTH, float32)
    total = float32(0)
    for i in range((chunks + 3) // 4):
        chunk = int32((cuda.threadIdx.x & 3) + 4 * i)
        if chunk < chunks:
            load(a, x, start + chunk * width(x))
            load(b, y, start + chunk * width(y))
            for k in range(width(x)):
                total += a[k] * b[k]
    return quad_sum(total)


def make_dq_kernel(HS: int, itemsize: int, KEYS: int, min_blocks: int, KEPT: int) -> Kernel:
    """The kernel that computes dq, for one head size and storage.

    KEYS   rows of the tiles of K and V
    KEPT   of Q and dO, how many stay in registers; the others are read again for every tile
    """
    WIDTH = 16 // itemsize
    CHUNKS = HS // WIDTH  # of 16 bytes in a row
    TILE = ROWS * HS  # elements
    KTILE = KEYS * HS
    STAGE = 2 * KTILE  # a tile of K and one of V; there are two stages
    ONES = ROWS // 2  # registers of a thread for 16 x ROWS
    LEFT, SCORES, ACC = 2 * CHUNKS, KEYS // 2, HS // 2  # as in the forward pass
    array, f32 = storage(itemsize), float32[::1]

    @kernel(
        void(array, f32, f32, array, array, array, f32, int32, int32, float32, float32, int32),
        max_threads=THREADS,
        min_blocks=min_blocks,
        minimum=(8, 0),
    )
    def flash_mma_dq_kernel(
        dqkv, tile_sums, lse_delta, dout, qkv, out, lse, T, NH, scale2, scale, with_sums
    ):
        """One block per 64 queries of a head: dq, and lse_delta for the dkv kernel.

        lse_delta  (B, NH, 2, T)          lse2 = lse * log2(e) and delta; P = 2 ** (scale2 S - lse2)
        tile_sums  (B, ceil(T / 64), 3C)  each tile's share of the bias's gradient, if with_sums

        Grid as by tile_grid(B * NH, ceil(T / 64)). scale2 = scale * log2(e).

        Reads q, dout, out and lse once, k and v once per query tile, mostly from the second-level
        cache; writes dq, lse_delta and, for each 64 tokens, three rows of sums: 6 HS numbers and
        12 + 3 HS / 16 bytes per token and head.
        """
        # tile:    Q   dO     K        V                K                V
        # index:   0   TILE   2 TILE   2 TILE + KTILE   2 TILE + STAGE   2 TILE + STAGE + KTILE
        # A turn of the loop uses one K and V, from k_tile on; the copies fill the other two.
        tile = keep_address(cuda.shared.array(0, qkv.dtype, alignment=1024))
        q_left = cuda.local.array(LEFT, int32)
        do_left = cuda.local.array(LEFT, int32)
        s = cuda.local.array(SCORES, float32)
        dp = cuda.local.array(SCORES, float32)
        dq = cuda.local.array(ACC, float32)
        ones = cuda.local.array(ONES, float32)
        lse2 = cuda.local.array(2, float32)
        delta = cuda.local.array(2, float32)

        head = int32(cuda.blockIdx.z * cuda.gridDim.x + cuda.blockIdx.x)
        b = int32(head // NH)
        h = int32(head - b * NH)
        q0 = int32(ROWS * (cuda.gridDim.y - 1 - cuda.blockIdx.y))  # long blocks first
        end = int32(q0 + ROWS)  # of the keys that are seen; those from T on are masked
        C = int64(NH) * HS
        stride = 3 * C
        q_start = int64(b) * T * stride + h * HS  # of token 0; k follows C behind q, v behind k
        o_start = int64(b) * T * C + h * HS
        offset = thread_offset(stride, WIDTH, CHUNKS)
        load_tile_async(tile, 0, qkv, q_start + q0 * stride + offset, stride, q0, T, ROWS, CHUNKS)
        do_start = o_start + q0 * C + thread_offset(C, WIDTH, CHUNKS)
        load_tile_async(tile, TILE, dout, do_start, C, q0, T, ROWS, CHUNKS)
        k_next = q_start + C + offset
        load_tile_async(tile, 2 * TILE, qkv, k_next, stride, 0, T, KEYS, CHUNKS)
        load_tile_async(tile, 2 * TILE + KTILE, qkv, k_next + C, stride, 0, T, KEYS, CHUNKS)
        copy_async_commit()

        lane = int32(cuda.threadIdx.x & 31)
        first = int32(q0 + (cuda.threadIdx.x >> 5) * 16 + (lane >> 2))
        for r in range(2):
            row = int32(first + 8 * r)
            there = row < T
            if not there:
                row = int32(T - 1)
            delta[r] = row_product(out, dout, o_start + row * C, CHUNKS)
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

        copy_async_wait(0)
        cuda.syncthreads()
        if KEPT >= 1:
            load_left_rows(q_left, tile, 0, CHUNKS)
        if KEPT >= 2:
            load_left_rows(do_left, tile, TILE, CHUNKS)
        k0 = int32(0)
        while k0 < end:
            copy_async_wait(0)
            cuda.syncthreads()  # the copies have arrived, and nobody reads the other stage any more
            k_tile = int32(2 * TILE + (uint32(k0) // uint32(KEYS) & 1) * STAGE)
            next_k_tile = int32(4 * TILE + STAGE - k_tile)
            k1 = int32(k0 + KEYS)
            if k1 < end:
                k_next += KEYS * stride
                load_tile_async(tile, next_k_tile, qkv, k_next, stride, k1, T, KEYS, CHUNKS)
                next_v_tile = next_k_tile + KTILE
                load_tile_async(tile, next_v_tile, qkv, k_next + C, stride, k1, T, KEYS, CHUNKS)
                copy_async_commit()
            if KEPT >= 1:
                rows_times_rows(s, q_left, tile, k_tile, KEYS, CHUNKS)
            else:
                tile_times_rows(s, tile, 0, k_tile, KEYS, CHUNKS)
            if KEPT >= 2:
                rows_times_rows(dp, do_left, tile, k_tile + KTILE, KEYS, CHUNKS)
            else:
                tile_times_rows(dp, tile, TILE, k_tile + KTILE, KEYS, CHUNKS)
            if k1 > q0:
                mask_above(s, int32(corner + q0 - k0), KEYS // 8)
            for n in range(KEYS // 8):
                for r in range(2):
                    for c in range(2):
                        i = 4 * n + 2 * r + c
                        s[i] = exp2(s[i] * scale2 - lse2[r]) * (dp[i] - delta[r])
            weights_times_rows(dq, s, tile, k_tile, KEYS, CHUNKS)
            k0 = k1
        cuda.syncthreads()
        product_to_shared(tile, 0, dq, scale, CHUNKS)
        cuda.syncthreads()
        b, h = head_after_loop(NH)
        dq_start = (int64(b) * T + q0) * stride + h * HS
        shared_to_global(tile, 0, dqkv, dq_start, stride, q0, T, CHUNKS)
        if with_sums != 0 and cuda.threadIdx.x < 32:
            for i in range(ACC):
                dq[i] = float32(0)
            column_sum_weights(ones, 0, ROWS // 8)
            weights_times_rows(dq, ones, tile, 0, ROWS, CHUNKS)
            column_sum_weights(ones, 1, ROWS // 8)
            weights_times_rows(dq, ones, tile, TILE, ROWS, CHUNKS)
            number = int32(cuda.gridDim.y - 1 - cuda.blockIdx.y)
            store_column_sums(tile_sums, number, tile, dq, NH, HS)

    flash_mma_dq_kernel.__name__ += f"_{HS}"
    return flash_mma_dq_kernel


def make_dkv_kernel(HS: int, itemsize: int, QUERIES: int, min_blocks: int, KEPT: int) -> Kernel:
    """The kernel that computes dk and dv, for one head size and storage.

    QUERIES   rows of the tiles of Q and dO
    KEPT      of K and V, how many stay in registers; the others are read again for every tile
    """
    WIDTH = 16 // itemsize
    CHUNKS = HS // WIDTH  # of 16 bytes in a row
    TILE = ROWS * HS  # elements
    QTILE = QUERIES * HS
    STAGE = 2 * QTILE  # a tile of Q and one of dO; there are two stages
    LSE_DELTA = (2 * TILE + 2 * STAGE) * itemsize // 4  # where lse2 and delta begin, in float32
    LEFT, SCORES, ACC = 2 * CHUNKS, QUERIES // 2, HS // 2
    array, f32 = storage(itemsize), float32[::1]

    @kernel(
        void(array, array, array, f32, int32, int32, float32, float32),
        max_threads=THREADS,
        min_blocks=min_blocks,
        minimum=(8, 0),
    )
    def flash_mma_dkv_kernel(dqkv, dout, qkv, lse_delta, T, NH, scale2, scale):
        """One block per 64 keys of a head: dk and dv, from the tiles of queries that see them.

        lse_delta (B, NH, 2, T): lse2 and delta, as flash_mma_dq_kernel left them.
        Grid as by tile_grid(B * NH, ceil(T / 64)). scale2 = scale * log2(e).

        Reads k and v once, q, dout and lse_delta once per key tile, mostly from the second-level
        cache; writes dk and dv: 6 HS numbers and 8 bytes per token and head.
        """
        # tile:    K   V      Q        dO               Q                dO
        # index:   0   TILE   2 TILE   2 TILE + QTILE   2 TILE + STAGE   2 TILE + STAGE + QTILE
        #                     stage 0                   stage 1
        # Behind these, from LSE_DELTA on, float32: lse2 and delta of stage 0, then of stage 1.
        tile = keep_address(cuda.shared.array(0, qkv.dtype, alignment=1024))
        shared_lse_delta = keep_address(cuda.shared.array(0, float32, alignment=1024))
        k_left = cuda.local.array(LEFT, int32)
        v_left = cuda.local.array(LEFT, int32)
        s = cuda.local.array(SCORES, float32)
        dp = cuda.local.array(SCORES, float32)
        dk = cuda.local.array(ACC, float32)
        dv = cuda.local.array(ACC, float32)
        pair = cuda.local.array(2, float32)

        head = int32(cuda.blockIdx.z * cuda.gridDim.x + cuda.blockIdx.x)
        b = int32(head // NH)
        h = int32(head - b * NH)
        k0 = int32(ROWS * cuda.blockIdx.y)  # long blocks first
        C = int64(NH) * HS
        stride = 3 * C
        token = int64(b) * T + k0
        k_start = token * stride + h * HS + C
        q_next = k_start - C + thread_offset(stride, WIDTH, CHUNKS)
        do_next = token * C + h * HS + thread_offset(C, WIDTH, CHUNKS)
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
        if thread < 2 * QUERIES:
            copy_word_async_or_zero(
                shared_lse_delta, LSE_DELTA + thread, lse_delta, lse_delta_next, query < T
            )
        copy_async_commit()
        for i in range(ACC):
            dk[i] = float32(0)
            dv[i] = float32(0)
        corner = fragment_corner()
        pair_start = int32(LSE_DELTA + 2 * (thread & 3))  # of this lane's columns, in stage 0

        copy_async_wait(0)
        cuda.syncthreads()
        if KEPT >= 1:
            load_left_rows(k_left, tile, 0, CHUNKS)
        if KEPT >= 2:
            load_left_rows(v_left, tile, TILE, CHUNKS)
        stage = int32(0)
        q0 = k0
        while q0 < T:
            copy_async_wait(0)
            cuda.syncthreads()  # the copies have arrived, and nobody reads the other stage any more
            q1 = int32(q0 + QUERIES)
            other = int32(1 - stage)
            if q1 < T:
                q_next += QUERIES * stride
                do_next += QUERIES * C
                lse_delta_next += QUERIES
                query = int32(query + QUERIES)
                next_q_tile = int32(2 * TILE + other * STAGE)
                load_tile_async(tile, next_q_tile, qkv, q_next, stride, q1, T, QUERIES, CHUNKS)
                next_do_tile = next_q_tile + QTILE
                load_tile_async(tile, next_do_tile, dout, do_next, C, q1, T, QUERIES, CHUNKS)
                if thread < 2 * QUERIES:
                    to = int32(LSE_DELTA + other * (2 * QUERIES) + thread)
                    copy_word_async_or_zero(
                        shared_lse_delta, to, lse_delta, lse_delta_next, query < T
                    )
                copy_async_commit()
            q_tile = int32(2 * TILE + stage * STAGE)
            do_tile = int32(q_tile + QTILE)
            pair_at = int32(pair_start + stage * (2 * QUERIES))
            if KEPT >= 1:
                rows_times_rows(s, k_left, tile, q_tile, QUERIES, CHUNKS)
            else:
                tile_times_rows(s, tile, 0, q_tile, QUERIES, CHUNKS)
            if q0 < int32(k0 + ROWS):
                mask_below(s, int32(corner + k0 - q0), QUERIES // 8)
            for n in range(QUERIES // 8):
                load_pair(pair, shared_lse_delta, int32(pair_at + 8 * n))
                for i in range(4 * n, 4 * n + 4, 2):
                    s[i] = exp2(s[i] * scale2 - pair[0])
                    s[i + 1] = exp2(s[i + 1] * scale2 - pair[1])
            weights_times_rows(dv, s, tile, do_tile, QUERIES, CHUNKS)
            if KEPT >= 2:
                rows_times_rows(dp, v_left, tile, do_tile, QUERIES, CHUNKS)
            else:
                tile_times_rows(dp, tile, TILE, do_tile, QUERIES, CHUNKS)
            for n in range(QUERIES // 8):
                load_pair(pair, shared_lse_delta, int32(pair_at + QUERIES + 8 * n))
                for i in range(4 * n, 4 * n + 4, 2):
                    s[i] *= dp[i] - pair[0]
                    s[i + 1] *= dp[i + 1] - pair[1]
            weights_times_rows(dk, s, tile, q_tile, QUERIES, CHUNKS)
            stage = other
            q0 = q1
        cuda.syncthreads()
        store_product(tile, 0, dk, scale, dqkv, k_start, stride, k0, T, CHUNKS)
        store_product(tile, TILE, dv, float32(1), dqkv, k_start + C, stride, k0, T, CHUNKS)

    flash_mma_dkv_kernel.__name__ += f"_{HS}"
    return flash_mma_dkv_kernel


# By head size and bytes of a number: rows of the tiles that stream past, the blocks that a
# multiprocessor holds together, and how many of the block's own tiles stay in registers.
DQ_TILES = {
    (16, 2): (64, 3, 2),
    (32, 2): (64, 3, 2),
    (64, 2): (64, 3, 2),
    (128, 2): (32, 2, 2),
    (16, 4): (64, 3, 2),
    (32, 4): (32, 3, 2),
    (64, 4): (32, 3, 2),
    (128, 4): (16, 2, 0),
}
DKV_TILES = {
    (16, 2): (64, 3, 2),
    (32, 2): (64, 3, 2),
    (64, 2): (32, 3, 1),
    (128, 2): (32, 2, 0),
    (16, 4): (64, 3, 2),
    (32, 4): (32, 3, 2),
    (64, 4): (32, 2, 2),
    (128, 4): (16, 2, 0),
}
dq_kernels = {key: make_dq_kernel(*key, *tiles) for key, tiles in DQ_TILES.items()}
dkv_kernels = {key: make_dkv_kernel(*key, *tiles) for key, tiles in DKV_TILES.items()}
# Bytes of shared memory, at most the 99 KB that every GPU since 8.0 has.
DQ_SHARED = {
    (HS, itemsize): (2 * ROWS + 4 * keys) * HS * itemsize
    for (HS, itemsize), (keys, _, _) in DQ_TILES.items()
}
DKV_SHARED = {
    (HS, itemsize): (2 * ROWS + 4 * queries) * HS * itemsize + 4 * queries * 4
    for (HS, itemsize), (queries, _, _) in DKV_TILES.items()
}
