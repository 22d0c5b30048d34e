"""`python -m numbagpt.data`: exact shards from small inputs, and one clear line for bad ones."""

import contextlib
import errno
import gzip
import hashlib
import io
import json
import os
import resource
import shlex
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request

import numpy as np
import pytest
from shard_files import read_shard

from numbagpt import data, documents, program, tinyshakespeare
from numbagpt.files import locked
from numbagpt.loader import find_shards
from numbagpt.tokenizer import decode, encode

EOT = 50256


def tree(folder):
    """Everything in a folder, hidden files too."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
    }


def split_of(folder, split, name="data"):
    """All tokens of a split, its shards one after the other."""
    shards = sorted(folder.glob(f"{name}_{split}_*.bin"))
    return np.concatenate([read_shard(path) for path in shards]).tolist() if shards else []


def tokens_of(*texts):
    return [i for text in texts for i in [EOT, *encode(text)]]


def make(*arguments):
    assert data.main([str(argument) for argument in arguments]) == 0


@pytest.fixture
def corpus(tmp_path):
    """Two text files, JSON Lines of twenty documents, and a gzipped one of five."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    texts = ["First file.\nIt's short.\n", "Second: naïve 👍\n\n" + "long words " * 500]
    lines = [f"Document {i}.\n" * (1 + i % 4) for i in range(25)]
    (folder / "a.txt").write_text(texts[0], encoding="utf-8")
    (folder / "b.txt").write_text(texts[1], encoding="utf-8")
    encoded = [json.dumps({"text": line, "body": line.upper()}) + "\n" for line in lines]
    (folder / "c.jsonl").write_text("".join(encoded[:20]))
    (folder / "d.jsonl.gz").write_bytes(gzip.compress("".join(encoded[20:]).encode()))
    return folder, [*texts, *lines]


def test_documents_in_order_each_after_end_of_text(corpus, tmp_path):
    folder, texts = corpus
    make(folder, "--output_dir", tmp_path / "out", "--name", "set")
    assert split_of(tmp_path / "out", "val", "set") == tokens_of(*texts[::10])
    train = [text for i, text in enumerate(texts) if i % 10]
    assert split_of(tmp_path / "out", "train", "set") == tokens_of(*train)
    assert sorted(os.listdir(tmp_path / "out")) == ["set_train_000000.bin", "set_val_000000.bin"]


@pytest.mark.parametrize(
    ("fraction", "chosen"),
    [
        ("0.5", range(0, 27, 2)),
        ("0.3", [0, 3, 6, 10, 13, 16, 20, 23, 26]),
        ("1/26", [0, 26]),
        ("1e-18", [0]),
    ],
)
def test_val_fraction_spreads_documents_evenly(corpus, tmp_path, fraction, chosen):
    folder, texts = corpus
    make(folder, "--output_dir", tmp_path / "out", "--val_fraction", fraction)
    assert split_of(tmp_path / "out", "val", "corpus") == tokens_of(*(texts[i] for i in chosen))


@pytest.mark.parametrize("count", [1, 5, 26])
def test_val_documents_takes_the_first(corpus, tmp_path, count):
    folder, texts = corpus
    make(folder, "--output_dir", tmp_path / "out", "--val_documents", count)
    assert split_of(tmp_path / "out", "val", "corpus") == tokens_of(*texts[:count])
    assert split_of(tmp_path / "out", "train", "corpus") == tokens_of(*texts[count:])


def test_no_validation_when_the_fraction_is_0(corpus, tmp_path):
    folder, texts = corpus
    make(folder, "--output_dir", tmp_path / "out", "--val_fraction", "0")
    assert os.listdir(tmp_path / "out") == ["corpus_train_000000.bin"]
    assert split_of(tmp_path / "out", "train", "corpus") == tokens_of(*texts)


