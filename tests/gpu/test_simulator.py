"""What kernels compute under the simulator, against NumPy; stepping through them."""

import inspect
import io
import math
import pdb
import sys
import threading

import numpy as np
import pytest
from numba import boolean, cuda, float32, int32, int64, uint16, uint32, uint64
from numba.cuda.extending import intrinsic

from numbagpt.gpu import simulator
from numbagpt.gpu.simulator import register_meaning, run_kernel, warp_operation

FULL = 0xFFFFFFFF
HALF = np.float32(0.5)
SEVEN = np.int32(7)


def run(kernel, grid, block, *args, shared_bytes=0):
    run_kernel(kernel, grid, block, shared_bytes, args)


def random(*shape):
    return np.random.default_rng(sum(shape)).standard_normal(shape, np.float32)


def unwritten(n, dtype=np.float32):
    """NaN, or the largest value of an integer type."""
    return np.full(n, np.nan if np.issubdtype(dtype, np.floating) else np.iinfo(dtype).max, dtype)


def test_two_python_threads_may_run_a_kernel_at_once(monkeypatch):
    def half_kernel(out, inp):
        i = cuda.grid(1)
        out[i] = HALF * inp[i]

    begun, go_on = threading.Event(), threading.Event()
    simulated = simulator._simulated

    def wait_and_look_up(value):
        begun.set()
        go_on.wait(10)
        return simulated(value)

    monkeypatch.setattr(simulator, "_simulated", wait_and_look_up)
    inp, outs = random(32), [unwritten(32), unwritten(32)]
    threads = [threading.Thread(target=run, args=(half_kernel, 1, 32, o, inp)) for o in outs]
    threads[0].start()
    assert begun.wait(10)
    threads[1].start()
    threads[1].join(0.1)  # it waits for the other, which is still getting the kernel ready
    go_on.set()
    for thread, out in zip(threads, outs, strict=True):
        thread.join()
        np.testing.assert_array_equal(out, HALF * inp)


# ---- warp operations -----------------------------------------------------------------------------


def shuffle_kernel(xor, up, down, at, inp, delta):
    i = cuda.grid(1)
    x = inp[i]
    xor[i] = cuda.shfl_xor_sync(FULL, x, delta)
    up[i] = cuda.shfl_up_sync(FULL, x, delta)
    down[i] = cuda.shfl_down_sync(FULL, x, delta)
    at[i] = cuda.shfl_sync(FULL, x, delta)


@pytest.mark.parametrize("delta", [0, 1, 5, 16, 31])
def test_shuffles_move_values_between_lanes(delta):
    inp = random(128)
    xor, up, down, at = (unwritten(128) for _ in range(4))
    run(shuffle_kernel, 2, 64, xor, up, down, at, inp, np.int32(delta))
    warps, lane = inp.reshape(4, 32), np.arange(32)
    np.testing.assert_array_equal(xor.reshape(4, 32), warps[:, lane ^ delta])
    source = np.where(lane < delta, lane, lane - delta)
    np.testing.assert_array_equal(up.reshape(4, 32), warps[:, source])
    source = np.where(lane + delta > 31, lane, lane + delta)
    np.testing.assert_array_equal(down.reshape(4, 32), warps[:, source])
    np.testing.assert_array_equal(at.reshape(4, 32), warps[:, [delta] * 32])


def votes_kernel(ballots, anys, alls, inp):
    i = cuda.grid(1)
    x = inp[i]
    ballots[i] = cuda.ballot_sync(FULL, x > 0)
    anys[i] = cuda.any_sync(FULL, x > 2)
    alls[i] = cuda.all_sync(FULL, x > -2)


def test_votes():
    inp = random(64)
    inp[:32].clip(-1, 1, out=inp[:32])
    inp[32:34] = [3, -3]
    ballots, anys, alls = unwritten(64, np.uint32), unwritten(64, np.int32), unwritten(64, np.int32)
    run(votes_kernel, 1, 64, ballots, anys, alls, inp)
    bits = np.packbits((inp > 0).reshape(2, 32), bitorder="little").view("<u4")
    np.testing.assert_array_equal(ballots, np.repeat(bits, 32))
    np.testing.assert_array_equal(anys, np.repeat([0, 1], 32))
    np.testing.assert_array_equal(alls, np.repeat([1, 0], 32))


