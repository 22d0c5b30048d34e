"""PTX instructions as functions that kernels call, each with its meaning written in Python.

    @instruction("ex2.approx.ftz.f32 $result, $x;", result=F32, x=F32)
    def exp2(x):
        "2 ** x."
        return np.exp2(x)

On the GPU a call of `exp2` becomes that one instruction (LLVM inline assembly); under the simulator
the function under the decorator runs instead. So the function is the instruction's documentation:
what it does, in Python and NumPy, without the hardware's way of doing it.

Each operand of the text, `$x`, is a parameter of the function or `result`, and has a kind:

    F32, I32, I64       a number; the argument is cast to that type first
    SHARED, GLOBAL      the address of an array's element. The function has two parameters for it,
                        the array and, right behind it, the offset in elements: on the GPU the two
                        become one address, and under the simulator an index that is checked
    Read(type, n)       n registers from a local array, which the instruction only reads
    Update(type, n)     n registers which it reads and writes back
    Write(type, n)      n registers which it writes
                        With first=True the function has a second parameter behind the array, as for
                        an address: the element at which the n registers begin
    Bytes(n)            from a truth value: n where it is true, 0 where it is false

`$frag` of a register array expands to {r0,r1,…} and `$frag[4:8]` to a part of it.

Where the text depends on sizes, give a function of these sizes that returns `Ptx(text, operands)`
in place of the text. A parameter of the instruction that has the name of such a size takes an
integer that is known when the kernel is compiled: a literal, or a global or closure variable of the
kernel.

Local arrays live in registers as long as every index into them is known when the kernel is
compiled: constants, and loops with a constant number of turns, which the compiler unrolls.
"""

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from llvmlite import ir
from numba.core import types
from numba.cuda.extending import intrinsic

from numbagpt.gpu.simulator import register_meaning

SHARED_SPACE = 3  # LLVM's number for the address space of shared memory


# ---- kinds of operands ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Number:
    """One register. `letter` is its kind in the constraints of inline assembly."""

    letter: str
    type: types.Type
    llvm: ir.Type


F32 = Number("f", types.float32, ir.FloatType())
I32 = Number("r", types.int32, ir.IntType(32))
I64 = Number("l", types.int64, ir.IntType(64))