def test_shards_and_inputs_in_the_order_given(corpus, tmp_path, monkeypatch):
    folder, texts = corpus
    inputs = [folder / "d.jsonl.gz", folder / "a.txt"]
    monkeypatch.setattr(data, "MIN_SHARD_TOKENS", 1)
    make(*inputs, "--output_dir", tmp_path, "--val_fraction", "0", "--shard_tokens", "1_0")
    expected = tokens_of(*texts[22:], texts[0])
    assert split_of(tmp_path, "train") == expected
    assert len(list(tmp_path.glob("data_train_*.bin"))) == -(-len(expected) // 10)
    assert read_shard(tmp_path / "data_train_000001.bin").tolist() == expected[10:20]


def test_another_text_key(corpus, tmp_path):
    folder, texts = corpus
    make(folder / "d.jsonl.gz", "--output_dir", tmp_path, "--text_key", "body")
    assert split_of(tmp_path, "val", "d") == tokens_of(texts[22].upper())


@pytest.mark.parametrize("block", [7, 1000, 2**18])
def test_the_result_depends_on_neither_workers_nor_pieces(corpus, tmp_path, monkeypatch, block):
    folder, texts = corpus
    monkeypatch.setattr(documents, "BLOCK_BYTES", block)
    monkeypatch.setattr(data, "TASK_CHARACTERS", block)
    for workers in (1, 2, 5):
        out = tmp_path / str(workers)
        make(folder, "--output_dir", out, "--workers", workers)
        assert tree(out) == tree(tmp_path / "1")
        train = [text for i, text in enumerate(texts) if i % 10]
        assert split_of(out, "train", "corpus") == tokens_of(*train)


@pytest.mark.parametrize("block", [10, 2**18])
@pytest.mark.parametrize("name", ["book.txt", "book", "book.txt.gz", "book.TXT.GZ"])
def test_a_single_text_is_cut_after_a_line(tmp_path, monkeypatch, name, block):
    monkeypatch.setattr(documents, "BLOCK_BYTES", block)
    lines = [f"This is line {i}.\n" for i in range(100)]
    content = "".join(lines).encode()
    (tmp_path / name).write_bytes(
        gzip.compress(content) if name.lower().endswith("gz") else content
    )
    make(tmp_path / name, "--output_dir", tmp_path / "out", "--val_fraction", "0.25")
    train, val = (split_of(tmp_path / "out", split, "book") for split in ("train", "val"))
    assert train.count(EOT) == val.count(EOT) == 1
    assert train[0] == val[0] == EOT
    assert decode(train[1:]) + decode(val[1:]) == content.decode()
    if block > len(content):
        # 75 % of the characters end inside line 75: lines 10 to 99 are longer than 0 to 9.
        assert val == tokens_of("".join(lines[76:]))
        assert train == tokens_of("".join(lines[:76]))
    assert abs(len(val) - len(train) / 3) < 16


def test_a_single_document_is_cut_like_a_single_text(tmp_path):
    lines = [f"This is line {i}.\n" for i in range(10)]
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "".join(lines)}) + '\n{"text": ""}\n')
    (tmp_path / "a.txt").write_text("".join(lines))
    (tmp_path / "empty.txt").write_text("")
    for i, names in enumerate([["a.jsonl"], ["a.txt", "empty.txt"], ["empty.txt", "a.txt"]]):
        out = tmp_path / str(i)
        make(*(tmp_path / name for name in names), "--output_dir", out, "--name", "set")
        assert split_of(out, "train", "set") == tokens_of("".join(lines[:9]))
        assert split_of(out, "val", "set") == tokens_of(lines[9])


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_two_documents_are_not_cut(tmp_path, name):
    (tmp_path / "a.txt").write_text("One.\nTwo.\n")
    (tmp_path / "a.jsonl").write_text('{"text": "One.\\nTwo.\\n"}\n')
    (tmp_path / "b.txt").write_text("Three.\nFour.\n")
    inputs = (tmp_path / name, tmp_path / "b.txt")
    make(*inputs, "--output_dir", tmp_path / "out")
    assert split_of(tmp_path / "out", "val") == tokens_of("One.\nTwo.\n")
    assert split_of(tmp_path / "out", "train") == tokens_of("Three.\nFour.\n")


