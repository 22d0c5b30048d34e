"""Documents out of files: every character of them, in pieces, and every unreadable file named."""

import errno
import gzip
import json
import os
import random
import re
import struct
from pathlib import Path

import numpy as np
import pytest

from numbagpt import documents
from numbagpt.documents import find_files, is_json, read_pieces
from numbagpt.errors import UserError
from numbagpt.tokenizer import encode


def write(path, content):
    """Write text or bytes to a file, gzipped if its name says so."""
    data = content.encode() if isinstance(content, str) else content
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def read(path, key="text"):
    """The documents of a file, joined from their pieces."""
    found = []
    for text, first in read_pieces(path, key):
        if first:
            found.append("")
        found[-1] += text
    return found


def refusal(path, key="text"):
    """What read_pieces says about a file: one line that names it."""
    with pytest.raises(UserError) as error:
        read(path, key)
    message = str(error.value)
    assert str(path) in message
    assert "\n" not in message
    return message


def prose(seed, characters):
    """Words, numbers, white space of all kinds, some of it long."""
    rng = random.Random(seed)
    words = [
        "it's",
        "naïve",
        "中文",
        "👍🏽",
        "x=1;",
        "3.14",
        "\n",
        "\n\n",
        " ",
        "   ",
        "\t",
        "\r\n",
        "\xa0",
    ]
    text = ""
    while len(text) < characters:
        text += rng.choice(words) + rng.choice(["", " ", " ", "\n"])
    return text


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_text_file_is_one_document_as_it_is(tmp_path, suffix):
    text = "One\r\ntwo\n\n  three\x00 <|endoftext|> \u2028\n"
    assert read(write(tmp_path / f"a.txt{suffix}", text)) == [text]
    assert read(write(tmp_path / f"README{suffix}", text)) == [text]


@pytest.mark.parametrize(
    "name", ["a.jsonl", "a.JSONL", "a.ndjson", "a.Json", "a.NDJSON.gz", "a.jsonl.GZ"]
)
def test_json_lines_under_any_of_their_names(tmp_path, name):
    line = b'{"text": "one"}\n'
    path = tmp_path / name
    path.write_bytes(gzip.compress(line) if name.lower().endswith(".gz") else line)
    assert find_files([str(path)]) == [path]
    assert read(path) == ["one"]


@pytest.mark.parametrize("name", ["dump", "a.jsonlines", "a.jsonl.bak", "dump.gz", "a.data.gz"])
@pytest.mark.parametrize(
    "line",
    ['{"text": "one"}', ' {"body": "Ünï"}\n{"body": "two"}\n', '\ufeff{"text": ""}\r\n', "{}"],
)
def test_json_lines_under_another_name_are_not_taken_for_text(tmp_path, name, line):
    path = write(tmp_path / name, line)
    with pytest.raises(UserError) as error:
        find_files([str(path)])
    gz = ".gz" if name.endswith(".gz") else ""
    assert str(error.value) == (
        f"{path} would be read as text and its first line is a JSON object; rename it to end in "
        f".jsonl{gz} for JSON Lines, in .txt{gz} for text"
    )
    renamed = path.rename(tmp_path / f"text.txt{gz}")
    assert find_files([str(renamed)]) == [renamed]


@pytest.mark.parametrize("name", ["README", "a.md", "a.md.gz"])
@pytest.mark.parametrize(
    "content", ["", "{", "{text}\n", '[{"text": 1}]', '{"text": "x"} and prose', "7\n", b"{\xff}"]
)
def test_text_under_any_name_is_text(tmp_path, name, content):
    path = write(tmp_path / name, content)
    assert find_files([str(path)]) == [path]


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_each_json_line_is_a_document(tmp_path, suffix):
    texts = ["one", "two\nlines", "", "é👍 \ud800", " "]
    lines = [json.dumps({"id": 1, "text": text, "body": text * 2}) for text in texts]
    lines.insert(2, "  ")
    for end in ("\n", "\r\n"):
        path = write(tmp_path / f"a.jsonl{suffix}", end.join(lines))
        assert read(path) == [text for text in texts if text]
        assert read(path, "body") == [text * 2 for text in texts if text]


