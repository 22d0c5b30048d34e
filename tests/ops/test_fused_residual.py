"""fused_residual_forward against NumPy, and against the two operations it stands for."""

import numpy as np
import pytest
from check import Place, poisoned, relative_error

from numbagpt.errors import UserError
from numbagpt.gpu.vec import bf16_to_float32, float32_to_bf16
from numbagpt.ops.fused_residual import fused_residual_forward, fused_residual_forward_reference
from numbagpt.ops.layernorm import layernorm_forward
from numbagpt.ops.residual import residual_forward

SHAPES = [(1, 1, 4), (2, 37, 36), (3, 5, 128), (2, 2, 768), (1, 3, 1600), (1, 1, 4096)]
OUTPUTS = ("residual", "normed", "mean", "rstd")


def random_inputs(shape: tuple) -> tuple[np.ndarray, ...]:
    """inp1, inp2, weight, bias, float32."""
    rng = np.random.default_rng(1)
    C = shape[-1]
    inputs = (
        rng.normal(0.5, 2, shape),
        rng.standard_normal(shape),
        rng.normal(1, 0.5, C),
        rng.standard_normal(C),
    )
    return tuple(a.astype(np.float32) for a in inputs)


def expected(inputs: tuple[np.ndarray, ...]) -> dict[str, np.ndarray]:
    """All four outputs in float64."""
    shape = inputs[0].shape
    result = [poisoned(s, np.float64) for s in (shape, shape, shape[:-1], shape[:-1])]
    fused_residual_forward_reference(*result, *(a.astype(np.float64) for a in inputs))
    return dict(zip(OUTPUTS, result, strict=True))


@pytest.mark.parametrize("shape", SHAPES)
def test_float32(place: Place, shape: tuple) -> None:
    inputs = random_inputs(shape)
    result = [poisoned(s) for s in (shape, shape, shape[:-1], shape[:-1])]
    place.run(fused_residual_forward, *result, *inputs)
    np.testing.assert_array_equal(result[0], inputs[0] + inputs[1])
    for name, value in zip(OUTPUTS, result, strict=True):
        assert relative_error(value, expected(inputs)[name]) <= 1e-5, name


@pytest.mark.parametrize("shape", [(2, 5, 72), (3, 5, 128), (2, 2, 768), (1, 3, 1600)])
def test_bf16(place: Place, shape: tuple) -> None:
    bits = tuple(float32_to_bf16(a) for a in random_inputs(shape))
    values = tuple(bf16_to_float32(a) for a in bits)
    residual, normed = np.zeros((2, *shape), np.uint16)
    mean, rstd = poisoned(shape[:-1]), poisoned(shape[:-1])
    place.run(fused_residual_forward, residual, normed, mean, rstd, *bits)
    np.testing.assert_array_equal(residual, float32_to_bf16(values[0] + values[1]))
    # The statistics are those of the residual that is stored, not of the exact sum.
    stored = bf16_to_float32(residual)
    of_stored = expected((stored, np.zeros_like(stored), *values[2:]))
    assert relative_error(mean, of_stored["mean"]) <= 1e-5
    assert relative_error(rstd, of_stored["rstd"]) <= 1e-5
    # bf16 has 8 significant bits: rounding errs by at most 2^-8 of a value.
    assert relative_error(bf16_to_float32(normed), of_stored["normed"]) <= 2**-8


@pytest.mark.parametrize("storage", ["float32", "bf16"])
def test_same_bits_as_one_after_the_other(place: Place, storage: str) -> None:
    shape = (2, 3, 136)
    inputs = random_inputs(shape)
    if storage == "bf16":
        inputs = tuple(float32_to_bf16(a) for a in inputs)
    fused = [np.zeros(shape, inputs[0].dtype) for _ in range(2)]
    fused += [poisoned(shape[:-1]), poisoned(shape[:-1])]
    place.run(fused_residual_forward, *fused, *inputs)
    plain = [np.zeros(shape, inputs[0].dtype) for _ in range(2)]
    plain += [poisoned(shape[:-1]), poisoned(shape[:-1])]
    place.run(residual_forward, plain[0], *inputs[:2])
    place.run(layernorm_forward, *plain[1:], plain[0], *inputs[2:])
    for name, a, b in zip(OUTPUTS, fused, plain, strict=True):
        np.testing.assert_array_equal(a, b, err_msg=name)


def test_in_place(place: Place) -> None:
    inp1, *inputs = random_inputs((2, 37, 36))
    total = inp1 + inputs[0]
    normed, mean, rstd = poisoned((2, 37, 36)), poisoned((2, 37)), poisoned((2, 37))
    place.run(fused_residual_forward, inp1, normed, mean, rstd, inp1, *inputs)
    np.testing.assert_array_equal(inp1, total)


def test_too_many_channels_are_refused() -> None:
    inputs = random_inputs((1, 4100))
    result = [poisoned(s) for s in ((1, 4100), (1, 4100), 1, 1)]
    with pytest.raises(UserError, match="4100 channels; expected at most 4096"):
        fused_residual_forward(*result, *inputs)


def test_reference_is_the_formula() -> None:
    inp1, inp2, weight, bias = (a.astype(np.float64) for a in random_inputs((2, 3, 36)))
    result = expected((inp1, inp2, weight, bias))
    x = inp1 + inp2
    mean, rstd = x.mean(axis=-1), 1 / np.sqrt(x.var(axis=-1) + 1e-5)
    assert relative_error(result["residual"], x) == 0
    assert relative_error(result["mean"], mean) <= 1e-12
    assert relative_error(result["rstd"], rstd) <= 1e-12
    normed = (x - mean[..., None]) * rstd[..., None] * weight + bias
    assert relative_error(result["normed"], normed) <= 1e-12
