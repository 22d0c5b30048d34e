"""Hopper's tensor-core products of tiles (PTX `wgmma`, compute capability 9.0 only).

The four warps of a warpgroup, 128 threads, multiply together. Warp w holds rows 16 w … 16 w + 15 of
the result in its registers, spread over its lanes as ops/flash_tile.py draws it. The right operand,
and the left one too unless it is in registers, are read from shared memory by the tensor cores
themselves, from tiles in the 128-byte swizzle: an instruction is given not an address but a
descriptor, 64 bits that say where a tile begins and how it is laid out.

    bits  0-13   address of the tile / 16
    bits 16-29   bytes / 16 from one panel of 64 columns to the next, where a product takes several
    bits 32-45   bytes / 16 from 8 rows to the next 8: 1024 / 16
    bits 62-63   1: the 128-byte swizzle, whose pattern repeats every 8 rows of 128 bytes. It is
                 taken from the address itself, so a tile must begin at a multiple of 1024 bytes

One instruction multiplies a depth of 16. Stepping along a row of the left or right tile by 16
columns is stepping its address by 32 bytes, and the hardware applies the swizzle after that.

Products run beside the thread that starts them. They are counted in groups, one for each function
called here, and finish in order:

    wgmma_abt(s, …)            starts
    wgmma_ab(o, p, …)          starts, behind it
    wgmma_wait(s, n, 1)        at most one is still running, so that s is there
    …                          the thread works on s, while the tensor cores work on o
    wgmma_wait(o, n, 0)        o is there; p may be overwritten

Until the wait the registers of a running product are not the thread's own. The compiler knows
nothing of that, except by the order of volatile instructions: a wait therefore names the
accumulator that it makes readable, and words for the left operand are made by `pack_bf16_in_order`
behind the wait that frees their registers. If they were packed earlier, the compiler would either
have to copy or, as ptxas says with C7513, let each product finish before it starts the next.
"""

from dataclasses import dataclass

import numpy as np
from llvmlite import ir

from numbagpt.gpu.instruction import (
    F32,
    I32,
    I64,
    Address,
    Ptx,
    Read,
    Update,
    Write,
    instruction,
)
from numbagpt.gpu.sim_lanes import FULL_MASK, here
from numbagpt.gpu.simulator import checked_slice, warp_operation
from numbagpt.gpu.vec import bf16_to_float32

ROWS = 64  # of the result and of the left operand
PANEL = 64  # columns of a panel: 128 bytes of bf16
DEPTH = 16  # of one instruction
LINE = 128 // 16  # chunks of 16 bytes in a panel's row

# The swizzle, the distance of 8 rows, and the distance of panels where there is only one.
_LAYOUT = 1 << 62 | 1024 // 16 << 32
_FENCE = "wgmma.fence.sync.aligned;"  # registers written so far are ready for a product
_COMMIT = "wgmma.commit_group.sync.aligned;"


@dataclass(frozen=True)
class Tile(Address):
    """Descriptor of the tile at array[offset]; where its panels are is left open."""

    def value(self, context, builder, array_type, array, offset):
        address = super().value(context, builder, array_type, array, offset)
        long = ir.IntType(64)
        start = builder.zext(builder.lshr(address, address.type(4)), long)
        return builder.or_(start, long(_LAYOUT))


TILE = Tile(I64, True)


def _check_panels(columns: int) -> None:
    """Raise ValueError for a tile that is not whole panels, when compiling and when simulating."""
    if columns % PANEL:
        raise ValueError(f"wgmma of a tile of {columns} columns; expected a multiple of {PANEL}")


def _product(columns: int, lines: list[str]) -> str:
    """Products of 64 x `columns` as one block of PTX: everything between a fence and a commit."""
    shape = f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.bf16.bf16"
    declarations = ".reg .pred add; .reg .b64 a, b; setp.ne.b32 add, 0, 0;"
    body = "\n".join(lines).replace("wgmma ", shape + " ")
    return "\n".join(["{", declarations, _FENCE, body, _COMMIT, "}"])


def _descriptor(register: str, tile: str, step: int, panel_distance: int = 0) -> str:
    """PTX for the descriptor of what is `step` chunks behind the start of a tile."""
    return f"add.s64 {register}, {tile}, {step + (panel_distance << 16)};"


