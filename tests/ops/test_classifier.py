"""Losses and gradient of the logits, whatever the padding holds and however large the logits."""

from types import SimpleNamespace

import numpy as np
import pytest
from check import finite_difference, poisoned, relative_error
from numba import cuda

from numbagpt.gpu import offline
from numbagpt.gpu.vec import bf16_to_float32, float32_to_bf16
from numbagpt.ops import classifier as module
from numbagpt.ops.classifier import (
    KERNELS,
    fused_classifier,
    fused_classifier_reference,
    rows_that_fit,
)

# B, T, V, Vp: one logit; most vectors padding; the last vector in part; no padding; more than the
# block reads at once (4096), so that threads read several vectors and not all equally many.
SHAPES = [
    (1, 1, 1, 128),
    (1, 3, 5, 128),
    (1, 2, 127, 128),
    (2, 1, 256, 256),
    (1, 1, 4099, 4224),
]
V, VP = 5, 128


@pytest.fixture
def rng():
    return np.random.default_rng(42)


@pytest.fixture
def small_block(monkeypatch):
    """Blocks of 64 threads, where their size does not matter: the simulator takes its time."""
    monkeypatch.setattr(module, "BLOCK", 64)


@pytest.fixture(params=[2, 1, 0])
def rows_kept(request, monkeypatch):
    """Run a test with two rows in shared memory, if they fit, and as if one did or none."""
    fit = module.rows_that_fit
    monkeypatch.setattr(module, "rows_that_fit", lambda logits: min(request.param, fit(logits)))


@pytest.fixture(autouse=True)
def few_blocks(monkeypatch):
    """Two blocks, so that with the few rows of a test a block has more than one."""
    monkeypatch.setattr(module, "multiprocessors", lambda logits: 2)


def problem(rng, B, T, V, Vp, padding=np.nan):
    """Logits with the given padding, and targets that include the first and the last id."""
    logits = np.full((B, T, Vp), padding, np.float32)
    logits[..., :V] = 3 * rng.standard_normal((B, T, V))
    targets = rng.integers(0, V, (B, T)).astype(np.int32)
    targets.flat[0], targets.flat[-1] = 0, V - 1
    return logits, targets


def run(launcher, logits, targets, V, *, probs=None, dlosses=None, **keywords):
    """(losses, logits afterwards) with the outputs poisoned first; the inputs stay as they are."""
    logits = logits.copy()
    losses = poisoned(targets.shape, np.float32 if logits.dtype == np.uint16 else logits.dtype)
    launcher(logits, losses, probs, dlosses, targets, V, **keywords)
    return losses, logits


def on(place):
    """The launcher at a place, with the signature of the reference."""
    return lambda *arguments, **keywords: place.run(fused_classifier, *arguments, **keywords)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.usefixtures("rows_kept")
def test_losses_and_gradient(place, rng, shape):
    B, T, V, Vp = shape
    logits, targets = problem(rng, B, T, V, Vp)
    losses, dlogits = run(on(place), logits, targets, V)
    expected = run(fused_classifier_reference, logits.astype(np.float64), targets, V)
    # With a single logit both are zero.
    assert relative_error(losses, expected[0]) <= 1e-5
    assert relative_error(dlogits, expected[1]) <= 1e-5
    assert not dlogits[..., V:].any()

    again = run(on(place), logits, targets, V)
    np.testing.assert_array_equal(losses, again[0])
    np.testing.assert_array_equal(dlogits, again[1])