def test_a_second_document_is_found_before_a_long_first_is_read(tmp_path, monkeypatch):
    read = []

    def noting(path, text_key):
        for piece in documents.read_pieces(path, text_key):
            read.append(path.name)
            yield piece

    monkeypatch.setattr(data, "read_pieces", noting)
    monkeypatch.setattr(documents, "BLOCK_BYTES", 64)
    (tmp_path / "a.txt").write_text("word " * 100)
    (tmp_path / "b.txt").write_text("word")
    assert data.single_length([tmp_path / "a.txt", tmp_path / "b.txt"], "text") is None
    assert read == ["b.txt", "a.txt"]


def test_inputs_may_stand_before_and_after_flags(tmp_path):
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(name)
    make(tmp_path / "a.txt", "--output_dir", tmp_path / "out", tmp_path / "b.txt")
    assert split_of(tmp_path / "out", "val") == tokens_of("a.txt")
    assert split_of(tmp_path / "out", "train") == tokens_of("b.txt")


@pytest.mark.parametrize(
    ("pieces", "cut", "expected"),
    [
        (["ab\ncd\nef"], 1, [("train", "ab\n", True), ("val", "cd\nef", True)]),
        (["ab\ncd\nef"], 3, [("train", "ab\ncd\n", True), ("val", "ef", True)]),
        (["ab\ncd\n"], 5, [("train", "ab\ncd", True), ("val", "\n", True)]),
        (["abcd"], 3, [("train", "abc", True), ("val", "d", True)]),
        (["ab", "cd", "ef"], 2, [("train", "ab", True), ("val", "cd", True), ("val", "ef", False)]),
        (["ab", "c\nd"], 2, [("train", "ab", True), ("train", "c\n", False), ("val", "d", True)]),
        (["a"], 0, [("val", "a", True)]),
    ],
)
def test_split_text(pieces, cut, expected):
    text = [documents.Piece(piece, i == 0) for i, piece in enumerate(pieces)]
    parts = [(split, *piece) for split, piece in data.split_text(text, cut)]
    assert parts == expected


def test_it_says_how_to_train(corpus, tmp_path, capsys):
    make(corpus[0], "--output_dir", tmp_path / "out")
    out, err = capsys.readouterr()
    train, val = (f"{tmp_path}/out/corpus_{split}_??????.bin" for split in ("train", "val"))
    count = len(split_of(tmp_path / "out", "train", "corpus"))
    assert f"{train}: {count:,} tokens\n" in out
    assert f"python train.py --input_bin '{train}' --input_val_bin '{val}'\n" in out
    # No progress bar where stderr is not a terminal.
    assert err == ""


def test_what_it_says_works_for_any_name(corpus, tmp_path, capsys):
    folder = tmp_path / "two words [1]*"
    make(corpus[0], "--output_dir", folder, "--name", "it's [x]?")
    line = capsys.readouterr().out.splitlines()[-1]
    *_, train_flag, train, val_flag, val = shlex.split(line)
    assert (train_flag, val_flag) == ("--input_bin", "--input_val_bin")
    assert find_shards(train) == [str(folder / "it's [x]?_train_000000.bin")]
    assert find_shards(val) == [str(folder / "it's [x]?_val_000000.bin")]


@pytest.mark.parametrize("folder", ["-x", "~x"])
def test_what_it_says_works_for_a_folder_like_a_flag(corpus, tmp_path, monkeypatch, capsys, folder):
    monkeypatch.chdir(tmp_path)
    make(corpus[0], f"--output_dir={folder}", "--name", "set")
    *_, train, _, val = shlex.split(capsys.readouterr().out.splitlines()[-1])
    assert find_shards(train) == [f"./{folder}/set_train_000000.bin"]
    assert find_shards(val) == [f"./{folder}/set_val_000000.bin"]


