"""numbagpt.init: the distribution, the zeros and ones, and what the seed fixes."""

import math

import numpy as np
import pytest

from numbagpt.config import GPT2Config
from numbagpt.errors import UserError
from numbagpt.init import random_parameters
from numbagpt.tensors import parameter_shapes

CONFIG = GPT2Config(max_seq_len=64, vocab_size=300, num_layers=3, num_heads=3, channels=36)


def test_shapes_and_constants():
    parameters = random_parameters(CONFIG, 0)
    assert {name: array.shape for name, array in parameters.items()} == parameter_shapes(CONFIG)
    assert all(array.dtype == np.float32 for array in parameters.values())
    for name in ("ln1w", "ln2w", "lnfw"):
        assert np.all(parameters[name] == 1), name
    for name in ("ln1b", "qkvb", "attprojb", "ln2b", "fcb", "fcprojb", "lnfb"):
        assert np.all(parameters[name] == 0), name
    assert np.all(parameters["wte"][300:] == 0)
    assert np.all(parameters["wte"][:300].any(axis=1))


@pytest.mark.parametrize("name", ["wte", "wpe", "qkvw", "attprojw", "fcw", "fcprojw"])
def test_normal_with_the_right_width(name):
    numbers = random_parameters(CONFIG, 0)[name][: 300 if name == "wte" else None].ravel()
    std = 0.02 / math.sqrt(6) if name in ("attprojw", "fcprojw") else 0.02
    # Five standard errors of the mean, of the standard deviation and of the kurtosis of n normals.
    n = numbers.size
    assert abs(numbers.mean(dtype=float)) < 5 * std / math.sqrt(n)
    assert abs(numbers.std(dtype=float) / std - 1) < 5 / math.sqrt(2 * n)
    assert abs(np.mean((numbers / std) ** 4, dtype=float) - 3) < 5 * math.sqrt(96 / n)


def test_the_seed_fixes_everything():
    first, again, other = (random_parameters(CONFIG, seed) for seed in (7, 7, 8))
    for name, array in first.items():
        np.testing.assert_array_equal(again[name], array, strict=True)
        if array.std() > 0:
            assert not np.any(other[name] == array, where=array != 0), name


def test_no_tensor_depends_on_another():
    """A longer context draws more numbers for wpe and leaves the rest as it was."""
    longer = GPT2Config(max_seq_len=128, vocab_size=300, num_layers=3, num_heads=3, channels=36)
    short, long = random_parameters(CONFIG, 0), random_parameters(longer, 0)
    for name in short.keys() - {"wpe"}:
        np.testing.assert_array_equal(long[name], short[name])


def test_streams_are_not_shared_between_tensors():
    parameters = random_parameters(CONFIG, 0)
    heads = {
        tuple(np.sign(parameters[name].ravel()[:64]))
        for name in ("wte", "wpe", "qkvw", "attprojw", "fcw", "fcprojw")
    }
    assert len(heads) == 6


def test_a_negative_seed_is_refused():
    with pytest.raises(UserError, match="the seed is -1; expected 0 or more"):
        random_parameters(CONFIG, -1)