def _abt(rows: int, depth: int) -> Ptx:
    _check_panels(depth)
    lines = []
    for k in range(depth // DEPTH):
        panel, within = divmod(k * DEPTH, PANEL)
        lines.append(_descriptor("a", "$a", panel * ROWS * LINE + within // 8))
        lines.append(_descriptor("b", "$b", panel * rows * LINE + within // 8))
        # The first product overwrites acc (the predicate `add` is false), the others add to it.
        lines.append(f"wgmma $acc, a, b, {1 if k else 'add'}, 1, 1, 0, 0;")
    return Ptx(_product(rows, lines), acc=Write(F32, rows // 2), a=TILE, b=TILE)


@instruction(_abt, volatile=True)
def wgmma_abt(acc, a, a_offset, b, b_offset, rows, depth):
    """Start acc = A B^T, both in shared memory: A 64 x depth, B rows x depth, bf16.

    acc is float32, rows / 2 registers. rows: a multiple of 8, at most 256; depth: a multiple of 64,
    for the tiles are whole panels.
    """
    warp = here.lane.number // 32 % 4

    def complete(operands):
        left = _matrix(a, a_offset, ROWS, depth)[16 * warp : 16 * warp + 16]
        return _fragments(left @ _matrix(b, b_offset, rows, depth).T, operands)

    _start(acc, warp_operation("wgmma_abt", FULL_MASK, None, complete))


def _ab(depth: int, columns: int) -> Ptx:
    _check_panels(columns)
    lines = []
    for k in range(depth // DEPTH):
        lines.append(_descriptor("b", "$b", k * DEPTH * LINE, depth * LINE))
        # The last 1: B lies with its columns side by side, not its depth.
        lines.append(f"wgmma $acc, $left[{4 * k}:{4 * k + 4}], b, 1, 1, 1, 1;")
    text = _product(columns, lines)
    return Ptx(text, acc=Update(F32, columns // 2), left=Read(I32, depth // 4), b=TILE)


@instruction(_ab, volatile=True)
def wgmma_ab(acc, left, b, b_offset, depth, columns):
    """Start acc += A B: A 64 x depth in registers, B depth x columns in shared memory, bf16.

    acc is float32, columns / 2 registers; left, depth / 4 words of two bf16, is a fragment packed
    as by flash_tile.pack_rows. depth: a multiple of 16; columns: of 64, at most 256.
    """

    def complete(operands):
        product = _left_operand(operands, depth) @ _matrix(b, b_offset, depth, columns)
        return _fragments(product, operands)

    before = _result_so_far(acc, columns // 2)
    words = left.array[: depth // 4].copy()
    _start(acc, before + warp_operation("wgmma_ab", FULL_MASK, words, complete))


@instruction(
    lambda n, pending: Ptx(f"wgmma.wait_group.sync.aligned {pending};", acc=Update(F32, n)),
    volatile=True,
)
def wgmma_wait(acc, n, pending):
    """Wait until at most `pending` products still run; acc[:n] is the result of one of the rest."""
    products = here.lane.products
    for product in products[: max(0, len(products) - pending)]:
        product.finished = True
    adding = [product for product in products if product.registers is acc.array]
    if adding and all(product.finished for product in adding):
        acc.array[:n] = adding[-1].result
        here.lane.products = [product for product in products if product not in adding]


# ---- pieces of the meanings ----------------------------------------------------------------------
#
# Under the simulator the registers of a running product are NaN until a wait that lets the product
# finish and names them. So a kernel that reads them too early, or waits for another accumulator,
# gets a wrong result.


@dataclass(eq=False)
class Product:
    """A product that one lane has not waited for: its accumulator, and what it will hold."""

    registers: np.ndarray
    result: np.ndarray
    finished: bool = False


def _start(acc, result):
    """Let a product run whose result this lane will hold in acc."""
    here.lane.products.append(Product(acc.array, result))
    acc.array[: len(result)] = np.nan


def _result_so_far(acc, n):
    """acc[:n], or what will be there when the last of the products that run has added to it."""
    for product in reversed(here.lane.products):
        if product.registers is acc.array:
            return product.result
    return acc.array[:n].copy()


def _matrix(array, offset, rows, columns):
    """The rows x columns matrix in a swizzled tile, as float32."""
    _check_panels(columns)
    stored = checked_slice(array, offset, rows * columns, align=1024 // array.dtype.itemsize)
    panels = stored.reshape(columns // PANEL, rows, LINE, 8)
    r = np.arange(rows)[:, None]
    chunks = panels[:, r, np.arange(LINE) ^ (r & 7)]
    return bf16_to_float32(chunks).transpose(1, 0, 2, 3).reshape(rows, columns)


def _fragments(product, lanes):
    """What each lane holds of a warp's 16 rows of a product."""
    blocks = product.reshape(2, 8, -1, 4, 2)  # r, quad, n, member, c
    by_lane = blocks.transpose(1, 3, 2, 0, 4).reshape(32, -1)  # (quad member), (n r c)
    return {lane: by_lane[lane] for lane in lanes}


def _left_operand(words, depth):
    """The warp's 16 x depth matrix whose fragments, packed, are `words`, by lane."""
    pairs = np.stack([words[lane] for lane in range(32)]).view(np.uint16)
    blocks = bf16_to_float32(pairs).reshape(8, 4, depth // 8, 2, 2)  # quad, member, n, r, c
    return blocks.transpose(3, 0, 2, 1, 4).reshape(16, depth)
