"""The norm of the gradients, the factor that clips it, and what happens when it is not a number."""

import numpy as np
import pytest
from check import poisoned, relative_error
from numba import cuda

from numbagpt.ops import global_norm as module
from numbagpt.ops.adamw import adamw_update, adamw_update_reference
from numbagpt.ops.global_norm import global_norm, global_norm_partials, global_norm_reference

# Less than a vector, no multiple of it, one block exactly and one element more, several blocks.
SIZES = [1, 3, 37, 1024, 1025, 5000]


@pytest.fixture
def rng():
    return np.random.default_rng(42)


def run(place, grads, max_norm):
    norm, grad_scale = poisoned(1), poisoned(1)
    partials = poisoned(global_norm_partials(grads.size))
    place.run(global_norm, norm, grad_scale, grads, partials, max_norm)
    return norm[0], grad_scale[0]


def run_reference(grads, max_norm):
    norm, grad_scale = poisoned(1, grads.dtype), poisoned(1, grads.dtype)
    global_norm_reference(norm, grad_scale, grads, poisoned(1), max_norm)
    return norm[0], grad_scale[0]


@pytest.mark.parametrize("N", SIZES)
def test_norm(place, rng, N):
    grads = rng.standard_normal(N).astype(np.float32)
    expected = np.linalg.norm(grads.astype(np.float64))
    for max_norm in (0.5 * expected, 2 * expected):
        norm, grad_scale = run(place, grads, max_norm)
        assert relative_error(norm, expected) <= 1e-6
        assert relative_error(grad_scale, min(1, max_norm / (expected + 1e-6))) <= 1e-5
        assert (norm, grad_scale) == run(place, grads, max_norm)


def test_grid_strides_over_what_it_does_not_cover(place, rng, monkeypatch):
    monkeypatch.setattr(module, "MAX_PARTIALS", 2)
    grads = rng.standard_normal(9 * 1024 + 7).astype(np.float32)
    norm, _ = run(place, grads, 0)
    assert relative_error(norm, np.linalg.norm(grads.astype(np.float64))) <= 1e-6


@pytest.mark.parametrize("N", [1, 37, 3 * (1 << 16) + 5])
def test_reference(rng, N):
    grads = rng.standard_normal(N)
    expected = np.sqrt(np.sum(grads**2))
    norm, grad_scale = run_reference(grads, 0.5 * expected)
    assert norm == pytest.approx(expected, rel=1e-12)
    assert grad_scale == pytest.approx(0.5 * expected / (expected + 1e-6), rel=1e-12)
    assert run_reference(grads, 2 * expected)[1] == 1


@pytest.mark.parametrize("max_norm", [0, -1])
def test_no_clipping(place, max_norm):
    grads = np.full(5, 100, np.float32)
    assert run(place, grads, max_norm)[1] == 1
    assert run_reference(grads, max_norm)[1] == 1


def test_a_norm_as_small_as_the_epsilon(place):
    """norm = max_norm = 1e-6: the epsilon halves the scale."""
    grads = np.zeros(5, np.float32)
    grads[3] = 1e-6
    assert run(place, grads, 1e-6)[1] == pytest.approx(0.5, rel=1e-5)
    assert run_reference(grads.astype(np.float64), 1e-6)[1] == pytest.approx(0.5, rel=1e-6)


def test_zero_gradient(place):
    assert run(place, np.zeros(37, np.float32), 1.0) == (0, 1)
    assert run_reference(np.zeros(37), 1.0) == (0, 1)


# The last one is finite, but its square is not.
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e20])
@pytest.mark.parametrize("at", [0, 1023, 1024])
def test_a_norm_that_is_not_finite_stops_adamw(place, rng, bad, at):
    grads = rng.standard_normal(1025).astype(np.float32)
    grads[at] = bad
    norm, grad_scale = run(place, grads, 1.0)
    assert not np.isfinite(norm)
    assert grad_scale == -1
    with np.errstate(over="ignore"):
        assert run_reference(grads, 1.0)[1] == -1

    before = [rng.standard_normal(1025).astype(np.float32) for _ in range(3)]
    hyper, scale = np.array([0.1, 0.1, 0.05], np.float32), np.array([-1], np.float32)
    for launcher in (lambda *a: place.run(adamw_update, *a), adamw_update_reference):
        params, m, v = (a.copy() for a in before)
        launcher(params, grads, m, v, hyper, scale, 0.9, 0.95, 1e-8, 0.1)
        for after, a in zip((params, m, v), before, strict=True):
            np.testing.assert_array_equal(after, a)


@pytest.mark.gpu
@pytest.mark.slow
def test_more_than_2_to_the_31_gradients():
    N = 2**31 + 1027
    if cuda.current_context().get_memory_info().free < 5 * N:
        pytest.skip("needs 9 GB of free GPU memory")
    grads = cuda.device_array(N, np.float32)
    cuda.driver.device_memset(grads, 0, 4 * N)
    # Each has a bit of its own in the sum of the squares: 4^k.
    for k, at in enumerate([0, 2**30, 2**31 - 1, 2**31, 2**31 + 1023, N - 1]):
        grads[at : at + 1].copy_to_device(np.array([2**k], np.float32))
    norm, grad_scale = cuda.device_array(1, np.float32), cuda.device_array(1, np.float32)
    partials = cuda.device_array(global_norm_partials(N), np.float32)
    global_norm(norm, grad_scale, grads, partials, 1.0)
    assert round(float(norm.copy_to_host()[0]) ** 2, 2) == 0b010101010101
