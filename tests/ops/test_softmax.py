"""Causal softmax and its gradient, on and below the diagonal and nowhere else."""

import weakref

import numpy as np
import pytest
from check import Place, finite_difference, poisoned, relative_error

from numbagpt.gpu import simulator
from numbagpt.ops import softmax as module
from numbagpt.ops.softmax import (
    softmax_backward,
    softmax_backward_reference,
    softmax_forward,
    softmax_forward_reference,
)

# B, NH, T: rows that start on every alignment, with no vector and with more than a warp has lanes.
SHAPES = [(1, 1, 1), (2, 3, 2), (1, 1, 4), (1, 3, 5), (1, 3, 37), (1, 1, 150)]


@pytest.fixture
def rng():
    return np.random.default_rng(42)


def lower(T):
    return np.tril(np.ones((T, T), bool))


def square(B, NH, T, below, above, dtype=np.float32):
    """(B, NH, T, T) with `below` on and below the diagonal and `above` above it."""
    return np.where(lower(T), below, above).astype(dtype) * np.ones((B, NH, 1, 1), dtype)


def att_and_datt(rng, shape, scale=1.0):
    """Attention weights and a gradient, float64."""
    preatt = rng.standard_normal(shape)
    att = np.zeros(shape)
    softmax_forward_reference(att, preatt, scale)
    return att, rng.standard_normal(shape)


def run_forward(place, preatt, scale):
    """softmax_forward with poison wherever it must write, and wherever it must not read."""
    B, NH, T, _ = preatt.shape
    att = square(B, NH, T, np.nan, 0)
    place.run(softmax_forward, att, np.where(lower(T), preatt, np.float32(np.nan)), scale)
    assert not att[..., ~lower(T)].any(), "something above the diagonal was written"
    return att


def check_forward(place, rng, B, NH, T):
    preatt = 3 * rng.standard_normal((B, NH, T, T)).astype(np.float32)
    att = run_forward(place, preatt, 0.25)
    expected = poisoned(att.shape, np.float64)
    softmax_forward_reference(expected, preatt.astype(np.float64), 0.25)
    assert relative_error(att, expected) <= 1e-5
    np.testing.assert_allclose(att.sum(axis=-1, dtype=np.float64), 1, rtol=1e-6)


def check_backward(place, rng, B, NH, T):
    att, datt = (a.astype(np.float32) for a in att_and_datt(rng, (B, NH, T, T)))
    expected = poisoned(att.shape, np.float64)
    softmax_backward_reference(expected, datt.astype(np.float64), att.astype(np.float64), 0.3)

    datt = np.where(lower(T), datt, np.float32(np.nan))
    readable = np.where(lower(T), att, np.float32(np.nan))
    dpreatt = square(B, NH, T, np.nan, 0)
    place.run(softmax_backward, dpreatt, datt, readable, 0.3)
    assert not dpreatt[..., ~lower(T)].any(), "something above the diagonal was written"
    # a single token always has weight 1: its gradient is zero but for rounding
    assert relative_error(dpreatt, expected) <= 1e-5


@pytest.fixture(params=["sim", pytest.param("cuda", marks=pytest.mark.gpu)])
def long_rows(request, monkeypatch):
    """A place and a T with up to three pieces in a row, the last of them with one vector.

    The simulator would take minutes: there, pieces have 128 values and not 1024.
    """
    if request.param == "cuda":
        return Place("cuda"), 2053
    monkeypatch.setattr(module, "VALUES", 4)
    monkeypatch.setattr(module, "PIECE", 128)
    monkeypatch.setattr(simulator, "_rebound", weakref.WeakKeyDictionary())
    return Place("sim"), 261


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_forward(place, rng, shape):
    check_forward(place, rng, *shape)


def test_forward_of_long_rows(long_rows, rng):
    place, T = long_rows
    check_forward(place, rng, 1, 1, T)