def divergent_halves_kernel(out, inp):
    lane = cuda.threadIdx.x
    x = inp[lane]
    if lane < 16:
        for i in range(4):
            x += cuda.shfl_xor_sync(0x0000FFFF, x, 8 >> i)
    else:
        for i in range(4):
            x = max(x, cuda.shfl_xor_sync(0xFFFF0000, x, 8 >> i))
    cuda.syncwarp()
    out[lane] = cuda.shfl_xor_sync(FULL, x, 16)


def test_halves_of_a_warp_work_apart_under_their_own_masks():
    inp, out = random(32), unwritten(32)
    run(divergent_halves_kernel, 1, 32, out, inp)
    np.testing.assert_array_equal(out[:16], np.full(16, inp[16:].max()))
    np.testing.assert_allclose(out[16:], inp[:16].sum(dtype=np.float64), rtol=1e-6)


def warp_product_kernel(out, inp):
    out[cuda.threadIdx.x] = warp_product(inp[cuda.threadIdx.x])


@intrinsic
def warp_product(typingctx, x):
    raise NotImplementedError("never compiled here")


def test_an_intrinsic_runs_by_its_registered_meaning():
    def meaning(x):
        def complete(operands):
            assert list(operands) == list(range(32))
            return dict.fromkeys(operands, math.prod(operands.values()))

        return warp_operation("warp_product", FULL, x, complete)

    register_meaning(warp_product, meaning)
    inp, out = 1 + random(32) / 8, unwritten(32)
    run(warp_product_kernel, 1, 32, out, inp)
    np.testing.assert_allclose(out, np.full(32, inp.prod(dtype=np.float64)), rtol=1e-5)


# ---- blocks --------------------------------------------------------------------------------------


