"""encoder_forward and encoder_backward against NumPy, and NumPy against finite differences."""

import itertools

import numpy as np
import pytest
from check import Place, finite_difference, poisoned, relative_error

from numbagpt.gpu.vec import bf16_to_float32, float32_to_bf16
from numbagpt.ops import encoder_backward as encoder_backward_module
from numbagpt.ops.encoder import (
    encoder_backward,
    encoder_backward_reference,
    encoder_forward,
    encoder_forward_reference,
    token_runs,
)

# The second has 56 positions, as many as make a run long.
SHAPES = [(1, 1, 4), (2, 28, 4), (2, 37, 36), (3, 5, 128), (1, 2, 768)]
VOCABULARY = 61
MAX_T = 40


def batch(kind: str, B: int, T: int) -> np.ndarray:
    """(B, T) int32 tokens: all equal, all different, or few frequent and many rare ones."""
    if kind == "equal":
        return np.full((B, T), 7, np.int32)
    rng = np.random.default_rng(B * T)
    if kind == "distinct":
        return rng.permutation(max(VOCABULARY, B * T))[: B * T].reshape(B, T).astype(np.int32)
    return np.minimum(rng.zipf(1.4, (B, T)) - 1, VOCABULARY - 1).astype(np.int32)


def random_tables(V: int, C: int, seed: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """wte or dwte (V, C), wpe or dwpe (MAX_T, C), float32."""
    rng = np.random.default_rng(seed)
    return tuple(rng.standard_normal((n, C)).astype(np.float32) for n in (V, MAX_T))


def plain_backward(
    dwte: np.ndarray, dwpe: np.ndarray, dout: np.ndarray, inp: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The gradients in float64, position by position, with no runs."""
    dwte, dwpe = dwte.astype(np.float64), dwpe.astype(np.float64)
    for b, t in np.ndindex(inp.shape):
        dwte[inp[b, t]] += dout[b, t]
        dwpe[t] += dout[b, t]
    return dwte, dwpe


@pytest.mark.parametrize("shape", SHAPES)
def test_forward(place: Place, shape: tuple) -> None:
    B, T, C = shape
    inp = batch("mixed", B, T)
    wte, wpe = random_tables(VOCABULARY, C)
    out = poisoned(shape)
    place.run(encoder_forward, out, inp, wte, wpe)
    np.testing.assert_array_equal(out, wte[inp] + wpe[:T])


@pytest.mark.ampere
def test_forward_bf16(place: Place) -> None:
    inp = batch("mixed", 2, 5)
    wte, wpe = (float32_to_bf16(table) for table in random_tables(VOCABULARY, 40))
    out = np.zeros((2, 5, 40), np.uint16)
    place.run(encoder_forward, out, inp, wte, wpe)
    expected = float32_to_bf16(bf16_to_float32(wte)[inp] + bf16_to_float32(wpe)[:5])
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("kind", ["equal", "distinct", "mixed"])
@pytest.mark.parametrize("shape", SHAPES)
def test_backward_adds_the_gradients(place: Place, shape: tuple, kind: str) -> None:
    B, T, C = shape
    inp = batch(kind, B, T)
    dwte, dwpe = random_tables(max(VOCABULARY, B * T), C)
    dout = np.random.default_rng(2).standard_normal(shape).astype(np.float32)
    expected_dwte, expected_dwpe = plain_backward(dwte, dwpe, dout, inp)
    place.run(encoder_backward, dwte, dwpe, dout, inp, *token_runs(inp))
    assert relative_error(dwte, expected_dwte) <= 1e-6
    assert relative_error(dwpe, expected_dwpe) <= 1e-6


def test_backward_leaves_other_rows_alone(place: Place) -> None:
    inp = batch("equal", 2, 3)
    dwte, dwpe = random_tables(VOCABULARY, 36)
    before_dwte, before_dwpe = dwte.copy(), dwpe.copy()
    dout = np.ones((2, 3, 36), np.float32)
    place.run(encoder_backward, dwte, dwpe, dout, inp, *token_runs(inp))
    np.testing.assert_array_equal(np.delete(dwte, 7, 0), np.delete(before_dwte, 7, 0))
    np.testing.assert_array_equal(dwpe[3:], before_dwpe[3:])


# Around every length at which the work is divided otherwise: 56 places make a run long, of which 64
# teams have 5 rows each under way, and 4 rows of a short run are.
LENGTHS = [470, 130, 90, 64, 57, 56, 55, 54, 41, 33, 32, 31, 17, 16, 15, 13, 12, 11, 9, 9, 8, 8, 8]
LENGTHS += [7, 7, 7, 6, 5, 4, 4, 3, 3, 3, 2, 2, 2, 2, 2] + 30 * [1]


@pytest.mark.parametrize("blocks", [1, 64])
@pytest.mark.parametrize("storage", [np.float32, pytest.param(np.uint16, marks=pytest.mark.ampere)])
@pytest.mark.parametrize("dropped", [0, 5, 14, 36])
def test_backward_of_runs_of_every_length(
    place: Place, monkeypatch: pytest.MonkeyPatch, dropped: int, storage: type, blocks: int
) -> None:
    monkeypatch.setattr(encoder_backward_module, "LONG_BLOCKS", blocks)
    monkeypatch.setattr(encoder_backward_module, "SHORT_BLOCKS", blocks)
    lengths = LENGTHS[dropped:]
    tokens = np.repeat(np.arange(len(lengths)), lengths)
    inp = np.random.default_rng(3).permutation(tokens).reshape(1, -1).astype(np.int32)
    rng = np.random.default_rng(4)
    C = 24  # in float32 6 vectors, which two blocks share where a run is long
    dwte = rng.standard_normal((len(lengths), C)).astype(np.float32)
    dwpe = rng.standard_normal((inp.size, C)).astype(np.float32)
    dout = rng.standard_normal((*inp.shape, C)).astype(np.float32)
    if storage == np.uint16:
        dout = bf16_to_float32(float32_to_bf16(dout))
    expected_dwte, expected_dwpe = plain_backward(dwte, dwpe, dout, inp)
    stored = float32_to_bf16(dout) if storage == np.uint16 else dout
    place.run(encoder_backward, dwte, dwpe, stored, inp, *token_runs(inp))
    assert relative_error(dwte, expected_dwte) <= 1e-6
    assert relative_error(dwpe, expected_dwpe) <= 1e-6


def test_backward_of_more_vectors_than_32_bits_count() -> None:
    one = np.zeros(1, np.float32)  # that many times over
    dout = np.broadcast_to(one, (1 << 13, 1 << 10, 1028))
    with pytest.raises(ValueError, match=r"^encoder_backward: dout has .* expected at most 343597"):
        encoder_backward(one, one, dout, *[one.astype(np.int32)] * 3)


@pytest.mark.ampere
@pytest.mark.parametrize("kind", ["equal", "distinct", "mixed"])
@pytest.mark.parametrize("shape", [(1, 1, 8), (3, 25, 40), (2, 3, 768)])
def test_backward_bf16(place: Place, shape: tuple, kind: str) -> None:
    B, T, C = shape
    inp = batch(kind, B, T)
    dwte, dwpe = random_tables(max(VOCABULARY, B * T), C)
    dout = float32_to_bf16(np.random.default_rng(9).standard_normal(shape))
    expected_dwte, expected_dwpe = plain_backward(dwte, dwpe, bf16_to_float32(dout), inp)
    place.run(encoder_backward, dwte, dwpe, dout, inp, *token_runs(inp))
    assert relative_error(dwte, expected_dwte) <= 1e-6
    assert relative_error(dwpe, expected_dwpe) <= 1e-6


def test_backward_gives_the_same_bits_again(place: Place) -> None:
    inp = batch("mixed", 3, 37)
    dout = np.random.default_rng(5).standard_normal((3, 37, 36)).astype(np.float32)
    runs = []
    for _ in range(2):
        dwte, dwpe = random_tables(VOCABULARY, 36)
        place.run(encoder_backward, dwte, dwpe, dout, inp, *token_runs(inp))
        runs.append((dwte, dwpe))
    np.testing.assert_array_equal(runs[0][0], runs[1][0])
    np.testing.assert_array_equal(runs[0][1], runs[1][1])


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["equal", "mixed"])
def test_backward_of_a_full_batch(kind: str) -> None:
    rng = np.random.default_rng(6)
    B, T, C, V = 16, 1024, 768, 50304
    inp = np.full((B, T), 7) if kind == "equal" else np.minimum(rng.zipf(1.2, (B, T)), V) - 1
    inp = inp.astype(np.int32)
    dout = rng.standard_normal((B, T, C)).astype(np.float32)
    results = []
    for _ in range(2):
        dwte, dwpe = np.zeros((V, C), np.float32), np.zeros((T, C), np.float32)
        Place("cuda").run(encoder_backward, dwte, dwpe, dout, inp, *token_runs(inp))
        results.append((dwte, dwpe))
    np.testing.assert_array_equal(results[0][0], results[1][0])
    np.testing.assert_array_equal(results[0][1], results[1][1])
    expected_dwte = np.zeros((V, C))
    np.add.at(expected_dwte, inp.reshape(-1), dout.reshape(-1, C))
    assert relative_error(dwte, expected_dwte) <= 1e-5
    assert relative_error(dwpe, dout.sum(axis=0, dtype=np.float64)) <= 1e-5


@pytest.mark.parametrize("kind", ["equal", "distinct", "mixed"])
@pytest.mark.parametrize("size", [(1, 1), (2, 37), (3, 5)])
def test_token_runs(size: tuple, kind: str) -> None:
    inp = batch(kind, *size)
    tokens, N = inp.reshape(-1), inp.size
    order, starts = token_runs(inp)
    assert (order.dtype, starts.dtype) == (np.int32, np.int32)
    assert (order.shape, starts.shape) == ((N,), (N + 1,))
    np.testing.assert_array_equal(np.sort(order), np.arange(N))

    count = np.unique(tokens).size
    np.testing.assert_array_equal(starts[count:], N)
    runs = [order[a:b] for a, b in itertools.pairwise(starts[: count + 1])]
    lengths = [run.size for run in runs]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[-1] >= 1
    assert len({int(tokens[run[0]]) for run in runs}) == count
    for run in runs:
        assert np.unique(tokens[run]).size == 1
        assert np.all(np.diff(run) > 0)


def test_references() -> None:
    inp = batch("mixed", 3, 5)
    wte, wpe = random_tables(VOCABULARY, 4)
    out = poisoned((3, 5, 4))
    encoder_forward_reference(out, inp, wte, wpe)
    np.testing.assert_array_equal(out, wte[inp] + wpe[:5])

    dout = np.random.default_rng(7).standard_normal((3, 5, 4))
    dwte, dwpe = (table.astype(np.float64) for table in random_tables(VOCABULARY, 4, seed=8))
    before_dwte, before_dwpe = dwte.copy(), dwpe.copy()
    encoder_backward_reference(dwte, dwpe, dout, inp, *token_runs(inp))

    def forward(wte: np.ndarray, wpe: np.ndarray) -> np.ndarray:
        out = poisoned((3, 5, 4), np.float64)
        encoder_forward_reference(out, inp, wte, wpe)
        return out

    slope_wte = finite_difference(lambda x: forward(x, wpe.astype(np.float64)), wte, dout)
    slope_wpe = finite_difference(lambda x: forward(wte.astype(np.float64), x), wpe, dout)
    assert relative_error(dwte, before_dwte + slope_wte) <= 1e-8
    assert relative_error(dwpe, before_dwpe + slope_wpe) <= 1e-8
