"""The learning rate against values worked out by hand."""

import math

import pytest

from numbagpt.schedule import learning_rate_at


def schedule(peak, warmup_iters, num_iterations, decay_frac, steps):
    return [
        learning_rate_at(step, peak, warmup_iters, num_iterations, decay_frac) for step in steps
    ]


def test_warm_up_rises_linearly_from_the_first_step_and_ends_at_the_peak():
    assert schedule(8.0, 4, 100, 0.1, range(5)) == [2.0, 4.0, 6.0, 8.0, 8.0]


def test_no_warm_up_starts_at_the_peak():
    assert schedule(3e-4, 0, 10, 0.0, [0]) == [3e-4]


def test_cosine_passes_its_quarter_points():
    # Warm-up 10, then 80 steps down from 1 to 0.2: at 1/4, 1/2, 3/4 of the way and at the end.
    root = math.sqrt(0.5)
    found = schedule(1.0, 10, 90, 0.2, [30, 50, 70, 90])
    expected = [0.2 + 0.4 * (1 + root), 0.6, 0.2 + 0.4 * (1 - root), 0.2]
    assert found == pytest.approx(expected, rel=1e-15)


def test_a_fraction_of_one_keeps_the_rate_constant():
    assert schedule(0.5, 2, 20, 1.0, range(2, 25)) == [0.5] * 23


def test_after_the_last_iteration_the_rate_stays_low():
    assert schedule(1.0, 5, 20, 0.25, [20, 21, 1000]) == [0.25] * 3


def test_warm_up_longer_than_the_run_is_cut_off():
    assert schedule(1.0, 10, 5, 0.0, range(5)) == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5])