@cuda.jit(device=True)
def add_up(shared, x):
    """Device function that calls another."""
    shared[cuda.threadIdx.x // 32] = add_up_warp(x)
    cuda.syncthreads()
    total = float32(0)
    for w in range(cuda.blockDim.x // 32):
        total += shared[w]
    return total


@cuda.jit(device=True)
def add_up_warp(x):
    for i in range(5):
        x += cuda.shfl_xor_sync(FULL, x, 16 >> i)
    return x


def block_sum_kernel(out, inp, n):
    shared = cuda.shared.array(32, float32)
    x = float32(0)
    for i in range(cuda.threadIdx.x, n, cuda.blockDim.x):
        x += inp[cuda.blockIdx.x * n + i]
    total = add_up(shared, x)
    if cuda.threadIdx.x == 0:
        out[cuda.blockIdx.x] = total


@pytest.mark.parametrize("n", [1, 37, 256, 1000])
def test_block_reduction_through_shuffles_and_shared_memory(n):
    inp, out = random(3, n), unwritten(3)
    run(block_sum_kernel, 3, 128, out, inp.reshape(-1), np.int32(n))
    np.testing.assert_allclose(out, inp.sum(axis=1, dtype=np.float64), rtol=1e-5, atol=1e-5)


def early_exit_kernel(out, n):
    shared = cuda.shared.array(1, int32)
    if cuda.grid(1) >= n:
        return
    if cuda.threadIdx.x == 0:
        shared[0] = 5
    cuda.syncthreads()
    out[cuda.grid(1)] = shared[0] + cuda.ballot_sync(FULL, True)


def test_threads_that_have_returned_hold_nobody_up():
    out = unwritten(40, np.int64)
    run(early_exit_kernel, 1, 64, out, np.int64(40))
    np.testing.assert_array_equal(out[:32], np.full(32, 5 + FULL))
    np.testing.assert_array_equal(out[32:], np.full(8, 5 + 0xFF))


def late_exit_kernel(out):
    """The other threads of the block already wait when the last one returns."""
    if cuda.threadIdx.x == cuda.blockDim.x - 1:
        return
    out[cuda.threadIdx.x] = cuda.syncthreads_count(cuda.threadIdx.x % 2)


def test_a_thread_that_returns_last_releases_the_barrier():
    out = unwritten(64, np.int32)
    run(late_exit_kernel, 1, 64, out)
    np.testing.assert_array_equal(out[:63], np.full(63, 31))
    assert out[63] == np.iinfo(np.int32).max


def barrier_votes_kernel(ands, ors, inp):
    t = cuda.threadIdx.x
    ands[t] = cuda.syncthreads_and(inp[t] > 0)
    ors[t] = cuda.syncthreads_or(inp[t] > 3)


def test_barriers_that_vote():
    ands, ors = unwritten(64, np.int32), unwritten(64, np.int32)
    inp = np.ones(64, np.float32)
    run(barrier_votes_kernel, 1, 64, ands, ors, inp)
    np.testing.assert_array_equal([ands, ors], [[1] * 64, [0] * 64])
    inp[40], inp[3] = 0, 4
    run(barrier_votes_kernel, 1, 64, ands, ors, inp)
    np.testing.assert_array_equal([ands, ors], [[0] * 64, [1] * 64])


def dynamic_shared_kernel(out, inp):
    """Reverse a block through dynamic shared memory, used as two arrays."""
    shared = cuda.shared.array(0, float32)
    t, n = cuda.threadIdx.x, cuda.blockDim.x
    high = shared[n:]
    shared[t] = inp[cuda.grid(1)]
    high[t] = float32(shared.size)
    cuda.syncthreads()
    out[cuda.grid(1)] = shared[n - 1 - t] + high[t]


def test_dynamic_shared_memory():
    inp, out = random(96), unwritten(96)
    run(dynamic_shared_kernel, 2, 48, out, inp, shared_bytes=2 * 48 * 4)
    np.testing.assert_array_equal(out, inp.reshape(2, 48)[:, ::-1].reshape(-1) + np.float32(96))


def transpose_kernel(out, inp, rows, columns):
    tile = cuda.shared.array((8, 9), float32)
    i, j = cuda.blockIdx.y * 8 + cuda.threadIdx.y, cuda.blockIdx.x * 8 + cuda.threadIdx.x
    if i < rows and j < columns:
        tile[cuda.threadIdx.y, cuda.threadIdx.x] = inp[i * columns + j]
    cuda.syncthreads()
    i, j = cuda.blockIdx.x * 8 + cuda.threadIdx.y, cuda.blockIdx.y * 8 + cuda.threadIdx.x
    if i < columns and j < rows:
        out[i * rows + j] = tile[cuda.threadIdx.x][cuda.threadIdx.y]


def test_two_dimensional_blocks_and_shared_arrays():
    inp, out = random(13, 37), unwritten(13 * 37)
    run(transpose_kernel, (5, 2), (8, 8), out, inp.reshape(-1), np.int32(13), np.int32(37))
    np.testing.assert_array_equal(out.reshape(37, 13), inp.T)


def indices_kernel(out, lanes):
    x, y, z = cuda.grid(3)
    nx, ny, nz = cuda.gridsize(3)
    out[(z * ny + y) * nx + x] += nz
    lanes[(z * ny + y) * nx + x] = cuda.laneid


def test_three_dimensional_grids_visit_every_thread_once():
    out, lanes = np.zeros(2 * 3 * 2 * 5 * 6, np.int64), unwritten(360, np.int32)
    run(indices_kernel, (1, 2, 3), (2, 3, 10), out, lanes)
    np.testing.assert_array_equal(out, np.full(360, 30))
    flat = np.arange(60).reshape(10, 3, 2)  # a block's threads in order: x runs fastest
    np.testing.assert_array_equal(lanes.reshape(3, 10, 2, 3, 2)[2, :, 1], flat % 32)


def shared_identity_kernel(out):
    first, second = cuda.shared.array(1, float32), cuda.shared.array(1, float32)
    if cuda.threadIdx.x == 0:
        first[0] = float32(cuda.blockIdx.x)
    cuda.syncthreads()
    out[cuda.grid(1) * 2] = first[0]
    out[cuda.grid(1) * 2 + 1] = second[0]


def test_shared_arrays_belong_to_one_block_and_start_unwritten():
    out = np.zeros(12, np.float32)
    run(shared_identity_kernel, 3, 2, out)
    np.testing.assert_array_equal(out[::2], [0, 0, 1, 1, 2, 2])
    assert np.isnan(out[1::2]).all()


def missing_barrier_kernel(out):
    shared = cuda.shared.array(32, float32)
    t = cuda.threadIdx.x
    shared[t] = float32(1)
    out[cuda.grid(1)] = shared[max(t - 1, 0)]


def test_a_missing_barrier_shows_since_odd_blocks_run_backwards():
    out = np.zeros(64, np.float32)
    run(missing_barrier_kernel, 2, 32, out)
    assert np.isfinite(out[:32]).all()
    assert np.isnan(out[33:]).all()


def reused_memory_kernel(out):
    """Two turns of sums over the warps, through the same memory and with one barrier in each."""
    shared = cuda.shared.array(2, float32)
    t = cuda.threadIdx.x
    for turn in range(2):
        total = cuda.shfl_xor_sync(0xFFFFFFFF, float32(1 + turn), 1)
        if t % 32 == 0:
            shared[t // 32] = total
        cuda.syncthreads()
        out[(cuda.blockIdx.x * 2 + turn) * 64 + t] = shared[0] + shared[1]


def test_memory_used_again_too_early_shows_since_one_warp_runs_ahead():
    out = unwritten(4 * 64)
    run(reused_memory_kernel, 2, 64, out)
    sums = out.reshape(2, 2, 64)
    np.testing.assert_array_equal(sums[0], [[2] * 32 + [3] * 32, [4] * 64])
    np.testing.assert_array_equal(sums[1], [[3] * 32 + [2] * 32, [4] * 64])


def first_segment_kernel(out):
    """A shuffle, and then without a barrier what the other warp has written behind its own."""
    shared = cuda.shared.array(2, float32)
    warp = cuda.threadIdx.x // 32
    shared[warp] = cuda.shfl_xor_sync(0xFFFFFFFF, float32(1), 1)
    out[cuda.grid(1)] = shared[1 - warp]


def test_a_warp_runs_ahead_from_its_start():
    out = unwritten(128)
    run(first_segment_kernel, 2, 64, out)
    missing = np.isnan(out.reshape(4, 32))
    assert missing[[0, 3]].all()
    assert not missing[[1, 2]].any()


# ---- types ---------------------------------------------------------------------------------------


def arithmetic_kernel(out, inp, n, scale):
    i = cuda.grid(1)
    if i < n:
        x = inp[i]
        y = x * scale + HALF * float32(i)
        y = y / float32(3) - math.sqrt(math.fabs(x)) * float32(0.1)
        out[i] = math.exp(-y) + min(max(y, float32(-1)), float32(1)) + math.tanh(x) * SEVEN


def test_float32_arithmetic_is_numpys_bit_for_bit():
    f = np.float32
    inp, out, scale = random(100), unwritten(100), f(1.7)
    run(arithmetic_kernel, 4, 32, out, inp, np.int64(100), scale)
    expected = []
    for i, x in enumerate(inp):
        y = x * scale + f(0.5) * f(i)
        y = y / f(3) - np.sqrt(np.abs(x)) * f(0.1)
        expected.append(np.exp(-y) + np.clip(y, f(-1), f(1)) + np.tanh(x) * f(7))
    assert {type(y) for y in expected} == {f}
    np.testing.assert_array_equal(out, np.array(expected))


def types_kernel(log, inp, n, x):
    a = cuda.local.array(3, float32)
    note(a[0])
    note(math.exp(x))
    note(math.sqrt(x) * inp[0])
    note(cuda.fma(x, x, x))
    note(cuda.shfl_sync(1, x, 0))
    note(min(x, float32(2)))
    note(float32(n) / float32(3))


def test_float32_stays_float32():
    seen = []
    register_meaning(note, lambda value: seen.append(type(value)))
    run(types_kernel, 1, 1, unwritten(1), random(4), np.int32(3), np.float32(1.5))
    assert seen == [np.float32] * 7


@intrinsic
def note(typingctx, value):
    raise NotImplementedError("never compiled here")


def casts_kernel(out, big, x):
    out[0] = int32(big)
    out[1] = int32(x)
    out[2] = uint16(big)
    out[3] = uint32(-1)
    out[4] = int64(x)
    out[5] = boolean(x)
    out[6] = (uint64(2**63) + uint64(2**63)) + uint64(9)
    out[7] = big * big // big
    out[8] = int32(uint32(3_000_000_000))


def test_casts_wrap_and_truncate_as_in_c():
    out = unwritten(9, np.int64)
    run(casts_kernel, 1, 1, out, np.int32(2**31 - 1), np.float32(-2.75))
    expected = [2**31 - 1, -2, 65535, 2**32 - 1, -2, 1, 9, 2**31 - 1, 3_000_000_000 - 2**32]
    np.testing.assert_array_equal(out, expected)
    run(casts_kernel, 1, 1, out, np.int64(2**40 + 2**31 + 5), np.float32(2.75))
    np.testing.assert_array_equal(out[:3], [5 - 2**31, 2, 5])


def narrow_store_kernel(shorts, ints):
    shorts[0] = 65536 + 7
    ints[0] = 2**31
    ints[1] = float32(-2.75)


def test_stores_keep_the_low_bits():
    shorts, ints = unwritten(1, np.uint16), unwritten(2, np.int32)
    run(narrow_store_kernel, 1, 1, shorts, ints)
    assert shorts[0] == 7
    np.testing.assert_array_equal(ints, [-(2**31), -2])


def bits_kernel(out, x):
    out[0] = cuda.popc(x)
    out[1] = cuda.clz(x)
    out[2] = cuda.ffs(x)
    out[3] = cuda.brev(x)
    out[4] = cuda.selp(x > 0, 10, 20)


def test_bit_operations_are_those_of_32_bits():
    out = unwritten(5, np.int64)
    run(bits_kernel, 1, 1, out, np.int32(0b1011000))
    np.testing.assert_array_equal(out, [3, 25, 4, 0b11010 << 24, 10])
    run(bits_kernel, 1, 1, out, np.int32(-1))
    np.testing.assert_array_equal(out, [32, 0, 1, FULL, 20])
    run(bits_kernel, 1, 1, out, np.int32(0))
    np.testing.assert_array_equal(out, [0, 32, 0, 0, 20])


def fma_kernel(out, a, b, c):
    out[0] = cuda.fma(a, b, c)


@pytest.mark.parametrize("sign", [1, -1])
def test_fma_rounds_a_sum_beside_a_tie_once(sign):
    """(1 + 2^-12)^2 = 1 + 2^-11 + 2^-24 lies half way between two float32; c says which is nearer,
    but is too small for float64 to tell.
    """
    a = np.float32(1 + 2.0**-12)
    low, high = np.float32(1 + 2.0**-11), np.float32(1 + 2.0**-11 + 2.0**-23)
    for c, expected in ((2.0**-80, high), (0.0, low), (-(2.0**-80), low)):
        out = unwritten(1)
        run(fma_kernel, 1, 1, out, np.float32(sign) * a, a, np.float32(sign * c))
        assert out[0] == sign * expected


def test_fma_of_infinities_and_overflow():
    inf, huge = np.float32(np.inf), np.float32(3e38)
    for a, b, c, expected in [(inf, 2, 1, inf), (huge, 2, 1, inf), (huge, -huge, inf, inf)]:
        out = unwritten(1)
        run(fma_kernel, 1, 1, out, *map(np.float32, (a, b, c)))
        assert out[0] == expected
    run(fma_kernel, 1, 1, out, inf, np.float32(1), -inf)
    assert np.isnan(out[0])


def test_fma_rounds_once():
    a, b, c = np.float32(1 + 2**-13), np.float32(1 - 2**-13), np.float32(-1)
    out = unwritten(1)
    run(fma_kernel, 1, 1, out, a, b, c)
    assert a * b + c == 0
    assert out[0] == np.float32(-(2**-26))


def atomics_kernel(total, top, bottom, old, inp):
    i = cuda.grid(1)
    old[i] = cuda.atomic.add(total, 0, 1)
    cuda.atomic.max(top, 0, inp[i])
    cuda.atomic.min(bottom, 0, inp[i])


def test_atomics():
    inp, old = random(64), unwritten(64, np.int32)
    total, top, bottom = np.zeros(1, np.int32), np.zeros(1, np.float32), np.zeros(1, np.float32)
    run(atomics_kernel, 2, 32, total, top, bottom, old, inp)
    assert (total[0], top[0], bottom[0]) == (64, inp.max(), inp.min())
    np.testing.assert_array_equal(np.sort(old), np.arange(64))


def test_overflow_is_silent_as_on_a_gpu(recwarn):
    def overflow_kernel(out, x):
        out[0] = math.exp(x)
        out[1] = x / float32(0)

    out = unwritten(2)
    run(overflow_kernel, 1, 1, out, np.float32(200))
    assert np.isposinf(out).all()
    assert not recwarn.list


def test_a_closure_keeps_what_it_closed_over():
    width, offset = np.int32(4), float32(0.25)

    def closure_kernel(out):
        for k in range(width):
            out[cuda.grid(1) * width + k] = scaled(k) + offset

    @cuda.jit(device=True)
    def scaled(k):
        return float32(k) * HALF

    out = unwritten(8)
    run(closure_kernel, 1, 2, out)
    np.testing.assert_array_equal(out, [0.25, 0.75, 1.25, 1.75] * 2)


# ---- debugging -----------------------------------------------------------------------------------


def test_a_tracer_sees_the_lines_of_the_kernel_and_of_its_device_functions():
    lines = set()

    def trace(frame, event, arg):
        if frame.f_code.co_filename == __file__ and event == "line":
            lines.add((frame.f_code.co_name, frame.f_lineno))
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        run(block_sum_kernel, 1, 64, unwritten(1), random(4), np.int32(4))
    finally:
        sys.settrace(before)
    for function in (block_sum_kernel, add_up.py_func, add_up_warp.py_func):
        source, first = inspect.getsourcelines(function)
        assert (function.__name__, first + len(source) - 1) in lines


def test_pdb_stops_in_one_thread_and_steps_over_a_shuffle():
    told = io.StringIO()
    commands = io.StringIO("p x\nnext\np x\np cuda.threadIdx.x\ncontinue\n")
    debugger = pdb.Pdb(stdin=commands, stdout=told, nosigint=True, readrc=False)
    debugger.prompt = ""

    def stepped_kernel(out, inp):
        x = inp[cuda.threadIdx.x]
        if cuda.threadIdx.x == 5:
            debugger.set_trace()
        x += cuda.shfl_xor_sync(FULL, x, 1)
        out[cuda.threadIdx.x] = x

    before = sys.gettrace()
    out, inp = unwritten(32), np.arange(32, dtype=np.float32)
    try:
        run(stepped_kernel, 1, 32, out, inp)
    finally:
        sys.settrace(before)
    answers = [line for line in told.getvalue().splitlines() if not line.startswith((">", "->"))]
    assert answers == ["np.float32(5.0)", "np.float32(9.0)", "5"]
    np.testing.assert_array_equal(out, inp + inp[np.arange(32) ^ 1])
