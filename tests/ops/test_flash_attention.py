"""Flash attention against float64, under the simulator and on a GPU."""

import math

import numpy as np
import pytest
from check import Place, finite_difference, poisoned, relative_error
from numba import cuda

from numbagpt.errors import UserError
from numbagpt.gpu.vec import bf16_to_float32, float32_to_bf16
from numbagpt.ops.flash_attention import (
    VARIANTS,
    flash_attention_backward,
    flash_attention_backward_reference,
    flash_attention_forward,
    flash_attention_forward_reference,
    flash_attention_scratch,
    supports,
    variant_for,
)
from numbagpt.ops.flash_tile import HEADS_TOGETHER, tile_grid

TOLERANCE = {np.uint16: 5e-3, np.float32: 2e-3}
# Scores of bf16 are sums of exact products; those of TF32 have 11 bits of q and k.
LSE_TOLERANCE = {np.uint16: 1e-5, np.float32: 2e-3}


class Problem:
    """Inputs that the storage can hold, results in float64, and outputs full of NaN."""

    def __init__(self, B, NH, T, HS, storage=np.uint16, spread=1.0, seed=0):
        generator = np.random.default_rng(seed)
        C = NH * HS
        self.shape = B, NH, T, HS
        self.storage = storage
        self.qkv = self.stored(generator.standard_normal((B, T, 3 * C)))
        q_and_k = self.values(self.qkv)
        q_and_k[..., : 2 * C] *= math.sqrt(spread)
        self.qkv = self.stored(q_and_k)
        self.dout = self.stored(generator.standard_normal((B, T, C)))

        self.expected_out, self.expected_lse = np.empty((B, T, C)), np.empty((B, NH, T))
        self.expected_dqkv = np.empty((B, T, 3 * C))
        self.dqkvb_before = generator.standard_normal(3 * C).astype(np.float32)
        self.expected_dqkvb = self.dqkvb_before.astype(np.float64)
        qkv, dout = self.values(self.qkv), self.values(self.dout)
        flash_attention_forward_reference(self.expected_out, self.expected_lse, qkv)
        flash_attention_backward_reference(
            self.expected_dqkv,
            dout,
            qkv,
            self.expected_out,
            self.expected_lse,
            None,
            dqkvb=self.expected_dqkvb,
        )

        self.out, self.dqkv = self.poison(B, T, C), self.poison(B, T, 3 * C)
        self.lse = poisoned((B, NH, T))
        self.scratch = poisoned(flash_attention_scratch(B, T, C, NH))

    def stored(self, x):
        return float32_to_bf16(x) if self.storage is np.uint16 else x.astype(np.float32)

    def values(self, x):
        """Of what is stored, in float64."""
        return (bf16_to_float32(x) if self.storage is np.uint16 else x).astype(np.float64)

    def poison(self, *shape):
        return np.full(shape, 0xFFFF, np.uint16) if self.storage is np.uint16 else poisoned(shape)

    def run(self, place, variant):
        self.dqkvb = self.dqkvb_before.copy()
        place.run(flash_attention_forward, self.out, self.lse, self.qkv, variant=variant)
        place.run(
            flash_attention_backward,
            self.dqkv,
            self.dout,
            self.qkv,
            self.out,
            self.lse,
            self.scratch,
            dqkvb=self.dqkvb,
            variant=variant,
        )

    def outputs(self):
        return [x.copy() for x in (self.out, self.lse, self.dqkv, self.dqkvb)]

    def check(self):
        B, NH, T, HS = self.shape
        tolerance = TOLERANCE[self.storage]
        assert relative_error(self.values(self.out), self.expected_out) < tolerance
        assert relative_error(self.lse, self.expected_lse) < LSE_TOLERANCE[self.storage]
        found = self.values(self.dqkv).reshape(B, T, 3, NH * HS)
        expected = self.expected_dqkv.reshape(B, T, 3, NH * HS)
        for i, name in enumerate(("dq", "dk", "dv")):
            if T == 1 and name != "dv":
                # One key has all the weight, whatever its score: the gradient is zero. dP - delta
                # comes out as zero where the products are exact, which those of TF32 are not.
                limit = tolerance if self.storage is np.float32 else 1e-4
                assert np.abs(found[:, :, i]).max() < limit
            else:
                error = relative_error(found[:, :, i], expected[:, :, i])
                assert error < tolerance, f"{name}: {error}"
        self.check_dqkvb()

    def check_dqkvb(self):
        """Against float64, and closer against the sums that it is made of.

        Errors are held against the root of the sum of squares of a column, not its sum: positive
        and negative numbers cancel, and those of dk do so exactly.
        """
        B, NH, T, HS = self.shape
        size = np.linalg.norm(self.expected_dqkv.reshape(B * T, 3, NH * HS), axis=(0, 2))
        if T == 1:  # dq and dk are zero, see above
            size[:2] = math.sqrt(B * NH * HS)

        def error(expected):
            return np.linalg.norm((self.dqkvb - expected).reshape(3, -1), axis=1) / size

        assert (error(self.expected_dqkvb) < TOLERANCE[self.storage]).all()
        dq = self.as_multiplied(self.dqkv[..., : NH * HS]).sum((0, 1))
        dv = self.as_multiplied(self.dout).sum((0, 1))
        sums = self.dqkvb_before + np.concatenate([dq, np.zeros_like(dq), dv])
        assert (error(sums) < 1e-6).all()

    def as_multiplied(self, x):
        """In float64, rounded as the tensor cores' operands are: float32 to the nearest TF32."""
        if self.storage is np.float32:
            x = (x.view(np.uint32) + 0x1000 & 0xFFFFE000).view(np.float32)
        return self.values(x)