@pytest.mark.parametrize("sign", [1, -1])
def test_forward_with_large_scores(place, sign):
    # the maximum grows with every vector, or is met first and leaves the rest to vanish
    T = 150
    row = (sign * np.linspace(-1e4, 1e4, T)).astype(np.float32)
    preatt = np.tile(row, (1, 1, T, 1))
    att = run_forward(place, preatt, 1.0)
    expected = np.zeros(att.shape)
    softmax_forward_reference(expected, preatt.astype(np.float64), 1.0)
    assert relative_error(att, expected) <= 1e-5


@pytest.mark.parametrize("value", [1e4, -1e4])
def test_forward_of_equal_scores(place, value):
    T = 5
    att = run_forward(place, np.full((1, 1, T, T), value, np.float32), 1.0)
    expected = lower(T) / np.arange(1, T + 1)[:, None]
    assert relative_error(att[0, 0], expected) <= 1e-6


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_backward(place, rng, shape):
    check_backward(place, rng, *shape)


def test_backward_of_long_rows(long_rows, rng):
    place, T = long_rows
    check_backward(place, rng, 1, 1, T)


def test_backward_in_place(place, rng):
    att, datt = (a.astype(np.float32) for a in att_and_datt(rng, (1, 2, 5, 5)))
    expected = poisoned(att.shape)
    softmax_backward_reference(expected, datt, att, 0.3)
    datt[..., ~lower(5)] = 0
    place.run(softmax_backward, datt, datt, att, 0.3)
    assert relative_error(datt, expected) <= 1e-5


def test_forward_reference_follows_the_formula(rng):
    T, scale = 6, 0.4
    preatt = rng.standard_normal((2, 3, T, T))
    att = poisoned(preatt.shape, np.float64)
    softmax_forward_reference(att, preatt, scale)
    for b, h, t in np.ndindex(2, 3, T):
        e = np.exp(scale * preatt[b, h, t, : t + 1])
        np.testing.assert_allclose(att[b, h, t, : t + 1], e / e.sum(), rtol=1e-12)
        assert not att[b, h, t, t + 1 :].any()


def test_backward_reference_against_finite_differences(rng):
    T, scale = 5, 0.7
    preatt = rng.standard_normal((1, 2, T, T))
    datt = rng.standard_normal(preatt.shape)

    def forward(x):
        att = np.zeros(x.shape)
        softmax_forward_reference(att, x, scale)
        return att

    dpreatt = poisoned(preatt.shape, np.float64)
    softmax_backward_reference(dpreatt, datt, forward(preatt), scale)
    assert relative_error(dpreatt, finite_difference(forward, preatt, datt)) <= 1e-8


@pytest.mark.gpu
@pytest.mark.slow
def test_offsets_past_two_to_the_31(rng):
    from numbagpt.device import CudaDevice

    device = CudaDevice()
    n, T, scale = 2049, 1024, 0.125
    assert n * T * T > 2**31
    preatt, att = device.zeros(n * T * T), device.zeros(n * T * T)
    head = rng.standard_normal((T, T)).astype(np.float32)
    start = (n - 1) * T * T

    device.upload(preatt[start:], head.reshape(-1))
    softmax_forward(att.reshape((1, n, T, T)), preatt.reshape((1, n, T, T)), scale)
    found = device.to_host(att[start:]).reshape(T, T)
    expected = np.zeros((T, T))
    softmax_forward_reference(expected, head.astype(np.float64), scale)
    assert relative_error(found, expected) <= 1e-5
    np.testing.assert_allclose(
        device.to_host(att[: T * T]).reshape(T, T),
        lower(T) / np.arange(1, T + 1)[:, None],
        rtol=1e-6,
    )

    datt = preatt  # in place
    softmax_backward(*(x.reshape((1, n, T, T)) for x in (datt, datt, att)), scale)
    expected_gradient = np.zeros((T, T))
    softmax_backward_reference(expected_gradient, head.astype(np.float64), expected, scale)
    gradient = np.tril(device.to_host(datt[start:]).reshape(T, T))
    assert relative_error(gradient, expected_gradient) <= 1e-5
