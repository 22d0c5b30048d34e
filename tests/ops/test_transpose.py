"""Rows become columns: every number in its place, nothing beside them touched."""

import numpy as np
import pytest
from check import poisoned

from numbagpt.ops.transpose import transpose, transpose_reference

# N, C: one vector; rows of out that begin on 16 bytes and others; whole tiles, and tiles that stick
# out on either side
SHAPES = [(1, 4), (4, 4), (37, 8), (128, 64), (132, 68), (65, 132)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_transpose(place, shape):
    N, C = shape
    inp = np.random.default_rng(42).standard_normal(shape).astype(np.float32)
    out = poisoned((C, N))
    place.run(transpose, out, inp)
    transpose_reference(expected := poisoned((C, N)), inp)
    np.testing.assert_array_equal(out, expected)
    assert all(expected[c, n] == inp[n, c] for n, c in np.ndindex(shape))


def test_sizes_must_agree():
    with pytest.raises(ValueError, match=r"transpose: out has 11 elements, .* expected 12"):
        transpose(poisoned(11), np.ones((3, 4), np.float32))


def test_rows_must_be_whole_vectors():
    with pytest.raises(ValueError, match=r"inp has rows of 6 elements .* multiple of 4"):
        transpose(poisoned((6, 2)), np.ones((2, 6), np.float32))