def test_a_byte_order_mark_is_dropped(tmp_path):
    assert read(write(tmp_path / "a.txt", b"\xef\xbb\xbftext")) == ["text"]
    assert read(write(tmp_path / "a.jsonl", b'\xef\xbb\xbf{"text": "x"}')) == ["x"]


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.jsonl", "a.jsonl.gz"])
def test_an_empty_file_has_no_documents(tmp_path, name):
    assert read(write(tmp_path / name, "")) == []


@pytest.mark.parametrize("block", [1, 2, 3, 64, 1000])
def test_pieces_have_the_tokens_of_the_text(tmp_path, monkeypatch, block):
    monkeypatch.setattr(documents, "BLOCK_BYTES", block)
    text = prose(block, 3000)
    pieces = list(read_pieces(write(tmp_path / "a.txt", text)))
    assert [piece.first for piece in pieces] == [True] + [False] * (len(pieces) - 1)
    assert len(pieces) > 1
    assert "".join(piece.text for piece in pieces) == text
    assert [i for piece in pieces for i in encode(piece.text)] == encode(text)


def test_text_without_white_space_is_cut_before_memory_is_full(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "BLOCK_BYTES", 10)
    monkeypatch.setattr(documents, "MAX_HELD", 25)
    pieces = list(read_pieces(write(tmp_path / "a.txt", "x" * 65)))
    assert [len(piece.text) for piece in pieces] == [30, 30, 5]


def test_advance_adds_up_to_the_size_of_the_file(tmp_path):
    line = json.dumps({"text": "word " * 1000}) + "\n"
    for name in ("a.txt", "a.txt.gz", "a.jsonl", "a.jsonl.gz"):
        path = write(tmp_path / name, line * 200)
        steps = []
        assert list(read_pieces(path, "text", steps.append))
        assert sum(steps) == path.stat().st_size
        assert min(steps) >= 0


def test_what_advance_raises_is_not_taken_for_an_error_of_the_file(tmp_path):
    def advance(count):
        raise BrokenPipeError

    for name in ("a.txt", "a.txt.gz"):
        path = write(tmp_path / name, "text")
        with pytest.raises(BrokenPipeError):
            list(read_pieces(path, "text", advance))