def skip_unless_supported(place, variant, HS, storage):
    forward, _ = VARIANTS[variant]
    kernel = forward.forward_kernels[HS, np.dtype(storage).itemsize]
    if place.name == "cuda":
        cc = cuda.get_current_device().compute_capability
        if not kernel.runs_on(tuple(cc)):
            pytest.skip(f"{variant} does not run on compute capability {cc}")


# Under the simulator: both sides of a tile's end, several heads, one token; and three tiles, so
# that a tile's memory is used again, in two blocks, in which other warps run ahead.
@pytest.mark.parametrize(
    ("variant", "storage", "B", "NH", "T", "HS"),
    [
        ("wgmma", np.uint16, 1, 2, 63, 64),
        ("wgmma", np.uint16, 1, 1, 70, 128),
        ("wgmma", np.uint16, 1, 1, 193, 64),
        ("wgmma", np.uint16, 2, 1, 1, 64),
    ],
)
def test_small(place, variant, storage, B, NH, T, HS):
    skip_unless_supported(place, variant, HS, storage)
    problem = Problem(B, NH, T, HS, storage)
    problem.run(place, variant)
    problem.check()


@pytest.fixture
def gpu():
    return Place("cuda")


BF16 = [("wgmma", np.uint16, 64), ("wgmma", np.uint16, 128)]


@pytest.mark.gpu
@pytest.mark.parametrize(("variant", "storage", "HS"), BF16)
@pytest.mark.parametrize(
    ("B", "NH", "T"),
    [
        (2, 3, 1),
        (2, 3, 37),
        (2, 3, 64),
        (2, 3, 65),
        (1, 5, 129),
        (3, 5, 513),
        (2, 2, 1000),
        (1, 2, 1023),
        (4, 12, 1024),
        (1, 25, 300),
    ],
)
def test_gpu(gpu, variant, storage, HS, B, NH, T):
    skip_unless_supported(gpu, variant, HS, storage)
    problem = Problem(B, NH, T, HS, storage, seed=T)
    problem.run(gpu, variant)
    problem.check()


@pytest.mark.gpu
@pytest.mark.parametrize(("variant", "storage", "HS"), BF16)
def test_random_lengths(gpu, variant, storage, HS):
    skip_unless_supported(gpu, variant, HS, storage)
    for T in np.random.default_rng(3).integers(2, 700, 12):
        problem = Problem(1, 3, int(T), HS, storage, seed=int(T))
        problem.run(gpu, variant)
        problem.check()


@pytest.mark.gpu
@pytest.mark.parametrize(("variant", "storage", "HS"), BF16)
def test_reruns_are_identical(gpu, variant, storage, HS):
    skip_unless_supported(gpu, variant, HS, storage)
    problem = Problem(8, 12, 777, HS, storage)
    problem.run(gpu, variant)
    first = problem.outputs()
    for _ in range(10):
        problem.run(gpu, variant)
        for found, before in zip(problem.outputs(), first, strict=True):
            np.testing.assert_array_equal(found, before)


@pytest.mark.parametrize("variant", ["wgmma"])
def test_large_scores(place, variant):
    """Scores of some hundreds, whose exponentials overflow unless the maximum is taken off."""
    skip_unless_supported(place, variant, 64, np.uint16)
    problem = Problem(1, 1, 66, 64, spread=100.0)
    assert problem.expected_lse.max() > 200
    place.run(flash_attention_forward, problem.out, problem.lse, problem.qkv, variant=variant)
    assert relative_error(problem.values(problem.out), problem.expected_out) < 5e-3
    np.testing.assert_allclose(problem.lse, problem.expected_lse, rtol=1e-5, atol=1e-3)


# ---- the references ------------------------------------------------------------------------------


def test_forward_reference_is_softmax_attention():
    B, NH, T, HS = 2, 3, 7, 4
    qkv = np.random.default_rng(1).standard_normal((B, T, 3, NH, HS))
    out, lse = poisoned((B, T, NH, HS), np.float64), poisoned((B, NH, T), np.float64)
    packed = qkv.reshape(B, T, -1)
    flash_attention_forward_reference(out.reshape(B, T, -1), lse, packed)
    for b, h, t in np.ndindex(B, NH, T):
        seen = slice(t + 1)
        weights = np.exp(qkv[b, seen, 1, h] @ qkv[b, t, 0, h] / math.sqrt(HS))
        assert lse[b, h, t] == pytest.approx(math.log(weights.sum()), abs=1e-12)
        expected = weights @ qkv[b, seen, 2, h] / weights.sum()
        np.testing.assert_allclose(out[b, t, h], expected, rtol=1e-12)


