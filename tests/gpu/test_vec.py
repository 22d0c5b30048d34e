"""Conversions between float32 and bf16 on the host, against the numbers they stand for."""

import numpy as np

from numbagpt.gpu.vec import bf16_to_float32, float32_to_bf16


def test_every_bf16_is_a_float32_and_back():
    bits = np.arange(1 << 16, dtype=np.uint16)
    values = bf16_to_float32(bits)
    numbers = ~np.isnan(values)
    np.testing.assert_array_equal(float32_to_bf16(values[numbers]), bits[numbers])
    assert (float32_to_bf16(values[~numbers]) == 0x7FFF).all()


def test_rounding_is_to_the_nearest_and_ties_go_to_even():
    step = 2.0**-7  # of bf16 between 1 and 2
    cases = {
        1 + 0.49 * step: 1.0,
        1 + 0.5 * step: 1.0,
        1 + 0.51 * step: 1 + step,
        1 + 1.5 * step: 1 + 2 * step,
        2 - 0.25 * step: 2.0,
        3.4e38: np.inf,  # beyond the largest bf16, 3.39e38, by more than half a step
    }
    values = np.array([s * x for x in cases for s in (1, -1)], np.float32)
    expected = np.array([s * x for x in cases.values() for s in (1, -1)], np.float32)
    np.testing.assert_array_equal(bf16_to_float32(float32_to_bf16(values)), expected)


def test_no_nan_becomes_a_number():
    """Adding half a step to the bits of some would carry into the sign."""
    bits = np.array([0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0xFF800001, 0xFFFFFFFF], np.uint32)
    assert np.isnan(bf16_to_float32(float32_to_bf16(bits.view(np.float32)))).all()
