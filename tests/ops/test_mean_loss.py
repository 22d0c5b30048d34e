"""The sum of the losses, added to what is there."""

import numpy as np
import pytest
from check import relative_error

from numbagpt.ops.mean_loss import mean_loss, mean_loss_reference

# Fewer losses than a vector holds, no multiple of it, more than the block reads at once (4096).
SHAPES = [(1, 1), (1, 3), (2, 37), (3, 1367)]


@pytest.fixture
def rng():
    return np.random.default_rng(42)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_mean_loss(place, rng, shape):
    losses = (5 + rng.standard_normal(shape)).astype(np.float32)
    scale = 1 / losses.size
    out = np.array([2.5], np.float32)
    place.run(mean_loss, out, losses, scale)
    expected = 2.5 + losses.astype(np.float64).mean()
    assert relative_error(out, [expected]) <= 1e-6

    again = np.array([2.5], np.float32)
    place.run(mean_loss, again, losses, scale)
    np.testing.assert_array_equal(out, again)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_reference(rng, shape):
    losses = rng.standard_normal(shape)
    out = np.array([2.5])
    mean_loss_reference(out, losses, 0.5)
    assert out[0] == pytest.approx(2.5 + 0.5 * sum(losses.ravel()), rel=1e-12)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("at", [0, 36])
def test_a_loss_that_is_not_finite_shows(place, at, bad):
    losses = np.ones(37, np.float32)
    losses[at] = bad
    out = np.zeros(1, np.float32)
    place.run(mean_loss, out, losses, 0.1)
    assert not np.isfinite(out[0])
    out[0] = 0
    mean_loss_reference(out, losses, 0.1)
    assert not np.isfinite(out[0])