@pytest.mark.ampere
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.usefixtures("small_block", "rows_kept")
def test_bf16_logits(place, rng, shape):
    B, T, V, Vp = shape
    logits, targets = problem(rng, B, T, V, Vp)
    logits = float32_to_bf16(logits)
    probs = np.full(logits.shape, 0x7FFF, np.uint16)
    losses, dlogits = run(on(place), logits, targets, V, probs=probs)

    x = bf16_to_float32(logits).astype(np.float64)
    expected_probs = poisoned(x.shape, np.float64)
    expected = run(fused_classifier_reference, x, targets, V, probs=expected_probs)
    assert relative_error(losses, expected[0]) <= 1e-5
    # Computed in float32, then rounded once to bf16, whose significand has 8 bits: half a unit in
    # the last of them is 2^-8 of a power of two. The target's gradient is a difference, right to
    # within the float32 error of the probability in it.
    error = np.abs(bf16_to_float32(dlogits) - expected[1])
    assert (error <= 2**-8 * np.abs(expected[1]) + 1e-5 * expected_probs / (B * T)).all()
    error = np.abs(bf16_to_float32(probs) - expected_probs)
    assert (error <= (2**-8 + 1e-5) * expected_probs).all()


# The same code at the same place has to give the same bits, whatever lies in the padding and
# whatever else is asked for.


@pytest.mark.parametrize("padding", [0, np.inf, -np.inf, 3e38, -3e38])
@pytest.mark.usefixtures("small_block")
def test_padding_is_not_read(place, rng, padding):
    logits, targets = problem(rng, 2, 3, V, VP)
    other = logits.copy()
    other[..., V:] = padding
    for launcher in (on(place), fused_classifier_reference):
        expected = run(launcher, logits, targets, V)
        losses, dlogits = run(launcher, other, targets, V)
        np.testing.assert_array_equal(losses, expected[0])
        np.testing.assert_array_equal(dlogits, expected[1])
        assert not dlogits[..., V:].any()


@pytest.mark.parametrize("write_dlogits", [False, True])
@pytest.mark.usefixtures("small_block", "rows_kept")
def test_probabilities(place, rng, write_dlogits):
    logits, targets = problem(rng, 2, 3, 37, 128)
    x = logits[..., :37].astype(np.float64)
    expected = np.exp(x) / np.exp(x).sum(axis=-1, keepdims=True)
    for launcher in (on(place), fused_classifier_reference):
        without = run(launcher, logits, targets, 37)
        probs = poisoned(logits.shape)
        keywords = {"probs": probs, "write_dlogits": write_dlogits}
        losses, after = run(launcher, logits, targets, 37, **keywords)
        assert relative_error(probs[..., :37], expected) <= 1e-5
        assert not probs[..., 37:].any()
        np.testing.assert_array_equal(losses, without[0])
        np.testing.assert_array_equal(after, without[1] if write_dlogits else logits)


@pytest.mark.usefixtures("small_block")
def test_losses_only(place, rng):
    logits, targets = problem(rng, 2, 3, V, VP)
    for launcher in (on(place), fused_classifier_reference):
        expected = run(launcher, logits, targets, V)
        losses, after = run(launcher, logits, targets, V, write_dlogits=False)
        np.testing.assert_array_equal(losses, expected[0])
        np.testing.assert_array_equal(after, logits)


@pytest.mark.usefixtures("small_block")
def test_some_rows_at_a_time(place, rng):
    logits, targets = problem(rng, 2, 3, V, VP)
    rows, flat_targets = logits.reshape(-1, VP), targets.reshape(-1)
    for launcher in (on(place), fused_classifier_reference):
        expected = run(launcher, logits, targets, V)
        for piece in (slice(0, 4), slice(4, 6)):
            losses, dlogits = run(launcher, rows[piece], flat_targets[piece], V, dloss=1 / 6)
            np.testing.assert_array_equal(losses, expected[0].reshape(-1)[piece])
            np.testing.assert_array_equal(dlogits, expected[1].reshape(-1, VP)[piece])


@pytest.mark.usefixtures("small_block")
def test_weights_of_the_losses(place, rng):
    logits, targets = problem(rng, 2, 3, V, VP)
    dlosses = rng.standard_normal((2, 3)).astype(np.float32)
    _, per_unit = run(fused_classifier_reference, logits.astype(np.float64), targets, V, dloss=1)
    for launcher in (on(place), fused_classifier_reference):
        _, dlogits = run(launcher, logits, targets, V)
        assert relative_error(dlogits, per_unit / 6) <= 1e-5
        _, dlogits = run(launcher, logits, targets, V, dloss=0.3)
        assert relative_error(dlogits, per_unit * 0.3) <= 1e-5
        _, dlogits = run(launcher, logits, targets, V, dlosses=dlosses)
        assert relative_error(dlogits, per_unit * dlosses[..., None]) <= 1e-5
        # dlosses wins over dloss.
        _, dlogits = run(launcher, logits, targets, V, dlosses=dlosses, dloss=0.3)
        assert relative_error(dlogits, per_unit * dlosses[..., None]) <= 1e-5


