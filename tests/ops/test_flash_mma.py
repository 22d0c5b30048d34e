"""Flash attention with mma.sync against float64, every head size, bf16 and TF32."""

import numpy as np
import pytest
from check import Place, relative_error
from numba import cuda
from test_flash_attention import Problem

from numbagpt.ops import flash_mma, flash_mma_backward
from numbagpt.ops.flash_attention import flash_attention_forward

BF16, FLOAT32 = np.uint16, np.float32
HEAD_SIZES = [16, 32, 64, 128]
SHARED_LIMIT = 99 * 1024  # of a block on the smallest GPUs since compute capability 8.0


@pytest.fixture
def gpu():
    if cuda.get_current_device().compute_capability < (8, 0):
        pytest.skip("mma.sync for bf16 and TF32 came with compute capability 8.0")
    return Place("cuda")


# Under the simulator: both sides of a tile's end (64, and 32 for some), several heads, one token;
# and three tiles, so that a tile's memory is used again, in two blocks, in which other warps run
# ahead.
@pytest.mark.parametrize(
    ("storage", "B", "NH", "T", "HS"),
    [
        (BF16, 1, 1, 63, 64),
        (BF16, 1, 1, 193, 16),
        (BF16, 2, 1, 1, 32),
        (BF16, 2, 3, 5, 16),
        (FLOAT32, 1, 1, 130, 32),
        (FLOAT32, 1, 1, 66, 16),
        (FLOAT32, 1, 2, 1, 16),
        (FLOAT32, 2, 3, 5, 16),
    ],
)
def test_small(storage, B, NH, T, HS):
    problem = Problem(B, NH, T, HS, storage)
    problem.run(Place("sim"), "mma")
    problem.check()


@pytest.mark.slow
@pytest.mark.parametrize("storage", [BF16, FLOAT32])
@pytest.mark.parametrize("HS", HEAD_SIZES)
def test_every_head_size(storage, HS):
    problem = Problem(1, 1, 67, HS, storage)
    problem.run(Place("sim"), "mma")
    problem.check()


@pytest.mark.parametrize("storage", [BF16, FLOAT32])
def test_large_scores(storage):
    """Scores of some hundreds, whose exponentials overflow unless the maximum is taken off."""
    problem = Problem(1, 1, 66, 16, storage, spread=150.0)
    assert problem.expected_lse.max() > 200
    flash_attention_forward(problem.out, problem.lse, problem.qkv, variant="mma")
    if storage is BF16:
        tolerance, lse_error = 5e-3, 1e-5  # products of bf16 are exact
    else:
        tolerance, lse_error = 2e-2, 5e-4  # q and k keep 11 bits, and so do scores
    largest = np.abs(problem.expected_lse).max()
    assert relative_error(problem.values(problem.out), problem.expected_out) < tolerance
    np.testing.assert_allclose(problem.lse, problem.expected_lse, rtol=0, atol=lse_error * largest)


def test_shared_memory_fits_everywhere():
    for sizes in (
        flash_mma.FORWARD_SHARED,
        flash_mma_backward.DQ_SHARED,
        flash_mma_backward.DKV_SHARED,
    ):
        assert set(sizes) == {(HS, itemsize) for HS in HEAD_SIZES for itemsize in (2, 4)}
        assert max(sizes.values()) <= SHARED_LIMIT


@pytest.mark.gpu
@pytest.mark.parametrize("storage", [BF16, FLOAT32])
@pytest.mark.parametrize("HS", HEAD_SIZES)
@pytest.mark.parametrize(
    ("B", "NH", "T"),
    [
        (2, 3, 1),
        (2, 3, 37),
        (2, 3, 64),
        (2, 3, 65),
        (2, 1, 100),
        (1, 5, 129),
        (3, 5, 513),
        (2, 2, 1000),
        (1, 2, 1023),
        (4, 12, 1024),
        (1, 25, 300),
    ],
)
def test_gpu(gpu, storage, HS, B, NH, T):
    problem = Problem(B, NH, T, HS, storage, seed=T)
    problem.run(gpu, "mma")
    problem.check()


@pytest.mark.gpu
@pytest.mark.parametrize("storage", [BF16, FLOAT32])
@pytest.mark.parametrize("HS", HEAD_SIZES)
def test_random_lengths(gpu, storage, HS):
    for T in np.random.default_rng(3).integers(2, 700, 12):
        problem = Problem(1, 3, int(T), HS, storage, seed=int(T))
        problem.run(gpu, "mma")
        problem.check()


@pytest.mark.gpu
@pytest.mark.parametrize("storage", [BF16, FLOAT32])
@pytest.mark.parametrize("HS", HEAD_SIZES)
def test_reruns_are_identical(gpu, storage, HS):
    problem = Problem(4, 12, 777, HS, storage)
    problem.run(gpu, "mma")
    first = problem.outputs()
    for _ in range(10):
        problem.run(gpu, "mma")
        for found, before in zip(problem.outputs(), first, strict=True):
            np.testing.assert_array_equal(found, before)
