"""What the flash attention kernels share: tiles in shared memory and fragments in registers.

Tiles and the swizzle
---------------------
A tile is some rows of Q, K, V or dO in shared memory. It is cut into chunks of 16 bytes (8 bf16 or
4 float32): what one asynchronous copy brings, and what the tensor cores read at a time.

128 bytes side by side, the 32 banks of shared memory, are read at once; two chunks 128 bytes apart
lie in the same banks and are read one after the other (transpose.py). The tensor cores ask for the
same chunk of 8 consecutive rows. With rows of 128 bytes stored plainly, those 8 chunks lie in the
same banks and take 8 turns. So row r keeps its chunk c at place c ^ (r & 7), and the 8 chunks lie
in 8 different places:

             place 0   1   2   3   4   5   6   7
    row 0      c = 0   1   2   3   4   5   6   7
    row 1          1   0   3   2   5   4   7   6
    row 2          2   3   0   1   6   7   4   5
    …
    row 7          7   6   5   4   3   2   1   0        chunk c = 0 of 8 rows: each in its own place

This is the pattern that wgmma calls the 128-byte swizzle. It repeats every 8 rows.

A row longer than 128 bytes is cut into panels of 128 bytes. Each panel is stored as a tile of its
own, one behind the other. Where a row is shorter, 2 or 4 rows share a line of 128 bytes, and the
swizzle exchanges places within a row only.

Kernels get their tiles by `cuda.shared.array(0, …)`: dynamic shared memory, whose size is given at
the launch. All such arrays of a kernel, of whatever type, begin at the same byte. Offsets in
elements say what lies where; each kernel has a drawing of them. `alignment=1024` is what wgmma's
swizzle needs (gpu/wgmma.py), and `keep_address` saves instructions (gpu/ptx.py).

Fragments
---------
A product of the tensor cores leaves its result spread over the registers of a warp. What one lane
holds of it is a fragment. Four lanes that share rows are a quad: quad = lane / 4, and a lane is its
member = lane % 4 (in the PTX manual groupID and threadID_in_group). Of 16 rows and N columns, a
lane holds rows quad and quad + 8, and of these two neighbouring columns in every block of 8:

              columns 0 1   2 3   4 5   6 7 |  8 9  10 11 …
    row 0          lane 0     1     2     3 |    0     1        acc[0], acc[1] | acc[4], acc[5]
    row 1               4     5     6     7 |    4     5
    …
    row 7              28    29    30    31 |
    row 8               0     1     2     3 |                   acc[2], acc[3] | acc[6], acc[7]
    …

    acc[4 n + 2 r + c]  is row quad + 8 r, column 8 n + 2 member + c          r, c = 0, 1

A row lies in the four lanes of a quad, so a sum over a row is a sum over some registers and two
shuffles. Local arrays of 2, indexed by r, hold one number for each of the lane's two rows.

Rounded to bf16 and packed in pairs, the registers are, as they stand, the left operand of a next
product. No trip through shared memory is needed between two products:

    pack[2 n + r] = (acc[4 n + 2 r], acc[4 n + 2 r + 1])
    pack[4 k : 4 k + 4] holds columns 16 k … 16 k + 15, the depth of one product

Names in the kernels
--------------------
    s, dp               fragments of S and dP, float32: the block's 64 rows by the tile at hand. s
                        is overwritten with P, and in the backward pass then with dS
    p, ds               P and dS packed to bf16, for wgmma
    o, dq, dk, dv       accumulators: fragments of 64 x HS, float32
    q_left, do_left …   the block's own rows as left operand of mma.sync
    row_max, row_sum    m and l of the online softmax; rescale is exp(m - m')
    scale2, lse2        scale * log2(e) and lse * log2(e), for exp2 in place of exp
    b, h, head          a sequence, a head in it, and b * NH + h
    q0, k0              first query and first key of a tile; q1, k1: of the next tile
    stride              elements from one token to the next in qkv: 3C
    …_start, …_next     index in global memory; …_next: of what this thread is to copy next
    …_tile              index of a tile in shared memory
"""

from numba import cuda, float32, int32, int64, uint32

