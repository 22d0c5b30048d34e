"""128-bit loads and stores.

A GPU thread can read or write 16 bytes in one instruction (LDG.E.128, STG.E.128). On an H200 that
moves a quarter more bytes a second than four 4-byte accesses do. Values are always float32 in
registers, whatever the array stores:

    float32 storage   4 values in 16 bytes
    bf16 storage      8 values in 16 bytes; the arrays are uint16, since a bf16 is the upper half of
                      a float32 and NumPy has no such type

so a kernel is written once for both: `width(arr)` is the number of values, known when the kernel is
compiled, and `load` and `store` move that many between an array and a local array of MAX_WIDTH.

    x = cuda.local.array(MAX_WIDTH, float32)
    load(x, inp, i)                  # x[:width] = inp[i : i + width], i a multiple of width
    for k in range(width(inp)):      # constant trip count: unrolled, x stays in registers
        x[k] *= scale
    store(out, i, x)                 # out[i : i + width] = x[:width]

`fetch` and `unpack` are the two halves of a load: the 16 bytes as they are stored, and the values
in them. bf16 that is fetched long before it is needed takes half the registers that way.

The address inp + i must be a multiple of 16 bytes, or of 8 for `store_half`.
"""

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.cuda.extending import intrinsic

from numbagpt.gpu.simulator import checked_slice, register_meaning

# Values of the narrowest storage type (bf16) in 16 bytes; the size of the local arrays.
MAX_WIDTH = 8

_I32 = ir.IntType(32)
_F32 = ir.FloatType()
_VECTOR = ir.VectorType(_I32, 4)


def bf16_to_float32(bits: np.ndarray) -> np.ndarray:
    """float32 values of bf16 bit patterns (uint16): the bits are the upper half of a float32."""
    return (np.asarray(bits, np.uint16).astype(np.uint32) << 16).view(np.float32)


def float32_to_bf16(values: np.ndarray) -> np.ndarray:
    """bf16 bit patterns (uint16) of float32 values, rounded to nearest even as the GPU does."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), 0x7FFF, rounded).astype(np.uint16)


def _width(dtype: object) -> int:
    return 16 // np.dtype(str(dtype)).itemsize


def _data_pointer(context, builder, array_type, array):
    return context.make_array(array_type)(context, builder, value=array).data


def _vector_pointer(context, builder, array_type, array, index, index_type):
    """Pointer to the 16 bytes that start at element `index`."""
    pointer = _data_pointer(context, builder, array_type, array)
    index = context.cast(builder, index, index_type, types.int64)
    return builder.bitcast(builder.gep(pointer, [index]), _VECTOR.as_pointer())


@intrinsic
def width(typingctx, arr):
    """Number of values in 16 bytes of the array: 4 for float32, 8 for bf16. A constant."""

    def codegen(context, builder, signature, args):
        return ir.Constant(ir.IntType(64), _width(signature.args[0].dtype))

    return types.int64(arr), codegen


def _fetch(context, builder, array_type, array, index, index_type):
    """The four words at element `index`."""
    source = _vector_pointer(context, builder, array_type, array, index, index_type)
    words = builder.load(source, align=16)
    return [builder.extract_element(words, _I32(w)) for w in range(4)]


def _unpack(context, builder, dtype, words, registers):
    """Put the values of four words, stored as dtype, into registers[0], registers[1], …"""
    values = words
    if dtype == types.uint16:
        values = []
        for word in words:
            values += [builder.shl(word, _I32(16)), builder.and_(word, _I32(0xFFFF0000))]
    for k, value in enumerate(values):
        builder.store(builder.bitcast(value, _F32), builder.gep(registers, [_I32(k)]))


@intrinsic
def load(typingctx, x, arr, i):
    """x[:width] = arr[i : i + width] in one 128-bit load, as float32."""

    def codegen(context, builder, signature, args):
        x_type, arr_type, i_type = signature.args
        words = _fetch(context, builder, arr_type, args[1], args[2], i_type)
        registers = _data_pointer(context, builder, x_type, args[0])
        _unpack(context, builder, arr_type.dtype, words, registers)
        return context.get_dummy_value()

    return types.void(x, arr, i), codegen


def _register_pointer(context, builder, array_type, array, index, index_type):
    """Pointer to element `index` of a local array."""
    index = context.cast(builder, index, index_type, types.int64)
    return builder.gep(_data_pointer(context, builder, array_type, array), [index])


@intrinsic
def fetch(typingctx, words, w, arr, i):
    """words[w : w + 4], int32, = the bits of arr[i : i + width], in one 128-bit load."""

    def codegen(context, builder, signature, args):
        words_type, w_type, arr_type, i_type = signature.args
        registers = _register_pointer(context, builder, words_type, args[0], args[1], w_type)
        fetched = _fetch(context, builder, arr_type, args[2], args[3], i_type)
        for k, word in enumerate(fetched):
            builder.store(word, builder.gep(registers, [_I32(k)]))
        return context.get_dummy_value()

    return types.void(words, w, arr, i), codegen


@intrinsic
def unpack(typingctx, x, k, words, w, arr):
    """x[k : k + width] = the values that fetch(words, w, arr, i) has fetched, as float32."""

    def codegen(context, builder, signature, args):
        x_type, k_type, words_type, w_type, arr_type = signature.args
        source = _register_pointer(context, builder, words_type, args[2], args[3], w_type)
        fetched = [builder.load(builder.gep(source, [_I32(k)])) for k in range(4)]
        registers = _register_pointer(context, builder, x_type, args[0], args[1], k_type)
        _unpack(context, builder, arr_type.dtype, fetched, registers)
        return context.get_dummy_value()

    return types.void(x, k, words, w, arr), codegen


def _store(context, builder, signature, args, count):
    """Store x[:count], rounded to the array's storage, in one instruction."""
    arr_type, i_type, x_type = signature.args
    registers = _data_pointer(context, builder, x_type, args[2])
    values = [builder.load(builder.gep(registers, [_I32(k)])) for k in range(count)]
    if arr_type.dtype == types.uint16:
        # Two floats become one word; the second operand of the instruction is the low half.
        pack = ir.InlineAsm(
            ir.FunctionType(_I32, [_F32, _F32]), "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f"
        )
        words = [builder.call(pack, pair) for pair in zip(values[::2], values[1::2], strict=True)]
    else:
        words = [builder.bitcast(value, _I32) for value in values]
    vector_type = ir.VectorType(_I32, len(words))
    vector = ir.Constant(vector_type, ir.Undefined)
    for w, word in enumerate(words):
        vector = builder.insert_element(vector, word, _I32(w))
    target = _vector_pointer(context, builder, arr_type, args[0], args[1], i_type)
    target = builder.bitcast(target, vector_type.as_pointer())
    builder.store(vector, target, align=4 * len(words))
    return context.get_dummy_value()