@pytest.mark.parametrize("size", [1e4, 1e30])
@pytest.mark.usefixtures("small_block")
def test_huge_logits(place, size):
    """The probability of the target underflows; its loss does not become infinite."""
    logits = np.zeros((1, 3, VP), np.float32)
    logits[0, :, :V] = [-size, 0, size, 0, -size]
    targets = np.array([[0, 1, 2]], np.int32)
    for launcher in (on(place), fused_classifier_reference):
        losses, dlogits = run(launcher, logits, targets, V, dloss=1)
        np.testing.assert_allclose(losses, [[2 * size, size, 0]], rtol=1e-6)
        expected = np.zeros((3, VP))
        expected[0, [0, 2]] = expected[1, [1, 2]] = [-1, 1]
        np.testing.assert_array_equal(dlogits[0], expected)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("at", [0, 4])
@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.usefixtures("small_block")
def test_a_logit_that_is_not_finite_shows_in_the_loss(place, rng, at, bad):
    logits, _ = problem(rng, 1, 2, V, VP)
    logits[0, 1, at] = bad
    targets = np.full((1, 2), 2, np.int32)
    for launcher in (on(place), fused_classifier_reference):
        losses, _ = run(launcher, logits, targets, V)
        np.testing.assert_array_equal(np.isfinite(losses), [[True, False]])


def losses_of(x, targets):
    """-log(softmax(x))[target], written down as in a textbook."""
    prob = np.exp(x) / np.exp(x).sum(axis=-1, keepdims=True)
    return -np.log(np.take_along_axis(prob, targets[..., None], axis=-1))[..., 0]


# In one piece, and row by row.
@pytest.mark.parametrize("chunk", [module.CHUNK, 1])
def test_reference(rng, monkeypatch, chunk):
    monkeypatch.setattr(module, "CHUNK", chunk)
    logits, targets = problem(rng, 2, 3, V, VP)
    logits = logits.astype(np.float64)
    dlosses = rng.standard_normal((2, 3))
    losses, dlogits = run(fused_classifier_reference, logits, targets, V, dlosses=dlosses)
    x = logits[..., :V]
    np.testing.assert_allclose(losses, losses_of(x, targets), rtol=1e-12)
    expected = finite_difference(lambda x: losses_of(x, targets), x, dlosses)
    assert relative_error(dlogits[..., :V], expected) <= 1e-8
    assert not dlogits[..., V:].any()


@pytest.mark.usefixtures("rows_kept")
def test_vocabulary_of_gpt2(place, rng):
    logits, targets = problem(rng, 1, 1, 50257, 50304)
    losses, dlogits = run(on(place), logits, targets, 50257)
    expected = run(fused_classifier_reference, logits.astype(np.float64), targets, 50257)
    assert relative_error(losses, expected[0]) <= 1e-5
    assert relative_error(dlogits, expected[1]) <= 1e-5
    assert not dlogits[..., 50257:].any()