def test_backward_reference_is_the_gradient():
    B, NH, T, HS = 1, 2, 5, 4
    generator = np.random.default_rng(2)
    qkv = generator.standard_normal((B, T, 3 * NH * HS))
    dout = generator.standard_normal((B, T, NH * HS))
    out, lse = np.empty_like(dout), np.empty((B, NH, T))

    def forward(x):
        flash_attention_forward_reference(out, lse, x)
        return out

    expected = finite_difference(forward, qkv, dout)
    forward(qkv)
    dqkv, dqkvb = poisoned(qkv.shape, np.float64), np.ones(qkv.shape[-1])
    flash_attention_backward_reference(dqkv, dout, qkv, out, lse, None, dqkvb=dqkvb)
    assert relative_error(dqkv, expected) < 1e-8
    assert relative_error(dqkvb, 1 + expected.sum((0, 1))) < 1e-8


# ---- choice and launch ---------------------------------------------------------------------------


@pytest.mark.parametrize("HS", [64, 128])
def test_hopper_gets_wgmma(HS):
    assert variant_for(HS, np.uint16, (9, 0)) == "wgmma"
    assert variant_for(HS, np.float32, (9, 0)) == "mma"


@pytest.mark.parametrize("cc", [(8, 0), (8, 9), (10, 0), (12, 0)])
def test_other_gpus_get_mma(cc):
    assert variant_for(64, np.uint16, cc) == "mma"


def test_supports():
    assert supports(64, np.uint16, (8, 0))
    assert supports(64, np.float32, (9, 0))
    assert not supports(64, np.uint16, (7, 5))
    assert not supports(80, np.uint16, (9, 0))


def test_unknown_head_size():
    problem = Problem(1, 1, 3, 8)
    with pytest.raises(UserError, match=r"head size 8 .*--attention materialized"):
        flash_attention_forward(problem.out, problem.lse, problem.qkv)


@pytest.mark.parametrize(
    ("variant", "storage", "HS", "message"),
    [
        ("wgmaa", np.uint16, 64, "variant is 'wgmaa'; expected one of wgmma, mma"),
        ("wgmma", np.float32, 64, "variant wgmma has no kernel for head size 64 in float32"),
        ("wgmma", np.uint16, 32, "variant wgmma has no kernel for head size 32 in uint16"),
    ],
)
def test_variants_without_a_kernel(variant, storage, HS, message):
    problem = Problem(1, 1, 3, HS, storage)
    with pytest.raises(ValueError, match=message):
        flash_attention_forward(problem.out, problem.lse, problem.qkv, variant)


@pytest.mark.parametrize("name", ["out", "qkv", "dqkv", "dout", "scratch"])
def test_sizes_that_do_not_fit(name):
    p = Problem(1, 1, 3, 16)
    arrays = {n: getattr(p, n) for n in ("dqkv", "dout", "qkv", "out", "lse", "scratch")}
    arrays[name] = arrays[name][:0] if name == "scratch" else arrays[name][:, :-1]
    with pytest.raises(ValueError, match=f"{name} has"):
        flash_attention_backward(**arrays)
    if name in ("out", "qkv"):
        with pytest.raises(ValueError, match=f"{name} has"):
            flash_attention_forward(arrays["out"], arrays["lse"], arrays["qkv"])


def test_nothing_is_written_where_the_sum_for_the_bias_does_not_fit():
    p = Problem(1, 1, 3, 16)
    arrays = {n: getattr(p, n) for n in ("dqkv", "dout", "qkv", "out", "lse", "scratch")}
    shifted = np.zeros(p.scratch.size + 1, np.float32)[1:]
    with pytest.raises(ValueError, match=r"flash_attention_backward: dqkvb has 47 elem.* 48$"):
        flash_attention_backward(**arrays, dqkvb=p.dqkvb_before[:-1])
    with pytest.raises(ValueError, match="flash_attention_backward: scratch starts at 0x"):
        flash_attention_backward(**{**arrays, "scratch": shifted}, dqkvb=p.dqkvb_before)
    assert (p.dqkv == 0xFFFF).all()


def test_channels_that_are_not_whole_heads():
    """9 heads of 16 channels are 144, and 8 more are whole vectors of 16 bytes."""
    out, qkv, dqkv = (np.zeros((1, 3, n * 152), np.uint16) for n in (1, 3, 3))
    lse, scratch = np.zeros((1, 9, 3), np.float32), np.zeros(10000, np.float32)
    message = "out has 152 channels; expected a multiple of 9, the heads of lse"
    with pytest.raises(ValueError, match=f"^flash_attention_forward: {message}"):
        flash_attention_forward(out, lse, qkv)
    with pytest.raises(ValueError, match=f"^flash_attention_backward: {message}"):
        flash_attention_backward(dqkv, out, qkv, out, lse, scratch)


@pytest.mark.parametrize("heads", [1, 25, 48, 49, 192, 300])
def test_grid_covers_heads(heads):
    together, tiles, groups = tile_grid(heads, 16)
    assert (together * groups, tiles) == (heads, 16)
    assert together <= HEADS_TOGETHER
