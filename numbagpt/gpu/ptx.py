"""The instructions that Numba has no name for, and what they mean.

instruction.py says how such a function is made.
"""

import itertools
import math

import numpy as np
from llvmlite import ir
from numba.cuda.extending import intrinsic

from numbagpt.gpu.instruction import (
    F32,
    GLOBAL,
    I32,
    SHARED,
    SHARED_SPACE,
    Bytes,
    Ptx,
    Read,
    Write,
    instruction,
)
from numbagpt.gpu.sim_lanes import here
from numbagpt.gpu.simulator import checked_slice, register_meaning
from numbagpt.gpu.vec import float32_to_bf16

# The GPU's exponential and logarithm are to base 2: exp(x) = exp2(LOG2_E * x) and
# log(x) = LN_2 * log2(x). Python floats: a kernel says float32(LOG2_E), or it computes in float64.
LOG2_E = math.log2(math.e)
LN_2 = math.log(2)

# ---- arithmetic: one instruction each; of all but `maximum` the last bit or two are uncertain ----


@instruction("ex2.approx.ftz.f32 $result, $x;", result=F32, x=F32)
def exp2(x):
    """2 ** x; 0 where x is the lowest float32 or -inf."""
    return np.exp2(x)


@instruction("lg2.approx.ftz.f32 $result, $x;", result=F32, x=F32)
def log2(x):
    """Logarithm of x > 0 to base 2."""
    return np.log2(x)


@instruction("rcp.approx.ftz.f32 $result, $x;", result=F32, x=F32)
def reciprocal(x):
    """1 / x."""
    return np.float32(1) / x


@instruction("max.ftz.f32 $result, $x, $y;", result=F32, x=F32, y=F32)
def maximum(x, y):
    """The larger of two float32."""
    return max(x, y)


# ---- bf16, two to a 32-bit word ------------------------------------------------------------------


def _pack_bf16(low, high):
    bits = float32_to_bf16(np.array([low, high], np.float32))
    return int(bits.view(np.int32)[0])


@instruction("cvt.rn.bf16x2.f32 $result, $high, $low;", result=I32, low=F32, high=F32)
def pack_bf16(low, high):
    """Two float32, rounded to nearest even, in one word: `low` in bits 0-15, `high` in 16-31."""
    return _pack_bf16(low, high)


@instruction(
    "cvt.rn.bf16x2.f32 $result, $high, $low;", volatile=True, result=I32, low=F32, high=F32
)
def pack_bf16_in_order(low, high):
    """pack_bf16 that stays where it is written, behind the waits and products before it.

    Needed where the word's register is an operand of an asynchronous product: see wgmma.py.
    """
    return _pack_bf16(low, high)


# ---- shared memory -------------------------------------------------------------------------------


@intrinsic
def keep_address(typingctx, array):
    """The same shared array, whose address is found once and kept in a register.

    The address of shared memory is a constant to the compiler, which would look it up again before
    each use; and that takes a slow instruction on Hopper.
    """

    def codegen(context, builder, signature, args):
        array_type = signature.args[0]
        made = context.make_array(array_type)(context, builder, value=args[0])
        generic = made.data.type
        pointer = generic.pointee.as_pointer(SHARED_SPACE)
        word = ir.IntType(32)
        address = builder.ptrtoint(builder.addrspacecast(made.data, pointer), word)
        move = ir.InlineAsm(ir.FunctionType(word, [word]), "mov.b32 $0, $1;", "=r,r")
        kept = builder.inttoptr(builder.call(move, [address]), pointer)
        made.data = builder.addrspacecast(kept, generic)
        return made._getvalue()

    return array(array), codegen


register_meaning(keep_address, lambda array: array)


@instruction("ld.global.nc.b32 $result, [$source];", result=I32, source=GLOBAL)
def look_up(source, offset):
    """source[offset], an int32 in global memory that nothing writes while the kernel runs.

    The compiler delays what `source[offset]` says until the value is needed, even out of one turn
    of a loop into the next. This load is begun where the kernel says so.

    It is not volatile although it touches memory: what it reads does not change, so the result is a
    function of the address, right wherever the compiler moves it, and two of one may become one.
    """
    return _words(source, offset, 1)[0]


@instruction("st.shared.b32 [$tile], $word;", volatile=True, tile=SHARED, word=I32)
def store_word(tile, offset, word):
    """Put the 4 bytes of `word` at tile[offset] in shared memory."""
    _words(tile, offset, 1)[:] = word


