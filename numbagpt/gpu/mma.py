"""Tensor-core products of one warp, mma.sync, and ldmatrix, which brings their operands.

One warp multiplies a 16 x K matrix A by a K x 8 matrix B and adds the product to a 16 x 8 matrix C
of float32. K is 16 for bf16 and 8 for TF32: a row of A, and a column of B, is 32 bytes either way.
The matrices are spread over the registers of the 32 lanes, which form 8 quads of 4. A lane is a
member of its quad: quad = lane / 4 and member = lane % 4 (in the PTX manual groupID and
threadID_in_group).

    C   acc[2 r + c]   row quad + 8 r, column 2 member + c                        r, c = 0, 1
    A   a[r + 2 h]     row quad + 8 r, word member + 4 h of the row's eight words
    B   b[h]           column quad,    word member + 4 h of the column's eight words    h = 0, 1

A word is 32 bits: two neighbouring bf16, the first in the low half, or one TF32. So a matrix of 8
rows of 16 bytes goes into one register of each lane: word `member` of row `quad`. ldmatrix reads
four of those.

The columns of A may stand in any order, as long as the rows of B stand in the same one: they are
what the product sums over.

TF32 is a float32 of which the tensor cores read the upper 19 bits: 8 of exponent, 10 of mantissa.
"""

import numpy as np

from numbagpt.gpu.instruction import F32, I32, SHARED, Read, Update, Write, instruction
from numbagpt.gpu.sim_lanes import FULL_MASK
from numbagpt.gpu.simulator import checked_slice, warp_operation
from numbagpt.gpu.vec import bf16_to_float32


@instruction(
    """{
        .reg .b32 bits, rounded;
        mov.b32 bits, $x;
        add.s32 rounded, bits, 0x1000;
        max.s32 $result, rounded, bits;
    }""",
    result=I32,
    x=F32,
)
def round_to_tf32(x):
    """Bits whose upper 19 are the TF32 number nearest to x, as an operand of mma_tf32; ties go away
    from zero.

    Half of the last place that is kept is added to the magnitude: what the lower 13 bits then hold,
    the tensor cores do not read. The maximum keeps the GPU's NaN, 0x7fffffff, to which the addition
    would make a zero. PTX has cvt.rna.tf32.f32 for it, which takes longer: it is a comparison and
    an addition that depends on it.
    """
    return _rounded_to_tf32(int(x.view(np.int32)))


@instruction(
    """{
        .reg .b32 rounded;
        add.s32 rounded, $words, 0x1000;
        max.s32 $words, rounded, $words;
    }""",
    words=Update(I32, 1, first=True),
)
def round_word_to_tf32(words, first):
    """The same for words[first], which holds the bits of a float32, in place."""
    words[first] = _rounded_to_tf32(int(words[first]))


@instruction(
    "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 $acc, $a, $b, $acc;",
    acc=Update(F32, 4, first=True),
    a=Read(I32, 4, first=True),
    b=Read(I32, 2, first=True),
)
def mma_bf16(acc, acc_first, a, a_first, b, b_first):
    """C += A B of a warp with bf16 operands, registers from acc[acc_first], a[a_first] … on."""
    _multiply("mma_bf16", acc, acc_first, a, a_first, b, b_first, _bf16)


@instruction(
    "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 $acc, $a, $b, $acc;",
    acc=Update(F32, 4, first=True),
    a=Read(I32, 4, first=True),
    b=Read(I32, 2, first=True),
)
def mma_tf32(acc, acc_first, a, a_first, b, b_first):
    """C += A B of a warp with TF32 operands, registers from acc[acc_first], a[a_first] … on."""
    _multiply("mma_tf32", acc, acc_first, a, a_first, b, b_first, _tf32)


@instruction(
    "ldmatrix.sync.aligned.m8n8.x4.shared.b16 $words, [$tile];",
    volatile=True,
    words=Write(I32, 4, first=True),
    tile=SHARED,
)
def ldmatrix(words, first, tile, offset):
    """Four matrices of 8 rows of 16 bytes from shared memory, words[first + m] for matrix m.

    Lane 8 m + i says where row i of matrix m is: 16 bytes at tile[offset], aligned to 16. Each
    lane receives word `member` of row `quad`.
    """
    _load_matrices("ldmatrix", words, first, tile, offset, lambda m: m.view(np.int32))


@instruction(
    "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 $words, [$tile];",
    volatile=True,
    words=Write(I32, 4, first=True),
    tile=SHARED,
)
def ldmatrix_transposed(words, first, tile, offset):
    """ldmatrix of matrices of 8 x 8 bf16, each transposed: a lane receives rows 2 member and
    2 member + 1 of column `quad`.
    """

    def transposed(m):
        return np.ascontiguousarray(m.view(np.uint16).transpose(0, 2, 1)).view(np.int32)

    _load_matrices("ldmatrix_transposed", words, first, tile, offset, transposed)


# ---- pieces of the meanings ----------------------------------------------------------------------


def _rounded_to_tf32(bits):
    """bits: a Python integer from an int32, and so is the result."""
    return bits if bits > 0x7FFFFFFF - 0x1000 else bits + 0x1000


def _bf16(words):
    """(n, 8) words as (n, 16) float32."""
    return bf16_to_float32(words.view(np.uint16))


def _tf32(words):
    """(n, 8) words as (n, 8) float32, of which the hardware reads the upper 19 bits."""
    return (words.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)


def _multiply(name, acc, acc_first, a, a_first, b, b_first, numbers):
    mine = checked_slice(acc, acc_first, 4, align=1)
    operands = (
        mine,
        checked_slice(a, a_first, 4, align=1),
        checked_slice(b, b_first, 2, align=1),
    )
    mine[:] = warp_operation(name, FULL_MASK, operands, lambda lanes: _product(lanes, numbers))


def _product(lanes, numbers):
    """C + A B, put together from the lanes' registers and taken apart again."""
    acc, a, b = (np.stack(registers) for registers in zip(*lanes.values(), strict=True))
    # quad, member and the indices of a lane's registers, rearranged into rows and columns:
    # quad member h r -> (r quad) (h member)
    left = a.reshape(8, 4, 2, 2).transpose(3, 0, 2, 1).reshape(16, 8)
    # quad member h -> quad (h member): columns of B
    right = b.reshape(8, 4, 2).transpose(0, 2, 1).reshape(8, 8)
    product = numbers(left) @ numbers(right).T
    # r quad member c -> (quad member) (r c)
    acc += product.reshape(2, 8, 4, 2).transpose(1, 2, 0, 3).reshape(32, 4)
    return dict(zip(lanes, acc, strict=True))


def _load_matrices(name, words, first, tile, offset, arranged):
    row = checked_slice(tile, offset, 16 // tile.dtype.itemsize).view(np.uint8).copy()

    def complete(rows):
        matrices = arranged(np.stack(list(rows.values())).reshape(4, 8, 16))
        by_lane = matrices.reshape(4, 32).T  # lane, matrix
        return dict(zip(rows, by_lane, strict=True))

    mine = checked_slice(words, first, 4, align=1)
    mine[:] = warp_operation(name, FULL_MASK, row, complete)
