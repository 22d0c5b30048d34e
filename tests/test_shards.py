"""The .bin format byte by byte, and one clear line for every file that is not a whole shard."""

import os
import re
import struct

import numpy as np
import pytest
from shard_files import read_shard

from numbagpt.errors import UserError
from numbagpt.shards import (
    check_unchanged,
    check_vocabulary,
    count_tokens,
    read_tokens,
    write_shard,
)

MAGIC = 20240520


def header(*numbers):
    return struct.pack(f"<{len(numbers)}i", *numbers).ljust(1024, b"\0")


def refusal(path):
    """What count_tokens says about a file: one line that names it."""
    with pytest.raises(UserError) as error:
        count_tokens(path)
    message = str(error.value)
    assert str(path) in message
    assert "\n" not in message
    return message


def test_the_bytes_of_a_shard(tmp_path):
    path = tmp_path / "a.bin"
    write_shard(path, np.array([0, 1, 256, 50256, 65535], np.int64))
    body = bytes([0, 0, 1, 0, 0, 1, 0x50, 0xC4, 0xFF, 0xFF])
    assert path.read_bytes() == header(MAGIC, 1, 5) + body
    assert os.listdir(tmp_path) == ["a.bin"]


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.int64, ">u2"])
@pytest.mark.parametrize("count", [1, 2, 1000])
def test_round_trip(tmp_path, dtype, count):
    tokens = np.random.default_rng(count).integers(0, 2**15, count).astype(dtype)
    write_shard(tmp_path / "a.bin", tokens)
    assert count_tokens(tmp_path / "a.bin") == count
    read = read_shard(tmp_path / "a.bin")
    assert read.dtype == np.uint16
    np.testing.assert_array_equal(read, tokens)


@pytest.mark.parametrize(("start", "count"), [(0, 1), (3, 4), (9, 1), (10, 0)])
def test_a_part_of_a_shard(tmp_path, start, count):
    write_shard(tmp_path / "a.bin", np.arange(10) ** 4)
    expected = [i**4 for i in range(start, start + count)]
    assert read_tokens(tmp_path / "a.bin", start, count).tolist() == expected


def test_a_shard_that_was_changed_since_it_was_counted(tmp_path):
    path = tmp_path / "a.bin"
    write_shard(path, np.arange(10))
    check_unchanged(path, 10)
    advice = "when it was first looked at; leave the shards of a run alone until it ends"
    write_shard(path, np.arange(8))
    with pytest.raises(UserError) as error:
        check_unchanged(path, 10)
    assert str(error.value) == f"{path} has 8 tokens; it had 10 {advice}"
    with pytest.raises(UserError) as error:
        read_tokens(path, 4, 6)
    assert str(error.value) == f"{path} ends at token 8; it was longer {advice}"


def test_strided_tokens_are_written_in_order(tmp_path):
    write_shard(tmp_path / "a.bin", np.arange(10)[::3])
    assert read_shard(tmp_path / "a.bin").tolist() == [0, 3, 6, 9]


@pytest.mark.parametrize("bad", [-1, 65536])
def test_an_id_that_does_not_fit_is_not_written(tmp_path, bad):
    with pytest.raises(UserError, match=f"{bad}.*expected 0 to 65535"):
        write_shard(tmp_path / "a.bin", np.array([5, bad]))
    assert os.listdir(tmp_path) == []


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(UserError, match=re.escape(str(tmp_path / "none" / "a.bin"))):
        write_shard(tmp_path / "none" / "a.bin", np.array([1]))


