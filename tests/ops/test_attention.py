"""Attention as a whole: by the formula, by finite differences, and only backwards in time."""

import numpy as np
import pytest
from check import Place, finite_difference, poisoned, relative_error

from numbagpt.ops.attention import (
    attention_backward,
    attention_backward_reference,
    attention_forward,
    attention_forward_reference,
)

# B, T, NH, HS
SHAPES = [(2, 1, 3, 12), (1, 37, 1, 36), (2, 37, 3, 12), (1, 5, 36, 1)]


@pytest.fixture
def rng():
    return np.random.default_rng(42)


class Attention:
    """Buffers of one attention, poisoned where they will be written, and both passes on them."""

    def __init__(self, shape, dtype=np.float32):
        B, T, NH, HS = self.shape = shape
        C = NH * HS
        self.dtype = dtype
        self.out = poisoned((B, T, C), dtype)
        self.qkvr = poisoned((3, B, NH, T, HS), dtype)
        self.att = self._lower_triangle_of_nan()

    def _lower_triangle_of_nan(self):
        B, T, NH, _ = self.shape
        return np.tile(np.tril(poisoned((T, T), self.dtype)), (B, NH, 1, 1))

    def forward(self, run, operation, qkv):
        B, T, NH, _ = self.shape
        inp = poisoned(max(qkv.size, B * NH * T * T), self.dtype)
        inp[: qkv.size] = qkv.reshape(-1)
        run(operation, self.out, self.qkvr, self.att, inp)
        self.assert_causal(self.att)
        return self.out

    def backward(self, run, operation, dout):
        B, T, NH, HS = self.shape
        dinp = poisoned((B, T, 3 * NH * HS), self.dtype)
        dqkvr, dpreatt = poisoned(self.qkvr.shape, self.dtype), self._lower_triangle_of_nan()
        # longer than needed, as the model's are
        datt, scratch = (poisoned(n, self.dtype) for n in (dpreatt.size + 3, dout.size + 3))
        run(operation, dinp, dqkvr, dpreatt, datt, scratch, dout, self.qkvr, self.att)
        self.assert_causal(dpreatt)
        return dinp

    def assert_causal(self, square):
        T = self.shape[1]
        assert not square[..., np.triu(np.ones((T, T), bool), 1)].any()


def call(operation, *arguments):
    return operation(*arguments)


def random(rng, shape):
    """QKV and a gradient of the output, float64."""
    B, T, NH, HS = shape
    return rng.standard_normal((B, T, 3 * NH * HS)), rng.standard_normal((B, T, NH * HS))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_launchers(place, rng, shape):
    qkv, dout = (a.astype(np.float32) for a in random(rng, shape))
    oracle = Attention(shape, np.float64)
    out = oracle.forward(call, attention_forward_reference, qkv)
    dinp = oracle.backward(call, attention_backward_reference, dout.astype(np.float64))

    device = Attention(shape)
    assert relative_error(device.forward(place.run, attention_forward, qkv), out) <= 1e-5
    assert relative_error(device.qkvr, oracle.qkvr) == 0
    assert relative_error(device.att, oracle.att) <= 1e-5
    found = device.backward(place.run, attention_backward, dout)
    assert relative_error(found, dinp) <= 1e-5


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_forward_reference_against_the_formula(rng, shape):
    B, T, NH, HS = shape
    qkv, _ = random(rng, shape)
    out = Attention(shape, np.float64).forward(call, attention_forward_reference, qkv)
    q, k, v = np.moveaxis(qkv.reshape(B, T, 3, NH, HS), 2, 0)
    e = np.exp(np.einsum("bthi,bshi->bhts", q, k) / np.sqrt(HS)) * np.tril(np.ones((T, T)))
    expected = np.einsum("bhts,bshi->bthi", e / e.sum(axis=-1, keepdims=True), v)
    np.testing.assert_allclose(out, expected.reshape(out.shape), rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("shape", [(1, 1, 2, 3), (2, 5, 2, 3)], ids=str)
def test_backward_reference_against_finite_differences(rng, shape):
    qkv, dout = random(rng, shape)

    def forward(x):
        return Attention(shape, np.float64).forward(call, attention_forward_reference, x)

    attention = Attention(shape, np.float64)
    attention.forward(call, attention_forward_reference, qkv)
    dinp = attention.backward(call, attention_backward_reference, dout)
    assert relative_error(dinp, finite_difference(forward, qkv, dout)) <= 1e-8


def test_later_tokens_change_nothing_before_them(place, rng):
    shape = 1, 5, 3, 12
    qkv = random(rng, shape)[0].astype(np.float32)
    before = Attention(shape).forward(place.run, attention_forward, qkv)
    qkv[:, 3:] *= -7
    after = Attention(shape).forward(place.run, attention_forward, qkv)
    np.testing.assert_array_equal(after[:, :3], before[:, :3])
    assert np.abs(after[:, 3:] - before[:, 3:]).min() > 0


@pytest.mark.gpu
def test_reruns_give_the_same_bits(rng):
    shape = 4, 515, 3, 64
    qkv, dout = (a.astype(np.float32) for a in random(rng, shape))
    run = Place("cuda").run
    first, second = Attention(shape), Attention(shape)
    np.testing.assert_array_equal(
        first.forward(run, attention_forward, qkv), second.forward(run, attention_forward, qkv)
    )
    np.testing.assert_array_equal(
        first.backward(run, attention_backward, dout),
        second.backward(run, attention_backward, dout),
    )
