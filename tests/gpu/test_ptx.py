"""Each instruction, on the GPU and in its Python meaning, against what it is said to do."""

import numpy as np
import pytest
from check import poisoned
from numba import cuda, float32, int32, int64, uint16, void
from numba.core.errors import TypingError

from numbagpt.gpu import offline
from numbagpt.gpu.instruction import I32, Ptx, Read, Write, instruction
from numbagpt.gpu.kernel import kernel
from numbagpt.gpu.ptx import (
    copy_async,
    copy_async_commit,
    copy_async_or_zero,
    copy_async_wait,
    copy_word_async_or_zero,
    exp2,
    keep_address,
    load_pair,
    load_words,
    log2,
    look_up,
    maximum,
    pack_bf16,
    pack_bf16_in_order,
    reciprocal,
    store_word,
    store_words,
)
from numbagpt.gpu.simulator import SimulatorError
from numbagpt.gpu.vec import float32_to_bf16

N = 64
TILE = 2 * 8 * N  # two rows of 16 bytes for each thread
PAIRS = 2 * N


@kernel(void(float32[::1], float32[::1], float32[::1]), max_threads=N, minimum=(8, 0))
def arithmetic_kernel(out, x, y):
    i = int32(cuda.threadIdx.x)
    out[i] = exp2(x[i])
    out[N + i] = log2(y[i])
    out[2 * N + i] = reciprocal(y[i])
    out[3 * N + i] = maximum(x[i], y[i])


