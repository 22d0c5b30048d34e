"""Each fault that the simulator must report, and what the report says."""

import inspect

import numpy as np
import pytest
from numba import cuda, float32
from numba.cuda.extending import intrinsic

from numbagpt.gpu.simulator import SimulatorError, checked_slice, register_meaning, run_kernel

FULL = 0xFFFFFFFF


def run(kernel, grid, block, *args):
    run_kernel(kernel, grid, block, 0, args)


def error_of(kernel, grid, block, *args):
    with pytest.raises(SimulatorError) as caught:
        run(kernel, grid, block, *args)
    return caught.value


def memory(n):
    return np.full(n, np.nan, np.float32)


def read_kernel(inp, i):
    if cuda.grid(1) == 37:
        inp[i]


def write_kernel(inp, i):
    if cuda.grid(1) == 37:
        inp[i] = float32(1)


def shared_index_kernel(inp, i):
    tile = cuda.shared.array((4, 8), float32)
    if cuda.grid(1) == 37:
        tile[3, i] = inp[0]


def local_index_kernel(inp, i):
    x = cuda.local.array(7, float32)
    if cuda.grid(1) == 37:
        x[i] = inp[0]


@pytest.mark.parametrize("index", [-1, 8, 2**40])
@pytest.mark.parametrize(
    ("kernel", "name"),
    [
        (read_kernel, "inp"),
        (write_kernel, "inp"),
        (shared_index_kernel, "shared array"),
        (local_index_kernel, "local array"),
    ],
)
def test_an_index_out_of_bounds_is_located(kernel, name, index):
    inp = memory(8)
    before = inp.copy()
    error = error_of(kernel, (2, 1), 32, inp, np.int64(index))
    line = inspect.getsourcelines(kernel)[1] + len(inspect.getsource(kernel).splitlines()) - 1
    assert f"{kernel.__name__}, block (1, 0, 0), thread (5, 0, 0), {__file__}:{line}" in str(error)
    assert name in str(error)
    assert f"{index}] is out of bounds" in str(error)
    assert isinstance(error.__cause__, IndexError)
    np.testing.assert_array_equal(inp, before)


def vector_kernel(out, i):
    fill4(out, i)


@intrinsic
def fill4(typingctx, out, i):
    raise NotImplementedError("never compiled here")


def test_vector_access_is_checked_for_bounds_and_alignment():
    def meaning(out, i):
        checked_slice(out, i, 4)[:] = 2

    register_meaning(fill4, meaning)
    out = np.zeros(14, np.float32)
    run(vector_kernel, 1, 1, out, np.int64(8))
    np.testing.assert_array_equal(out, [0] * 8 + [2] * 4 + [0] * 2)
    for index, fault in [(-4, "out of bounds"), (12, "out of bounds"), (6, "misaligned")]:
        assert f"out[{index} : {index + 4}] is {fault}" in str(
            error_of(vector_kernel, 1, 1, out, np.int64(index))
        )


def half_at_barrier_kernel(out):
    if cuda.threadIdx.x < 16:
        cuda.syncthreads()
    else:
        cuda.shfl_xor_sync(FULL, float32(1), 1)


def test_a_deadlock_says_who_waits_where():
    error = error_of(half_at_barrier_kernel, 1, 32, memory(1))
    first = inspect.getsourcelines(half_at_barrier_kernel)[1]
    assert "half_at_barrier_kernel, block (0, 0, 0)" in str(error)
    assert "deadlock of 32 threads" in str(error)
    assert f"16 waiting in syncthreads() at {__file__}:{first + 2}" in str(error)
    assert (
        f"16 waiting in shfl_xor_sync with mask 0xffffffff at {__file__}:{first + 4}, "
        "the first of them (16, 0, 0)"
    ) in str(error)


def two_barriers_kernel(out):
    if cuda.threadIdx.x < 32:
        cuda.syncthreads()
    else:
        cuda.syncthreads()


def test_a_barrier_reached_at_two_places_is_divergent():
    error = error_of(two_barriers_kernel, 1, 64, memory(1))
    first = inspect.getsourcelines(two_barriers_kernel)[1]
    assert f"thread (32, 0, 0), {__file__}:{first + 4}: divergent barrier" in str(error)
    assert f"thread (0, 0, 0) waits in syncthreads() at {__file__}:{first + 2}" in str(error)


