"""A file that is named in the place of another: both readers say what it is."""

import gzip
import struct

import numpy as np
import pytest
from programs import SMALL_VOCAB

from numbagpt import huggingface
from numbagpt.checkpoint import read_model
from numbagpt.errors import UserError
from numbagpt.init import random_parameters
from numbagpt.magics import kind_of_file
from numbagpt.shards import count_tokens, write_shard


@pytest.mark.parametrize(
    ("magic", "what"),
    [
        (20240326, "a model (for train.py's --model)"),
        (20240327, "a debug state"),
        (20240328, "a tokenizer"),
        (20240520, "a shard of tokens (for train.py's --input_bin)"),
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


@pytest.mark.parametrize(
    ("start", "what"),
    [
        (gzip.compress(b"", mtime=0), "gzipped (gunzip unpacks it)"),
        (b"PK\x03\x04\x00\x00", "a zip archive, such as torch.save writes"),
        ("Ünïcödé".encode(), "text"),
        ((20240326).to_bytes(4, "big"), "a model written on a big-endian machine"),
        (b"\x93NUMPY\x01\x00", "a NumPy array (numpy.load reads it)"),
        (b"PAR1\x15\x04\x15\x10", "a Parquet table"),
        (
            struct.pack("<Q", 4312) + b'{"wte": ',
            "weights in safetensors (train.py's --model takes the folder they are in)",
        ),
        (struct.pack("<Q", 10**8 + 1) + b'{"wte": ', None),
        (struct.pack("<Q", 4312) + b"{", None),
        (b"\x00\x00\x00\x00", None),
    ],
    ids=[
        "gzip",
        "zip",
        "text",
        "big-endian",
        "NumPy",
        "Parquet",
        "safetensors",
        "a header too long for safetensors",
        "cut short",
        "zeros",
    ],
)
def test_files_of_other_kinds(start, what):
    assert kind_of_file(start) == what


def test_what_is_no_model_is_said_of_it(tmp_path):
    path = tmp_path / "a.bin"
    for start, what in [(b"prose ", "is text"), (b"\xff\x00", "starts with 16711935")]:
        path.write_bytes(start * 1024)
        with pytest.raises(UserError) as error:
            read_model(path)
        assert str(error.value) == f"{path} {what}; expected a model .bin, magic 20240326"


def test_weights_in_safetensors_under_another_name(tmp_path):
    """Its letters, read as bare tokens, would all be in the vocabulary."""
    huggingface.write(tmp_path, SMALL_VOCAB, random_parameters(SMALL_VOCAB, 1))
    path = (tmp_path / "model.safetensors").rename(tmp_path / "a.bin")
    kind = "weights in safetensors (train.py's --model takes the folder they are in)"
    with pytest.raises(UserError) as error:
        read_model(path)
    assert str(error.value) == f"{path} is {kind}; expected a model .bin, magic 20240326"
    with pytest.raises(UserError) as error:
        count_tokens(path)
    expected = f"{path} is not a token shard: it is {kind}; expected magic 20240520; make shards"
    assert str(error.value).startswith(expected)


def test_a_numpy_array_is_not_taken_for_bare_tokens(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(1, 2000, dtype=np.uint16))
    with pytest.raises(UserError, match=r"it is a NumPy array .*; expected magic 20240520; make"):
        count_tokens(tmp_path / "a.npy")


def test_a_gzipped_shard(tmp_path):
    path = tmp_path / "a.bin"
    write_shard(path, np.arange(100))
    path.write_bytes(gzip.compress(path.read_bytes()))
    with pytest.raises(UserError, match=r"not a token shard: it is gzipped \(gunzip unpacks it\);"):
        count_tokens(path)