@dataclass(frozen=True)
class Address:
    """Address of array[offset]: 32 bits in shared memory's own window, 64 bits otherwise.

    number: the register that the operand takes.
    """

    number: Number
    shared: bool

    def value(self, context, builder, array_type, array, offset):
        pointer = context.make_array(array_type)(context, builder, value=array).data
        if self.shared:
            # An offset in 32 bits, from a pointer that LLVM knows to be one into shared memory.
            pointer = builder.addrspacecast(pointer, pointer.type.pointee.as_pointer(SHARED_SPACE))
            start = builder.ptrtoint(pointer, ir.IntType(32))
            offset = context.cast(builder, offset[0], offset[1], types.int32)
            size = ir.Constant(ir.IntType(32), array_type.dtype.bitwidth // 8)
            return builder.add(start, builder.mul(offset, size))
        offset = context.cast(builder, offset[0], offset[1], types.int64)
        return builder.ptrtoint(builder.gep(pointer, [offset]), ir.IntType(64))


SHARED = Address(I32, True)
GLOBAL = Address(I64, False)


@dataclass(frozen=True)
class Bytes:
    """`n` where the argument is true, else 0."""

    n: int


@dataclass(frozen=True)
class Registers:
    """`n` elements of a local array, 32 bits each: the first n, or from the one that is named."""

    number: Number
    n: int
    read: bool
    written: bool
    first: bool

    def elements(self, context, builder, array_type, array, first) -> list:
        """Pointers to them; `first` is the value and type of the argument behind the array."""
        i32 = ir.IntType(32)
        pointer = context.make_array(array_type)(context, builder, value=array).data
        if self.first:
            pointer = builder.gep(pointer, [context.cast(builder, *first, types.int32)])
        return [builder.gep(pointer, [ir.Constant(i32, i)]) for i in range(self.n)]


def Read(number: Number, n: int, first: bool = False) -> Registers:
    return Registers(number, n, True, False, first)


def Update(number: Number, n: int, first: bool = False) -> Registers:
    return Registers(number, n, True, True, first)


def Write(number: Number, n: int, first: bool = False) -> Registers:
    return Registers(number, n, False, True, first)


class Ptx:
    """The text of an instruction and its operands."""

    def __init__(self, text: str, **operands: Any) -> None:
        self.text = text
        self.result = operands.pop("result", None)
        self.operands = operands


# ---- the decorator -------------------------------------------------------------------------------


def instruction(
    ptx: str | Callable[..., Ptx], *, volatile: bool = False, **operands: Any
) -> Callable[[Callable], Callable]:
    """Make an instruction of the function that says what it means.

    ptx        its text, or a function from sizes to Ptx
    volatile   it does more than compute its outputs from its inputs: it touches other threads, or
               memory that is written while the kernel runs, so it must neither be moved across its
               like nor left out
    operands   kind of every operand in the text; `result=` where the instruction returns a number
    """

    def wrap(meaning: Callable) -> Callable:
        names = list(inspect.signature(meaning).parameters)
        sizes = [] if isinstance(ptx, str) else list(inspect.signature(ptx).parameters)

        def typing(typingctx, *argument_types):
            known = {}
            for name, t in zip(names, argument_types, strict=True):
                if name in sizes:
                    if not isinstance(t, types.IntegerLiteral):
                        return None  # Numba asks first with int64, then with the literal
                    known[name] = t.literal_value
            form = Ptx(ptx, **operands) if isinstance(ptx, str) else ptx(**known)
            returned = form.result.type if form.result else types.void

            def codegen(context, builder, signature, values):
                arguments = dict(zip(names, zip(values, signature.args, strict=True), strict=True))
                return _emit(context, builder, form, arguments, names, volatile)

            return returned(*argument_types), codegen

        parameters = [inspect.Parameter(n, inspect.Parameter.POSITIONAL_OR_KEYWORD) for n in names]
        context = inspect.Parameter("typingctx", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        typing.__signature__ = inspect.Signature([context, *parameters])
        typing.__name__ = typing.__qualname__ = meaning.__name__
        made = intrinsic(typing)
        made.__doc__ = meaning.__doc__
        register_meaning(made, meaning)
        return made

    return wrap


def _emit(context, builder, form: Ptx, arguments: dict, names: Sequence[str], volatile: bool):
    """The call of the inline assembly, and the stores of what it wrote into local arrays."""
    place: dict[str, list[int]] = {}  # operand numbers by name; outputs come first
    outputs: list[tuple[Number, Any]] = []  # kind, and where to store it (None: the result)
    if form.result:
        place["result"] = [0]
        outputs.append((form.result, None))
    elements = {
        name: kind.elements(context, builder, *_array_and_next(name, arguments, names))
        for name, kind in form.operands.items()
        if isinstance(kind, Registers)
    }
    for name, kind in form.operands.items():
        if isinstance(kind, Registers) and kind.written:
            place[name] = list(range(len(outputs), len(outputs) + kind.n))
            outputs.extend((kind.number, pointer) for pointer in elements[name])

    inputs: list[tuple[str, Any]] = []  # constraint and value
    for name, kind in form.operands.items():
        if isinstance(kind, Registers):
            if not kind.read:
                continue
            values = [builder.load(pointer) for pointer in elements[name]]
            if kind.written:  # tied: the same registers as the outputs
                inputs.extend((str(i), v) for i, v in zip(place[name], values, strict=True))
                continue
            letters = kind.number.letter
        else:
            values = [_operand(context, builder, kind, name, arguments, names)]
            letters = _letter(kind)
        first = len(outputs) + len(inputs)
        place[name] = list(range(first, first + len(values)))
        inputs.extend((letters, v) for v in values)

    constraints = ["=" + kind.letter for kind, _ in outputs] + [c for c, _ in inputs]
    if volatile:
        constraints.append("~{memory}")
    llvm_types = [kind.llvm for kind, _ in outputs]
    returned = ir.VoidType()
    if llvm_types:
        returned = llvm_types[0] if len(outputs) == 1 else ir.LiteralStructType(llvm_types)
    function = ir.FunctionType(returned, [v.type for _, v in inputs])
    assembly = ir.InlineAsm(
        function, _number_operands(form.text, place), ",".join(constraints), side_effect=volatile
    )
    produced = builder.call(assembly, [v for _, v in inputs])
    result = context.get_dummy_value()
    for i, (_, pointer) in enumerate(outputs):
        value = produced if len(outputs) == 1 else builder.extract_value(produced, i)
        if pointer is None:
            result = value
        else:
            builder.store(value, pointer)
    return result


def _array_and_next(name: str, arguments: dict, names: Sequence[str]) -> tuple:
    """Type and value of the array `name`, and the argument behind it, None where there is none."""
    array, array_type = arguments[name]
    behind = names[names.index(name) + 1 :]
    return array_type, array, arguments[behind[0]] if behind else None


def _operand(context, builder, kind, name: str, arguments: dict, names: Sequence[str]):
    """The value of an operand that takes one register."""
    value, numba_type = arguments[name]
    if isinstance(kind, Number):
        return context.cast(builder, value, numba_type, kind.type)
    if isinstance(kind, Bytes):
        truth = context.cast(builder, value, numba_type, types.boolean)
        return builder.select(truth, I32.llvm(kind.n), I32.llvm(0))
    return kind.value(context, builder, *_array_and_next(name, arguments, names))


def _letter(kind) -> str:
    if isinstance(kind, Bytes):
        return I32.letter
    return kind.letter if isinstance(kind, Number) else kind.number.letter


def _number_operands(text: str, place: dict[str, list[int]]) -> str:
    """The text with $name and $name[a:b] replaced by LLVM's $0, $1, … and lists of them."""

    def replace(match: re.Match) -> str:
        name, first, last = match[1], match[2], match[3]
        numbers = place[name]
        if first is not None:
            numbers = numbers[int(first) : int(last)]
        elif len(numbers) == 1:
            return f"${numbers[0]}"
        return "{" + ",".join(f"${i}" for i in numbers) + "}"

    return re.sub(r"\$([a-z_]\w*)(?:\[(\d+):(\d+)\])?", replace, text)