@pytest.mark.parametrize("block", [4, 2**18])
@pytest.mark.parametrize("at", [0, 3, 8, 5000])
@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.jsonl"])
def test_bytes_that_are_not_utf8_are_placed(tmp_path, monkeypatch, name, at, block):
    monkeypatch.setattr(documents, "BLOCK_BYTES", block)
    line = '{"text": "é"}\n'.encode()
    good = (line * 400)[: at // len(line) * len(line)] if name == "a.jsonl" else b"abc " * 2000
    good = good.ljust(at, b" ")[:at]
    # A two-byte character whose second byte is missing: the place is that of the first.
    message = refusal(write(tmp_path / name, good + b"\xc3("))
    assert f"not UTF-8 at byte {at:,};" in message
    assert "iconv" in message
    if name != "a.jsonl":
        assert f"at byte {at:,};" in refusal(write(tmp_path / name, good + b"\xc3"))


def test_the_advice_for_other_encodings_can_be_pasted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, pasted in (("-x.txt", "./-x.txt"), ("two words.txt", "'two words.txt'")):
        assert refusal(write(Path(name), b"\xff")).endswith(f" -t UTF-8 {pasted}")


BINARY = {
    "gzip": (gzip.compress(b"text"), "is gzipped; expected a name that says so"),
    "zip": (b"PK\x03\x04\x14\x00\xff", "is a zip archive, such as torch.save writes; expected"),
    "shard": (struct.pack("<3i", 20240520, 1, 5), r"is a shard of tokens \(.*\); expected UTF-8"),
    "model": (struct.pack("<3i", 20240326, 3, 64), r"is a model \(.*\); expected UTF-8 text; give"),
    "safetensors": (struct.pack("<Q", 4312) + b'{"a": "', r"is weights in safetensors \(.*; expec"),
}


@pytest.mark.parametrize("kind", BINARY)
@pytest.mark.parametrize("name", ["a", "a.txt", "a.jsonl", "a.txt.gz", "a.jsonl.gz"])
def test_what_is_not_text_is_said_to_be_what_it_is(tmp_path, kind, name):
    content, expected = BINARY[kind]
    if kind == "gzip" and name.endswith(".gz"):
        expected = r"is gzipped \(gunzip unpacks it\); expected UTF-8 text; give files with text"
    path = write(tmp_path / name, content)
    message = refusal(path)
    assert re.match(re.escape(str(path)) + " " + expected, message)
    assert "iconv" not in message


def test_the_advice_for_a_gzipped_file_without_gz_works(tmp_path):
    path = write(tmp_path / "a", gzip.compress(b"some text"))
    assert refusal(path).endswith("; rename it to end in .txt.gz or .jsonl.gz")
    path = path.rename(tmp_path / "a.txt.gz")
    assert read(path) == ["some text"]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('{"text": "x"', r"line 3: invalid JSON at column 13 \(.*JSON Lines, one object a line"),
        ("plain text", "line 3: invalid JSON at column 1"),
        (
            '["x"]',
            r"line 3: JSON of type list; expected JSON Lines, one object a line; an array .* jq -c",
        ),
        (
            "[",
            r"line 3: invalid JSON at column 2 \(.*expected JSON Lines.*by: jq -c '\.\[\]' FILE$",
        ),
        ("7", "line 3: JSON of type int; expected JSON Lines, one object a line$"),
        (
            '{"body": "x", "id": 1}',
            r"line 3: no field 'text' among its fields \(body, id\); .*--text_key",
        ),
        ("{}", r"line 3: no field 'text' among its fields \(none\)"),
        ('{"text": null}', "line 3: field 'text' is of type NoneType; expected a string"),
        ('{"text": ' + "1" * 5000 + "}", r"line 3: invalid JSON \(Exceeds the limit"),
        ('{"text": ' + "[" * 100_000, r"line 3: invalid JSON \(maximum recursion"),
    ],
    ids=lambda value: value[:20],
)
def test_a_bad_json_line_is_placed(tmp_path, line, expected):
    path = write(tmp_path / "a.jsonl", '{"text": "fine"}\n\n' + line + "\n")
    assert re.search(expected, refusal(path))


