"""AdamW against the algorithm as it is printed, in float64, and against PyTorch's."""

import numpy as np
import pytest
from check import relative_error

from numbagpt.gpu.vec import float32_to_bf16
from numbagpt.ops import adamw as module
from numbagpt.ops.adamw import adamw_update, adamw_update_reference

# Less than a vector, no multiple of it, more than a block takes (1024).
SIZES = [1, 3, 4, 5, 37, 1024, 1031]
# An epsilon that the smaller gradients feel.
BETA1, BETA2, EPS, LEARNING_RATE = 0.9, 0.95, 1e-2, 0.03
STEPS = 5
NAN_BF16 = 0x7FFF


@pytest.fixture
def rng():
    return np.random.default_rng(42)


def textbook(params, gradients, weight_decay):
    """Loshchilov and Hutter 2019, algorithm 2, in float64, line by line."""
    p, m, v = params.astype(np.float64), np.zeros(params.size), np.zeros(params.size)
    for t, g in enumerate(gradients.astype(np.float64), start=1):
        m = BETA1 * m + (1 - BETA1) * g
        v = BETA2 * v + (1 - BETA2) * g**2
        m_hat = m / (1 - BETA1**t)
        v_hat = v / (1 - BETA2**t)
        p = p - LEARNING_RATE * (m_hat / (np.sqrt(v_hat) + EPS) + weight_decay * p)
    return p, m, v


def train(update, params, gradients, weight_decay, scale=1.0, **copy):
    """Parameters, m and v after a step with each of the gradients."""
    dtype = params.dtype
    p, m, v = params.copy(), np.zeros_like(params), np.zeros_like(params)
    for t, g in enumerate(gradients, start=1):
        hyper = np.array([LEARNING_RATE, 1 - BETA1**t, 1 - BETA2**t], dtype)
        grad_scale = np.array([scale], dtype)
        g = g.astype(dtype)
        update(p, g, m, v, hyper, grad_scale, BETA1, BETA2, EPS, weight_decay, **copy)
    return p, m, v


def problem(rng, N, dtype):
    """Parameters so small that what is added to them is not lost in their rounding."""
    params = (0.1 * rng.standard_normal(N)).astype(dtype)
    gradients = rng.standard_normal((STEPS, N)) * np.exp(3 * rng.standard_normal(N))
    return params, gradients.astype(dtype)


@pytest.mark.parametrize("with_copy", [False, pytest.param(True, marks=pytest.mark.ampere)])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("N", SIZES)
def test_five_steps(place, rng, N, weight_decay, with_copy):
    params, gradients = problem(rng, N, np.float32)
    copy = np.full(N, NAN_BF16, np.uint16) if with_copy else None

    def update(*arguments, **keywords):
        place.run(adamw_update, *arguments, **keywords)

    p, m, v = train(update, params, gradients, weight_decay, copy=copy)
    expected_p, expected_m, expected_v = textbook(params, gradients, weight_decay)
    assert relative_error(p - params, expected_p - params) <= 1e-5
    assert relative_error(m, expected_m) <= 1e-5
    assert relative_error(v, expected_v) <= 1e-5
    if with_copy:
        np.testing.assert_array_equal(copy, float32_to_bf16(p))


def test_a_copy_that_is_not_bf16_is_refused(rng):
    """It would be left as it is, as if there were none."""
    params = rng.standard_normal(4).astype(np.float32)
    ones, hyper = np.ones(1, np.float32), np.ones(3, np.float32)
    arrays = [params, *(np.zeros(4, np.float32) for _ in range(3)), hyper, ones]
    with pytest.raises(TypeError, match="copy is of float32; expected uint16"):
        adamw_update(*arrays, BETA1, BETA2, EPS, 0.1, copy=np.zeros(4, np.float32))