@instruction("ld.shared.v2.f32 $pair, [$tile];", volatile=True, pair=Write(F32, 2), tile=SHARED)
def load_pair(pair, tile, offset):
    """pair[:2] = tile[offset : offset + 2], float32 in shared memory, in one 64-bit load."""
    pair.array[:2] = checked_slice(tile, offset, 2)


@instruction("ld.shared.v4.b32 $words, [$tile];", volatile=True, words=Write(I32, 4), tile=SHARED)
def load_words(words, tile, offset):
    """words[:4] = the 16 bytes at tile[offset] in shared memory."""
    words.array[:4] = _words(tile, offset, 4)


@instruction(
    "st.global.v4.b32 [$target], $words;", volatile=True, target=GLOBAL, words=Read(I32, 4)
)
def store_words(target, offset, words):
    """Put words[:4] into the 16 bytes at target[offset] in global memory."""
    _words(target, offset, 4)[:] = words.array[:4]


# ---- asynchronous copies, global to shared memory ------------------------------------------------
#
# The thread goes on while the bytes travel, and they pass through no register. A thread's copies
# are counted in groups: commit closes a group, and wait(n) returns when at most the n latest groups
# are still under way. Each thread waits for its own copies; a barrier behind the wait makes
# everybody's visible to everybody.
#
# When the bytes arrive is up to the GPU. The simulator takes the worst of it at either end: it
# spoils the target when a copy starts, and fills it when the thread waits. So a kernel that forgets
# to wait finds NaN there, and so does one that copies over what another thread still reads.


@instruction(
    "cp.async.cg.shared.global.L2::128B [$tile], [$source], 16;",
    volatile=True,
    tile=SHARED,
    source=GLOBAL,
)
def copy_async(tile, tile_offset, source, source_offset):
    """Start to copy 16 bytes, aligned to 16, from source[source_offset] to tile[tile_offset].

    The two arrays store the same type. The hint has the second-level cache fetch 128 bytes.
    """
    _copy(tile, tile_offset, source, source_offset, 16, True)


@instruction(
    "cp.async.cg.shared.global [$tile], [$source], 16, $valid;",
    volatile=True,
    tile=SHARED,
    source=GLOBAL,
    valid=Bytes(16),
)
def copy_async_or_zero(tile, tile_offset, source, source_offset, valid):
    """copy_async where `valid`; otherwise 16 zero bytes, and the source is not read."""
    _copy(tile, tile_offset, source, source_offset, 16, valid)


@instruction(
    "cp.async.ca.shared.global [$tile], [$source], 4, $valid;",
    volatile=True,
    tile=SHARED,
    source=GLOBAL,
    valid=Bytes(4),
)
def copy_word_async_or_zero(tile, tile_offset, source, source_offset, valid):
    """copy_async_or_zero of 4 bytes."""
    _copy(tile, tile_offset, source, source_offset, 4, valid)


@instruction("cp.async.commit_group;", volatile=True)
def copy_async_commit():
    """Close the group of the copies that this thread has started since the last commit."""
    here.lane.copies.append([])


@instruction(lambda pending: Ptx(f"cp.async.wait_group {pending};"), volatile=True)
def copy_async_wait(pending):
    """Wait until at most `pending`, a constant, of this thread's groups are still under way."""
    *closed, started = here.lane.copies
    arrived = closed[: max(0, len(closed) - pending)]
    for target, values in itertools.chain(*arrived):
        target[:] = values
    here.lane.copies = [*closed[len(arrived) :], started]


@instruction("fence.proxy.async.shared::cta;", volatile=True)
def fence_async_proxy():
    """Make what this thread wrote or copied into shared memory visible to wgmma.

    wgmma reads shared memory by a path of its own, the async proxy; ordinary writes and cp.async do
    not show there before such a fence. In each writing thread: wait, fence, then the barrier.
    """


# ---- pieces of the meanings ----------------------------------------------------------------------


def _words(array, offset, count):
    """`count` 32-bit words at array[offset], aligned to all of them together; a writable view."""
    elements = 4 * count // array.dtype.itemsize
    return checked_slice(array, offset, elements).view(np.int32)


def _copy(tile, tile_offset, source, source_offset, size, valid):
    count = size // tile.dtype.itemsize
    target = checked_slice(tile, tile_offset, count)
    values = checked_slice(source, source_offset, count).copy() if valid else 0
    target.view(np.uint8)[:] = 0xFF  # NaN, in float32 and in bf16
    here.lane.copies[-1].append((target, values))