def test_a_damaged_gzip_file_is_refused(tmp_path):
    whole = gzip.compress(np.random.default_rng(0).bytes(1000).hex().encode())
    path = tmp_path / "a.txt.gz"
    broken = bytearray(whole)
    broken[len(whole) // 2] ^= 0xFF
    for content in (whole[:-20], whole[:-5], whole[:5], b"plain text", bytes(broken)):
        path.write_bytes(content)
        assert "is not a whole gzip file" in refusal(path)


def test_find_files(tmp_path):
    for name in (
        "b/c.txt",
        "b/a.jsonl.gz",
        "b/d/e.txt.gz",
        "b/f.md",
        "b/g.bin",
        "b/h.json",
        "b/i.TXT",
        "b/j.ndjson",
        "b/k.JSONL.GZ",
        "z",
        "y.gz",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    texts = ["b/c.txt", "b/d/e.txt.gz", "b/i.TXT"]
    json_lines = ["b/a.jsonl.gz", "b/h.json", "b/j.ndjson", "b/k.JSONL.GZ"]
    walked = sorted(texts + json_lines)
    inputs = ["z", "b", "b/f.md", "y.gz"]
    assert find_files([str(tmp_path / name) for name in inputs]) == [
        tmp_path / name for name in ("z", *walked, "b/f.md", "y.gz")
    ]
    assert [name for name in walked if is_json(tmp_path / name)] == json_lines


def test_links_to_folders_are_followed_and_each_is_read_once(tmp_path):
    for name in ("in/b/one.txt", "elsewhere/two.txt", "elsewhere/deep/three.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "in" / "z").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "in" / "a").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "in" / "c").symlink_to("b")
    (tmp_path / "elsewhere" / "deep" / "up").symlink_to(tmp_path / "in")
    (tmp_path / "in" / "b" / "self").symlink_to(".")
    walked = ["a/deep/three.txt", "a/two.txt", "b/one.txt"]
    assert find_files([str(tmp_path / "in")]) == [tmp_path / "in" / name for name in walked]


@pytest.fixture
def texts(tmp_path, monkeypatch):
    """A folder with a text, a link to it, and a link to the folder."""
    monkeypatch.chdir(tmp_path)
    Path("in").mkdir()
    for name in ("b.txt", "in/a.txt"):
        write(Path(name), "text")
    Path("link.txt").symlink_to("in/a.txt")
    Path("link").symlink_to("in")


@pytest.mark.parametrize(
    ("inputs", "twice"),
    [
        (["b.txt", "b.txt"], "b.txt is among the inputs twice; "),
        (["in", "b.txt", "in"], "in/a.txt is among the inputs twice; "),
        (["in", "link"], "link/a.txt is among the inputs twice, also as in/a.txt; "),
        (["link.txt", "in"], "in/a.txt is among the inputs twice, also as link.txt; "),
        (["in/a.txt", "in/../link.txt"], "in/../link.txt is among .* twice, also as in/a.txt; "),
    ],
)
def test_a_file_that_two_inputs_lead_to_is_refused(texts, inputs, twice):
    with pytest.raises(UserError, match=f"^{twice}expected each text once, .*; leave one out$"):
        find_files(inputs)


def test_two_names_of_a_file_in_one_folder_are_read_once(texts):
    Path("in", "z.txt").symlink_to("a.txt")
    assert find_files(["in", "b.txt"]) == [Path("in/a.txt"), Path("b.txt")]


@pytest.mark.parametrize("name", ["in", "in/below"])
def test_a_folder_that_cannot_be_read_is_named(tmp_path, monkeypatch, name):
    write(tmp_path / "a.txt", "text")
    (tmp_path / "in" / "below").mkdir(parents=True)
    write(tmp_path / "in" / "a.txt", "text")
    scandir = os.scandir

    def refuse(folder):
        if os.fspath(folder) == str(tmp_path / name):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(UserError) as error:
        find_files([str(tmp_path / "a.txt"), str(tmp_path / "in")])
    assert str(error.value) == (
        f"cannot read folder {tmp_path / name}: Permission denied; check the permissions"
    )


def test_what_is_not_a_file_is_refused_in_a_folder_too(tmp_path):
    write(tmp_path / "a.txt", "text")
    odd = tmp_path / "b.txt"
    os.mkfifo(tmp_path / "pipe")
    os.mkfifo(odd)
    for inputs in ([odd], [tmp_path]):
        with pytest.raises(UserError, match=r"cannot read .*b\.txt: it is not a regular file$"):
            find_files(list(map(str, inputs)))
    odd.unlink()
    odd.symlink_to("none")
    for inputs in ([odd], [tmp_path]):
        with pytest.raises(UserError, match=r"cannot read .*b\.txt: No such file or directory;"):
            find_files(list(map(str, inputs)))
    odd.unlink()
    assert find_files([str(tmp_path)]) == [tmp_path / "a.txt"]  # what has another name is let be


def test_inputs_that_are_not_there_are_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "a.bin").write_bytes(b"")
    with pytest.raises(UserError, match=r"none\.txt: No such file or directory; check the path"):
        find_files([str(tmp_path / "none.txt")])
    with pytest.raises(UserError, match=r"empty has no .* \.txt, \.jsonl, \.ndjson, \.json, or "):
        find_files([str(tmp_path / "empty")])