@intrinsic
def store(typingctx, arr, i, x):
    """arr[i : i + width] = x[:width] in one 128-bit store, rounded to the array's storage."""

    def codegen(context, builder, signature, args):
        return _store(context, builder, signature, args, _width(signature.args[0].dtype))

    return types.void(arr, i, x), codegen


@intrinsic
def store_half(typingctx, arr, i, x):
    """The same with half as many values, in one 64-bit store: a float32 vector's into bf16."""

    def codegen(context, builder, signature, args):
        return _store(context, builder, signature, args, _width(signature.args[0].dtype) // 2)

    return types.void(arr, i, x), codegen


def _load_meaning(x, arr, i):
    values = checked_slice(arr, i, _width(arr.dtype))
    registers = checked_slice(x, 0, len(values))
    registers[:] = bf16_to_float32(values) if values.dtype == np.uint16 else values


def _fetch_meaning(words, w, arr, i):
    checked_slice(words, w, 4)[:] = checked_slice(arr, i, _width(arr.dtype)).view(np.int32)


def _unpack_meaning(x, k, words, w, arr):
    values = checked_slice(words, w, 4).view(arr.dtype)
    registers = checked_slice(x, k, len(values))
    registers[:] = bf16_to_float32(values) if values.dtype == np.uint16 else values


def _store_meaning(arr, i, x, parts=1):
    target = checked_slice(arr, i, _width(arr.dtype) // parts)
    values = checked_slice(x, 0, len(target))
    target[:] = float32_to_bf16(values) if target.dtype == np.uint16 else values


register_meaning(width, lambda arr: 16 // arr.dtype.itemsize)
register_meaning(load, _load_meaning)
register_meaning(fetch, _fetch_meaning)
register_meaning(unpack, _unpack_meaning)
register_meaning(store, _store_meaning)
register_meaning(store_half, lambda arr, i, x: _store_meaning(arr, i, x, parts=2))
