"""Rows of channels to rows of heads and back: every value in its place, whatever the head size."""

import numpy as np
import pytest
from check import poisoned

from numbagpt.ops.permute import (
    permute,
    permute_backward,
    permute_backward_reference,
    permute_reference,
    unpermute,
    unpermute_backward,
    unpermute_backward_reference,
    unpermute_reference,
)

# B, T, NH, HS. Head sizes 1 and 6 can't be moved in vectors of 4; 25 * 64 channels take two blocks.
SHAPES = [
    (1, 1, 1, 64),
    (2, 37, 3, 12),
    (2, 5, 36, 1),
    (2, 3, 6, 6),
    (1, 2, 25, 64),
]


@pytest.fixture
def rng():
    return np.random.default_rng(42)


def three_heads(B, T, NH, HS):
    return (3, B, NH, T, HS), (B, T, 3 * NH * HS)


def one_head(B, T, NH, HS):
    return (B, NH, T, HS), (B, T, NH * HS)


OPERATIONS = {
    "permute": (permute, permute_reference, three_heads),
    "permute_backward": (permute_backward, permute_backward_reference, three_heads),
    "unpermute": (unpermute, unpermute_reference, one_head),
    "unpermute_backward": (unpermute_backward, unpermute_backward_reference, one_head),
}
TO_HEADS = ("permute", "unpermute_backward")


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", OPERATIONS)
def test_launcher_moves_what_the_reference_moves(place, rng, name, shape):
    launcher, reference, shapes = OPERATIONS[name]
    heads, rows = shapes(*shape)
    out_shape, inp_shape = (heads, rows) if name in TO_HEADS else (rows, heads)
    inp = rng.standard_normal(inp_shape).astype(np.float32)
    out, expected = poisoned(out_shape), poisoned(out_shape)
    place.run(launcher, out, inp)
    reference(expected, inp)
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("name", OPERATIONS)
def test_bf16_is_refused(name):
    launcher, _, shapes = OPERATIONS[name]
    heads, rows = shapes(2, 5, 3, 8)
    out_shape, inp_shape = (heads, rows) if name in TO_HEADS else (rows, heads)
    out = np.zeros(out_shape, np.uint16)
    with pytest.raises(TypeError, match=r"permute_kernel takes .* not \(uint16, uint16, "):
        launcher(out, np.ones(inp_shape, np.uint16))
    assert not out.any()


def test_references_follow_the_formula(rng):
    B, T, NH, HS = 2, 3, 4, 5
    inp = rng.standard_normal((B, T, 3, NH, HS))
    qkvr = poisoned((3, B, NH, T, HS), np.float64)
    permute_reference(qkvr, inp.reshape(B, T, 3 * NH * HS))
    for b, t, p, h, i in np.ndindex(inp.shape):
        assert qkvr[p, b, h, t, i] == inp[b, t, p, h, i]
    out = poisoned((B, T, NH * HS), np.float64)
    unpermute_reference(out, qkvr[1])
    np.testing.assert_array_equal(out, inp[:, :, 1].reshape(B, T, NH * HS))


@pytest.mark.parametrize(
    ("name", "backward"),
    [("permute", "permute_backward"), ("unpermute", "unpermute_backward")],
)
def test_backward_is_the_adjoint(rng, name, backward):
    # sum(f(x) * y) = sum(x * f'(y)) for a linear f and its gradient f'
    _, forward, shapes = OPERATIONS[name]
    heads, rows = shapes(2, 3, 4, 5)
    if name == "unpermute":
        heads, rows = rows, heads
    x, y = rng.standard_normal(rows), rng.standard_normal(heads)
    fx, gradient = poisoned(heads, np.float64), poisoned(rows, np.float64)
    forward(fx, x)
    OPERATIONS[backward][1](gradient, y)
    assert np.sum(fx * y) == pytest.approx(np.sum(x * gradient), rel=1e-12)


@pytest.mark.gpu
@pytest.mark.slow
def test_offsets_past_two_to_the_31(rng):
    from numbagpt.device import CudaDevice

    device = CudaDevice()
    B, T, NH, HS = 437, 1024, 25, 64
    C = NH * HS
    assert 3 * B * T * C > 2**31
    inp, qkvr = device.zeros(3 * B * T * C), device.zeros(3 * B * T * C)
    last = rng.standard_normal((1, T, 3 * C)).astype(np.float32)
    device.upload(inp[(B - 1) * T * 3 * C :], last.reshape(-1))
    permute(qkvr.reshape((3, B, NH, T, HS)), inp)
    expected = poisoned((3, 1, NH, T, HS))
    permute_reference(expected, last)
    for p in range(3):
        end = (p + 1) * B * T * C
        np.testing.assert_array_equal(
            device.to_host(qkvr[end - T * C : end]), expected[p].reshape(-1)
        )
    device.clear(inp)
    permute_backward(inp, qkvr.reshape((3, B, NH, T, HS)))
    np.testing.assert_array_equal(device.to_host(inp[(B - 1) * T * 3 * C :]), last.reshape(-1))
