"""The two products of flash attention with mma.sync, for bf16 and for TF32.

A block is four warps, and a warp has 16 rows of the left operand and of the result. The right
operand is a tile in shared memory. flash_tile.py has the layouts, gpu/mma.py the instructions.

Code is written once for both kinds of storage. A row of A, or column of B, of one mma.sync is 32
bytes, two chunks: 16 bf16 or 8 float32.

`rows_times_rows` (S = q k^T): the sums run along the rows of both tiles. For both kinds of storage
ldmatrix reads the same bytes in the same order.

`weights_times_rows` (out += P v): the sums run down the rows of the tile. The left operand is P, a
result that lies in registers as flash_tile.py shows; `quad` and `member` are explained there. Here
the kinds of storage differ.

* bf16: two neighbouring columns of P, packed, are a word of the left operand as they stand.
  ldmatrix transposes on the way, since mma wants B by columns.
* TF32: a lane holds columns 2 member and 2 member + 1 of each 8 of P, while words `member` and
  member + 4 of A are wanted. Nothing need be moved, because a sum may run in any order. Key
  2 member is taken for word `member` of A and key 2 member + 1 for word member + 4. B has to agree:
  b[0] comes from row 2 member of v and b[1] from row 2 member + 1. ldmatrix does not transpose
  32-bit elements, so these are plain loads.
  As column `quad` of B any column of v will do, as long as whoever reads the result knows. Columns
  2 quad and 2 quad + 1 of 16 are taken, for two products j = 0, 1. One 64-bit load serves both, and
  a lane ends up with four neighbouring columns of out:

      acc[8 n + 4 j + 2 r + c]  is row quad + 8 r, column 16 n + 4 member + 2 c + j     (TF32)

`product` in a name means a result of weights_times_rows, in this order or in the plain one of bf16.

Banks: ldmatrix reads one chunk of each of 8 consecutive rows, and the swizzle keeps these in 8
different places. A 64-bit load is served 16 lanes at a time. Here these read 4 rows, all even or
all odd, and 2 neighbouring chunks, and chunk ^ row are 8 different places again. (In rows of 64
bytes, float32 at head size 16, two rows share a line and its places: two turns.)

float32 is rounded to the nearest TF32 by an instruction of its own. The tensor cores alone would
drop the lower bits, and errors that all point towards zero add up.
"""

from numba import cuda, float32, int32

from numbagpt.gpu.kernel import device_function
from numbagpt.gpu.mma import (
    ldmatrix,
    ldmatrix_transposed,
    mma_bf16,
    mma_tf32,
    round_to_tf32,
    round_word_to_tf32,
)
from numbagpt.gpu.ptx import load_pair, pack_bf16
from numbagpt.gpu.vec import store, width
from numbagpt.ops.flash_tile import ROWS, fragment_to_shared, shared_to_global, swizzled

# ---- one mma.sync for both kinds of storage ------------------------------------------------------


@device_function
def multiply(tile, acc, acc_first, a, a_first, b, b_first):
    """C += A B with the instruction for the storage of `tile`."""
    if width(tile) == 8:
        mma_bf16(acc, acc_first, a, a_first, b, b_first)
    else:
        mma_tf32(acc, acc_first, a, a_first, b, b_first)


@device_function
def load_operand(tile, words, first, offset):
    """words[first : first + 4] from ldmatrix, rounded to TF32 where the tile stores float32."""
    ldmatrix(words, first, tile, offset)
    if width(tile) == 4:
        for i in range(4):
            round_word_to_tf32(words, first + i)


@device_function
def chunk_index(tile, offset, row, chunk, rows, chunks):
    """Index of the first element of a chunk; `offset` is where the tile begins."""
    return int32(offset + swizzled(row, chunk, rows, chunks) * width(tile))