@pytest.mark.parametrize("N", SIZES)
def test_reference(rng, monkeypatch, N):
    monkeypatch.setattr(module, "CHUNK", 16)
    params, gradients = problem(rng, N, np.float64)
    results = train(adamw_update_reference, params, gradients, 0.1)
    for result, expected in zip(results, textbook(params, gradients, 0.1), strict=True):
        assert relative_error(result, expected) <= 1e-12


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_copy_of_the_reference(rng, monkeypatch, dtype):
    monkeypatch.setattr(module, "CHUNK", 16)
    params, gradients = problem(rng, 37, dtype)
    copy = np.full(37, NAN_BF16, np.uint16)
    p, m, v = train(adamw_update_reference, params, gradients, 0.1, copy=copy)
    np.testing.assert_array_equal(copy, float32_to_bf16(p))
    for a, b in zip((p, m, v), train(adamw_update_reference, params, gradients, 0.1), strict=True):
        np.testing.assert_array_equal(a, b)


def test_reference_keeps_float32(rng):
    params, gradients = problem(rng, 37, np.float32)
    p, m, v = train(adamw_update_reference, params, gradients, 0.1)
    expected_p, expected_m, expected_v = textbook(params, gradients, 0.1)
    assert p.dtype == m.dtype == v.dtype == np.float32
    assert relative_error(p - params, expected_p - params) <= 1e-5
    assert relative_error(m, expected_m) <= 1e-5
    assert relative_error(v, expected_v) <= 1e-5


def test_against_pytorch(rng):
    torch = pytest.importorskip("torch")
    params, gradients = problem(rng, 37, np.float64)
    p = torch.nn.Parameter(torch.from_numpy(params.copy()))
    optimizer = torch.optim.AdamW(
        [p], lr=LEARNING_RATE, betas=(BETA1, BETA2), eps=EPS, weight_decay=0.1
    )
    for g in gradients:
        p.grad = torch.from_numpy(g.copy())
        optimizer.step()
    result, _, _ = train(adamw_update_reference, params, gradients, 0.1)
    assert relative_error(result, p.detach().numpy()) <= 1e-12


# Powers of two, so that scaling is exact; and a zero, which is not negative.
@pytest.mark.parametrize("scale", [0.25, 0.0])
def test_gradient_is_scaled(place, rng, scale):
    params, gradients = problem(rng, 37, np.float32)

    def launch(*arguments):
        place.run(adamw_update, *arguments)

    for update in (launch, adamw_update_reference):
        scaled = train(update, params, gradients, 0.1, scale=scale)
        expected = train(update, params, gradients * np.float32(scale), 0.1)
        for a, b in zip(scaled, expected, strict=True):
            np.testing.assert_array_equal(a, b)
        assert not np.array_equal(scaled[1], train(update, params, gradients, 0.1)[1])


def test_no_gradient(place):
    """Zero over the square root of zero: epsilon alone makes it zero."""
    hyper, grad_scale = np.array([0.1, 0.1, 0.05], np.float32), np.ones(1, np.float32)
    for update in (lambda *a: place.run(adamw_update, *a), adamw_update_reference):
        params, grads = np.ones(37, np.float32), np.zeros(37, np.float32)
        m, v = grads.copy(), grads.copy()
        update(params, grads, m, v, hyper, grad_scale, BETA1, BETA2, 1e-8, 0.0)
        np.testing.assert_array_equal(params, 1)
        assert not m.any()
        assert not v.any()


@pytest.mark.ampere
@pytest.mark.parametrize("N", [3, 37])
def test_negative_scale_changes_nothing(place, rng, N):
    before = [rng.standard_normal(N).astype(np.float32) for _ in range(3)]
    grads = np.full(N, np.nan, np.float32)
    hyper, grad_scale = np.array([0.1, 0.1, 0.05], np.float32), np.array([-1], np.float32)
    copy_before = rng.integers(0, 1 << 16, N).astype(np.uint16)
    for update in (lambda *a: place.run(adamw_update, *a), adamw_update_reference):
        for copy in (None, copy_before.copy()):
            params, m, v = (a.copy() for a in before)
            update(params, grads, m, v, hyper, grad_scale, BETA1, BETA2, EPS, 0.1, copy)
            for after, a in zip((params, m, v), before, strict=True):
                np.testing.assert_array_equal(after, a)
            if copy is not None:
                np.testing.assert_array_equal(copy, copy_before)