TOKENS = np.array([50256, *range(900)])
BAD_FILES = {
    "empty": (b"", "is empty; expected a token shard; make shards from text with"),
    "tiny": (b"\1\2\3", "it has only 3 bytes"),
    "other magic": (header(12345678, 1, 2) + b"abcd", "starts with 12345678; expected magic"),
    "text": ("Ünïcödé prose, ".encode() * 200, r"it is text; .*numbagpt\.data .*bad\.bin --output"),
    "bare int32": (TOKENS.astype("<i4").tobytes(), r"bare int32 tokens.*first.*'int32'\)\)"),
    "bare uint16": (TOKENS.astype("<u2").tobytes(), r"bare uint16 tokens.*nanoGPT.*'uint16'\)\)"),
    "too large for bare int32": (np.array([50257, *range(900)], "<i4").tobytes(), "with 50257;"),
    "noise": (np.random.default_rng(0).bytes(5000), "starts with -?[0-9]+; expected magic"),
    "version": (header(MAGIC, 2, 2) + b"abcd", "version 2; expected version 1; make"),
    "half a header": (header(MAGIC, 1, 2)[:500], "inside its header, at byte 500 of 1024"),
    "odd": (header(MAGIC, 1, 2) + b"abc", "odd size, 1,027 bytes; expected 2 bytes a token"),
    "truncated": (header(MAGIC, 1, 3) + b"abcd", "holds 2 tokens; its header says 3; .*cut short"),
    "too long": (header(MAGIC, 1, 1) + b"abcd", "holds 2 tokens; its header says 1; copy or"),
    "no tokens": (header(MAGIC, 1, 0), "holds no tokens; make"),
    "negative": (header(MAGIC, 1, -1), "holds 0 tokens; its header says -1"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_a_bad_file_is_refused(tmp_path, case):
    content, expected = BAD_FILES[case]
    path = tmp_path / "bad.bin"
    path.write_bytes(content)
    assert re.search(expected, refusal(path))


def test_the_advice_for_text_can_be_pasted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, pasted in (("-x.bin", "./-x.bin"), ("two words.bin", "'two words.bin'")):
        (tmp_path / name).write_text("Prose. " * 200)
        assert f"python -m numbagpt.data {pasted} --output_dir DIR" in refusal(name)


def test_text_cut_inside_a_character_is_still_text(tmp_path):
    path = tmp_path / "bad.bin"
    path.write_bytes(b"x" + "é".encode() * 3000)
    assert "it is text" in refusal(path)


def test_what_is_not_a_file_is_refused(tmp_path):
    assert "No such file" in refusal(tmp_path / "none.bin")
    assert "not a regular file" in refusal(tmp_path)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root reads anything")
def test_a_file_without_permission_is_refused(tmp_path):
    write_shard(tmp_path / "a.bin", TOKENS)
    (tmp_path / "a.bin").chmod(0)
    assert "Permission denied" in refusal(tmp_path / "a.bin")


def test_the_advice_for_bare_tokens_works(tmp_path):
    old, new = tmp_path / "old.bin", tmp_path / "new.bin"
    TOKENS.astype("<i4").tofile(old)
    assert f"numpy.fromfile('{old}', 'int32')" in refusal(old)
    write_shard(new, np.fromfile(old, "int32"))
    np.testing.assert_array_equal(read_shard(new), TOKENS)


@pytest.mark.parametrize("first", [0, 7, 99])
@pytest.mark.parametrize("start", [0, 5000])
def test_the_first_id_beyond_the_vocabulary_is_named(first, start):
    tokens = np.full(100, 99, np.uint16)
    tokens[first:] = 100
    check_vocabulary(tokens, 101, "a.bin", start)
    with pytest.raises(UserError) as error:
        check_vocabulary(tokens, 100, "a.bin", start)
    assert str(error.value) == (
        f"a.bin has token id 100 at position {start + first:,}; expected ids below the model's "
        "vocabulary of 100; use the tokenizer the model was made for"
    )


def test_no_16_bit_id_is_beyond_a_vocabulary_of_65536():
    tokens = np.array([65535], np.uint16)
    for vocab_size in (65536, 2**31):
        check_vocabulary(tokens, vocab_size, "a.bin", 0)
    with pytest.raises(UserError, match="token id 65535"):
        check_vocabulary(tokens, 65535, "a.bin", 0)