# Compute capability, KB of shared memory that a block may have, and how many of GPT-2's rows fit.
@pytest.mark.parametrize(
    ("cc", "kilobytes", "bf16", "fp32"),
    [
        ((7, 5), 64, 0, 0),
        ((8, 0), 163, 1, 0),
        ((8, 6), 99, 1, 0),
        ((9, 0), 227, 2, 1),
        ((12, 0), 99, 1, 0),
    ],
    ids=str,
)
def test_how_many_rows_fit(monkeypatch, cc, kilobytes, bf16, fp32):
    gpu = SimpleNamespace(compute_capability=cc, MAX_SHARED_MEMORY_PER_BLOCK_OPTIN=1024 * kilobytes)
    monkeypatch.setattr(cuda, "get_current_device", lambda: gpu)
    for dtype, fit in ((np.uint16, bf16), (np.float32, fp32)):
        logits = SimpleNamespace(shape=(16, 1024, 50304), dtype=np.dtype(dtype))
        assert rows_that_fit(logits) == fit
        # No vector more than the device has.
        most = (1024 * kilobytes - module.STATIC_SHARED) // logits.dtype.itemsize
        for Vp in (most, most + 1):
            logits.shape = (1, Vp)
            assert rows_that_fit(logits) == (cc >= (8, 0) and Vp == most)


def test_shared_memory_of_the_sums():
    for k in KERNELS.values():
        assert offline.inspect(k, k.signatures[0], (9, 0)).shared == module.STATIC_SHARED


@pytest.mark.gpu
@pytest.mark.slow
def test_more_than_2_to_the_31_logits(rng):
    N, V, Vp = 42700, 50257, 50304
    assert N * Vp > 2**31
    if cuda.current_context().get_memory_info().free < 5 * N * Vp:
        pytest.skip("needs 11 GB of free GPU memory")
    logits = cuda.device_array((1, N, Vp), np.float32)
    cuda.driver.device_memset(logits, 0, 4 * N * Vp)
    targets = np.zeros((1, N), np.int32)
    x, last = problem(rng, 1, 2, V, Vp)
    flat = logits.reshape(-1)
    flat[(N - 2) * Vp :].copy_to_device(x.reshape(-1))
    targets[0, -2:] = last
    losses = cuda.device_array((1, N), np.float32)
    fused_classifier(logits, losses, None, None, cuda.to_device(targets), V, dloss=1.0)

    losses = losses.copy_to_host()[0]
    np.testing.assert_allclose(losses[:-2], np.log(V), rtol=1e-6)
    expected = run(fused_classifier_reference, x.astype(np.float64), last, V, dloss=1.0)
    assert relative_error(losses[-2:], expected[0][0]) <= 1e-5
    dlogits = flat[(N - 2) * Vp :].copy_to_host().reshape(1, 2, Vp)
    assert relative_error(dlogits, expected[1]) <= 1e-5
    # A row that starts just below 2^31 elements ends above.
    row = 2**31 // Vp
    dlogits = flat[row * Vp : (row + 1) * Vp].copy_to_host()
    expected = np.where(np.arange(Vp) < V, 1 / V, 0)
    expected[0] -= 1
    assert relative_error(dlogits, expected) <= 1e-5


@pytest.mark.parametrize("name", ["logits", "probs", "dlosses", "targets"])
def test_sizes_that_do_not_fit(name):
    N, V, Vp = 6, 11, 16
    arrays = {
        "logits": np.zeros((N, Vp), np.float32),
        "losses": np.zeros(N, np.float32),
        "probs": np.zeros((N, Vp), np.float32),
        "dlosses": np.zeros(N, np.float32),
        "targets": np.zeros(N, np.int32),
    }
    arrays[name] = arrays[name][:-1]
    with pytest.raises(ValueError, match=f"fused_classifier: {name} has {arrays[name].size} elem"):
        fused_classifier(**arrays, V=V)


@pytest.mark.parametrize("V", [0, 17])
def test_a_vocabulary_that_does_not_fit(V):
    logits, losses = np.zeros((2, 16), np.float32), np.zeros(2, np.float32)
    with pytest.raises(ValueError, match=f"V is {V}; expected 1 to 16, the columns of logits"):
        fused_classifier(logits, losses, None, None, np.zeros(2, np.int32), V)


def test_rows_that_are_not_whole_vectors():
    logits, losses = np.zeros((2, 10), np.float32), np.zeros(2, np.float32)
    with pytest.raises(ValueError, match="logits has rows of 10 elements of float32"):
        fused_classifier(logits, losses, None, None, np.zeros(2, np.int32), 10)