def test_what_it_says_takes_no_other_data_set(corpus, tmp_path, capsys):
    for name in ("web", "web_train_x", "web_val_x"):
        make(corpus[0], "--output_dir", tmp_path / "out", "--name", name)
        *_, train, _, val = shlex.split(capsys.readouterr().out.splitlines()[-1])
        for split, pattern in (("train", train), ("val", val)):
            assert find_shards(pattern) == [f"{tmp_path}/out/{name}_{split}_000000.bin"]


# --- bad input ---


def refuse(tmp_path, capsys, *arguments):
    """Run the command on bad input; its one line. Nothing may change in tmp_path."""
    before = tree(tmp_path)
    assert program.run(lambda: data.main([str(argument) for argument in arguments])) == 1
    assert tree(tmp_path) == before
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    return err


BAD_INPUTS = {
    "none.txt": (None, r"none.txt: No such file"),
    "bad.jsonl": (b'{"text": "x"}\n{"text": \n', "bad.jsonl, line 2: invalid JSON at column"),
    "key.jsonl": (b'{"body": "x"}\n', "key.jsonl, line 1: no field 'text'"),
    "latin.txt": (b"caf\xe9 au lait", "latin.txt is not UTF-8 at byte 3;"),
    "cut.txt.gz": (gzip.compress(b"text" * 99)[:-9], "cut.txt.gz is not a whole gzip file"),
    "packed": (gzip.compress(b"text"), "packed is gzipped; expected a name that says so"),
    "shard.txt": (b"\x88\xd84\x01", "shard.txt is a shard of tokens (for train.py's --input_bin);"),
    "empty.txt": (b"", "there is no text in the input"),
    "empty.jsonl": (b'{"text": ""}\n\n', "there is no text in the input"),
    "letter.jsonl": (b'{"text": "x"}\n', "all the text would be for validation"),
    "letter.txt": (b"x", "all the text would be for validation"),
}


@pytest.mark.parametrize("name", BAD_INPUTS)
@pytest.mark.parametrize("where", ["new/deep", "there"])
def test_bad_input_is_one_line_and_nothing_written(tmp_path, monkeypatch, capsys, name, where):
    monkeypatch.setattr(data, "MIN_SHARD_TOKENS", 1)
    content, expected = BAD_INPUTS[name]
    (tmp_path / "there").mkdir()
    (tmp_path / "good.txt").write_text("Good text, read before the bad.\n" * 100)
    if content is not None:
        (tmp_path / name).write_bytes(content)
    alone = "validation" in expected or "no text" in expected
    inputs = [tmp_path / name] if alone else [tmp_path / "good.txt", tmp_path / name]
    arguments = ("--output_dir", tmp_path / where, "--shard_tokens", "50")
    assert expected in refuse(tmp_path, capsys, *inputs, *arguments)


def test_an_input_that_disappears_is_the_input_that_cannot_be_read(tmp_path, monkeypatch, capsys):
    (tmp_path / "a.txt").write_text("text\n" * 100)
    files = [tmp_path / "a.txt", tmp_path / "gone.txt"]
    monkeypatch.setattr(data, "find_files", lambda inputs: files)
    gone = f"error: cannot read {tmp_path}/gone.txt: No such file or directory"
    for size in (documents.file_size, lambda path: 0):  # before it is measured, and after
        monkeypatch.setattr(data, "file_size", size)
        message = refuse(tmp_path, capsys, *files, "--output_dir", tmp_path / "out")
        assert message.startswith(gone)


def test_an_output_folder_that_is_a_file(corpus, tmp_path, capsys):
    file = corpus[0] / "a.txt"
    message = refuse(tmp_path, capsys, file, "--output_dir", file)
    assert message == (
        f"error: cannot write to folder {file}: a file of that name exists; name another folder\n"
    )


