"""layernorm_forward and layernorm_backward against NumPy, and NumPy against finite differences."""

import numpy as np
import pytest
from check import Place, finite_difference, poisoned, relative_error

from numbagpt.errors import UserError
from numbagpt.gpu.vec import bf16_to_float32, float32_to_bf16
from numbagpt.ops import layernorm_backward as backward_module
from numbagpt.ops.layernorm import (
    layernorm_backward,
    layernorm_backward_reference,
    layernorm_backward_scratch,
    layernorm_forward,
    layernorm_forward_reference,
)
from numbagpt.ops.layernorm_partials import sum_partials

SHAPES = [(1, 1, 4), (1, 1, 768), (2, 37, 36), (3, 5, 128), (1, 3, 1600), (2, 1, 4096)]
FORWARD = ("out", "mean", "rstd")
BACKWARD = ("dinp", "dweight", "dbias")


def random_inputs(shape: tuple, offset: float = 0.5) -> dict[str, np.ndarray]:
    """inp, weight, bias, dout and what the gradients hold already, float32."""
    rng = np.random.default_rng(1)
    C = shape[-1]
    return {
        "inp": rng.normal(offset, 2, shape).astype(np.float32),
        "weight": rng.normal(1, 0.5, C).astype(np.float32),
        "bias": rng.standard_normal(C).astype(np.float32),
        "dout": rng.standard_normal(shape).astype(np.float32),
        "dinp": rng.standard_normal(shape).astype(np.float32),
        "dweight": rng.standard_normal(C).astype(np.float32),
        "dbias": rng.standard_normal(C).astype(np.float32),
    }


