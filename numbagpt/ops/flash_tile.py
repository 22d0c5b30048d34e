"""What the flash attention kernels share: tiles in shared memory and fragments in registers.

Tiles and the swizzle
---------------------
A tile is some rows of Q, K, V or dO in shared memory, cut into chunks of 16 bytes: 8 bf16, what one
asynchronous copy brings and what the tensor cores read at a time. Shared memory has 32 banks of 4
bytes, so 128 bytes side by side are read at once, but two chunks 128 bytes apart lie in the same
banks and are read one after the other. The tensor cores ask for one chunk of each of 8 consecutive
rows. With rows of 128 bytes stored plainly, those 8 chunks lie in the same banks: 8 turns. So row r
keeps its chunk c at place c ^ (r & 7), and the 8 chunks lie in 8 different places:

             place 0   1   2   3   4   5   6   7
    row 0      c = 0   1   2   3   4   5   6   7
    row 1          1   0   3   2   5   4   7   6
    row 2          2   3   0   1   6   7   4   5
    …
    row 7          7   6   5   4   3   2   1   0        column 0 of 8 rows: one chunk in each place

This is the pattern that wgmma calls the 128-byte swizzle. A row longer than 128 bytes is cut into
panels of 128 bytes, each a tile of its own, one behind the other. Where a row is shorter, 2 or 4
rows share a line of 128 bytes, and the swizzle exchanges places within a row only.

Kernels get their tiles by `cuda.shared.array(0, …)`: dynamic shared memory, whose size is given at
the launch. All such arrays of a kernel, of whatever type, begin at the same byte, so that offsets
say what lies where.

Fragments
---------
A product of the tensor cores leaves its result spread over the registers of a warp. Of 16 rows and
N columns, lane `l` holds, with g = l / 4 and q = l % 4, in rows g and g + 8 and in every block of 8
columns two neighbours:

              columns 0 1   2 3   4 5   6 7 |  8 9  10 11 …
    row 0          lane 0     1     2     3 |    0     1        acc[0], acc[1] | acc[4], acc[5]
    row 1               4     5     6     7 |    4     5
    …
    row 7              28    29    30    31 |
    row 8               0     1     2     3 |                   acc[2], acc[3] | acc[6], acc[7]
    …

    acc[4 n + 2 r + c]  is row g + 8 r, column 8 n + 2 q + c

so that a row lies in the four lanes of a quad (same g), and a sum over a row is a sum over some
registers and two shuffles. Rounded to bf16 and packed in pairs, the registers are, as they stand,
the left operand of a next product: no trip through shared memory is needed between two products.

    pack[2 n + r] = (acc[4 n + 2 r], acc[4 n + 2 r + 1])
    pack[4 k : 4 k + 4] holds columns 16 k … 16 k + 15, the depth of one product
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
def my_chunk(stride, per_chunk, chunks):
    """Where this thread's part of a tile lies, from the tile's first row on in global memory.

    Threads side by side take the chunks of a row, as far as a panel goes, then of the next row.
    stride: elements from one row to the next; per_chunk: elements in 16 bytes.
    """
    thread = uint32(cuda.threadIdx.x)
    across = uint32(min(chunks, 8))
    return int64(thread // across) * stride + int64(thread % across) * per_chunk


@device_function
def load_my_chunks(tile, offset, source, start, stride, first, T, rows, chunks):
    """Start to copy `rows` rows of T into a tile, by THREADS threads; zeros from row T on.

    tile, offset    shared memory and where in it the tile begins, in elements
    source, start   where row `first` begins in global memory, in elements, plus my_chunk(…), which
                    a loop over tiles computes once
    stride          elements from one row to the next
    first           number of the tile's first row, among the T
    rows, chunks    of the tile: constants
    """
    across = min(chunks, 8)  # chunks of a row that are copied at a time: a panel's
    step = THREADS // across  # and rows
    thread = uint32(cuda.threadIdx.x)
    row = int32(thread // uint32(across))
    place = swizzled(row, int32(thread % uint32(across)), rows, chunks)
    at = int32(offset + place * width(tile))
    # The swizzle repeats after 8 lines of 128 bytes, and a step is 16: the place moves in line.
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
def lay_out(tile, offset, acc, factor, chunks):
    """factor * acc, rounded to bf16, into a tile of ROWS that nobody needs any more.

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
def take_up(tile, offset, target, start, stride, first, T, chunks):
    """Copy a tile of ROWS to the rows below T of a matrix in global memory.

    Each warp copies the 16 rows that it has laid out itself; a syncwarp has to lie between.
    target, start   where row `first` begins, in elements; the others as for load_my_chunks
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
def store_tile(tile, offset, acc, factor, target, start, stride, first, T, chunks):
    """factor * acc, rounded to bf16, to the rows below T of a matrix in global memory.

    A fragment's row is spread over a quad, 4 bytes here and there. So each warp lays its 16 rows
    out in shared memory and takes them up again in chunks. The arguments are those of both.
    """
    lay_out(tile, offset, acc, factor, chunks)
    cuda.syncwarp()
    take_up(tile, offset, target, start, stride, first, T, chunks)


# ---- sums of rows --------------------------------------------------------------------------------


@device_function
def ones_in_half(p, half, blocks):
    """p, of 16 x 8 * blocks, becomes one in rows 8 * half to 8 * half + 7 and zero in the others.

    Its product with a tile has the sum of the tile's rows in each of these rows. With one tile
    behind half 0 and another behind half 1, two products can add to one accumulator.
    """
    for n in range(blocks):
        for r in range(2):
            for c in range(2):
                p[4 * n + 2 * r + c] = float32(r == half)


@device_function
def store_sums(target, number, tile, acc, NH, HS):
    """Store what a tile adds to the gradient of the bias of q, k and v.

    target   (B, tiles, 3, NH, HS), float32
    number   the block's place on the second axis
    acc      sums of the rows of dq in rows 0-7, and of dv, over all keys, in rows 8-15; as products
             with the storage of `tile` leave them. That of dk is zero
    """
    # Computed again, unsigned, which the compiler does not take for the kernel's own b and h: no
    # registers are to hold them while the tiles stream past.
    head = uint32(cuda.blockIdx.z * cuda.gridDim.x + cuda.blockIdx.x)
    b = int32(head // uint32(NH))
    h = int32(int32(head) - b * NH)
    start = ((int64(b) * cuda.gridDim.y + number) * 3 * NH + h) * HS
    C = int64(NH) * HS
    g = int32(cuda.threadIdx.x >> 2)  # of the first warp, for a block of columns each
    quad = int32(cuda.threadIdx.x & 3)
    blocks = HS // 8
    together = min(blocks, 8)
    if g < together:
        for first in range(0, blocks, 8):
            n = int32(first + g)
            for c in range(2):
                column = int32(8 * n + 2 * quad + c)
                if width(tile) == 4:  # the order of flash_mma_products.py
                    column = int32(16 * (n >> 1) + 4 * quad + 2 * c + (n & 1))
                # Registers cannot be indexed by g: take all, keep one.
                dq = acc[4 * first + c]
                dv = acc[4 * first + 2 + c]
                for k in range(1, together):
                    next_dq = acc[4 * (first + k) + c]
                    next_dv = acc[4 * (first + k) + 2 + c]
                    dq = next_dq if g == k else dq
                    dv = next_dv if g == k else dv
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
    """Scores to the right of the diagonal become the lowest float: keys behind the query."""
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
def online_softmax(s, m, l, alpha, scale2, blocks):
    """Scores become exp(score - m) of the running maximum m; l is the sum of all so far.

    s       scores of 8 * blocks more keys, not yet scaled; overwritten
    m, l    for this lane's two rows: maximum so far, not yet scaled, and the sum of exponentials
            so far, of this lane's columns only (the quad's sum is taken once, at the end)
    alpha   written: what the sums over former keys must be multiplied with, because m has grown
    scale2  scale * log2(e): exp(scale * x) = 2 ** (scale2 * x), and 2 ** x is one instruction
    """
    for r in range(2):
        top = m[r]
        for n in range(blocks):
            top = maximum(top, maximum(s[4 * n + 2 * r], s[4 * n + 2 * r + 1]))
        top = quad_max(top)
        top2 = top * scale2
        alpha[r] = exp2(m[r] * scale2 - top2)
        m[r] = top
        total = float32(0)
        for n in range(blocks):
            a = exp2(s[4 * n + 2 * r] * scale2 - top2)
            b = exp2(s[4 * n + 2 * r + 1] * scale2 - top2)
            total += a + b
            s[4 * n + 2 * r] = a
            s[4 * n + 2 * r + 1] = b
        l[r] = l[r] * alpha[r] + total


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