@device_function
def advance_index(tile, index, down, right, rows, chunks):
    """Index of the chunk that is `down` rows and `right` chunks further than the one at `index`.

    down is a constant, a multiple of 8: the swizzle repeats every 8 rows. right is a constant, a
    multiple of 2 or 4, and the chunk at `index` is one of the first 2 or 4 of its row: so
    chunk + right = chunk ^ right. The swizzle is an exclusive or too, and it is enough to flip the
    bits of `right` in the index.

    chunk_index would give the same, but the compiler would keep the index of each chunk in a
    register throughout a loop. This takes an instruction or two on the one index at hand.
    """
    across = 8 if chunks >= 8 else chunks  # chunks of a row within its panel
    behind = (right // across) * rows * 8 + down * across
    return int32((index ^ (right % across) * width(tile)) + behind * width(tile))


# ---- the two products ----------------------------------------------------------------------------


@device_function
def load_left_step(a, first, tile, offset, k, chunks):
    """Chunks 2 k and 2 k + 1 of this warp's 16 rows of a tile of ROWS, as the A of one mma."""
    lane = int32(cuda.threadIdx.x & 31)
    row = int32((cuda.threadIdx.x >> 5) * 16 + (lane & 15))
    at = chunk_index(tile, offset, row, lane >> 4, ROWS, chunks)
    load_operand(tile, a, first, advance_index(tile, at, 0, 2 * k, ROWS, chunks))


@device_function
def load_left_rows(a, tile, offset, chunks):
    """This warp's 16 rows of a tile of ROWS: the left operand of rows_times_rows."""
    for k in range(chunks // 2):
        load_left_step(a, 4 * k, tile, offset, k, chunks)


@device_function
def multiply_step(acc, a, a_first, tile, offset, k, rows, chunks):
    """acc += A B^T over chunks 2 k and 2 k + 1 of A, at a[a_first], and of all rows of the tile."""
    lane = int32(cuda.threadIdx.x & 31)
    b = cuda.local.array(4, int32)
    # matrices 0 and 1 are the two chunks of 8 rows, 2 and 3 those of the next 8
    at = chunk_index(tile, offset, (lane & 7) + (lane >> 4) * 8, lane >> 3 & 1, rows, chunks)
    for n in range(rows // 16):
        load_operand(tile, b, 0, advance_index(tile, at, 16 * n, 2 * k, rows, chunks))
        multiply(tile, acc, 8 * n, a, a_first, b, 0)
        multiply(tile, acc, 8 * n + 4, a, a_first, b, 2)


@device_function
def rows_times_rows(acc, a, tile, offset, rows, chunks):
    """acc = A B^T: this warp's 16 rows, in registers, by all rows of the tile.

    acc   rows / 2 float32, overwritten: 16 x rows
    a     2 * chunks words, from load_left_rows
    """
    for i in range(rows // 2):
        acc[i] = float32(0)
    for k in range(chunks // 2):
        multiply_step(acc, a, 4 * k, tile, offset, k, rows, chunks)


@device_function
def tile_times_rows(acc, tile, left, offset, rows, chunks):
    """rows_times_rows that reads the 16 rows step by step, from the tile of ROWS at offset `left`.

    For kernels without the registers to keep them. It reads a quarter more for tiles of 64 rows.
    """
    a = cuda.local.array(4, int32)
    for i in range(rows // 2):
        acc[i] = float32(0)
    for k in range(chunks // 2):
        load_left_step(a, 0, tile, left, k, chunks)
        multiply_step(acc, a, 0, tile, offset, k, rows, chunks)


@device_function
def weights_times_rows(acc, p, tile, offset, rows, chunks):
    """acc += P B: P is in registers, B is the tile.

    acc   16 x head size
    p     16 x rows, as rows_times_rows leaves it; rounded here to the storage of the tile
    """
    lane = int32(cuda.threadIdx.x & 31)
    a = cuda.local.array(4, int32)
    b = cuda.local.array(4, int32)
    if width(tile) == 8:
        # matrices 0 and 1 are two times 8 rows of one chunk, 2 and 3 of the next chunk
        at = chunk_index(tile, offset, lane & 15, lane >> 4, rows, chunks)
        for k in range(rows // 16):
            for i in range(4):
                a[i] = pack_bf16(p[8 * k + 2 * i], p[8 * k + 2 * i + 1])
            for n in range(chunks // 2):
                index = advance_index(tile, at, 16 * k, 2 * n, rows, chunks)
                ldmatrix_transposed(b, 0, tile, index)
                multiply(tile, acc, 8 * n, a, 0, b, 0)
                multiply(tile, acc, 8 * n + 4, a, 0, b, 2)
    else:
        even = cuda.local.array(2, float32)
        odd = cuda.local.array(2, float32)
        row = int32(2 * (lane & 3))
        # columns 2 quad and 2 quad + 1: in chunk quad / 2 = lane / 8, its first or second half
        chunk = int32(lane >> 3)
        within = int32((lane >> 2 & 1) * 2)
        at = int32(chunk_index(tile, offset, row, chunk, rows, chunks) + within)
        at_odd = int32(chunk_index(tile, offset, row + 1, chunk, rows, chunks) + within)
        for k in range(rows // 8):
            for h in range(2):  # of A's words, as in gpu/mma.py
                for r in range(2):
                    a[r + 2 * h] = round_to_tf32(p[4 * k + 2 * r + h])
            for n in range(chunks // 4):
                load_pair(even, tile, advance_index(tile, at, 8 * k, 4 * n, rows, chunks))
                load_pair(odd, tile, advance_index(tile, at_odd, 8 * k, 4 * n, rows, chunks))
                for j in range(2):
                    b[2 * j] = round_to_tf32(even[j])
                    b[2 * j + 1] = round_to_tf32(odd[j])
                    multiply(tile, acc, 8 * n + 4 * j, a, 0, b, 2 * j)


@device_function
def product_to_shared(tile, offset, acc, factor, chunks):
    """fragment_to_shared for acc as weights_times_rows leaves it."""
    if width(tile) == 8:
        fragment_to_shared(tile, offset, acc, factor, chunks)
    else:
        lane = int32(cuda.threadIdx.x & 31)
        x = cuda.local.array(4, float32)
        for r in range(2):
            row = int32((cuda.threadIdx.x >> 5) * 16 + (lane >> 2) + 8 * r)
            for n in range(chunks // 4):
                for j in range(2):
                    for c in range(2):
                        x[2 * c + j] = acc[8 * n + 4 * j + 2 * r + c] * factor
                place = swizzled(row, int32(4 * n + (lane & 3)), ROWS, chunks)
                store(tile, int32(offset + place * 4), x)


@device_function
def store_product(tile, offset, acc, factor, target, start, stride, first, T, chunks):
    """store_fragment for acc as weights_times_rows leaves it."""
    product_to_shared(tile, offset, acc, factor, chunks)
    cuda.syncwarp()
    shared_to_global(tile, offset, target, start, stride, first, T, chunks)