from numbagpt.gpu.kernel import device_function
from numbagpt.gpu.ptx import (
    copy_async,
    copy_async_or_zero,
    exp2,
    load_words,
    maximum,
    pack_bf16,
    pack_bf16_in_order,
    store_word,
    store_words,
)
from numbagpt.gpu.reduce import FULL_MASK, LOWEST
from numbagpt.gpu.vec import width

THREADS = 128  # of a block: four warps
ROWS = 64  # that a block owns, queries or keys: 16 for each warp

# Heads whose blocks run side by side. Blocks of one head read the same K and V, those of too many
# heads push each other's out of the second-level cache.
HEADS_TOGETHER = 48


def tile_grid(heads: int, tiles: int) -> tuple[int, int, int]:
    """Grid of one block per tile and head: (heads together, tiles, groups of heads).

    blockIdx.x runs fastest, so that the same tile of some HEADS_TOGETHER heads comes first, then
    the next tile. A block's head is blockIdx.z * gridDim.x + blockIdx.x, of B * NH.
    """
    together = min(heads, HEADS_TOGETHER)
    while heads % together:
        together -= 1
    return together, tiles, heads // together


@device_function
def head_after_loop(NH):
    """b and h of this block again, for what a kernel does after its loop over tiles.

    If it used those from before the loop, the compiler would keep them in registers throughout the
    loop. From unsigned numbers it does not recognise that they are the same.
    """
    head = uint32(cuda.blockIdx.z * cuda.gridDim.x + cuda.blockIdx.x)
    b = int32(head // uint32(NH))
    return b, int32(int32(head) - b * NH)


# ---- tiles ---------------------------------------------------------------------------------------


@device_function
def swizzled(row, chunk, rows, chunks):
    """Place of 16-byte chunk `chunk` of row `row`, in chunks from the start of the tile.

    rows, chunks: of the tile, known when the kernel is compiled; chunks is 2, 4, 8, 16 …
    """
    if chunks >= 8:
        return (chunk >> 3) * rows * 8 + row * 8 + ((chunk & 7) ^ (row & 7))
    if chunks == 4:
        return row * 4 + (chunk ^ (row >> 1 & 3))
    return row * 2 + (chunk ^ (row >> 2 & 1))


@device_function
def thread_offset(stride, per_chunk, chunks):
    """Elements from a tile's first row in global memory to the first chunk that this thread copies.

    Threads side by side take the chunks of a row, as far as a panel goes, then of the next row.
    stride: elements from one row to the next; per_chunk: elements in 16 bytes.
    """
    thread = uint32(cuda.threadIdx.x)
    across = uint32(min(chunks, 8))
    return int64(thread // across) * stride + int64(thread % across) * per_chunk


@device_function
def load_tile_async(tile, offset, source, start, stride, first, T, rows, chunks):
    """Start to copy `rows` rows of T into a tile, by THREADS threads; zeros from row T on.

    tile, offset    shared memory and where in it the tile begins, in elements
    source, start   global memory and where in it row `first` begins, in elements, plus
                    thread_offset(…), which a loop over tiles computes once
    stride          elements from one row to the next
    first           number of the tile's first row, among the T
    rows, chunks    of the tile: constants
    """
    across = min(chunks, 8)  # chunks of a row that the block copies at a time: a panel's
    step = THREADS // across  # rows that it copies at a time: 16, 32 or 64
    thread = uint32(cuda.threadIdx.x)
    row = int32(thread // uint32(across))
    place = swizzled(row, int32(thread % uint32(across)), rows, chunks)
    at = int32(offset + place * width(tile))
    # The swizzle repeats every 8 rows, and step is a multiple of 8. So this thread's chunk has the
    # same place in every row that it copies, and one step down is step * across chunks further on.
    if int32(first + rows) <= T:
        for panel in range(chunks // across):
            for i in range(rows // step):
                to = int32(at + (panel * rows + i * step) * across * width(tile))
                copy_async(tile, to, source, start + panel * 8 * width(tile) + (i * step) * stride)
    else:
        for panel in range(chunks // across):
            for i in range(rows // step):
                to = int32(at + (panel * rows + i * step) * across * width(tile))
                here = start + panel * 8 * width(tile) + (i * step) * stride
                there = int32(first + row + i * step) < T
                copy_async_or_zero(tile, to, source, here, there)


@device_function
def fragment_to_shared(tile, offset, acc, factor, chunks):
    """Write factor * acc, rounded to bf16, into a tile of ROWS that nobody needs any more.

    acc   4 float32 for every chunk: each warp writes its own 16 rows
    """
    lane = int32(cuda.threadIdx.x & 31)
    for r in range(2):
        row = int32((cuda.threadIdx.x >> 5) * 16 + (lane >> 2) + 8 * r)
        for n in range(chunks):
            place = swizzled(row, n, ROWS, chunks)
            word = pack_bf16(acc[4 * n + 2 * r] * factor, acc[4 * n + 2 * r + 1] * factor)
            store_word(tile, int32(offset + place * 8 + 2 * (lane & 3)), word)


@device_function
def shared_to_global(tile, offset, target, start, stride, first, T, chunks):
    """Copy a tile of ROWS to global memory, as far as its rows are among the T of the matrix.

    Each warp copies the 16 rows that it has written itself; a syncwarp has to lie between.
    target, start   where row `first` begins, in elements; the others as for load_tile_async
    """
    warp = int32(cuda.threadIdx.x >> 5)
    lane = uint32(cuda.threadIdx.x & 31)
    words = cuda.local.array(4, int32)
    step = 32 // chunks  # rows that a warp copies at a time
    chunk = int32(lane % uint32(chunks))
    row = int32(16 * warp + int32(lane // uint32(chunks)))
    start += int64(row) * stride + chunk * width(tile)
    for i in range(16 // step):
        if int32(first + row + i * step) < T:
            place = swizzled(row + i * step, chunk, ROWS, chunks)
            load_words(words, tile, int32(offset + place * width(tile)))
            store_words(target, start + (i * step) * stride, words)


@device_function
def store_fragment(tile, offset, acc, factor, target, start, stride, first, T, chunks):
    """Store factor * acc, rounded to bf16, in global memory, as far as its rows are among the T.

    A lane's parts of a row are 4 bytes each, 16 bytes apart. So each warp first writes its 16 rows
    to shared memory, and then stores them from there in chunks. The arguments are those of both.
    """
    fragment_to_shared(tile, offset, acc, factor, chunks)
    cuda.syncwarp()
    shared_to_global(tile, offset, target, start, stride, first, T, chunks)


# ---- sums of columns, for the gradient of the bias -----------------------------------------------


@device_function
def column_sum_weights(p, half, blocks):
    """The left operand whose product with a tile is the sum of the tile's rows, column by column.

    p, a fragment of 16 x 8 * blocks, becomes one in rows 8 * half to 8 * half + 7 and zero in the
    others. So each of these 8 rows of the product is that sum, and the other 8 are zero.

    The dq kernels add up the 64 rows of dq and of dout this way (flash_attention.py says why). In
    fragments these rows are spread over lanes and warps; the tensor cores add them without a
    shuffle. With half 0 for dq and half 1 for dout, one accumulator takes both sums.
    """
    for n in range(blocks):
        for r in range(2):
            for c in range(2):
                p[4 * n + 2 * r + c] = float32(r == half)


@device_function
def store_column_sums(target, number, tile, acc, NH, HS):
    """Store what a tile adds to the gradient of the bias of q, k and v. For dk that is zero.

    target   (B, tiles, 3, NH, HS), float32
    number   the block's place on the second axis
    acc      the two products with column_sum_weights: the sums for dq in rows 0-7, the sums for dv
             in rows 8-15. Their order in acc is that of a product with the storage of `tile`
    """
    b, h = head_after_loop(NH)
    start = ((int64(b) * cuda.gridDim.y + number) * 3 * NH + h) * HS
    C = int64(NH) * HS
    # Every quad of the first warp has all the sums. Each stores one of 8 blocks of 8 columns.
    quad = int32(cuda.threadIdx.x >> 2)
    member = int32(cuda.threadIdx.x & 3)
    blocks = HS // 8
    together = min(blocks, 8)
    if quad < together:
        for first in range(0, blocks, 8):
            n = int32(first + quad)
            for c in range(2):
                column = int32(8 * n + 2 * member + c)
                if width(tile) == 4:  # the order of flash_mma_products.py
                    column = int32(16 * (n >> 1) + 4 * member + 2 * c + (n & 1))
                # Registers cannot be indexed by quad, a variable: take all, keep one.
                dq = acc[4 * first + c]
                dv = acc[4 * first + 2 + c]
                for k in range(1, together):
                    next_dq = acc[4 * (first + k) + c]
                    next_dv = acc[4 * (first + k) + 2 + c]
                    dq = next_dq if quad == k else dq
                    dv = next_dv if quad == k else dv
                target[start + column] = dq
                target[start + C + column] = float32(0)
                target[start + 2 * C + column] = dv


# ---- fragments -----------------------------------------------------------------------------------


@device_function
def quad_sum(x):
    """Sum over the four lanes that share a row, in each of them."""
    x += cuda.shfl_xor_sync(FULL_MASK, x, 1)
    return x + cuda.shfl_xor_sync(FULL_MASK, x, 2)


@device_function
def quad_max(x):
    """Maximum over the four lanes that share a row, in each of them."""
    x = maximum(x, cuda.shfl_xor_sync(FULL_MASK, x, 1))
    return maximum(x, cuda.shfl_xor_sync(FULL_MASK, x, 2))


@device_function
def fragment_corner():
    """Row minus column of this thread's acc[0] in a tile, for the masks.

    acc[4 n + 2 r + c] has row minus column that much plus 8 r - 8 n - c.
    """
    thread = int32(cuda.threadIdx.x)
    return int32((thread >> 5) * 16 + (thread >> 2 & 7) - 2 * (thread & 3))


@device_function
def mask_above(s, corner, blocks):
    """Scores right of the diagonal become the lowest float: their keys come after the query."""
    for n in range(blocks):
        for r in range(2):
            for c in range(2):
                if corner < int32(8 * n + c - 8 * r):
                    s[4 * n + 2 * r + c] = LOWEST


@device_function
def mask_below(s, corner, blocks):
    """The same for transposed scores, whose rows are keys: those below the diagonal."""
    for n in range(blocks):
        for r in range(2):
            for c in range(2):
                if corner > int32(8 * n + c - 8 * r):
                    s[4 * n + 2 * r + c] = LOWEST


@device_function
def online_softmax(s, row_max, row_sum, rescale, scale2, blocks):
    """One step of the online softmax: scores become exp(scale * (score - row_max)).

    s         scores of 8 * blocks more keys, not yet scaled; overwritten
    row_max   of this lane's two rows: maximum so far, not yet scaled; updated
    row_sum   the sum of exponentials so far, of this lane's columns only; updated. The sum over the
              quad is taken once, at the end
    rescale   written: what the sums over former keys must be multiplied by, since row_max has grown
    scale2    scale * log2(e): exp(scale * x) = 2 ** (scale2 * x), and 2 ** x is one instruction
    """
    for r in range(2):
        top = row_max[r]
        for n in range(blocks):
            top = maximum(top, maximum(s[4 * n + 2 * r], s[4 * n + 2 * r + 1]))
        top = quad_max(top)
        top2 = top * scale2
        rescale[r] = exp2(row_max[r] * scale2 - top2)
        row_max[r] = top
        total = float32(0)
        for n in range(blocks):
            a = exp2(s[4 * n + 2 * r] * scale2 - top2)
            b = exp2(s[4 * n + 2 * r + 1] * scale2 - top2)
            total += a + b
            s[4 * n + 2 * r] = a
            s[4 * n + 2 * r + 1] = b
        row_sum[r] = row_sum[r] * rescale[r] + total


@device_function
def scale_rows(acc, factor, blocks):
    """acc *= factor[r] for the lane's two rows r."""
    for n in range(blocks):
        for r in range(2):
            for c in range(2):
                acc[4 * n + 2 * r + c] *= factor[r]


@device_function
def pack_rows(acc, pack, blocks):
    """acc rounded to bf16, two to a word: a left operand for the next product."""
    for n in range(blocks):
        for r in range(2):
            pack[2 * n + r] = pack_bf16_in_order(acc[4 * n + 2 * r], acc[4 * n + 2 * r + 1])
