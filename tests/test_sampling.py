"""The distributions tokens are drawn from, exactly; the draws, by a chi-square test."""

import math

import numpy as np
import pytest

from numbagpt.errors import UserError
from numbagpt.sampling import generate, sample_token, token_probabilities

# Probabilities 1/2, 1/4, 1/8, 1/8 for tokens 2, 0, 3, 1.
LOGITS = np.log(np.array([4.0, 2.0, 8.0, 2.0], np.float64))


def softmax(logits):
    powers = [math.exp(x) for x in logits]
    return np.array(powers) / math.fsum(powers)


def test_plain_softmax():
    np.testing.assert_allclose(token_probabilities(LOGITS), [0.25, 0.125, 0.5, 0.125], rtol=1e-15)


@pytest.mark.parametrize("temperature", [0.1, 0.7, 1.0, 2.5])
def test_temperature_divides_the_logits(temperature):
    logits = np.random.default_rng(1).normal(size=50)
    found = token_probabilities(logits, temperature)
    np.testing.assert_allclose(found, softmax(logits / temperature), rtol=1e-13)


def test_temperature_zero_takes_the_most_probable_and_the_first_of_equals():
    assert token_probabilities(LOGITS, 0).tolist() == [0, 0, 1, 0]
    assert token_probabilities(np.array([1.0, 3, 3, 2]), 0).tolist() == [0, 1, 0, 0]


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-30])
def test_a_tiny_temperature_is_greedy_without_overflow(temperature):
    logits = np.array([-1e4, 3.0, 1e4, 9.9e3], np.float32)
    with np.errstate(all="raise", under="ignore"):
        assert token_probabilities(logits, temperature).tolist() == [0, 0, 1, 0]


def test_large_logits_do_not_overflow():
    shifted = token_probabilities(LOGITS + 1e6)
    np.testing.assert_allclose(shifted, [0.25, 0.125, 0.5, 0.125], rtol=1e-9)


def test_top_k_keeps_the_k_largest_and_renormalises():
    np.testing.assert_allclose(token_probabilities(LOGITS, top_k=2), [1 / 3, 0, 2 / 3, 0])
    assert token_probabilities(LOGITS, top_k=1).tolist() == [0, 0, 1, 0]
    for enough in (4, 5, 10**9):
        np.testing.assert_array_equal(
            token_probabilities(LOGITS, top_k=enough), token_probabilities(LOGITS)
        )


def test_top_k_keeps_all_that_equal_the_kth():
    np.testing.assert_allclose(
        token_probabilities(LOGITS, top_k=3), [0.25, 0.125, 0.5, 0.125], rtol=1e-15
    )


# The smallest set that reaches top_p, of probabilities 0.5, 0.3, 0.15, 0.05.
@pytest.mark.parametrize(
    ("top_p", "kept"),
    [(1e-9, 1), (0.49, 1), (0.51, 2), (0.79, 2), (0.81, 3), (0.94, 3), (0.96, 4), (1.0, 4)],
)
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p, kept):
    probabilities = np.array([0.3, 0.05, 0.5, 0.15])
    order = [2, 0, 3, 1][:kept]
    expected = np.zeros(4)
    expected[order] = probabilities[order] / probabilities[order].sum()
    found = token_probabilities(np.log(probabilities), top_p=top_p)
    np.testing.assert_allclose(found, expected, rtol=1e-14)


def test_top_p_reached_exactly_adds_no_further_token():
    # Four equal logits: every probability is exactly 1/4, and so are the sums.
    for top_p, kept in [(0.25, 1), (0.5, 2), (0.75, 3)]:
        expected = [1 / kept] * kept + [0] * (4 - kept)
        assert token_probabilities(np.zeros(4), top_p=top_p).tolist() == expected


def test_the_filters_apply_in_order():
    # p = 0.4, 0.3, 0.2, 0.1. top_k = 2 leaves 4/7, 3/7; then 0.55 is reached by the first alone,
    # though 0.4 is less.
    logits = np.log([0.4, 0.3, 0.2, 0.1])
    assert token_probabilities(logits, top_k=2, top_p=0.55).tolist() == [1, 0, 0, 0]
    # Temperature comes first: at 0.5 the probabilities go as 16, 9, 4, 1 and 0.53 suffices.
    assert token_probabilities(logits, 0.5, top_p=0.53).tolist() == [1, 0, 0, 0]
    assert np.count_nonzero(token_probabilities(logits, top_p=0.53)) == 2


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("temperature", [0, 1])
def test_logits_that_are_not_finite_are_refused(bad, temperature):
    with pytest.raises(UserError, match="not finite"):
        token_probabilities(np.array([0.0, bad, 1.0]), temperature)


def test_draws_follow_the_distribution():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=20).astype(np.float32)
    expected = 20_000 * token_probabilities(logits, 0.8, top_k=12, top_p=0.9)
    draws = [sample_token(logits, 0.8, 12, 0.9, rng) for _ in range(20_000)]
    counts = np.bincount(draws, minlength=20)
    assert counts[expected == 0].sum() == 0
    kept = expected > 0
    assert 5 < kept.sum() < 12
    chi_square = ((counts[kept] - expected[kept]) ** 2 / expected[kept]).sum()
    # 99.9th percentile of chi-square with 10 degrees of freedom: an upper bound for fewer.
    assert chi_square < 29.6


class Constant:
    """An rng whose every number is `value`."""

    def __init__(self, value):
        self.value = value

    def random(self):
        return self.value


def test_the_ends_of_the_unit_interval_draw_tokens_that_have_probability():
    logits = np.array([-1e9, 0.0, -1e9, 0.5, -1e9])
    assert sample_token(logits, 1.0, None, 1.0, Constant(0.0)) == 1
    assert sample_token(logits, 1.0, None, 1.0, Constant(np.nextafter(1.0, 0.0))) == 3


class Counter:
    """A model whose next token is always the last one plus one; records what it was shown."""

    def __init__(self):
        self.shown = []

    def next_token_logits(self, tokens):
        self.shown.append(tokens)
        logits = np.zeros(10)
        logits[tokens[-1] + 1] = 1
        return logits


def test_generate_continues_the_prompt_within_the_context():
    model = Counter()
    found = generate(
        model.next_token_logits, [1, 2], 4, 3, end=None, rng=np.random.default_rng(0), temperature=0
    )
    assert list(found) == [3, 4, 5, 6]
    assert model.shown == [[1, 2], [1, 2, 3], [2, 3, 4], [3, 4, 5]]


def test_generate_stops_at_the_end_of_the_text_without_yielding_it():
    found = generate(
        Counter().next_token_logits, [1], 8, 9, end=4, rng=np.random.default_rng(0), temperature=0
    )
    assert list(found) == [2, 3]


def test_generate_yields_each_token_before_it_asks_for_the_next():
    model = Counter()
    found = generate(
        model.next_token_logits, [1], 8, 9, end=None, rng=np.random.default_rng(0), temperature=0
    )
    assert next(found) == 2
    assert len(model.shown) == 1