@pytest.mark.ampere
def test_arithmetic(place):
    generator = np.random.default_rng(0)
    x = generator.uniform(-20, 20, N).astype(np.float32)
    y = generator.uniform(0.01, 20, N).astype(np.float32)
    x[0] = np.finfo(np.float32).min
    out = poisoned((4, N))
    place.run(arithmetic_kernel[1, N], out, x, y)
    exact = x.astype(np.float64), y.astype(np.float64)
    np.testing.assert_allclose(out[0], np.exp2(exact[0]), rtol=1e-6)
    np.testing.assert_allclose(out[1], np.log2(exact[1]), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(out[2], 1 / exact[1], rtol=1e-6)
    np.testing.assert_array_equal(out[3], np.maximum(x, y))


@kernel(void(int32[::1], float32[::1]), max_threads=N, minimum=(8, 0))
def pack_kernel(words, x):
    i = int32(cuda.threadIdx.x)
    words[i] = pack_bf16(x[2 * i], x[2 * i + 1])
    words[N + i] = pack_bf16_in_order(x[2 * i], x[2 * i + 1])


@pytest.mark.ampere
def test_pack(place):
    x = np.random.default_rng(1).standard_normal(2 * N).astype(np.float32)
    x[:4] = 1 + 2.0**-9, 1 + 3 * 2.0**-9, -0.0, 2.0**-100  # the first two lie half way
    words = np.zeros((2, N), np.int32)
    place.run(pack_kernel[1, N], words, x)
    expected = float32_to_bf16(x)
    np.testing.assert_array_equal(words[0].view(np.uint16), expected)
    np.testing.assert_array_equal(words[1], words[0])


@kernel(
    void(uint16[::1], float32[::1], uint16[::1], float32[::1], int64),
    max_threads=N,
    minimum=(8, 0),
)
def copy_kernel(out, pairs, inp, values, count):
    """Rows of 16 bytes: out[0] all of inp, out[1] the first `count`; values reversed in pairs."""
    tile = keep_address(cuda.shared.array(TILE, uint16, alignment=1024))
    numbers = cuda.shared.array(PAIRS, float32, alignment=8)
    words = cuda.local.array(4, int32)
    pair = cuda.local.array(2, float32)
    i = int32(cuda.threadIdx.x)
    copy_async(tile, 8 * i, inp, 8 * i)
    copy_async_commit()
    copy_async_or_zero(tile, 8 * N + 8 * i, inp, 8 * i, i < count)
    copy_word_async_or_zero(numbers, 2 * i, values, 2 * i, i < count)
    copy_word_async_or_zero(numbers, 2 * i + 1, values, 2 * i + 1, True)
    copy_async_commit()
    copy_async_wait(1)
    copy_async_wait(0)
    cuda.syncthreads()
    for half in range(2):
        load_words(words, tile, 8 * N * half + 8 * i)
        store_words(out, 8 * N * half + 8 * i, words)
    load_pair(pair, numbers, 2 * (N - 1 - i))
    pairs[2 * i] = pair[0]
    pairs[2 * i + 1] = pair[1]
    cuda.syncthreads()
    store_word(tile, 8 * i + 6, i)
    load_words(words, tile, 8 * i)
    store_words(out, 16 * N + 8 * i, words)


@pytest.mark.ampere
@pytest.mark.parametrize("count", [0, 37, N])
def test_copies(place, count):
    generator = np.random.default_rng(2)
    inp = generator.integers(0, 1 << 16, (N, 8)).astype(np.uint16)
    values = generator.standard_normal((N, 2)).astype(np.float32)
    out, pairs = np.full((3, N, 8), 0xFFFF, np.uint16), poisoned((N, 2))
    place.run(copy_kernel[1, N], out, pairs, inp, values, count)
    np.testing.assert_array_equal(out[0], inp)
    np.testing.assert_array_equal(out[1, :count], inp[:count])
    assert not out[1, count:].any()
    values[count:, 0] = 0
    np.testing.assert_array_equal(pairs, values[::-1])
    np.testing.assert_array_equal(out[2, :, :6], inp[:, :6])
    np.testing.assert_array_equal(out[2, :, 6:].copy().view(np.int32)[:, 0], np.arange(N))


@kernel(void(int32[::1], int32[::1], int64), max_threads=N)
def look_up_kernel(out, inp, start):
    i = int32(cuda.threadIdx.x)
    out[i] = look_up(inp, start - i)


def test_look_up(place):
    inp = np.random.default_rng(6).integers(-(1 << 31), 1 << 31, 2 * N).astype(np.int32)
    out = np.zeros(N, np.int32)
    place.run(look_up_kernel[1, N], out, inp, N + 5)
    np.testing.assert_array_equal(out, inp[6 : N + 6][::-1])


@kernel(void(uint16[::1], uint16[::1], int64), max_threads=32, minimum=(8, 0))
def one_copy_kernel(out, inp, at):
    tile = cuda.shared.array(TILE, uint16, alignment=16)
    copy_async(tile, 8 * cuda.threadIdx.x, inp, at)
    out[0] = tile[0]


@pytest.mark.parametrize(("at", "message"), [(4, "misaligned"), (16, "out of bounds")])
def test_simulator_checks_copies(at, message):
    with pytest.raises(SimulatorError, match=message):
        one_copy_kernel[1, 1](np.zeros(1, np.uint16), np.zeros(16, np.uint16), at)


@kernel(void(float32[::1], float32[::1]), max_threads=32, minimum=(8, 0))
def two_groups_kernel(out, inp):
    """Three copies in two groups, and what is in shared memory before, between and after waits."""
    tile = cuda.shared.array(12, float32, alignment=16)
    copy_async(tile, 0, inp, 0)
    copy_async(tile, 4, inp, 4)
    copy_async_commit()
    copy_async(tile, 8, inp, 8)
    copy_async_commit()
    for i in range(12):
        out[i] = tile[i]
    copy_async_wait(1)
    for i in range(12):
        out[12 + i] = tile[i]
    copy_async_wait(0)
    for i in range(12):
        out[24 + i] = tile[i]
    copy_async(tile, 0, inp, 4)
    copy_async_wait(0)  # for nothing: the group is not closed
    for i in range(12):
        out[36 + i] = tile[i]


def test_the_simulator_lets_copies_arrive_when_they_are_waited_for():
    inp, out = np.arange(12, dtype=np.float32), np.zeros((4, 12), np.float32)
    two_groups_kernel[1, 1](out, inp)
    found = np.where(np.isnan(out), -1, out)
    np.testing.assert_array_equal(found[0], 12 * [-1])
    np.testing.assert_array_equal(found[1], [*range(8), *4 * [-1]])
    np.testing.assert_array_equal(found[2], range(12))
    np.testing.assert_array_equal(found[3], [*4 * [-1], *range(4, 12)])


# ---- the decorator: an instruction with registers and a size -------------------------------------


@instruction(
    lambda start: Ptx(
        f"{{.reg .b64 t; mov.b64 t, $x[{start}:{start + 2}]; mov.b64 $y, t;}}",
        y=Write(I32, 2),
        x=Read(I32, 4),
    )
)
def pick(y, x, start):
    """y = x[start : start + 2]."""
    y.array[:2] = x.array[start : start + 2]


@kernel(void(int32[::1], int32[::1]), max_threads=32)
def pick_kernel(out, inp):
    x = cuda.local.array(4, int32)
    y = cuda.local.array(2, int32)
    for i in range(4):
        x[i] = inp[i]
    pick(y, x, 1)
    out[0] = y[0]
    out[1] = y[1]


@kernel(void(int32[::1], int32[::1]), max_threads=32)
def variable_pick_kernel(out, inp):
    x = cuda.local.array(4, int32)
    y = cuda.local.array(2, int32)
    pick(y, x, inp[0])


def test_registers_and_sizes(place):
    out = np.zeros(2, np.int32)
    place.run(pick_kernel[1, 1], out, np.array([5, 6, 7, 8], np.int32))
    assert out.tolist() == [6, 7]


def test_size_must_be_constant():
    with pytest.raises(TypingError, match="pick"):
        offline.compile_ptx(variable_pick_kernel, variable_pick_kernel.signatures[0], (9, 0))


def test_instruction_knows_its_meaning():
    assert exp2.__doc__.startswith("2 ** x")
    assert exp2.__name__ == "exp2"