def two_shuffles_kernel(out):
    if cuda.threadIdx.x < 3:
        cuda.shfl_up_sync(FULL, float32(1), 1)
    else:
        cuda.shfl_down_sync(FULL, float32(1), 1)


def test_different_operations_under_one_mask():
    error = error_of(two_shuffles_kernel, 1, 32, memory(1))
    assert "thread (3, 0, 0)" in str(error)
    assert "shfl_down_sync reached under mask 0xffffffff while lane 0 waits in shfl_up" in str(
        error
    )


def foreign_mask_kernel(out):
    cuda.syncwarp(0x0000FFFF)


def test_a_mask_must_name_its_caller():
    error = error_of(foreign_mask_kernel, 1, 32, memory(1))
    assert "thread (16, 0, 0)" in str(error)
    assert "mask 0x0000ffff does not name the calling lane 16" in str(error)


def returned_source_kernel(out, n):
    if cuda.threadIdx.x < n:
        out[cuda.threadIdx.x] = cuda.shfl_down_sync(FULL, float32(1), 4)


@pytest.mark.parametrize("block", [32, 20])
def test_a_shuffle_cannot_read_a_lane_that_is_not_there(block):
    error = error_of(returned_source_kernel, 1, block, memory(32), np.int32(20))
    assert "shfl_down_sync: lane 16 reads lane 20, which has returned or is not" in str(error)


def changing_shape_kernel(out):
    cuda.shared.array(4 + cuda.threadIdx.x, float32)


def test_a_shared_array_has_one_shape():
    error = error_of(changing_shape_kernel, 1, 2, memory(1))
    assert "shape 5 by this thread and (4,) by another" in str(error)


def too_much_shared_kernel(out):
    cuda.shared.array((64, 65), float32)
    cuda.shared.array((64, 128), float32)


def test_static_shared_memory_is_limited():
    assert "49408 bytes of static shared memory" in str(
        error_of(too_much_shared_kernel, 1, 1, memory(1))
    )


def raising_kernel(out):
    if cuda.grid(1) == 3:
        [][0] = 1
    cuda.syncthreads()


def test_an_exception_names_its_thread_and_leaves_the_simulator_usable():
    error = error_of(raising_kernel, 1, 32, memory(1))
    assert "raising_kernel, block (0, 0, 0), thread (3, 0, 0)" in str(error)
    assert "IndexError" in str(error)
    out = memory(32)
    run(neighbour_kernel, 1, 32, out, np.arange(32, dtype=np.float32))
    np.testing.assert_array_equal(out, np.arange(32) ^ 1)


def neighbour_kernel(out, inp):
    shared = cuda.shared.array(32, float32)
    t = cuda.threadIdx.x
    shared[t] = inp[t]
    cuda.syncthreads()
    out[t] = shared[t ^ 1]


def unknown_name_kernel(out):
    cuda.nanosleep(7)


def test_an_unknown_cuda_name_is_named():
    assert "cuda.nanosleep" in str(error_of(unknown_name_kernel, 1, 1, memory(1)))


def count_kernel(out):
    out[0] += 1


@pytest.mark.parametrize(
    ("grid", "block"),
    [
        (1, 0),
        (1, 1025),
        (1, (32, 33)),
        (1, (1, 1, 65)),
        ((0, 1), 32),
        ((1, -1, -1), 32),
        ((1, 65536), 1),
        ((1, 1, 65536), 1),
        (2**31, 1),
    ],
)
def test_a_launch_that_no_gpu_takes(grid, block):
    out = np.zeros(1, np.float32)
    error = error_of(count_kernel, grid, block, out)
    assert "expected 1 to (2147483647, 65535, 65535) blocks" in str(error)
    assert "1 to (1024, 1024, 64) threads, 1024 at most in all" in str(error)
    assert not out.any()