def test_an_output_folder_that_another_program_writes_to(corpus, tmp_path, capsys):
    out = tmp_path / "out"
    flags = ("--output_dir", out, "--overwrite")
    make(corpus[0], *flags)
    capsys.readouterr()
    with locked(out):
        message = refuse(tmp_path, capsys, corpus[0] / "c.jsonl", "--name", "corpus", *flags)
    assert message == (
        f"error: another program writes to folder {out}; expected one at a time; wait for its end "
        "or name another folder\n"
    )


def test_more_validation_documents_than_there_are(corpus, tmp_path, capsys):
    flags = ("--output_dir", tmp_path / "out", "--val_documents", "27")
    assert refuse(tmp_path, capsys, corpus[0], *flags) == (
        "error: all the text would be for validation, none is left to train on; give more "
        "documents, a smaller --val_documents, or leave it out, to cut a single document in two\n"
    )


def test_the_advice_for_a_text_that_is_too_short_works(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("ab")
    flags = (tmp_path / "a.txt", "--output_dir", tmp_path / "out", "--val_fraction")
    assert refuse(tmp_path, capsys, *flags, "0.9") == (
        "error: all the text would be for validation, none is left to train on; give more "
        "documents, a smaller --val_fraction or, for no validation, --val_fraction 0\n"
    )
    make(*flags, "0.5")
    assert split_of(tmp_path / "out", "train", "a") == tokens_of("a")
    make(*flags, "0", "--overwrite")
    assert split_of(tmp_path / "out", "train", "a") == tokens_of("ab")


def test_shards_that_exist_are_replaced_only_when_asked(corpus, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(data, "MIN_SHARD_TOKENS", 1)
    flags = ("--output_dir", tmp_path / "out", "--shard_tokens", "100")
    make(corpus[0], *flags)
    capsys.readouterr()
    assert "already has corpus_train_000000.bin" in refuse(tmp_path, capsys, corpus[0], *flags)
    make(corpus[0] / "c.jsonl", *flags, "--name", "corpus", "--overwrite")
    assert split_of(tmp_path / "out", "val", "corpus") == tokens_of(corpus[1][2], corpus[1][12])


@pytest.mark.parametrize("letter", ["n", "é"])
def test_a_name_too_long_for_a_file(corpus, tmp_path, capsys, letter):
    most = 255 - len("_train_000000.bin")
    name = (letter * most)[: most // len(letter.encode())]
    make(corpus[0], "--output_dir", tmp_path / "out", "--name", name)
    capsys.readouterr()
    (tmp_path / f"{name}n.txt").write_text("text\n" * 100)
    flags = ("--output_dir", tmp_path / "new")
    size = 18 + len(name.encode())
    for arguments in ([tmp_path / f"{name}n.txt"], [corpus[0], "--name", f"{name}n"]):
        message = refuse(tmp_path, capsys, *arguments, *flags)
        assert message == (
            f"error: the name of a shard would have {size} bytes; expected at most 255; choose a "
            "shorter one with --name\n"
        )


def test_an_output_folder_whose_name_is_too_long(corpus, tmp_path, capsys):
    out = tmp_path / ("n" * 256)
    assert refuse(tmp_path, capsys, corpus[0], "--output_dir", out) == (
        f"error: cannot write to folder {out}: File name too long; choose a shorter one\n"
    )


def test_an_input_without_a_name_to_take_is_called_data(tmp_path):
    (tmp_path / "..txt").write_text("text\n" * 100)
    make(tmp_path / "..txt", "--output_dir", tmp_path / "out")
    assert tree(tmp_path / "out").keys() == {"data_train_000000.bin", "data_val_000000.bin"}


@pytest.mark.parametrize(
    "flags",
    [
        ["--val_fraction", "1"],
        ["--val_fraction", "-0.1"],
        ["--val_fraction", "nan"],
        ["--val_fraction", "1/0"],
        ["--val_fraction", "1e-99999999"],
        ["--val_fraction", "1e99999999"],
        ["--val_fraction", "0e-99999999"],
        ["--val_fraction", "1e-19"],
        ["--val_fraction", "1/9999999999999999999"],
        ["--val_fraction", "0.1", "--val_documents", "1"],
        ["--val_documents", "0"],
        ["--shard_tokens", "1023"],
        ["--shard_tokens", "2147483648"],
        ["--workers", "0"],
        *(["--name", name] for name in ("a/b", "..", "/", "")),
        ["--output_dir", ""],
    ],
)
def test_flags_out_of_range(tmp_path, capsys, flags):
    with pytest.raises(SystemExit) as status:
        data.main([str(tmp_path), "--output_dir", str(tmp_path / "out"), *flags])
    assert status.value.code == 2
    err = capsys.readouterr().err
    assert flags[-2] in err
    assert err.count("\n") == 1


# --- the real command line ---


def command(*arguments, **options):
    return subprocess.run(
        [sys.executable, "-m", "numbagpt.data", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        **options,
    )


def test_command_line(corpus, tmp_path):
    ended = command(corpus[0], "--output_dir", tmp_path / "out")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "train on them" in ended.stdout
    assert split_of(tmp_path / "out", "val", "corpus") == tokens_of(*corpus[1][::10])


@pytest.mark.parametrize("name", ["~tilde.txt", "./~tilde.txt", "~/home.txt"])
def test_command_line_with_a_tilde(tmp_path, name):
    """It is the home folder also where the shell leaves it alone, else a character like others."""
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "home.txt").write_text("At home.\nAnd there.\n")
    (tmp_path / "~tilde.txt").write_text("Tilde.\nAnd there.\n")
    stem = name.rpartition("/")[2].removesuffix(".txt")
    environment = os.environ | {"HOME": str(tmp_path / "home")}
    for given, folder, printed in [
        ("~nouser/x", "~nouser/x", "./~nouser/x"),
        ("./~/x", "~/x", "./~/x"),
        ("~/x", "home/x", f"{tmp_path}/home/x"),
    ]:
        ended = command(name, "--output_dir", given, cwd=tmp_path, env=environment)
        assert (ended.returncode, ended.stderr) == (0, "")
        made = sorted(path.name for path in (tmp_path / folder).iterdir())
        assert made == [f"{stem}_train_000000.bin", f"{stem}_val_000000.bin"]
        # The pattern it prints means the same folder to train.py, which expands ~ as well.
        pattern = shlex.split(ended.stdout.splitlines()[-1])[-1]
        assert pattern == f"{printed}/{stem}_val_??????.bin"


def test_command_line_refuses_in_one_line(corpus, tmp_path):
    (tmp_path / "corpus" / "e.jsonl").write_text("no JSON\n")
    before = tree(tmp_path)
    ended = command(corpus[0], "--output_dir", tmp_path / "out")
    assert ended.returncode == 1
    assert ended.stdout == ""
    assert ended.stderr.startswith(f"error: {corpus[0]}/e.jsonl, line 1: invalid JSON")
    assert ended.stderr.count("\n") == 1
    assert "Traceback" not in ended.stderr
    assert tree(tmp_path) == before


def test_command_line_on_a_full_disk(tmp_path):
    # The system refuses the bytes beyond a limit as it does those beyond a disk.
    (tmp_path / "a.txt").write_text("one two three four\n" * 30_000)
    before = tree(tmp_path)
    ended = command(
        tmp_path / "a.txt",
        "--output_dir",
        tmp_path / "out",
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000)),
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
    )
    assert ended.returncode == 1
    assert ended.stderr == f"error: cannot write to folder {tmp_path}/out: File too large\n"
    assert tree(tmp_path) == before


def test_command_line_interrupted(tmp_path):
    # 38 MB: some seconds of work, Ctrl-C comes as soon as some of it is written.
    (tmp_path / "a.txt").write_text("one two three four\n" * 2_000_000)
    before = tree(tmp_path)
    process = subprocess.Popen(
        [sys.executable, "-m", "numbagpt.data", "a.txt", "--output_dir", "out", "--workers", "1"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while not any(path.stat().st_size > 10_000 for path in tmp_path.glob("out/.*/*.bin")):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert out == ""
    assert err.count("\n") == 1
    assert "interrupted" in err
    assert tree(tmp_path) == before


# --- tinyshakespeare ---

SPEECHES = ["First Citizen:\nSpeak.", "All:\nSpeak, speak.\n", "Second:\nOne word."]


@pytest.fixture
def network(tmp_path, monkeypatch):
    """A small text in the place of the real one, a network that has it, and an empty cache."""
    text = "\n\n".join(SPEECHES * 10).encode()
    requests = []

    def urlopen(url, timeout):
        requests.append((url, timeout))
        return contextlib.closing(io.BytesIO(text))

    monkeypatch.setenv("NUMBAGPT_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(urllib.request, "urlopen", urlopen)
    monkeypatch.setattr(tinyshakespeare, "SHA256", hashlib.sha256(text).hexdigest())
    monkeypatch.setattr(tinyshakespeare, "NUM_BYTES", len(text))
    monkeypatch.setattr(tinyshakespeare, "VAL_TOKENS", 33)
    return requests


def test_tinyshakespeare_has_llmc_documents_and_split(network, tmp_path):
    make("tinyshakespeare", "--output_dir", "out")
    # What llm.c does in effect: end-of-text at the start and after every blank line.
    marked = ("\n\n".join(SPEECHES * 10)).replace("\n\n", "\n\n<|endoftext|>")
    expected = encode("<|endoftext|>" + marked, allow_special=True)
    assert split_of(tmp_path / "out", "val", "tinyshakespeare") == expected[:33]
    assert split_of(tmp_path / "out", "train", "tinyshakespeare") == expected[33:]


def test_tinyshakespeare_is_fetched_once(network, tmp_path):
    make("tinyshakespeare", "--output_dir", "out")
    make("tinyshakespeare", "--output_dir", "again")
    assert network == [(tinyshakespeare.URL, tinyshakespeare.TIMEOUT_SECONDS)]
    assert tree(tmp_path / "out") == tree(tmp_path / "again")
    # A damaged copy is fetched anew.
    (tmp_path / "cache" / "tinyshakespeare.txt").write_bytes(b"")
    make("tinyshakespeare", "--output_dir", "third")
    assert len(network) == 2


def test_a_file_of_that_name_is_just_a_file(network, tmp_path):
    (tmp_path / "tinyshakespeare").write_text("To be\nor not\n")
    make("tinyshakespeare", "--output_dir", "out", "--val_fraction", "0")
    assert split_of(tmp_path / "out", "train", "tinyshakespeare") == tokens_of("To be\nor not\n")
    assert network == []


@pytest.mark.parametrize(
    "error",
    [
        urllib.error.URLError("no route to host"),
        TimeoutError("timed out"),
        ConnectionResetError("reset"),
    ],
)
def test_without_a_network_it_says_what_to_do(network, tmp_path, monkeypatch, capsys, error):
    def urlopen(url, timeout):
        raise error

    (tmp_path / "cache").mkdir()
    monkeypatch.setattr(urllib.request, "urlopen", urlopen)
    message = refuse(tmp_path, capsys, "tinyshakespeare", "--output_dir", "out")
    assert f"cannot download {tinyshakespeare.URL} ({getattr(error, 'reason', error)});" in message
    assert f"save it as {tmp_path}/cache/tinyshakespeare.txt and run this again" in message


def test_a_cache_on_a_full_disk_is_named(network, tmp_path, monkeypatch, capsys):
    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (tmp_path / "cache").mkdir()
    monkeypatch.setattr(os, "fsync", full)
    message = refuse(tmp_path, capsys, "tinyshakespeare", "--output_dir", "out")
    assert message == (
        f"error: cannot write {tmp_path}/cache/tinyshakespeare.txt: No space left on device; make "
        "room or name another folder; NUMBAGPT_CACHE names the cache's folder\n"
    )


@pytest.mark.parametrize("content", [b"", b"<html>", b"To be,\r\n"])
def test_a_text_saved_by_hand_that_is_another_is_described(
    network, tmp_path, monkeypatch, capsys, content
):
    def urlopen(url, timeout):
        raise TimeoutError("timed out")

    monkeypatch.setattr(urllib.request, "urlopen", urlopen)
    saved = tmp_path / "cache" / "tinyshakespeare.txt"
    saved.parent.mkdir()
    saved.write_bytes(content)
    message = refuse(tmp_path, capsys, "tinyshakespeare", "--output_dir", "out")
    assert message == (
        f"error: cannot download {tinyshakespeare.URL} (timed out); nor is {saved} that text: it "
        f"has {len(content)} bytes; expected {tinyshakespeare.NUM_BYTES:,} bytes with sha256 "
        f"{tinyshakespeare.SHA256}; download it by hand, save it as {saved} and run this again\n"
    )


def test_a_folder_in_the_place_of_the_text_is_named(network, tmp_path, capsys):
    saved = tmp_path / "cache" / "tinyshakespeare.txt"
    saved.mkdir(parents=True)
    message = refuse(tmp_path, capsys, "tinyshakespeare", "--output_dir", "out")
    assert message == f"error: cannot read {saved}: it is not a regular file\n"
    assert network == []


def test_tinyshakespeare_stands_alone(network, tmp_path, capsys):
    (tmp_path / "book.txt").write_text("text\n")
    for inputs in (["tinyshakespeare", "book.txt"], ["book.txt", "tinyshakespeare"]):
        message = refuse(tmp_path, capsys, *inputs, "--output_dir", "out")
        assert message == (
            "error: tinyshakespeare is fetched by itself, and there is no file of that name; give "
            "it no other INPUT beside it\n"
        )
    assert network == []


def test_another_text_at_that_address_is_refused(network, tmp_path, monkeypatch, capsys):
    (tmp_path / "cache").mkdir()
    monkeypatch.setattr(tinyshakespeare, "SHA256", "0" * 64)
    message = refuse(tmp_path, capsys, "tinyshakespeare", "--output_dir", "out")
    assert f"bytes with sha256 {'0' * 64}; download it by hand" in message


# A regular file to all appearances whose first byte cannot be read.
UNREADABLE = "/proc/self/mem"


@pytest.mark.skipif(not os.path.exists(UNREADABLE), reason=f"no {UNREADABLE}")
def test_a_cached_copy_that_cannot_be_read_is_named(network, tmp_path, capsys):
    (tmp_path / "cache").mkdir()
    cached = tmp_path / "cache" / "tinyshakespeare.txt"
    cached.symlink_to(UNREADABLE)
    assert program.run(lambda: data.main(["tinyshakespeare", "--output_dir", "out"])) == 1
    assert capsys.readouterr().err == f"error: cannot read {cached}: Input/output error\n"
    assert not (tmp_path / "out").exists()
    assert network == []


@pytest.mark.parametrize("flags", [["--val_fraction", "0.1"], ["--val_documents", "3"]])
def test_the_split_of_tinyshakespeare_is_fixed(network, tmp_path, capsys, flags):
    message = refuse(tmp_path, capsys, "tinyshakespeare", "--output_dir", "out", *flags)
    assert "has a split of its own" in message
