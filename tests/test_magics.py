"""A file of llm.c that is named in the place of another: both readers say what it is."""

import numpy as np
import pytest

from numbagpt.checkpoint import read_model
from numbagpt.errors import UserError
from numbagpt.shards import count_tokens


@pytest.mark.parametrize(
    ("magic", "what"),
    [
        (20240326, "a model (name it with --model)"),
        (20240327, "a debug state"),
        (20240328, "a tokenizer"),
        (20240520, "a shard of tokens (name it with --input_bin)"),
        (20240522, "a set of multiple-choice questions"),
        (20240527, "an optimizer state"),
        (20240801, "a shard of Llama 3 tokens"),
        (20240803, "a Llama 3 model or its debug state"),
    ],
)
def test_the_file_of_each_magic(tmp_path, magic, what):
    path = tmp_path / "a.bin"
    np.array([magic, 1, *[0] * 254], "<i4").tofile(path)
    if magic != 20240326:
        with pytest.raises(UserError) as error:
            read_model(path)
        assert str(error.value) == f"{path} is {what}; expected a model .bin, magic 20240326"
    if magic != 20240520:
        with pytest.raises(UserError) as error:
            count_tokens(path)
        expected = f"{path} is not a token shard: it is {what}; expected magic 20240520; make"
        assert str(error.value).startswith(expected)