@pytest.mark.parametrize(
    ("grid", "block"), [(1, 1024), (2, (4, 4, 64)), ((1, 65535), 1), ((2, 3, 4), (5, 6))]
)
def test_a_launch_that_a_gpu_takes(grid, block):
    out = np.zeros(1, np.float32)
    run(count_kernel, grid, block, out)
    assert out[0] == np.prod(grid) * np.prod(block)


def nested_launch_kernel(out):
    launch_again(out)


@intrinsic
def launch_again(typingctx, out):
    raise NotImplementedError("never compiled here")


def test_a_kernel_cannot_launch_a_kernel():
    register_meaning(launch_again, lambda out: run(foreign_mask_kernel, 1, 1, out.array))
    assert "launched from inside a kernel" in str(error_of(nested_launch_kernel, 1, 1, memory(1)))


def test_a_view_off_the_vector_grid_is_misaligned() -> None:
    """Hardware sees the address: element 0 of a view may lie anywhere in its buffer."""

    def first_vector(out, inp):
        out[0] = first_of_four(inp, 0)

    buffer, out = np.arange(16, dtype=np.float32), np.zeros(1, np.float32)
    run_kernel(first_vector, 1, 1, 0, (out, buffer[4:]))
    assert out[0] == 4
    with pytest.raises(SimulatorError, match="misaligned"):
        run_kernel(first_vector, 1, 1, 0, (out, buffer[3:]))


@intrinsic
def first_of_four(typingctx, arr, i):
    raise NotImplementedError("never compiled here")


register_meaning(first_of_four, lambda arr, i: checked_slice(arr, i, 4)[0])


def unaligned_kernel(out):
    out[0] = first_of_four(cuda.shared.array(8, float32), 4)


def unaligned_dynamic_kernel(out):
    out[0] = first_of_four(cuda.shared.array(0, float32), 4)


def too_little_aligned_kernel(out):
    out[0] = first_of_four(cuda.shared.array(8, float32, 8), 4)


def unaligned_part_kernel(out):
    out[0] = first_of_four(cuda.shared.array(8, float32)[4:], 0)


def unaligned_row_kernel(out):
    out[0] = first_of_four(cuda.shared.array((2, 4), float32)[1], 0)


@pytest.mark.parametrize(
    ("kernel", "name", "alignment"),
    [
        (unaligned_kernel, "shared array", 4),
        (unaligned_dynamic_kernel, "dynamic shared array", 4),
        (too_little_aligned_kernel, "shared array", 8),
        (unaligned_part_kernel, "shared array", 4),
        (unaligned_row_kernel, "shared array", 4),
    ],
)
def test_shared_memory_is_as_aligned_as_it_was_asked_to_be(kernel, name, alignment):
    with pytest.raises(SimulatorError, match="may be misaligned") as caught:
        run_kernel(kernel, 1, 1, 32, (memory(1),))
    assert f"{name} is aligned to {alignment} bytes" in str(caught.value)
    assert "a vector of 4 elements needs alignment=16" in str(caught.value)


def aligned_kernel(out):
    static = cuda.shared.array(8, float32, alignment=16)
    dynamic = cuda.shared.array(0, float32, 1024)
    rows = cuda.shared.array((2, 4), float32, alignment=16)
    local = cuda.local.array(8, float32)
    for i in range(8):
        static[i] = float32(i)
        dynamic[i] = float32(10 + i)
        rows[i // 4, i % 4] = float32(20 + i)
        local[i] = float32(30 + i)
    out[0] = first_of_four(static, 4)
    out[1] = first_of_four(static[4:], 0)
    out[2] = first_of_four(dynamic, 4)
    out[3] = first_of_four(rows[1], 0)
    out[4] = first_of_four(local, 4)


def test_vectors_in_aligned_shared_memory():
    out = memory(5)
    run_kernel(aligned_kernel, 1, 1, 32, (out,))
    np.testing.assert_array_equal(out, [4, 4, 14, 24, 34])


def test_a_misaligned_vector_in_aligned_shared_memory():
    def kernel(out):
        out[0] = first_of_four(cuda.shared.array(8, float32, 1024), 2)

    assert "shared array[2 : 6] is misaligned" in str(error_of(kernel, 1, 1, memory(1)))