def expected_forward(a: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """out, mean and rstd in float64."""
    inp, weight, bias = (a[name].astype(np.float64) for name in ("inp", "weight", "bias"))
    out, mean, rstd = (poisoned(s, np.float64) for s in (inp.shape, *[inp.shape[:-1]] * 2))
    layernorm_forward_reference(out, mean, rstd, inp, weight, bias)
    return {"out": out, "mean": mean, "rstd": rstd}


def expected_backward(a: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """dinp, dweight and dbias in float64, from statistics in float64."""
    a = {name: value.astype(np.float64) for name, value in a.items()}
    stats = expected_forward(a)
    layernorm_backward_reference(
        *(a[name] for name in (*BACKWARD, "dout", "inp", "weight")), stats["mean"], stats["rstd"]
    )
    return {name: a[name] for name in BACKWARD}


def run_forward(place: Place, a: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    result = {
        "out": poisoned(a["inp"].shape),
        "mean": poisoned(a["inp"].shape[:-1]),
        "rstd": poisoned(a["inp"].shape[:-1]),
    }
    place.run(layernorm_forward, *result.values(), a["inp"], a["weight"], a["bias"])
    return result


def run_backward(place: Place, a: dict[str, np.ndarray], **keywords) -> dict[str, np.ndarray]:
    """The gradients, as a stores them: float32 or bf16 bits."""
    values = {k: bf16_to_float32(v) if v.dtype == np.uint16 else v for k, v in a.items()}
    stats = {name: value.astype(np.float32) for name, value in expected_forward(values).items()}
    result = {name: a[name].copy() for name in BACKWARD}
    C = a["inp"].shape[-1]
    scratch = poisoned(layernorm_backward_scratch(a["inp"].size // C, C))
    inputs = (a["dout"], a["inp"], a["weight"], stats["mean"], stats["rstd"], scratch)
    place.run(layernorm_backward, *result.values(), *inputs, **keywords)
    return result


@pytest.mark.parametrize("shape", SHAPES)
def test_forward(place: Place, shape: tuple) -> None:
    a = random_inputs(shape)
    result, expected = run_forward(place, a), expected_forward(a)
    for name in FORWARD:
        assert relative_error(result[name], expected[name]) <= 1e-5, name


def test_forward_far_from_zero(place: Place) -> None:
    # mean(x²) - mean² would be 1e6 - 1e6 here and leave no digit of the variance 4.
    a = random_inputs((2, 3, 128), offset=1000)
    result, expected = run_forward(place, a), expected_forward(a)
    assert relative_error(result["rstd"], expected["rstd"]) <= 1e-5
    # The inputs themselves have steps of 6e-5 there, and so has the mean.
    assert relative_error(result["out"], expected["out"]) <= 1e-4


def test_forward_of_equal_values(place: Place) -> None:
    a = random_inputs((1, 2, 36))
    a["inp"][:] = 3
    result = run_forward(place, a)
    np.testing.assert_array_equal(result["mean"], 3)
    np.testing.assert_allclose(result["rstd"], 1e-5**-0.5, rtol=1e-6)
    np.testing.assert_array_equal(result["out"], np.broadcast_to(a["bias"], (1, 2, 36)))


@pytest.mark.parametrize("shape", SHAPES)
def test_backward_adds_the_gradients(place: Place, shape: tuple) -> None:
    a = random_inputs(shape)
    result, expected = run_backward(place, a), expected_backward(a)
    for name in BACKWARD:
        assert relative_error(result[name], expected[name]) <= 1e-5, name


# Teams of 1, 3 and 16 warps; and two blocks, in which, under the simulator, other warps run ahead.
@pytest.mark.parametrize(("blocks", "N", "C"), [(1, 48, 36), (2, 23, 520), (1, 3, 4096)])
def test_backward_with_several_rows_for_each_team(
    place: Place, monkeypatch: pytest.MonkeyPatch, blocks: int, N: int, C: int
) -> None:
    monkeypatch.setattr(backward_module, "MULTIPROCESSORS", blocks)
    a = random_inputs((N, C))
    result, expected = run_backward(place, a), expected_backward(a)
    for name in BACKWARD:
        assert relative_error(result[name], expected[name]) <= 1e-5, name


@pytest.mark.ampere
@pytest.mark.parametrize(("blocks", "N", "C"), [(1, 37, 72), (2, 23, 520)])
def test_backward_with_several_rows_for_each_team_in_bf16(
    place: Place, monkeypatch: pytest.MonkeyPatch, blocks: int, N: int, C: int
) -> None:
    monkeypatch.setattr(backward_module, "MULTIPROCESSORS", blocks)
    a = random_inputs((N, C))
    half = {k: float32_to_bf16(a[k]) for k in ("inp", "weight", "dout", "dinp")}
    a |= {name: bf16_to_float32(bits) for name, bits in half.items()}
    total = np.zeros(C, np.float32)
    result, expected = run_backward(place, a | half, dresidual_sum=total), expected_backward(a)
    # bf16 has 8 significant bits: rounding errs by at most 2^-8 of a value.
    assert relative_error(bf16_to_float32(result["dinp"]), expected["dinp"]) <= 2**-8
    for name in ("dweight", "dbias"):
        assert relative_error(result[name], expected[name]) <= 1e-5, name
    assert relative_error(total, expected["dinp"].sum(axis=0)) <= 1e-5


@pytest.mark.parametrize("shape", [(2, 37, 36), (1, 3, 1600)])
def test_backward_sums_the_new_gradient(place: Place, shape: tuple) -> None:
    a = random_inputs(shape)
    total = np.random.default_rng(2).standard_normal(shape[-1]).astype(np.float32)
    expected = expected_backward(a)
    expected_total = total + expected["dinp"].reshape(-1, shape[-1]).sum(axis=0)
    result = run_backward(place, a, dresidual_sum=total)
    assert relative_error(total, expected_total) <= 1e-5
    for name in BACKWARD:
        assert relative_error(result[name], expected[name]) <= 1e-5, name


@pytest.mark.parametrize("shape", [(2, 37, 36), (1, 3, 1600)])
def test_backward_overwrites(place: Place, shape: tuple) -> None:
    a = random_inputs(shape)
    expected = expected_backward({**a, "dinp": np.zeros(shape, np.float32)})
    total = np.zeros(shape[-1], np.float32)
    poison = {**a, "dinp": poisoned(shape)}
    result = run_backward(place, poison, dresidual_sum=total, accumulate=False)
    for name in BACKWARD:
        assert relative_error(result[name], expected[name]) <= 1e-5, name
    expected_total = expected["dinp"].reshape(-1, shape[-1]).sum(axis=0)
    assert relative_error(total, expected_total) <= 1e-5


# Fewer than the 32 rows that a block reads at once, as many, one more; five times as many, which is
# a turn, and more. Several strips of 32 columns, the last in part.
@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("blocks", [1, 31, 32, 33, 132, 161])
def test_partial_sums_of_any_number_of_blocks(
    place: Place, blocks: int, with_residual: bool
) -> None:
    C, sums = 36, 3 if with_residual else 2
    rng = np.random.default_rng(blocks)
    partials = poisoned((blocks + 1, sums, C))  # the scratch may be larger
    partials[:blocks] = rng.standard_normal((blocks, sums, C))
    before = rng.standard_normal((3, C)).astype(np.float32)
    dweight, dbias, dresidual_sum = (row.copy() for row in before)
    last = dresidual_sum if with_residual else None
    place.run(sum_partials, dweight, dbias, last, partials, blocks)
    expected = before.astype(np.float64)
    expected[:sums] += partials[:blocks].sum(axis=0, dtype=np.float64)
    assert relative_error(np.stack([dweight, dbias, dresidual_sum]), expected) <= 1e-6


def test_backward_gives_the_same_bits_again(place: Place) -> None:
    a = random_inputs((3, 5, 128))
    first, second = run_backward(place, a), run_backward(place, a)
    for name in BACKWARD:
        np.testing.assert_array_equal(first[name], second[name])


@pytest.mark.gpu
@pytest.mark.parametrize("C", [768, 1024, 1280, 1600])
def test_backward_of_many_rows(C: int) -> None:
    a = random_inputs((8, 1024, C))
    totals = np.zeros((2, C), np.float32)
    first, second = (run_backward(Place("cuda"), a, dresidual_sum=total) for total in totals)
    expected = expected_backward(a)
    np.testing.assert_array_equal(*totals)
    expected_total = expected["dinp"].reshape(-1, C).sum(axis=0)
    assert relative_error(totals[0], expected_total) <= 1e-5
    for name in BACKWARD:
        np.testing.assert_array_equal(first[name], second[name])
        assert relative_error(first[name], expected[name]) <= 1e-5, name


@pytest.mark.ampere
@pytest.mark.parametrize("shape", [(2, 5, 72), (1, 3, 128), (2, 2, 768), (1, 3, 1600)])
def test_bf16(place: Place, shape: tuple) -> None:
    a = random_inputs(shape)
    half = {k: float32_to_bf16(a[k]) for k in ("inp", "weight", "bias", "dout", "dinp")}
    a |= {name: bf16_to_float32(bits) for name, bits in half.items()}
    mean, rstd, out = poisoned(shape[:-1]), poisoned(shape[:-1]), np.zeros_like(half["inp"])
    place.run(layernorm_forward, out, mean, rstd, half["inp"], half["weight"], half["bias"])
    forward = expected_forward(a)
    assert relative_error(mean, forward["mean"]) <= 1e-5
    assert relative_error(rstd, forward["rstd"]) <= 1e-5
    # bf16 has 8 significant bits: rounding errs by at most 2^-8 of a value.
    assert relative_error(bf16_to_float32(out), forward["out"]) <= 2**-8

    N, C = a["inp"].size // shape[-1], shape[-1]
    expected = expected_backward(a)
    dweight, dbias, total = a["dweight"].copy(), a["dbias"].copy(), np.zeros(C, np.float32)
    inputs = (half["dout"], half["inp"], half["weight"], mean, rstd)
    scratch = poisoned(layernorm_backward_scratch(N, C))
    dinp = half["dinp"].copy()
    place.run(layernorm_backward, dinp, dweight, dbias, *inputs, scratch, total)
    assert relative_error(bf16_to_float32(dinp), expected["dinp"]) <= 2**-8
    assert relative_error(dweight, expected["dweight"]) <= 1e-5
    assert relative_error(dbias, expected["dbias"]) <= 1e-5
    assert relative_error(total, expected["dinp"].reshape(-1, C).sum(axis=0)) <= 1e-5

    overwritten = np.full_like(dinp, 0x7FC0)  # NaN
    place.run(layernorm_backward, overwritten, dweight, dbias, *inputs, scratch, accumulate=False)
    expected = expected_backward({**a, "dinp": np.zeros(shape)})
    assert relative_error(bf16_to_float32(overwritten), expected["dinp"]) <= 2**-8


def test_too_many_channels_are_refused() -> None:
    a = random_inputs((1, 1, 4100))
    with pytest.raises(UserError, match="4100 channels; expected at most 4096"):
        run_forward(Place("sim"), a)
    mean, rstd, scratch = poisoned((1, 1)), poisoned((1, 1)), poisoned(3 * 4100)
    gradients = a["dinp"], a["dweight"], a["dbias"]
    with pytest.raises(UserError, match="4100 channels; expected at most 4096"):
        layernorm_backward(*gradients, a["dout"], a["inp"], a["weight"], mean, rstd, scratch)
    with pytest.raises(UserError, match="4100 channels; expected at most 4096"):
        layernorm_backward_scratch(1, 4100)


@pytest.mark.parametrize("shape", [(1, 1, 4), (2, 3, 36)])
def test_reference_is_the_formula(shape: tuple) -> None:
    a = random_inputs(shape)
    result = expected_forward(a)
    for index in np.ndindex(shape[:-1]):
        x = a["inp"][index].astype(np.float64)
        norm = (x - np.mean(x)) / np.sqrt(np.var(x) + 1e-5)
        assert relative_error(result["out"][index], norm * a["weight"] + a["bias"]) <= 1e-12
        assert abs(result["mean"][index] - np.mean(x)) <= 1e-12
        assert abs(result["rstd"][index] - (np.var(x) + 1e-5) ** -0.5) <= 1e-12


@pytest.mark.parametrize("shape", [(1, 1, 4), (2, 3, 12)])
def test_backward_reference_is_the_slope(shape: tuple) -> None:
    a = {name: value.astype(np.float64) for name, value in random_inputs(shape).items()}
    expected = expected_backward(a)
    for name in ("inp", "weight", "bias"):
        slope = finite_difference(
            lambda x, name=name: expected_forward({**a, name: x})["out"], a[name], a["dout"]
        )
        assert relative_error(expected[f"d{name}"], a[f"d{name}"] + slope) <= 1e-7, name


def test_references_in_float32() -> None:
    a = random_inputs((2, 37, 36))
    forward, backward = expected_forward(a), expected_backward(a)
    out, mean, rstd = poisoned((2, 37, 36)), poisoned((2, 37)), poisoned((2, 37))
    layernorm_forward_reference(out, mean, rstd, a["inp"], a["weight"], a["bias"])
    layernorm_backward_reference(
        *(a[name] for name in (*BACKWARD, "dout", "inp", "weight")), mean, rstd
    )
    for name, result in {"out": out, "mean": mean, "rstd": rstd}.items():
        assert relative_error(result, forward[name]) <= 1e-5, name
    for name in BACKWARD:
        assert relative_error(a[name], backward[name]) <= 1e-5, name


def test_backward_reference_with_sum_and_overwriting() -> None:
    a = {name: value.astype(np.float64) for name, value in random_inputs((2, 3, 12)).items()}
    stats, expected = expected_forward(a), expected_backward({**a, "dinp": np.zeros((2, 3, 12))})
    dinp, total = poisoned((2, 3, 12), np.float64), np.ones(12)
    layernorm_backward_reference(
        *(dinp, a["dweight"], a["dbias"], a["dout"], a["inp"], a["weight"]),
        *(stats["mean"], stats["rstd"]),
        dresidual_sum=total,
        accumulate=False,
    )
    assert relative_error(dinp, expected["dinp"]) == 0
    assert relative_error(total, 1 + expected["dinp"].sum(axis=(0, 1))) <= 1e-14
